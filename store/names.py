"""Which model a name stands for, and models that were only imported until the real one is loaded."""

from __future__ import annotations

from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from ..core.errors import LayerSetError
from ..core.times import now
from ..core.types import LayerSetRecord, ModelInfo
from .plan_tables import ComparisonRow, LearnedRow, MoveRow, PlanRow
from .rows import model_info
from .tables import LayerSetRow, ModelRow, NameRow

BY_NAME = select(ModelRow).join(NameRow).where(NameRow.name == bindparam("name"))


def find_model(session: Session, model: str) -> ModelRow | None:
    """The model of a name or a fingerprint."""
    return by_name(session, model) or by_fingerprint(session, model)


def by_name(session: Session, name: str) -> ModelRow | None:
    """The model that the name stands for now."""
    return session.scalar(BY_NAME, {"name": name})


def by_fingerprint(session: Session, fingerprint: str) -> ModelRow | None:
    """The model with that fingerprint."""
    return session.scalar(select(ModelRow).where(ModelRow.fingerprint == fingerprint))


def list_models(session: Session) -> list[ModelInfo]:
    """Every model that has a fingerprint, in the order in which they came."""
    names: dict[int, list[str]] = {}
    for name in sorted(session.scalars(select(NameRow)), key=lambda row: row.name):
        names.setdefault(name.model_id, []).append(name.name)
    found = session.scalars(select(ModelRow).where(ModelRow.fingerprint.is_not(None)).order_by(ModelRow.id))
    return [model_info(row, names.get(row.id, [])) for row in found]


def list_names(session: Session) -> list[str]:
    """Every name, those of imported sets among them."""
    return sorted(session.scalars(select(NameRow.name)))  # a server's collation may order them otherwise


def remember(session: Session, info: ModelInfo) -> None:
    """Insert or update the model, let its names stand for it, and take over what was imported under them."""
    row, mistaken = by_fingerprint(session, info.fingerprint), None
    if row is not None and row.n_layers != info.n_layers:
        # Only an imported file can have said so. The loaded model is right: that file's sets belong to something else.
        row.fingerprint, mistaken, row = None, row, None
        session.flush()
    for name in info.names:
        row = _adopt(session, row, by_name(session, name), info.fingerprint, info.n_layers)
    row = row or _new_model(session, info.fingerprint, info.n_layers)
    row.architecture, row.n_parameters = info.architecture, info.n_parameters
    if mistaken is not None:  # what was trained for the fingerprint was trained on the loaded model
        session.execute(update(LearnedRow).where(LearnedRow.model_id == mistaken.id).values(model_id=row.id))
    for name in info.names:
        point(session, name, row)


def model_for(session: Session, record: LayerSetRecord) -> ModelRow:
    """The model that a new layer set belongs to, created if it is unknown; locked until the transaction ends.

    A fingerprint decides over the name: when the name stands for another model now, it keeps doing so.

    Raises: LayerSetError: the set has another number of layers than the model.
    """
    fingerprint, n_layers = record.fingerprint, record.layer_set.n_layers
    named = by_name(session, record.model)
    row = by_fingerprint(session, fingerprint) if fingerprint else named
    known = row or named
    if known is not None and known.n_layers != n_layers:
        raise LayerSetError(
            f"the layer set is for {n_layers} layers, but {record.model} has {known.n_layers}: use a set of that model"
        )
    if fingerprint:
        row = _adopt(session, row, named, fingerprint, n_layers)
    row = row or _new_model(session, fingerprint, n_layers)
    if named is None:
        # An insert, unlike `point`: it must fail, and the write begin anew, if another process gave the name meanwhile.
        session.add(NameRow(name=record.model, model_id=row.id))
    lock(session, row)
    return row


def lock(session: Session, row: ModelRow) -> None:
    """Let no other transaction number versions or move aliases of the model (SQLite locks the whole file instead)."""
    session.flush()
    session.execute(select(ModelRow.id).where(ModelRow.id == row.id).with_for_update())


def point(session: Session, name: str, row: ModelRow) -> None:
    """Let the name stand for the model from now on."""
    session.merge(NameRow(name=name, model_id=row.id))


def _new_model(session: Session, fingerprint: str | None, n_layers: int) -> ModelRow:
    row = ModelRow(fingerprint=fingerprint, architecture="", n_layers=n_layers, n_parameters=0, created_at=now())
    session.add(row)
    session.flush()
    return row


def _adopt(
    session: Session, row: ModelRow | None, found: ModelRow | None, fingerprint: str, n_layers: int
) -> ModelRow | None:
    """Make an only imported model `found` of the same depth the model `row`, or the model with that fingerprint."""
    if found is None or found.fingerprint is not None or found.n_layers != n_layers:
        return row
    if row is None:
        found.fingerprint = fingerprint
        return found
    _merge(session, found, row)
    return row


def _merge(session: Session, imported: ModelRow, into: ModelRow) -> None:
    """Give an imported model's sets and plans to the real one, numbered after those that it has."""
    lock(session, into)
    newest = dict(_newest_versions(session, into))
    for task in dict(_newest_versions(session, imported)):
        for table in (LayerSetRow, PlanRow):
            session.execute(
                update(table)
                .where(table.model_id == imported.id, table.task == task)
                .values(model_id=into.id, version=table.version + newest.get(task, 0))
            )
    for owned in (MoveRow, NameRow, ComparisonRow):
        session.execute(update(owned).where(owned.model_id == imported.id).values(model_id=into.id))
    session.execute(delete(ModelRow).where(ModelRow.id == imported.id))


def _newest_versions(session: Session, row: ModelRow) -> list[tuple[str, int]]:
    query = select(PlanRow.task, func.max(PlanRow.version)).where(PlanRow.model_id == row.id)
    return [(task, version) for task, version in session.execute(query.group_by(PlanRow.task))]
