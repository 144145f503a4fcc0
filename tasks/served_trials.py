"""Tracks which trials of a served model's searches are stored already."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.types import Trial, now
from ..optimizer.search import Search
from ..store.served_trials import ServedSearch


@dataclass(slots=True)
class _LoggedSearch:
    """A task's search, its stored counterpart, and the number of trials stored so far."""

    search: Search
    stored_search: ServedSearch
    n_stored: int = 0


class ServedTrials:
    """The stored searches of a served model, by task. A task's new search begins a new stored search.

    Args: fingerprint: of the model. model: the name under which it is served.
    """

    def __init__(self, fingerprint: str, model: str) -> None:
        self._fingerprint, self._model = fingerprint, model
        self._by_task: dict[str, _LoggedSearch] = {}

    def unstored(self, task: str, search: Search) -> tuple[ServedSearch, Sequence[Trial]]:
        """Return the stored search of a task, and its trials that are not stored yet."""
        logged = self._by_task.get(task)
        if logged is None or logged.search is not search:
            stored_search = ServedSearch(secrets.token_hex(8), self._fingerprint, self._model, task, now())
            logged = self._by_task[task] = _LoggedSearch(search, stored_search)
        return logged.stored_search, search.trials[logged.n_stored :]

    def mark_stored(self, stored_search: ServedSearch, trials: Sequence[Trial]) -> None:
        """Record that these trials are stored."""
        logged = self._by_task.get(stored_search.task)
        if logged is not None and logged.stored_search.id == stored_search.id and trials:
            logged.n_stored = trials[-1].step + 1

    def forget(self, task: str) -> None:
        """Forget a task that is no longer served."""
        self._by_task.pop(task, None)
