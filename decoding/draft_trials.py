"""Timed trials of rounds with and without drafts, to stop drafting if it does not pay with concurrent requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

PLAIN_ROUNDS = 3  # Rounds in one trial of plain decoding.
DRAFTED_ROUNDS = 64  # Drafted rounds per trial, summed over all sequences.
FIRST_WAIT, MAX_WAIT = 128, 512  # Rounds between trials of the slower way: at first, and at most.
# Minimum measured gain for drafting. A smaller gain is lost because sequences end, and prompts are read, at different
# times.
MIN_GAIN = 1.1


@dataclass(slots=True)
class _Rounds:
    """Decaying sums of the tokens and seconds of one kind of rounds; `n` counts rounds since the latest trial began."""

    n: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float, memory: float = 0.97) -> None:
        self.n += 1
        self.tokens, self.seconds = memory * self.tokens + tokens, memory * self.seconds + seconds

    def restart_trial(self) -> None:
        self.n, self.tokens, self.seconds = 0, self.tokens / 4, self.seconds / 4


@dataclass(slots=True)
class DraftTrials:
    """Decides by measured time whether drafting pays with `n_sequences` concurrent sequences.

    Drafts pay less the more rows a pass has. A sequence cannot know the limit by itself, because it depends on the
    other sequences, which all wait for those that draft. So rounds in which any sequence drafted are compared with
    plain ones. The first few are plain; then the faster way is used, and the other is tried ever more rarely while it
    stays slower. `paid`: drafts won the latest comparison. `idle`: rounds since the latest trial; `wait`: rounds until
    the next.
    """

    n_sequences: int
    plain: _Rounds = field(default_factory=_Rounds)
    drafted: _Rounds = field(default_factory=_Rounds)
    paid: bool = True
    idle: int = 0
    wait: int = FIRST_WAIT

    @classmethod
    def beginning(cls, n_sequences: int, known_trials: Iterable[DraftTrials]) -> Self:
        """Return trials for a new number of sequences; skip the first trial if drafts lost with a similar number."""
        trials = cls(n_sequences)
        timed_trials = [trials_of_n for trials_of_n in known_trials if trials_of_n.drafted.seconds]
        nearest = min(timed_trials, key=lambda trials_of_n: abs(trials_of_n.n_sequences - n_sequences), default=trials)
        if not nearest.paid and 4 * abs(nearest.n_sequences - n_sequences) <= n_sequences:
            trials.paid, trials.drafted.n = False, DRAFTED_ROUNDS
        return trials

    @property
    def drafts(self) -> bool:
        """Whether the next round may draft."""
        return self.plain.n >= PLAIN_ROUNDS and (self.paid or self._tries_drafts)

    @property
    def _tries_drafts(self) -> bool:
        return self.drafted.n * self.n_sequences < DRAFTED_ROUNDS

    def add(self, drafted: bool, tokens: int, seconds: float) -> None:
        """Add the tokens and the time of one round of all sequences."""
        (self.drafted if drafted else self.plain).add(tokens, seconds)
        if self.plain.n < PLAIN_ROUNDS or self._tries_drafts:
            return
        gained_tokens = self.drafted.tokens * self.plain.seconds - MIN_GAIN * self.plain.tokens * self.drafted.seconds
        paid_before, self.paid = self.paid, gained_tokens > 0
        self.idle += 1
        if paid_before != self.paid:
            self.idle, self.wait = 0, FIRST_WAIT
        elif self.idle >= self.wait:
            self.idle, self.wait = 0, min(2 * self.wait, MAX_WAIT)
            (self.plain if self.paid else self.drafted).restart_trial()
