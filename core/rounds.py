"""Figures of the rounds of one request, without its texts: tokens committed, drafted and accepted, and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .serialization import Record
from .types import TokenSource

MOST_ROUNDS = 512  # Maximum number of rounds of a request that are stored individually; sums cover all rounds.


class RoundFigures(NamedTuple):
    """One round: its tokens, draft steps and accepted steps, and the drafter ("target": nothing was drafted)."""

    tokens: int
    steps: int
    accepted: int
    drafter: TokenSource


@dataclass(frozen=True, slots=True)
class RequestRounds(Record):
    """A request's `n` rounds: sums over those that drafted and those that did not, and the `first` MOST_ROUNDS.

    Seconds are the time that the request waited for its rounds. `beside` is the mean number of other sequences in the
    passes that verified them.
    """

    n: int = 0
    plain_tokens: int = 0
    plain_s: float = 0.0
    drafted_tokens: int = 0
    drafted_s: float = 0.0
    beside: float = 0.0
    first: tuple[RoundFigures, ...] = ()


NO_ROUNDS = RequestRounds()


@dataclass(slots=True)
class RoundLog:
    """Collects the rounds of a request while it is decoded."""

    _n: int = 0
    _tokens: list[int] = field(default_factory=lambda: [0, 0])  # Of rounds without a draft, and of those with one.
    _seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _n_beside: int = 0
    _first: list[RoundFigures] = field(default_factory=list)

    def add(self, figures: RoundFigures, seconds: float, n_sequences: int) -> None:
        """Add a round; `n_sequences` sequences shared the pass that verified it."""
        self._n += 1
        self._tokens[figures.steps > 0] += figures.tokens
        self._seconds[figures.steps > 0] += seconds
        self._n_beside += n_sequences - 1
        if len(self._first) < MOST_ROUNDS:
            self._first.append(figures)

    def total(self) -> RequestRounds:
        """Return the figures of the rounds so far."""
        (plain_tokens, drafted_tokens), (plain_s, drafted_s) = self._tokens, self._seconds
        sums = plain_tokens, plain_s, drafted_tokens, drafted_s
        return RequestRounds(self._n, *sums, self._n_beside / self._n if self._n else 0.0, tuple(self._first))
