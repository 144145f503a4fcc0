"""The verdict: plain and tuned decoding side by side on prompts that the search did not see.

Its figures are also those of other engines' benchmarks, which need no torch.
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

E = TypeVar("E")
T = TypeVar("T")
Array = NDArray[np.float64]

ERROR_RATE = 0.05  # Error probability of a 95 % interval, and of all interim tests of a verdict together.
# Error-spending function: an interim test after the share t of all runs has spent ERROR * t ** SPENDING_POWER.
SPENDING_POWER = 2
MAX_RUNS = 32  # Maximum runs of each kind (plain, tuned) in a verdict.
MIN_SECONDS = 1e-12  # Minimum seconds of a run, against division by zero.
MAX_LOG_RATIO = 99.0  # Bound on the logarithm of an interval's end, against overflow with two very different prompts.
MIN_HELD_OUT, HELD_OUT_SHARE, MAX_HELD_OUT = 8, 0.2, 16


def hold_out(prompts: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split one task's prompts: those to tune on, and the last max(8, 20 %), at most 16 and half, for the verdict."""
    n_wanted = max(MIN_HELD_OUT, -(-len(prompts) // round(1 / HELD_OUT_SHARE)))
    n_held_out = min(n_wanted, MAX_HELD_OUT, len(prompts) // 2)
    return list(prompts[: len(prompts) - n_held_out]), list(prompts[len(prompts) - n_held_out :])


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn of a held-out prompt under plain and under tuned decoding."""

    plain: Completion
    tuned: Completion


def in_pairs(
    session: Session, prompt: Prompt, method: Method, tuned_first: bool, earlier: Sequence[Pair]
) -> Iterator[Round | tuple[Prompt, Pair]]:
    """Decode a prompt's turns after the `earlier` ones, each plain and with `method` before the next begins.

    Yields every round, and each turn's prompt and pair.
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
    """One turn of a prompt under both ways of decoding."""

    plain: Timed
    tuned: Timed

    @classmethod
    def of(cls, pair: Pair) -> TimedTurn:
        return cls(Timed.of(pair.plain), Timed.of(pair.tuned))


def faster(first: Timed, second: Timed) -> Timed:
    """Return the faster of two runs of one prompt, as other load on the machine only adds time."""
    return min(first, second, key=lambda run: run.seconds / max(1, run.tokens))


def speed_ratio(fast: Sequence[Timed], slow: Sequence[Timed]) -> float:
    """Return the ratio of two speeds, each total tokens ÷ total time."""
    return speed(fast) / speed(slow)


def speed_interval(
    fast: Sequence[Timed], slow: Sequence[Timed], error: float = ERROR_RATE
) -> tuple[float, float] | None:
    """Return the confidence interval of `speed_ratio` over prompts, one pair of runs each; None if too few."""
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
    """Return the jackknife interval of a ratio of sums over prompts, computed on the logarithm."""
    interval = jackknife_interval(rows, log_ratio, error)
    return interval and (math.exp(max(-MAX_LOG_RATIO, interval[0])), math.exp(min(MAX_LOG_RATIO, interval[1])))


def jackknife_interval(
    rows: ArrayLike, statistic: Callable[[Array], Array], error: float = ERROR_RATE
) -> tuple[float, float] | None:
    """Return the jackknife t interval of a statistic of sums over prompts, which holds for few prompts as well.

    None where the spread is not known: of one prompt,
    or where the statistic does not exist without one of them.

    Args: rows: what is summed, (prompts, columns). statistic: of sums (..., columns), their values (...).
          error: chance that the interval misses, of both sides together.
    """
    from scipy.special import stdtrit

    row_values = np.asarray(rows, dtype=float)
    n_rows, sums = len(row_values), row_values.sum(axis=0)
    if n_rows < 2:
        return None
    # The sums without a prompt are zero if that prompt has all the tokens.
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate, leave_one_out = float(statistic(sums)), statistic(sums - row_values)
        pseudo_values = n_rows * estimate - (n_rows - 1) * leave_one_out
        margin = float(stdtrit(n_rows - 1, 1 - error / 2) * pseudo_values.std(ddof=1) / math.sqrt(n_rows))
    return (estimate - margin, estimate + margin) if math.isfinite(margin) else None


def judge(tuned: Sequence[Timed], plain: Sequence[Timed], expected: float | None, error: float = ERROR_RATE) -> Verdict:
    """Return "use" only if the whole interval is above 1, and "unmeasured" where nothing was held out."""
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


# --- interim tests: an open verdict gets more runs, and all tests together have the error of one 95 % interval


@dataclass(frozen=True, slots=True)
class Look:
    """One interim test of a verdict: its prompts, the indices of their runs, and the error of its interval."""

    prompts: range
    runs: range
    error: float


def looks_of(n_held_out: int, n_more: int = 0) -> list[Look]:
    """Plan a verdict's interim tests ("looks") on `n_held_out` prompts and `n_more` others not scored by the search.

    The held-out prompts are timed first, then the others, then all of them once more, then twice more, as long as that
    is within `MAX_RUNS`. The error is spent by Kim and DeMets' power family (Biometrika 74, 1987, 149-154), an
    error-spending rule as of Lan and DeMets (Biometrika 70, 1983, 659-663): after a share t of the planned runs
    `ERROR_RATE` · t^2 is spent. A look's interval has the error that is newly spent. By the union bound the false
    answers of all looks then add up to `ERROR_RATE` at most, however the looks depend on each other.
    """
    held_out, later_prompts, all_prompts = (
        range(n_held_out),
        range(n_held_out, n_held_out + n_more),
        range(n_held_out + n_more),
    )
    look_ranges = [(held_out, range(1)), (later_prompts, range(1))]
    if len(all_prompts) > 1:  # The spread between prompts is unknown with one prompt, however often it runs.
        look_ranges += [(all_prompts, range(1, 2)), (all_prompts, range(2, 4))]
    look_ranges = [(prompts, runs) for prompts, runs in look_ranges if prompts]
    n_runs_so_far = [
        n_runs for n_runs in accumulate(len(prompts) * len(runs) for prompts, runs in look_ranges) if n_runs <= MAX_RUNS
    ]
    spent_errors = [0.0, *(ERROR_RATE * (n_runs / n_runs_so_far[-1]) ** SPENDING_POWER for n_runs in n_runs_so_far)]
    errors = (spent_after - spent_before for spent_before, spent_after in pairwise(spent_errors))
    return [Look(prompts, runs, error) for (prompts, runs), error in zip(look_ranges, errors, strict=False)]


@dataclass(frozen=True, slots=True)
class JudgedTurns:
    """A verdict and the timed turns that it is based on, the fastest run of each."""

    verdict: Verdict
    turns: Sequence[TimedTurn]


# Measures a look: yields the events of decoding; returns (prompt number, timed turns) for each run.
Measure = Callable[[Look], Generator[E, None, Iterable[tuple[int, Sequence[TimedTurn]]]]]


def by_looks(looks: Sequence[Look], measure: Measure[E]) -> Generator[E, None, JudgedTurns]:
    """Return the verdict of the first look that decides, or of the last one; passes on the events of `measure`."""
    fastest: dict[int, Sequence[TimedTurn]] = {}
    verdict = judge([], [], None)
    for look in looks:
        for prompt_index, turns in (yield from measure(look)):
            fastest_before = fastest.get(prompt_index, turns)
            run_pairs = zip(fastest_before, turns, strict=True)
            fastest[prompt_index] = [TimedTurn(*map(faster, earlier, latest)) for earlier, latest in run_pairs]
        # Sum the turns of a chat into one run: they are correlated, and counted singly they would make the interval too
        # narrow.
        totals_by_prompt = [
            TimedTurn(*(reduce(add, runs) for runs in zip(*turns, strict=True))) for turns in fastest.values()
        ]
        verdict = judge(
            [prompt_turns.tuned for prompt_turns in totals_by_prompt],
            [prompt_turns.plain for prompt_turns in totals_by_prompt],
            None,
            look.error,
        )
        if not is_open(verdict):
            break
    return JudgedTurns(verdict, [*chain.from_iterable(fastest.values())])


def is_open(verdict: Verdict) -> bool:
    """Tell whether more runs may decide: the verdict's interval contains 1 or is unknown."""
    return verdict.interval is None or verdict.interval[0] <= 1 <= verdict.interval[1]
