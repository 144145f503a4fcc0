"""Models and their names, including models known only from imported layer sets until the model is loaded."""

from __future__ import annotations

from typing import TypeVar

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, func, select, update
from sqlalchemy.orm import Session, aliased

from ..core.errors import LayerSetError, StoreError
from ..core.records import LayerSetRecord, ModelInfo
from ..core.types import now
from .tables import ComparisonRow, LayerSetRow, LearnedRow, ModelRow, MoveRow, NameRow, OfTask, PlanRow, to_record

Row = TypeVar("Row", bound=OfTask)

BY_NAME = select(ModelRow).join(NameRow).where(NameRow.name == bindparam("name"))
_OF_FINGERPRINT = aliased(ModelRow)
# One query with an index for each half, because queries dominate a lookup's time. A name precedes a fingerprint.
BY_NAME_OR_FINGERPRINT = select(ModelRow).where(
    ModelRow.id
    == func.coalesce(
        select(NameRow.model_id).where(NameRow.name == bindparam("name")).scalar_subquery(),
        select(_OF_FINGERPRINT.id).where(_OF_FINGERPRINT.fingerprint == bindparam("name")).scalar_subquery(),
    )
)


def find_model(session: Session, model: str) -> ModelRow | None:
    return session.scalar(BY_NAME_OR_FINGERPRINT, {"name": model})


def known_model(session: Session, model: str, needed_for: str) -> ModelRow:
    """Return the loaded model with a name or fingerprint.

    Raises: StoreError: no such model was ever loaded.
    """
    model_row = find_model(session, model)
    if model_row is None:
        raise StoreError(f"no model {model} is stored: store it before its {needed_for}")
    return model_row


def where_task(table: type[OfTask], model: ModelRow | None, task: str) -> ColumnElement[bool]:
    """Match the rows of a model and task; no rows if the model is None."""
    return and_(table.model_id == (model.id if model else None), table.task == task)


def newest(session: Session, table: type[Row], model: str | None, task: str | None) -> Select[Row]:
    """Select the rows of a model (name or fingerprint) and task, None for any, newest first."""
    query = select(table).order_by(table.id.desc())
    if model is not None:
        model_row = find_model(session, model)
        query = query.where(table.model_id == (model_row.id if model_row else None))
    return query if task is None else query.where(table.task == task)


def next_version(
    session: Session, table: type[PlanRow | LearnedRow], model: ModelRow, task: str, *conditions: ColumnElement[bool]
) -> int:
    """Return the number of the next row for a model and task; the model must be locked."""
    return (session.scalar(select(func.max(table.version)).where(where_task(table, model, task), *conditions)) or 0) + 1


def by_name(session: Session, name: str) -> ModelRow | None:
    """Return the model to which the name refers now."""
    return session.scalar(BY_NAME, {"name": name})


def by_fingerprint(session: Session, fingerprint: str) -> ModelRow | None:
    return session.scalar(select(ModelRow).where(ModelRow.fingerprint == fingerprint))


def list_models(session: Session) -> list[ModelInfo]:
    """Return the models that were loaded, oldest first; one known only from an imported set has no fingerprint yet."""
    names = names_of(session)
    model_rows = session.scalars(select(ModelRow).where(ModelRow.fingerprint.is_not(None)).order_by(ModelRow.id))
    return [to_record(ModelInfo, row, names=tuple(sorted(names.get(row.id, []))), earlier=()) for row in model_rows]


def names_of(session: Session) -> dict[int, list[str]]:
    """Return the names of every model, the shortest first."""
    names: dict[int, list[str]] = {}
    for name in sorted(session.scalars(select(NameRow)), key=lambda row: (len(row.name), row.name)):
        names.setdefault(name.model_id, []).append(name.name)
    return names


def list_names(session: Session) -> list[str]:
    """Return every name that a model can be looked up by, sorted."""
    # Sort here: the order of a database server depends on its collation.
    return sorted(session.scalars(select(NameRow.name)))


def remember(session: Session, info: ModelInfo) -> None:
    """Insert or update a model; its names refer to it from now on, and sets imported under them are assigned to it.

    Everything stored under its earlier fingerprints is assigned to it, too, except measured costs. A set keeps its
    version, unless the model has sets for the same task: then it is numbered after those.
    """
    row, mistaken_row = by_fingerprint(session, info.fingerprint), None
    if row is not None and row.n_layers != info.n_layers:
        # A different number of layers can only come from an imported file. Trust the loaded model: the layer sets in
        # the file belong to another model.
        row.fingerprint, mistaken_row, row = None, row, None
        session.flush()
    for fingerprint in info.earlier:
        earlier_row = by_fingerprint(session, fingerprint)
        if earlier_row is None or earlier_row is row or earlier_row.n_layers != info.n_layers:
            continue
        if row is None:
            earlier_row.fingerprint, row = info.fingerprint, earlier_row
            session.flush()
        else:
            _merge(session, earlier_row, row)
    for name in info.names:
        row = _adopt(session, row, by_name(session, name), info.fingerprint, info.n_layers)
    row = row or _new_model(session, info.fingerprint, info.n_layers)
    row.architecture, row.n_parameters = info.architecture, info.n_parameters
    # Heads and probes stored under this fingerprint were trained on the loaded model, so keep them with it.
    if mistaken_row is not None:
        session.execute(update(LearnedRow).where(LearnedRow.model_id == mistaken_row.id).values(model_id=row.id))
    for name in info.names:
        session.merge(NameRow(name=name, model_id=row.id))


def model_for(session: Session, record: LayerSetRecord) -> ModelRow:
    """Return the model of a new layer set, created if it is unknown; locked until the transaction ends.

    The fingerprint takes precedence: a name that now refers to another model keeps doing so.

    Raises: LayerSetError: the set has another number of layers than the model.
    """
    fingerprint, n_layers = record.fingerprint, record.layer_set.n_layers
    model_of_name = by_name(session, record.model)
    row = by_fingerprint(session, fingerprint) if fingerprint else model_of_name
    model_row = row or model_of_name
    if model_row is not None and model_row.n_layers != n_layers:
        problem = f"the layer set is for {n_layers} layers, but {record.model} has {model_row.n_layers}"
        raise LayerSetError(f"{problem}: use a set of that model")
    if fingerprint:
        row = _adopt(session, row, model_of_name, fingerprint, n_layers)
    row = row or _new_model(session, fingerprint, n_layers)
    if model_of_name is None:
        # Insert, do not merge: if another process has added the name, the insert fails and the write is retried.
        session.add(NameRow(name=record.model, model_id=row.id))
    lock(session, row)
    return row


def lock(session: Session, row: ModelRow) -> None:
    """Lock the model's row against concurrent new versions and alias moves (SQLite locks the whole file instead)."""
    session.flush()
    session.execute(select(ModelRow.id).where(ModelRow.id == row.id).with_for_update())


def _new_model(session: Session, fingerprint: str | None, n_layers: int) -> ModelRow:
    row = ModelRow(fingerprint=fingerprint, architecture="", n_layers=n_layers, n_parameters=0, created_at=now())
    session.add(row)
    session.flush()
    return row


def _adopt(
    session: Session, row: ModelRow | None, candidate: ModelRow | None, fingerprint: str, n_layers: int
) -> ModelRow | None:
    """Merge `candidate` into `row` (None: give it the fingerprint) if it is only imported and has as many layers."""
    if candidate is None or candidate.fingerprint is not None or candidate.n_layers != n_layers:
        return row
    if row is None:
        candidate.fingerprint = fingerprint
        return candidate
    _merge(session, candidate, row)
    return row


def _merge(session: Session, duplicate: ModelRow, target: ModelRow) -> None:
    """Move what is stored for a second row of the same model to the first, with version numbers after its own."""
    lock(session, target)
    for task in session.scalars(select(PlanRow.task).where(PlanRow.model_id == duplicate.id).distinct()).all():
        n_taken = next_version(session, PlanRow, target, task) - 1
        for table in (LayerSetRow, PlanRow):
            versions = update(table).where(where_task(table, duplicate, task))
            session.execute(versions.values(model_id=target.id, version=table.version + n_taken))
    kinds = select(LearnedRow.task, LearnedRow.kind).where(LearnedRow.model_id == duplicate.id).distinct()
    for task, kind in session.execute(kinds).all():
        n_taken = next_version(session, LearnedRow, target, task, LearnedRow.kind == kind) - 1
        weights = update(LearnedRow).where(where_task(LearnedRow, duplicate, task), LearnedRow.kind == kind)
        session.execute(weights.values(model_id=target.id, version=LearnedRow.version + n_taken))
    for other_table in (MoveRow, NameRow, ComparisonRow):
        session.execute(update(other_table).where(other_table.model_id == duplicate.id).values(model_id=target.id))
    session.execute(delete(ModelRow).where(ModelRow.id == duplicate.id))
