"""The trials of searches that run with the requests of served models; bounded, because servers run for months."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from ..core.types import Trial
from .results import StoredSearch, Tried, trial_columns
from .tables import ServedSearchRow, ServedTrialRow, to_row

MOST_SEARCHES = 8  # Number of newest searches kept per task of a model.
MOST_TRIALS = 10_000  # Number of newest trials kept per search.
STATE = "served"  # The state of these searches; jobs have others.


@dataclass(frozen=True, slots=True)
class ServedSearch:
    """A search of a served model's task: `model` is the name that it is served under."""

    id: str
    fingerprint: str
    model: str
    task: str
    created_at: str


def add_served_trials(session: Session, search: ServedSearch, trials: Sequence[Trial]) -> None:
    """Store those of a search's newest trials that are not stored yet; the oldest are removed."""
    if session.get(ServedSearchRow, search.id) is None:
        session.add(to_row(ServedSearchRow, search))
        session.flush()
        of_task = ServedSearchRow.fingerprint == search.fingerprint, ServedSearchRow.task == search.task
        newest = select(ServedSearchRow.id).where(*of_task)
        newest = newest.order_by(ServedSearchRow.created_at.desc(), ServedSearchRow.id.desc())
        old = list(session.scalars(newest.offset(MOST_SEARCHES)))
        session.execute(delete(ServedTrialRow).where(ServedTrialRow.search_id.in_(old)))
        session.execute(delete(ServedSearchRow).where(ServedSearchRow.id.in_(old)))
    of_search = ServedTrialRow.search_id == search.id
    last_step = session.scalar(select(func.max(ServedTrialRow.step)).where(of_search))
    new_trials = [trial for trial in trials if last_step is None or trial.step > last_step]
    session.add_all(to_row(ServedTrialRow, trial, search_id=search.id) for trial in new_trials)
    if new_trials:
        session.execute(delete(ServedTrialRow).where(of_search, ServedTrialRow.step <= trials[-1].step - MOST_TRIALS))


def list_served_searches(session: Session, id: str | None = None, limit: int = 100) -> list[StoredSearch]:
    """Return the newest searches of served models, or the one of that id; `job` is a search's id."""
    figures = func.count(), func.max(ServedTrialRow.score), func.max(ServedTrialRow.matchness)
    columns = ServedSearchRow.id, ServedSearchRow.model, ServedSearchRow.created_at, ServedSearchRow.task
    query = select(*columns, *figures).join(ServedTrialRow, ServedTrialRow.search_id == ServedSearchRow.id)
    if id is not None:
        query = query.where(ServedSearchRow.id == id)
    newest = query.group_by(*columns).order_by(ServedSearchRow.created_at.desc(), ServedSearchRow.id.desc())
    return [
        StoredSearch(search_id, STATE, model, created_at, task, n_trials, best_score, best_matchness)
        for search_id, model, created_at, task, n_trials, best_score, best_matchness in session.execute(
            newest.limit(limit)
        )
    ]


def fingerprint_of_search(session: Session, id: str) -> str | None:
    """Return the fingerprint of the model that a search was for; None: there is no such search."""
    return session.scalar(select(ServedSearchRow.fingerprint).where(ServedSearchRow.id == id))


def list_served_tried(session: Session, id: str) -> list[Tried]:
    """Return a search's trials in step order, without parsing their layer sets."""
    query = trial_columns(ServedTrialRow).where(ServedTrialRow.search_id == id)
    return list(map(Tried._make, session.execute(query.order_by(ServedTrialRow.step))))
