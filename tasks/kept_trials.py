"""Which trials of a served model's searches are stored already, so that the others can be."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.types import Trial, now
from ..optimizer.search import Search
from ..store.served_trials import ServedSearch


@dataclass(slots=True)
class _Kept:
    search: Search
    stored: ServedSearch
    n_trials: int = 0


class KeptTrials:
    """The stored searches of a served model, by task; a task whose search is another one begins a new stored search.

    Args: fingerprint, model: of the model, and the name that it is served under.
    """

    def __init__(self, fingerprint: str, model: str) -> None:
        self._fingerprint, self._model = fingerprint, model
        self._by_task: dict[str, _Kept] = {}

    def unstored(self, task: str, search: Search) -> tuple[ServedSearch, Sequence[Trial]]:
        """Return the stored search of a task, and its trials that are not stored yet."""
        kept = self._by_task.get(task)
        if kept is None or kept.search is not search:
            stored = ServedSearch(secrets.token_hex(8), self._fingerprint, self._model, task, now())
            kept = self._by_task[task] = _Kept(search, stored)
        return kept.stored, search.trials[kept.n_trials :]

    def mark(self, stored: ServedSearch, trials: Sequence[Trial]) -> None:
        """Note that these trials are stored."""
        kept = self._by_task.get(stored.task)
        if kept is not None and kept.stored.id == stored.id and trials:
            kept.n_trials = trials[-1].step + 1

    def forget(self, task: str) -> None:
        """Forget a task that is no longer served."""
        self._by_task.pop(task, None)
