"""Plans of any method: one sequence of versions per model and task, whether tuning or a comparison made them."""

from __future__ import annotations

import difflib

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import Session

from ..core.errors import LayerSetNotFound, StoreError
from ..core.types import LayerSetRecord, Plan
from .learned import find_row
from .names import find_model, lock
from .plan_tables import PlanRow
from .rows import plan_row
from .tables import LayerSetRow, ModelRow, NameRow


def add_plan(session: Session, model: str, task: str, plan: Plan) -> PlanRow:
    """A new version that points at the stored layer set and the stored heads or probe of the plan.

    Raises: StoreError: the model was never loaded. LayerSetNotFound, LearnedNotFound: the plan's are not stored.
    """
    row = find_model(session, model)
    if row is None:
        raise StoreError(f"no model {model} is stored: remember it before its plans")
    lock(session, row)
    layer_set = _layer_set(session, row, plan.layer_set) if plan.layer_set is not None else None
    learned = find_row(session, plan.learned) if plan.learned is not None else None
    made = plan_row(plan, row, task, next_version(session, row, task))
    made.layer_set, made.learned = layer_set, learned
    session.add(made)
    session.flush()
    session.refresh(made)  # what was written, as a reader will get it: JSON has no tuples
    return made


def plan_of(session: Session, model: str, task: str, version: int) -> PlanRow:
    """The plan of one version.

    Raises: LayerSetNotFound: names the versions that are stored, or else the nearest model and task.
    """
    row = find_model(session, model)
    if row is None:
        raise not_found(session, model, task)
    plan = session.scalar(select(PlanRow).where(_of(row, task), PlanRow.version == version))
    if plan is not None:
        return plan
    stored = versions(session, row, task)
    if not stored:
        raise not_found(session, model, task)
    raise LayerSetNotFound(f"{model}/{task} has no version {version}: stored are {listed(stored)}")


def versions(session: Session, model: ModelRow, task: str) -> list[int]:
    """The stored versions, oldest first."""
    return list(session.scalars(select(PlanRow.version).where(_of(model, task)).order_by(PlanRow.version)))


def next_version(session: Session, model: ModelRow, task: str) -> int:
    """The number of the next layer set or plan; the model must be locked."""
    return (session.scalar(select(func.max(PlanRow.version)).where(_of(model, task))) or 0) + 1


def not_found(session: Session, model: str, task: str, alias: str = "best") -> LayerSetNotFound:
    """The error for a model and task that nothing can be had for, with what comes nearest."""
    row = find_model(session, model)
    stored = versions(session, row, task) if row is not None else []
    if stored:
        return LayerSetNotFound(
            f"{model}/{task} has no layer set under the alias {alias!r}: promote one of its versions {listed(stored)}"
        )
    wanted = f"{model}/{task}"
    pairs = session.execute(
        select(NameRow.name, PlanRow.task).join(PlanRow, PlanRow.model_id == NameRow.model_id).distinct()
    )
    nearest = difflib.get_close_matches(wanted, sorted(f"{name}/{its}" for name, its in pairs), n=1, cutoff=0.0)
    hint = f" (the nearest is {nearest[0]})" if nearest else ""
    return LayerSetNotFound(f"no layer set is stored for {wanted}{hint}: run `{tune_command(model, task)}`")


def tune_command(model: str, task: str) -> str:
    """The command that makes a layer set."""
    return f"swiftopt tune --model {model} --stream FILE --task {task}"


def listed(stored: list[int]) -> str:
    """1, 2, 3"""
    return ", ".join(str(version) for version in stored)


def _of(model: ModelRow, task: str) -> ColumnElement[bool]:
    return and_(PlanRow.model_id == model.id, PlanRow.task == task)


def _layer_set(session: Session, model: ModelRow, record: LayerSetRecord) -> LayerSetRow:
    """The stored row of a record; its task need not be the plan's, for a look-up may have fallen back."""
    its = and_(LayerSetRow.model_id == model.id, LayerSetRow.task == record.task)
    found = session.scalar(select(LayerSetRow).where(its, LayerSetRow.version == record.version))
    if found is None:
        raise LayerSetNotFound(
            f"the plan's layer set, version {record.version} of {record.model}/{record.task}, is not stored for that"
            " model: store it first"
        )
    return found
