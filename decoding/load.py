"""Load of an engine, visible to all its requests: number of sequences and times of passes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..core.observed_costs import PassTiming

MAX_TIMINGS = 256  # Maximum pass times kept until they are collected.


@dataclass(slots=True)
class Load:
    """Number of sequences in the latest passes of an engine: of the whole target, and of drafts.

    `n_checks` counts target passes that verified drafts. `n_beside` counts passes that read a prompt or scored a
    window, passes that are not captured yet, and other work that took time. `n_tokens` counts committed tokens.
    `drafts`: whether drafts pay with the current number of sequences. `timings` are the latest timed passes, until a
    consumer takes them.
    """

    checked: int = 1
    drafted: int = 1
    n_checks: int = 0
    n_beside: int = 0
    n_tokens: int = 0
    drafts: bool = True
    timings: deque[PassTiming] = field(default_factory=lambda: deque(maxlen=MAX_TIMINGS))

    def is_shared(self) -> bool:
        """Whether several sequences share the engine, so that all wait for each other's passes."""
        return self.checked > 1

    def take_timings(self) -> list[PassTiming]:
        """Return the passes timed since the last call, oldest first, at most `MAX_TIMINGS`."""
        timings = list(self.timings)
        self.timings.clear()
        return timings
