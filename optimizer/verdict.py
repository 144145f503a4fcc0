"""The verdict: plain and tuned decoding side by side on prompts that the search did not see.

Its figures are also those of other engines' benchmarks, which need no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from ..core.types import NOT_FASTER, Completion, Prompt, Verdict, n_turns
from ..decoding.methods import PLAIN, Method

if TYPE_CHECKING:
    from ..decoding.loop import Round
    from ..decoding.session import Session

T = TypeVar("T")
Array = NDArray[np.float64]

ERROR = 0.05  # of an interval of 95 %
FIRST_ERROR, SECOND_ERROR = 0.01, 0.04  # of a verdict's two looks, together ERROR: most is for the one that decides
LEAST_S = 1e-12  # a run counts as at least this
LARGEST_LOG = 99.0  # of the end of a ratio's interval: two prompts that differ much say nothing
SMALLEST_HELD_OUT, HELD_OUT_SHARE, LARGEST_HELD_OUT = 4, 0.2, 16


def hold_out(prompts: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split one task's prompts: those to tune on, and the last max(4, 20 %), at most 16 and half, for the verdict."""
    wanted = max(SMALLEST_HELD_OUT, -(-len(prompts) // round(1 / HELD_OUT_SHARE)))
    n = min(wanted, LARGEST_HELD_OUT, len(prompts) // 2)
    return list(prompts[: len(prompts) - n]), list(prompts[len(prompts) - n :])


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
    from ..decoding.loop import Round
    from ..decoding.session import Turn

    plain = session.request(prompt, PLAIN, [pair.plain.text for pair in earlier])
    tuned = session.request(prompt, method, [pair.tuned.text for pair in earlier])
    order = [tuned, plain] if tuned_first else [plain, tuned]
    done: list[Turn] = []
    with ExitStack() as stack:
        runs = [stack.enter_context(closing(side_by_side([work]))) for work in order]
        for _ in range(n_turns(prompt) - len(earlier)):
            for run in runs:
                for event in run:
                    if isinstance(event, Turn):
                        done.append(event)
                        break
                    if isinstance(event, Round):
                        yield event
            slow, fast = reversed(done) if tuned_first else done
            done = []
            yield slow.prompt, Pair(slow.completion, fast.completion)


def turns_done(prompts: Sequence[Prompt], n_done: int) -> tuple[int, int]:
    """Return how many of `prompts` are done after `n_done` turns, and how many turns of the next one."""
    for number, prompt in enumerate(prompts):
        if n_done < n_turns(prompt):
            return number, n_done
        n_done -= n_turns(prompt)
    return len(prompts), 0


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


def timed_pairs(pairs: Sequence[Pair]) -> tuple[list[Timed], list[Timed]]:
    """Return the plain and the tuned runs of each pair."""
    return [Timed.of(pair.plain) for pair in pairs], [Timed.of(pair.tuned) for pair in pairs]


def by_prompt(prompts: Sequence[Prompt], runs: Sequence[Timed]) -> list[Timed]:
    """Return the runs of each prompt's turns as one: turns of a chat are alike, and would make a verdict too sure."""
    left = iter(runs)
    return [reduce(add, islice(left, n_turns(prompt))) for prompt in prompts]


def faster(first: Sequence[Timed], second: Sequence[Timed]) -> list[Timed]:
    """Return the faster of two runs of each prompt: other work of the machine only adds time."""
    return [min(pair, key=lambda run: run.seconds / max(1, run.tokens)) for pair in zip(first, second, strict=True)]


def speed_ratio(fast: Sequence[Timed], slow: Sequence[Timed]) -> float:
    """Return total tokens ÷ total time of one, divided by the other's."""
    return speed(fast) / speed(slow)


def speed_interval(fast: Sequence[Timed], slow: Sequence[Timed], error: float = ERROR) -> tuple[float, float] | None:
    """Return the interval of `speed_ratio` over prompts, a pair of runs each; None where there are too few of them."""
    rows = [(own.tokens, own.seconds, base.tokens, base.seconds) for own, base in zip(fast, slow, strict=True)]

    def log_ratio(sums: Array) -> Array:
        tokens, seconds, base_tokens, base_seconds = np.maximum(sums, (0, LEAST_S, 0, LEAST_S)).T
        return np.asarray(np.log(tokens * base_seconds / (base_tokens * seconds)))

    return ratio_interval(rows, log_ratio, error)


def ratio_interval(
    rows: ArrayLike, log_ratio: Callable[[Array], Array], error: float = ERROR
) -> tuple[float, float] | None:
    """Return the interval of a ratio of sums over prompts, by its logarithm; else as `jackknife_interval`."""
    found = jackknife_interval(rows, log_ratio, error)
    return found and (math.exp(max(-LARGEST_LOG, found[0])), math.exp(min(LARGEST_LOG, found[1])))


def jackknife_interval(
    rows: ArrayLike, statistic: Callable[[Array], Array], error: float = ERROR
) -> tuple[float, float] | None:
    """Return the jackknife t interval of a statistic of sums over prompts, which holds for few prompts as well.

    None where the spread is not known: of one prompt,
    or where the statistic does not exist without one of them.

    Args: rows: what is summed, (prompts, columns). statistic: of sums (..., columns), their values (...).
          error: chance that the interval misses, of both sides together.
    """
    values = np.asarray(rows, dtype=float)
    n, whole = len(values), values.sum(axis=0)
    if n < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):  # a prompt that has all the tokens
        estimate, without = float(statistic(whole)), statistic(whole - values)
        pseudo_values = n * estimate - (n - 1) * without
        margin = float(stdtrit(n - 1, 1 - error / 2) * pseudo_values.std(ddof=1) / math.sqrt(n))
    return (estimate - margin, estimate + margin) if math.isfinite(margin) else None


def judge(tuned: Sequence[Timed], plain: Sequence[Timed], expected: float | None, error: float = ERROR) -> Verdict:
    """Return "use" only if the whole interval is above 1, and "unmeasured" where nothing was held out."""
    n = len(tuned)
    if not n:
        return Verdict("unmeasured", reason="the stream has too few prompts to hold any out")
    ratio, interval = speed_ratio(tuned, plain), speed_interval(tuned, plain, error)
    if interval is not None and interval[0] > 1:
        return Verdict("use", ratio, interval, expected, n, "faster on held-out prompts")
    reason = NOT_FASTER
    if interval is None or (interval[1] >= 1 and n < SMALLEST_HELD_OUT):
        reason = f"{'one held-out prompt is' if n == 1 else f'{n} held-out prompts are'} too few to tell: give more"
    return Verdict("plain", ratio, interval, expected, n, reason)


def is_open(verdict: Verdict) -> bool:
    """Tell whether the interval contains 1, so that a second measurement may decide."""
    return verdict.interval is not None and verdict.interval[0] <= 1 <= verdict.interval[1]


def speed(runs: Sequence[Timed]) -> float:
    """Return tokens per second: total tokens ÷ total time."""
    return sum(run.tokens for run in runs) / max(LEAST_S, sum(run.seconds for run in runs))
