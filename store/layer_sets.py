"""Layer sets as immutable versions of a model and task, each with the plan to decode with it."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session, undefer

from ..core.errors import LayerSetNotFound, StoreError
from ..core.known_sets import KnownSet, unpacked
from ..core.plans import AS_FOUND
from ..core.types import LayerSetRecord, Plan
from .names import find_model, model_for
from .plan_tables import PlanRow
from .plans import listed, next_version, plan_of, tune_command
from .rows import layer_set_record, layer_set_row, plan_row
from .tables import JobRow, LayerSetRow, ModelRow

N_KNOWN = 100  # the newest sets of a model that are compared with a text


def add_version(session: Session, record: LayerSetRecord, method: str) -> tuple[LayerSetRow, PlanRow]:
    """A new version, and the plan to decode with it.

    Raises: LayerSetError: the model has another number of layers. StoreError: the record names an unknown job.
    """
    if record.job is not None and session.get(JobRow, record.job) is None:
        raise StoreError(f"no job {record.job} is stored: create it before its layer sets")
    model = model_for(session, record)
    row = layer_set_row(record, model, next_version(session, model, record.task))
    session.add(row)
    session.flush()
    made = Plan(
        method,
        settings=AS_FOUND if method == "adaptive" else record.settings,
        verdict=record.verdict,
        measured_speedup=record.measured_speedup,
        measured_interval=record.measured_interval,
        device=record.device,
        dtype=record.dtype,
    )
    plan = plan_row(made, model, record.task, row.version, row.id)
    session.add(plan)
    session.flush()
    session.refresh(row)  # what was written, as a reader will get it: JSON has no tuples
    session.refresh(plan)
    return row, plan


def layer_set_of(session: Session, model: str, task: str, version: int) -> LayerSetRecord:
    """The layer set that a version was stored with or, where a comparison made it, decodes with.

    Raises: LayerSetNotFound: there is no such version, or its method needs no layer set.
    """
    plan = plan_of(session, model, task, version)
    if plan.layer_set is not None:
        return layer_set_record(plan.layer_set)
    query = select(LayerSetRow.version).where(LayerSetRow.model_id == plan.model_id, LayerSetRow.task == task)
    stored = list(session.scalars(query.order_by(LayerSetRow.version)))
    raise LayerSetNotFound(
        f"version {version} of {model}/{task} decodes with {plan.method} and has no layer set: "
        + (f"those with one are {listed(stored)}" if stored else f"tune one with `{tune_command(model, task)}`")
    )


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


def known_sets(session: Session, fingerprint: str) -> list[KnownSet]:
    """The model's newest sets of which it is known where their prompts lie, whatever their task."""
    query = (
        select(LayerSetRow)
        .options(undefer(LayerSetRow.prompt_state))
        .join(ModelRow, LayerSetRow.model_id == ModelRow.id)
        .where(ModelRow.fingerprint == fingerprint, LayerSetRow.prompt_state.is_not(None))
        .order_by(LayerSetRow.id.desc())
        .limit(N_KNOWN)
    )
    rows = session.scalars(query)
    return [KnownSet(layer_set_record(row).layer_set, unpacked(row.prompt_state or b"")) for row in rows]
