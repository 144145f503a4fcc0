"""What tuning runs leave behind: trials and measured costs."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ..core.costs import CostProfile
from ..core.types import Trial
from . import rows
from .tables import CostProfileRow, TrialRow


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
