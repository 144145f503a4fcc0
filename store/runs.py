"""What tuning runs leave behind: jobs, their trials, and measured costs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from ..core.errors import InvalidInput, NotFound
from ..core.types import CostProfile, Trial
from . import rows
from .tables import CostProfileRow, JobRow, TrialRow

END_STATES = ("succeeded", "failed", "cancelled")


def create_job(session: Session, request: Mapping[str, Any]) -> str:
    """Insert a running job; its id."""
    job = secrets.token_hex(6)
    session.add(JobRow(id=job, state="running", request=dict(request), created_at=rows.now()))
    return job


def find_job(session: Session, job: str) -> JobRow:
    """The job.

    Raises: NotFound: no such job.
    """
    row = session.get(JobRow, job)
    if row is None:
        raise NotFound(f"no job {job!r} is stored: check its id")
    return row


def finish_job(session: Session, job: str, state: str, error: str | None) -> None:
    """End a running job; one that has ended stays as it is.

    Raises: NotFound: no such job. InvalidInput: no such state.
    """
    if state not in END_STATES:
        raise InvalidInput(f"a job cannot end as {state!r}: use one of {', '.join(END_STATES)}")
    find_job(session, job)
    running = update(JobRow).where(JobRow.id == job, JobRow.state == "running")
    session.execute(running.values(state=state, error=error, finished_at=rows.now()))


def add_trials(session: Session, job: str, task: str, trials: Sequence[Trial]) -> None:
    """Append trials.

    Raises: NotFound: no such job.
    """
    find_job(session, job)
    session.add_all(rows.trial_row(job, task, trial) for trial in trials)


def list_trials(session: Session, job: str, task: str) -> list[Trial]:
    """The trials in step order."""
    query = select(TrialRow).where(TrialRow.job_id == job, TrialRow.task == task)
    return [rows.trial(row) for row in session.scalars(query.order_by(TrialRow.step, TrialRow.id))]


def save_cost_profile(session: Session, profile: CostProfile) -> None:
    """Insert the profile in place of the one with its key."""
    session.execute(
        delete(CostProfileRow).where(
            CostProfileRow.fingerprint == profile.fingerprint,
            CostProfileRow.device == profile.device,
            CostProfileRow.dtype == profile.dtype,
            CostProfileRow.context_bucket == profile.context_bucket,
            CostProfileRow.n_layers == profile.n_layers,
        )
    )
    session.add(rows.cost_profile_row(profile))


def find_cost_profile(
    session: Session, fingerprint: str, device: str, dtype: str, context_bucket: int
) -> CostProfile | None:
    """The newest profile of that key."""
    query = select(CostProfileRow).where(
        CostProfileRow.fingerprint == fingerprint,
        CostProfileRow.device == device,
        CostProfileRow.dtype == dtype,
        CostProfileRow.context_bucket == context_bucket,
    )
    row = session.scalars(query.order_by(CostProfileRow.id.desc())).first()
    return rows.cost_profile(row) if row is not None else None
