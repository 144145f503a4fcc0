"""Measures how often a verdict says `use`, by running `optimizer.verdict` on simulated timings of prompts.

A prompt has about 100 tokens (lognormal, 30 %). The seconds of each run and the gain of each prompt are lognormal with
a given spread. On a `disturbed` machine, one run in ten takes 1.2 to 3 times as long. The ratio of the total seconds is
the true gain.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from ..decoding.work import exhaust
from ..optimizer.verdict import (
    InterimTest,
    JudgedTurns,
    Timed,
    TimedTurn,
    hold_out,
    plan_interim_tests,
    run_interim_tests,
)

GAINS = (1.0, 1.1, 1.3)
TOKENS, TOKENS_SPREAD = 100, 0.3
DISTURBED, SLOWER = 0.1, (1.2, 3.0)  # Share of disturbed runs, and the range of their factors of time.


@dataclass(frozen=True, slots=True)
class Machine:
    """Timing noise: lognormal spread of run times (`runs`) and of prompts' gains, and occasional slow runs."""

    runs: float = 0.0
    gains: float = 0.0
    disturbed: bool = False

    @property
    def words(self) -> str:
        phrases = [f"runs {100 * self.runs:.0f} %"] if self.runs else []
        phrases += [f"gains {100 * self.gains:.0f} %"] if self.gains else []
        return ", ".join([*phrases, *(["disturbed"] if self.disturbed else [])])


@dataclass(frozen=True, slots=True)
class Stream:
    """A task of `n` prompts, of which the search scored no window of `unscored`."""

    n: int
    unscored: int = 0

    @property
    def n_held_out(self) -> int:
        return len(hold_out(range(self.n))[1])

    @property
    def interim_tests(self) -> list[InterimTest]:
        n_held_out = self.n_held_out
        return plan_interim_tests(n_held_out, min(self.unscored, n_held_out, self.n - n_held_out))


MACHINES = (
    Machine(0.05),
    Machine(0.15),
    Machine(0.4),
    Machine(0.05, disturbed=True),
    Machine(0.03, 0.15),
    Machine(0.03, 0.4),
)
STREAMS = (Stream(4), Stream(8), Stream(8, 2), Stream(16), Stream(16, 4), Stream(16, 8), Stream(80))


class Prompts:
    """Simulated prompts; each has the same number of tokens and the same gain in all runs."""

    def __init__(self, rng: np.random.Generator, machine: Machine, speedup: float, n: int) -> None:
        self._rng, self._machine = rng, machine
        self._tokens = np.maximum(1, np.round(TOKENS * np.exp(TOKENS_SPREAD * rng.standard_normal(n))))
        # With gains**2 / 2 the mean of 1 / self._gains is 1 / speedup, so the ratio of total seconds is the speedup.
        self._gains = speedup * np.exp(machine.gains * rng.standard_normal(n) + machine.gains**2 / 2)

    def measure(self, test: InterimTest) -> Generator[None, None, Iterator[tuple[int, Sequence[TimedTurn]]]]:
        """Return simulated timings of an interim test, in the form of `MeasureRuns`; yields no event."""
        yield from ()
        return ((number, [self._timed(number)]) for _ in test.runs for number in test.prompts)

    def _timed(self, number: int) -> TimedTurn:
        tokens = int(self._tokens[number])
        seconds = tokens * self._slowness()
        return TimedTurn(Timed(tokens, seconds), Timed(tokens, tokens * self._slowness() / self._gains[number]))

    def _slowness(self) -> float:
        machine, rng = self._machine, self._rng
        slowness = math.exp(machine.runs * rng.standard_normal())
        return slowness * rng.uniform(*SLOWER) if machine.disturbed and rng.random() < DISTURBED else slowness


@dataclass(frozen=True, slots=True)
class VerdictShare:
    """Share of `use` among simulated verdicts, and mean number of timed runs (plain or drafting) per verdict."""

    use: float
    n_runs: float


def simulate(stream: Stream, machine: Machine, speedup: float, n_verdicts: int, seed: int = 0) -> VerdictShare:
    """Simulate `n_verdicts` verdicts on a task, each with newly drawn prompts."""
    rng, interim_tests = np.random.default_rng(seed), stream.interim_tests
    n_use = n_runs = 0
    for _ in range(n_verdicts):
        prompts = Prompts(rng, machine, speedup, max((test.prompts.stop for test in interim_tests), default=0))
        timed_tests: list[InterimTest] = []

        def measure(test: InterimTest, prompts: Prompts = prompts, timed_tests: list[InterimTest] = timed_tests) -> Any:
            timed_tests.append(test)
            return prompts.measure(test)

        judged: JudgedTurns = exhaust(run_interim_tests(interim_tests, measure), lambda event: None)
        n_use += judged.verdict.word == "use"
        n_runs += sum(len(test.prompts) * len(test.runs) for test in timed_tests)
    return VerdictShare(n_use / n_verdicts, n_runs / n_verdicts)


def table(
    n_verdicts: int, streams: Sequence[Stream] = STREAMS, machines: Sequence[Machine] = MACHINES
) -> Iterator[str]:
    """Yield the lines of a table: the percentage of `use` and the number of timed runs at each true gain."""
    gains, seeds = " / ".join(f"{speedup:.1f}x" for speedup in GAINS), count()
    yield f"| prompts, held out + unscored | {' | '.join(machine.words for machine in machines)} |"
    yield "|---|" + "---|" * len(machines)
    for stream in streams:
        cells = []
        for machine in machines:
            verdict_shares = [simulate(stream, machine, speedup, n_verdicts, next(seeds)) for speedup in GAINS]
            use_percentages = " / ".join(f"{100 * share.use:.1f}" for share in verdict_shares)
            cells.append(f"{use_percentages} ({' / '.join(f'{share.n_runs:.0f}' for share in verdict_shares)})")
        unscored_words = f" + {stream.unscored}" if stream.unscored else ""
        yield f"| {stream.n}, {stream.n_held_out}{unscored_words} | {' | '.join(cells)} |"
    yield f"{n_verdicts:,} verdicts each: per cent `use` at {gains}; in brackets the mean number of timed runs."


def main(args: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verdicts", type=int, default=4000, help="verdicts of each cell [default: 4000]")
    parser.add_argument(
        "--prompts", type=int, action="append", help="rows with this number of prompts; may be repeated [default: all]"
    )
    parsed = parser.parse_args(args)
    streams = [stream for stream in STREAMS if stream.n in (parsed.prompts or [stream.n])]
    for line in table(parsed.verdicts, streams):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
