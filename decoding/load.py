"""Load of an engine, visible to all its requests: number of sequences and times of passes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..core.observed_costs import PassTiming

MAX_TIMINGS = 256  # Maximum pass times kept until they are collected.


@dataclass(slots=True)
class Load:
    """How many sequences the latest passes of an engine served: of the whole target, and of drafts.

    `n_checks` counts passes of the target that checked drafts; `n_beside` those that read a prompt or scored a window,
    those that will be replayed but are not yet, and what else took time; `n_tokens` what rounds
    committed. `drafts` says whether drafts pay with so many others. `timings` are the latest passes that were timed,
    for whoever learns from them and takes them out.
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
        """Return the passes that were timed since the last call, oldest first, `MAX_TIMINGS` at most."""
        timings = list(self.timings)
        self.timings.clear()
        return timings
