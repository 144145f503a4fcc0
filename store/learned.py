"""Trained heads and probes as immutable versions of a model, task and kind; only `weights_of` reads weights."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ..core.errors import LearnedNotFound, StoreError
from ..core.learned import LearnedKind, LearnedRecord
from .names import by_fingerprint, find_model, lock
from .plan_tables import LearnedRow, WeightsRow
from .rows import learned_record, learned_row

DEFAULT_TASK = "default"  # what was trained for it stands in for a task that has none


def add_learned(session: Session, record: LearnedRecord, weights: bytes) -> LearnedRecord:
    """A new version with its weights.

    Raises: StoreError: no model with that fingerprint was ever loaded.
    """
    model = by_fingerprint(session, record.fingerprint)
    if model is None:
        raise StoreError(
            f"no model {record.model} ({record.fingerprint}) is stored: remember it before its {record.kind}"
        )
    lock(session, model)
    its = (LearnedRow.model_id == model.id, LearnedRow.task == record.task, LearnedRow.kind == record.kind)
    newest = session.scalar(select(func.max(LearnedRow.version)).where(*its)) or 0
    row = learned_row(record, model, newest + 1)
    session.add(row)
    session.flush()
    session.add(WeightsRow(learned_id=row.id, weights=weights))
    session.flush()
    session.refresh(row)  # what was written, as a reader will get it: JSON has no tuples
    return learned_record(row)


def find_learned(session: Session, model: str, task: str, kind: LearnedKind, version: int | None) -> LearnedRecord:
    """The newest, or that version; without a version the task "default" stands in for one that has none.

    Raises: LearnedNotFound: names what is stored, and the command that trains it.
    """
    row = find_model(session, model)
    stored = select(LearnedRow).where(LearnedRow.kind == kind).order_by(LearnedRow.version.desc()).limit(1)
    if version is not None:
        stored = stored.where(LearnedRow.version == version)
    for candidate in (task, DEFAULT_TASK) if version is None else (task,):
        its = stored.where(LearnedRow.model_id == row.id, LearnedRow.task == candidate) if row is not None else None
        found = session.scalar(its) if its is not None else None
        if found is not None:
            return learned_record(found)
    raise _not_found(session, model, task, kind, version)


def list_learned(
    session: Session, model: str | None, task: str | None, kind: LearnedKind | None
) -> list[LearnedRecord]:
    """Those of the model (name or fingerprint), task and kind, newest first; none if nothing matches."""
    query = select(LearnedRow).order_by(LearnedRow.id.desc())
    if model is not None:
        row = find_model(session, model)
        if row is None:
            return []
        query = query.where(LearnedRow.model_id == row.id)
    if task is not None:
        query = query.where(LearnedRow.task == task)
    if kind is not None:
        query = query.where(LearnedRow.kind == kind)
    return [learned_record(found) for found in session.scalars(query)]


def find_row(session: Session, record: LearnedRecord) -> LearnedRow:
    """The stored row of a record, by fingerprint, task, kind and version.

    Raises: LearnedNotFound: it is not stored.
    """
    model = by_fingerprint(session, record.fingerprint)
    its = (LearnedRow.task == record.task, LearnedRow.kind == record.kind, LearnedRow.version == record.version)
    found = session.scalar(select(LearnedRow).where(LearnedRow.model_id == model.id, *its)) if model else None
    if found is None:
        raise _not_found(session, record.model, record.task, record.kind, record.version)
    return found


def weights_of(session: Session, record: LearnedRecord) -> bytes:
    """The bytes that were stored with the record.

    Raises: LearnedNotFound: the record is not stored.
    """
    return session.scalars(
        select(WeightsRow.weights).where(WeightsRow.learned_id == find_row(session, record).id)
    ).one()


def _not_found(session: Session, model: str, task: str, kind: LearnedKind, version: int | None) -> LearnedNotFound:
    what = kind if version is None else f"version {version} of {kind}"
    found = list_learned(session, model, None, kind)
    stored = ", ".join(f"{one.task} version {one.version}" for one in found) or "nothing"
    verb = "is" if kind == "probe" or version is not None else "are"
    return LearnedNotFound(
        f"no {what} {verb} stored for {model}/{task} (stored for the model: {stored}): "
        f"run `swiftopt {kind} train --model {model} --stream FILE --task {task}`"
    )
