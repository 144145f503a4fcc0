"""Aliases: which plan `best` means, as moves that are only ever added, so that each can be undone."""

from __future__ import annotations

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session, aliased

from ..core.errors import LayerSetNotFound
from ..core.times import now
from ..core.types import FoundPlan
from .learned import DEFAULT_TASK
from .names import find_model, lock
from .plan_tables import MoveRow, PlanRow
from .plans import not_found
from .rows import found_plan
from .tables import ModelRow

_UNDOING = aliased(MoveRow)
# Built once: a look-up spends more time on putting its statements together than the database on answering them.
STANDING = (
    select(MoveRow)
    .where(MoveRow.model_id == bindparam("model_id"), MoveRow.task == bindparam("task"))
    .where(MoveRow.alias == bindparam("alias"), MoveRow.undoes_id.is_(None))
    .where(~select(_UNDOING.id).where(_UNDOING.undoes_id == MoveRow.id).exists())
    .order_by(MoveRow.id.desc())
)


def move(session: Session, plan: PlanRow, alias: str) -> FoundPlan:
    """Let the alias mean the plan, for the device and dtype that it was made on; no move if it does already."""
    lock(session, plan.model)
    standing = _standing(session, plan.model, plan.task, alias)
    if not standing or standing[0].plan_id != plan.id:
        session.add(_row(plan, alias))
    return found_plan(plan, alias)


def offer(session: Session, plan: PlanRow) -> None:
    """Let `best` mean a tuned plan, unless it means one of another method, of this device and dtype, that is faster."""
    lock(session, plan.model)
    here = [
        found.plan
        for found in _standing(session, plan.model, plan.task, "best")
        if (found.device, found.dtype) == (plan.device, plan.dtype)
    ]
    if not here or not _beats(here[0], plan):
        move(session, plan, "best")


def _beats(standing: PlanRow, new: PlanRow) -> bool:
    """Whether a comparison found the standing plan worth its while, and the new one is not known to be as fast."""
    if standing.method == new.method or standing.verdict != "use":
        return False
    return new.verdict != "use" or (standing.measured_speedup or 0.0) > (new.measured_speedup or 0.0)


def stands(session: Session, plan: PlanRow, alias: str = "best") -> bool:
    """Whether the alias means anything for the plan's model and task."""
    return bool(_standing(session, plan.model, plan.task, alias))


def undo(session: Session, model: str, task: str, alias: str) -> FoundPlan:
    """Take back the alias's last move that still stands, and give the plan of the one before it.

    Raises: LayerSetNotFound: there is no move before the last one.
    """
    row = find_model(session, model)
    if row is None:
        raise not_found(session, model, task, alias)
    lock(session, row)
    standing = _standing(session, row, task, alias)
    if not standing:
        raise not_found(session, model, task, alias)
    if len(standing) == 1:
        raise LayerSetNotFound(
            f"the alias {alias!r} of {model}/{task} cannot go back: "
            f"version {standing[0].plan.version} is the first it had; promote another version"
        )
    last, before = standing[0], standing[1]
    session.add(_row(before.plan, alias, undoes=last))
    return found_plan(before.plan, alias)


def lookup(session: Session, model: str, task: str, device: str | None, dtype: str | None, alias: str) -> FoundPlan:
    """The plan for the task on this device and dtype, else the nearest that the model has.

    Raises: LayerSetNotFound: the model has neither a plan for the task nor a default one.
    """
    row = find_model(session, model)
    for candidate in dict.fromkeys((task, DEFAULT_TASK)) if row is not None else ():
        standing = _standing(session, row, candidate, alias) if row is not None else []
        if standing:
            chosen = _nearest(standing, device, dtype)
            return found_plan(chosen.plan, alias, _difference(chosen, task, device, dtype))
    raise not_found(session, model, task, alias)


def _standing(session: Session, model: ModelRow, task: str, alias: str) -> list[MoveRow]:
    """The moves that no rollback has taken back, newest first."""
    return list(session.scalars(STANDING, {"model_id": model.id, "task": task, "alias": alias}))


def _nearest(standing: list[MoveRow], device: str | None, dtype: str | None) -> MoveRow:
    """The newest move of the right device and dtype, else of the device, else of the dtype, else of all."""

    def closeness(found: MoveRow) -> tuple[bool, bool]:
        return device in (None, found.device), dtype in (None, found.dtype)

    return max(standing, key=closeness)  # the first of equals, which is the newest


def _difference(found: MoveRow, task: str, device: str | None, dtype: str | None) -> str | None:
    """What the answer is not, compared with what was asked, in words."""
    parts = ["model default"] if found.task != task else []
    if device not in (None, found.device) or dtype not in (None, found.dtype):
        where = " ".join(part for part in (found.device, found.dtype) if part)
        parts.append(f"tuned on {where or 'an unknown device'}")
    return ", ".join(parts) or None


def _row(plan: PlanRow, alias: str, undoes: MoveRow | None = None) -> MoveRow:
    return MoveRow(
        model_id=plan.model_id,
        task=plan.task,
        alias=alias,
        device=plan.device,
        dtype=plan.dtype,
        plan_id=plan.id,
        undoes_id=undoes.id if undoes else None,
        created_at=now(),
    )
