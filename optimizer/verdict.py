"""The verdict: plain and tuned decoding side by side on prompts that the search did not see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import islice
from operator import add
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.types import Completion, Prompt, Verdict
from ..decoding.engine import side_by_side
from ..decoding.loop import Round
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session, Turn, n_turns

T = TypeVar("T")
Array = NDArray[np.float64]

BOOTSTRAPS = 2000  # resamples of the prompts behind the interval
CONFIDENCE = 0.95
LEAST_S = 1e-12  # a run counts as at least this
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


def bootstrap_interval(fast: Sequence[Timed], slow: Sequence[Timed]) -> tuple[float, float]:
    """Return the percentile interval of `speed_ratio` over resampled prompts, a pair of runs each."""
    pairs = [(own.tokens, own.seconds, base.tokens, base.seconds) for own, base in zip(fast, slow, strict=True)]

    def ratio(sums: Array) -> Array:
        tokens, seconds, base_tokens, base_seconds = sums.T
        return np.asarray(tokens / np.maximum(LEAST_S, seconds) / (base_tokens / np.maximum(LEAST_S, base_seconds)))

    return resampled(pairs, ratio)


def resampled(rows: ArrayLike, statistic: Callable[[Array], Array]) -> tuple[float, float]:
    """Return the percentile interval of a statistic of sums over resampled prompts.

    Args: rows: what is summed, (prompts, columns). statistic: of sums (resamples, columns), their values (resamples,).
    """
    values = np.asarray(rows, dtype=float)
    found = np.sort(statistic(_counts(len(values)) @ values))
    tail = (1 - CONFIDENCE) / 2
    return float(found[int(tail * BOOTSTRAPS)]), float(found[int((1 - tail) * BOOTSTRAPS) - 1])


@lru_cache(maxsize=8)  # a server judges the same number of pairs again and again
def _counts(n: int) -> Array:
    """Return how often each of `n` prompts is in each resample, (resamples, prompts)."""
    # The draws of Python's own generator, of which all published intervals were made.
    picks = (np.random.RandomState([0]).random_sample((BOOTSTRAPS, n)) * n).astype(np.intp)
    numbered = picks + n * np.arange(BOOTSTRAPS)[:, None]
    return np.bincount(numbered.ravel(), minlength=BOOTSTRAPS * n).reshape(BOOTSTRAPS, n).astype(float)


def judge(tuned: Sequence[Timed], plain: Sequence[Timed], expected: float | None) -> Verdict:
    """Return "use" only if the whole interval is above 1, and "unmeasured" where nothing was held out."""
    if not tuned:
        return Verdict("unmeasured", reason="the stream has too few prompts to hold any out")
    ratio = speed_ratio(tuned, plain)
    if len(tuned) == 1:
        return Verdict("plain", ratio, None, expected, 1, "one held-out prompt is too few to tell")
    interval = bootstrap_interval(tuned, plain)
    word, reason = ("use", "faster on held-out prompts") if interval[0] > 1 else ("plain", "not reliably faster here")
    return Verdict(word, ratio, interval, expected, len(tuned), reason)  # type: ignore[arg-type]


def is_open(verdict: Verdict) -> bool:
    """Tell whether the interval contains 1, so that a second measurement may decide."""
    return verdict.interval is not None and verdict.interval[0] <= 1 <= verdict.interval[1]


def speed(runs: Sequence[Timed]) -> float:
    """Return tokens per second: total tokens ÷ total time."""
    return sum(run.tokens for run in runs) / max(LEAST_S, sum(run.seconds for run in runs))
