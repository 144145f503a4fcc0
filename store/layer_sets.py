"""Layer sets as immutable versions 1, 2, 3 ... of a model and task."""

from __future__ import annotations

import difflib

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import Session

from ..core.errors import LayerSetNotFound, StoreError
from ..core.types import LayerSetRecord
from .names import find_model, model_for
from .rows import layer_set_record, layer_set_row
from .tables import JobRow, LayerSetRow, ModelRow, NameRow, PlanRow


def add_version(session: Session, record: LayerSetRecord, method: str) -> PlanRow:
    """A new version, and the plan to decode with it.

    Raises: LayerSetError: the model has another number of layers. StoreError: the record names an unknown job.
    """
    if record.job is not None and session.get(JobRow, record.job) is None:
        raise StoreError(f"no job {record.job} is stored: create it before its layer sets")
    model = model_for(session, record)
    newest = select(func.max(LayerSetRow.version)).where(_of(model, record.task))
    row = layer_set_row(record, model, version=(session.scalar(newest) or 0) + 1)
    session.add(row)
    session.flush()
    plan = PlanRow(layer_set_id=row.id, method=method, settings=dict(record.settings), verdict=record.verdict)
    session.add(plan)
    session.flush()
    session.refresh(row)  # what was written, as a reader will get it: JSON has no tuples
    session.refresh(plan)
    return plan


def plan_of(session: Session, model: str, task: str, version: int) -> PlanRow:
    """The plan of one version.

    Raises: LayerSetNotFound: names the versions that are stored, or else the nearest model and task.
    """
    row = find_model(session, model)
    if row is None:
        raise not_found(session, model, task)
    plan = session.scalar(select(PlanRow).join(LayerSetRow).where(_of(row, task), LayerSetRow.version == version))
    if plan is not None:
        return plan
    stored = versions(session, row, task)
    if not stored:
        raise not_found(session, model, task)
    raise LayerSetNotFound(f"{model}/{task} has no version {version}: stored are {_listed(stored)}")


def list_layer_sets(session: Session, model: str | None, task: str | None) -> list[LayerSetRecord]:
    """Those of the model (name or fingerprint) and task, newest first; none if nothing matches."""
    query = select(LayerSetRow).order_by(LayerSetRow.id.desc())
    if model is not None:
        row = find_model(session, model)
        if row is None:
            return []
        query = query.where(LayerSetRow.model_id == row.id)
    if task is not None:
        query = query.where(LayerSetRow.task == task)
    return [layer_set_record(found) for found in session.scalars(query)]


def versions(session: Session, model: ModelRow, task: str) -> list[int]:
    """The stored versions, oldest first."""
    return list(session.scalars(select(LayerSetRow.version).where(_of(model, task)).order_by(LayerSetRow.version)))


def not_found(session: Session, model: str, task: str, alias: str = "best") -> LayerSetNotFound:
    """The error for a model and task that nothing can be had for, with what comes nearest."""
    row = find_model(session, model)
    stored = versions(session, row, task) if row is not None else []
    if stored:
        return LayerSetNotFound(
            f"{model}/{task} has no layer set under the alias {alias!r}: promote one of its versions {_listed(stored)}"
        )
    wanted = f"{model}/{task}"
    pairs = session.execute(
        select(NameRow.name, LayerSetRow.task).join(LayerSetRow, LayerSetRow.model_id == NameRow.model_id).distinct()
    )
    nearest = difflib.get_close_matches(wanted, sorted(f"{name}/{its}" for name, its in pairs), n=1, cutoff=0.0)
    hint = f" (the nearest is {nearest[0]})" if nearest else ""
    return LayerSetNotFound(
        f"no layer set is stored for {wanted}{hint}: run `swiftopt tune --model {model} --stream FILE --task {task}`"
    )


def _of(model: ModelRow, task: str) -> ColumnElement[bool]:
    return and_(LayerSetRow.model_id == model.id, LayerSetRow.task == task)


def _listed(stored: list[int]) -> str:
    return ", ".join(str(version) for version in stored)
