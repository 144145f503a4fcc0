"""The verdict on a tuned draft: plain and tuned decoding, timed in turns on prompts that the search did not score.

Benchmarks of other engines use its statistics too, so this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain, pairwise
from operator import add
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.types import NOT_FASTER, Completion, Prompt, Verdict, n_turns
from ..decoding.methods import PLAIN, Method

if TYPE_CHECKING:
    from ..decoding.events import Round
    from ..decoding.session import Session

E = TypeVar("E")  # Events of decoding.
T = TypeVar("T")
Array = NDArray[np.float64]

ERROR_RATE = 0.05  # Error probability of a 95 % interval, and of all interim tests of a verdict together.
# Error-spending function: after a share t of all runs, ERROR_RATE * t ** SPENDING_POWER has been spent.
SPENDING_POWER = 2
MAX_RUNS = 32  # Maximum runs of each kind (plain, tuned) in a verdict.
MIN_SECONDS = 1e-12  # Minimum seconds of a run, against division by zero.
MAX_LOG_RATIO = 99.0  # Bound on the logarithm of an interval's end, against overflow with two very different prompts.
MIN_HELD_OUT, HELD_OUT_SHARE, MAX_HELD_OUT = 8, 0.2, 16  # Prompts held out for a verdict; the share is of the task's.


def hold_out(prompts: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split one task's prompts into those to tune on and, from the end, those held out for the verdict.

    A fifth is held out, but at least 8 and at most 16 prompts, and never more than half.
    """
    n_share = -(-len(prompts) // round(1 / HELD_OUT_SHARE))
    n_held_out = min(max(MIN_HELD_OUT, n_share), MAX_HELD_OUT, len(prompts) // 2)
    return list(prompts[: len(prompts) - n_held_out]), list(prompts[len(prompts) - n_held_out :])


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn of a held-out prompt under plain and under tuned decoding."""

    plain: Completion
    tuned: Completion


def in_pairs(
    session: Session, prompt: Prompt, method: Method, tuned_first: bool, earlier: Sequence[Pair]
) -> Iterator[Round | tuple[Prompt, Pair]]:
    """Decode the turns of a prompt after the `earlier` ones; each is decoded plain and with `method` before the next.

    Yields: every round, and after each turn its prompt and pair.
    """
    from ..decoding.engine import side_by_side
    from ..decoding.events import Round, Turn

    plain_work = session.request(prompt, PLAIN, [pair.plain.text for pair in earlier])
    tuned_work = session.request(prompt, method, [pair.tuned.text for pair in earlier])
    ordered_works = [tuned_work, plain_work] if tuned_first else [plain_work, tuned_work]
    turns_done: list[Turn] = []
    with ExitStack() as stack:
        event_streams = [stack.enter_context(closing(side_by_side([work]))) for work in ordered_works]
        for _ in range(n_turns(prompt) - len(earlier)):
            for event_stream in event_streams:
                for event in event_stream:
                    if isinstance(event, Turn):
                        turns_done.append(event)
                        break
                    if isinstance(event, Round):
                        yield event
            plain_turn, tuned_turn = reversed(turns_done) if tuned_first else turns_done
            turns_done = []
            yield plain_turn.prompt, Pair(plain_turn.completion, tuned_turn.completion)


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens and seconds of one prompt under one method."""

    tokens: int
    seconds: float

    @classmethod
    def of(cls, completion: Completion) -> Timed:
        """Count the whole request, prefill included: what a user waits for."""
        return cls(completion.n_tokens, completion.timings.total_s)

    def __add__(self, other: Timed) -> Timed:
        return Timed(self.tokens + other.tokens, self.seconds + other.seconds)


class TimedTurn(NamedTuple):
    """One turn of a prompt under plain and under tuned decoding."""

    plain: Timed
    tuned: Timed

    @classmethod
    def of(cls, pair: Pair) -> TimedTurn:
        return cls(Timed.of(pair.plain), Timed.of(pair.tuned))


def faster(first: Timed, second: Timed) -> Timed:
    """Return the faster of two runs of one prompt: the other one was slowed down by other load on the machine."""
    return min(first, second, key=lambda run: run.seconds / max(1, run.tokens))


def speed_ratio(fast: Sequence[Timed], slow: Sequence[Timed]) -> float:
    """Return the ratio of two speeds, each total tokens ÷ total time."""
    return speed(fast) / speed(slow)


def speed_interval(
    fast: Sequence[Timed], slow: Sequence[Timed], error: float = ERROR_RATE
) -> tuple[float, float] | None:
    """Return the confidence interval of `speed_ratio` from one pair of runs per prompt; None for too few prompts."""
    rows = [
        (fast_run.tokens, fast_run.seconds, slow_run.tokens, slow_run.seconds)
        for fast_run, slow_run in zip(fast, slow, strict=True)
    ]

    def log_ratio(sums: Array) -> Array:
        tokens, seconds, base_tokens, base_seconds = np.maximum(sums, (0, MIN_SECONDS, 0, MIN_SECONDS)).T
        return np.asarray(np.log(tokens * base_seconds / (base_tokens * seconds)))

    return ratio_interval(rows, log_ratio, error)


def ratio_interval(
    rows: ArrayLike, log_ratio: Callable[[Array], Array], error: float = ERROR_RATE
) -> tuple[float, float] | None:
    """Return the jackknife interval of a ratio of sums over prompts, computed on the ratio's logarithm."""
    interval = jackknife_interval(rows, log_ratio, error)
    return interval and (math.exp(max(-MAX_LOG_RATIO, interval[0])), math.exp(min(MAX_LOG_RATIO, interval[1])))


def jackknife_interval(
    rows: ArrayLike, statistic: Callable[[Array], Array], error: float = ERROR_RATE
) -> tuple[float, float] | None:
    """Return the jackknife t interval of a statistic of sums over prompts; it is valid for few prompts too.

    Args:    rows: the summands, shape (prompts, columns). statistic: maps sums (..., columns) to values (...). error:
             probability that the interval misses the true value, on both sides together.
    Returns: None if the spread is unknown: with one prompt, or if the statistic is undefined without one of them.
    """
    from scipy.special import stdtrit

    row_values = np.asarray(rows, dtype=float)
    n_rows, sums = len(row_values), row_values.sum(axis=0)
    if n_rows < 2:
        return None
    # If one prompt has all the tokens, the sums without it are zero.
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate, leave_one_out = float(statistic(sums)), statistic(sums - row_values)
        pseudo_values = n_rows * estimate - (n_rows - 1) * leave_one_out
        margin = float(stdtrit(n_rows - 1, 1 - error / 2) * pseudo_values.std(ddof=1) / math.sqrt(n_rows))
    return (estimate - margin, estimate + margin) if math.isfinite(margin) else None


def judge(tuned: Sequence[Timed], plain: Sequence[Timed], expected: float | None, error: float = ERROR_RATE) -> Verdict:
    """Return the verdict "use" if the whole interval is above 1, "unmeasured" without prompts, else "plain"."""
    n_prompts = len(tuned)
    if not n_prompts:
        return Verdict("unmeasured", reason="the stream has too few prompts to hold any out")
    ratio, interval = speed_ratio(tuned, plain), speed_interval(tuned, plain, error)
    if interval is not None and interval[0] > 1:
        return Verdict("use", ratio, interval, expected, n_prompts, "reliably faster here")
    reason = NOT_FASTER
    if interval is None or (interval[1] >= 1 and n_prompts < MIN_HELD_OUT):
        count = "one held-out prompt is" if n_prompts == 1 else f"{n_prompts} held-out prompts are"
        reason = f"{count} too few to tell: give more"
    return Verdict("plain", ratio, interval, expected, n_prompts, reason)


def speed(runs: Sequence[Timed]) -> float:
    """Return tokens per second: total tokens ÷ total time."""
    return sum(run.tokens for run in runs) / max(MIN_SECONDS, sum(run.seconds for run in runs))


# --- interim tests: an undecided verdict gets more runs; all tests together have the error of one 95 % interval


@dataclass(frozen=True, slots=True)
class InterimTest:
    """One interim test of a verdict: its prompts, which of their runs to time, and the error of its interval."""

    prompts: range
    runs: range
    error: float


def plan_interim_tests(n_held_out: int, n_more: int = 0) -> list[InterimTest]:
    """Plan the interim tests of a verdict on `n_held_out` prompts and `n_more` others that the search did not score.

    The held-out prompts are timed first, then the others, then all of them once more, then twice more, as long as the
    runs do not exceed `MAX_RUNS`. The tests share the error probability by the power family of Kim and DeMets
    (Biometrika 74, 1987, 149-154), an error-spending function in the sense of Lan and DeMets (Biometrika 70, 1983,
    659-663): after a share t of the planned runs, `ERROR_RATE` · t^2 has been spent. The interval of a test has the
    error that is newly spent, so by the union bound the probability of any false answer is at most `ERROR_RATE`,
    however the tests depend on each other.
    """
    held_out, others = range(n_held_out), range(n_held_out, n_held_out + n_more)
    all_prompts = range(n_held_out + n_more)
    test_ranges = [(held_out, range(1)), (others, range(1))]
    if len(all_prompts) > 1:  # More runs of a single prompt do not show the spread between prompts.
        test_ranges += [(all_prompts, range(1, 2)), (all_prompts, range(2, 4))]
    test_ranges = [(prompts, runs) for prompts, runs in test_ranges if prompts]
    total_runs = accumulate(len(prompts) * len(runs) for prompts, runs in test_ranges)
    total_runs_planned = [n_runs for n_runs in total_runs if n_runs <= MAX_RUNS]
    spent = [ERROR_RATE * (n_runs / total_runs_planned[-1]) ** SPENDING_POWER for n_runs in total_runs_planned]
    errors = (spent_after - spent_before for spent_before, spent_after in pairwise([0.0, *spent]))
    return [InterimTest(prompts, runs, error) for (prompts, runs), error in zip(test_ranges, errors, strict=False)]


@dataclass(frozen=True, slots=True)
class JudgedTurns:
    """A verdict and the timed turns that it is based on, the fastest run of each."""

    verdict: Verdict
    turns: Sequence[TimedTurn]


# Times the runs of an interim test. Yields the events of decoding; returns (prompt index, timed turns) for each run.
MeasureRuns = Callable[[InterimTest], Generator[E, None, Iterable[tuple[int, Sequence[TimedTurn]]]]]


def run_interim_tests(tests: Sequence[InterimTest], measure: MeasureRuns[E]) -> Generator[E, None, JudgedTurns]:
    """Run the tests until one decides; return its verdict, or the last one's. Yields the events of `measure`."""
    fastest_turns: dict[int, Sequence[TimedTurn]] = {}  # By prompt index.
    verdict = judge([], [], None)
    for test in tests:
        for prompt_index, turns in (yield from measure(test)):
            turn_pairs = zip(fastest_turns.get(prompt_index, turns), turns, strict=True)
            fastest_turns[prompt_index] = [TimedTurn(*map(faster, earlier, latest)) for earlier, latest in turn_pairs]
        # Add the turns of a chat up to one run. They are correlated: as separate runs they would make the interval too
        # narrow.
        prompt_totals = [
            TimedTurn(*(reduce(add, runs) for runs in zip(*turns, strict=True))) for turns in fastest_turns.values()
        ]
        tuned, plain = [total.tuned for total in prompt_totals], [total.plain for total in prompt_totals]
        verdict = judge(tuned, plain, None, test.error)
        if not is_open(verdict):
            break
    return JudgedTurns(verdict, [*chain.from_iterable(fastest_turns.values())])


def is_open(verdict: Verdict) -> bool:
    """Tell whether more runs may decide: the verdict's interval contains 1 or is unknown."""
    return verdict.interval is None or verdict.interval[0] <= 1 <= verdict.interval[1]
