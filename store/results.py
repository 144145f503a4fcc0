"""Results of training, comparisons and tuning runs: heads and probes with their weights, reports, costs, trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Select, Text, cast, delete, exists, func, select
from sqlalchemy.orm import Session

from ..core.costs import CostProfile
from ..core.errors import LearnedNotFound, StoreError
from ..core.layer_sets import LayerSet
from ..core.records import LearnedKind, LearnedRecord
from ..core.types import DEFAULT_TASK, Trial, now
from .names import by_fingerprint, known_model, lock, names_of, newest, next_version, where_task
from .tables import (
    ComparisonRow,
    CostProfileRow,
    JobRow,
    LearnedRow,
    ServedTrialRow,
    TrialRow,
    WeightsRow,
    add_row,
    learned_record,
    mapping,
    reading,
    to_record,
    to_row,
)

COMPARISON = ("id", "model", "task", "device", "dtype", "created_at", "report")


# --- heads and probes; reads raise LearnedNotFound, which lists what is stored and names the training command ---


def add_learned(session: Session, record: LearnedRecord, weights: bytes) -> LearnedRecord:
    """Store heads or a probe as a new version, `weights` the bytes of their safetensors file; the record as stored.

    Raises: StoreError: no model with that fingerprint is stored.
    """
    model = by_fingerprint(session, record.fingerprint)
    if model is None:
        raise StoreError(f"no model {record.model} ({record.fingerprint}) is stored: store it before its {record.kind}")
    lock(session, model)
    version = next_version(session, LearnedRow, model, record.task, LearnedRow.kind == record.kind)
    created_at = record.created_at or now()
    row = add_row(session, to_row(LearnedRow, record, model_id=model.id, version=version, created_at=created_at))
    session.add(WeightsRow(learned_id=row.id, weights=weights))
    return learned_record(row)


def find_learned(
    session: Session, model: str, task: str, kind: LearnedKind, version: int | None = None
) -> LearnedRecord:
    """Return the newest heads or probe for a model (name or fingerprint) and task, or else the task "default"; or
    exactly that version.
    """
    for candidate in (task, DEFAULT_TASK) if version is None else (task,):
        query = newest(session, LearnedRow, model, candidate).where(LearnedRow.kind == kind)
        learned_row = session.scalar(query.limit(1) if version is None else query.where(LearnedRow.version == version))
        if learned_row is not None:
            return learned_record(learned_row)
    raise _not_found(session, model, task, kind, version)


def list_learned(
    session: Session, model: str | None = None, task: str | None = None, kind: LearnedKind | None = None
) -> list[LearnedRecord]:
    """Return the stored versions of a model, task and kind, or of all, newest first; weights are not read."""
    query = newest(session, LearnedRow, model, task)
    learned_rows = session.scalars(query if kind is None else query.where(LearnedRow.kind == kind))
    return [learned_record(row) for row in learned_rows]


def find_row(session: Session, record: LearnedRecord) -> LearnedRow:
    """Return the stored row of a record, by fingerprint, task, kind and version."""
    of_task = where_task(LearnedRow, by_fingerprint(session, record.fingerprint), record.task)
    version = (LearnedRow.kind == record.kind, LearnedRow.version == record.version)
    learned_row = session.scalar(select(LearnedRow).where(of_task, *version))
    if learned_row is None:
        raise _not_found(session, record.model, record.task, record.kind, record.version)
    return learned_row


def weights_of(session: Session, record: LearnedRecord) -> bytes:
    """Return the bytes that were stored with a record."""
    return session.scalars(
        select(WeightsRow.weights).where(WeightsRow.learned_id == find_row(session, record).id)
    ).one()


def _not_found(session: Session, model: str, task: str, kind: LearnedKind, version: int | None) -> LearnedNotFound:
    description = kind if version is None else f"version {version} of {kind}"
    learned_records = list_learned(session, model, None, kind)
    # Commands do not accept a fingerprint, so the advice must use the model's name.
    if (row := by_fingerprint(session, model)) is not None:
        model = next(iter(names_of(session).get(row.id, ())), model)
    stored_list = ", ".join(f"{record.task} version {record.version}" for record in learned_records) or "nothing"
    verb = "is" if kind == "probe" or version is not None else "are"
    return LearnedNotFound(
        f"no {description} {verb} stored for {model}/{task} (stored for the model: {stored_list}): "
        f"run `swiftopt {kind} train --model {model} --stream FILE --task {task}`"
    )


# --- comparisons ---


def add_comparison(
    session: Session, model: str, task: str, device: str, dtype: str, report: Mapping[str, Any], created_at: str
) -> int:
    """Store the report of a comparison and return its number.

    Raises: StoreError: the model is not stored.
    """
    row = ComparisonRow(
        model_id=known_model(session, model, "comparisons").id,
        task=task,
        model=model,
        device=device,
        dtype=dtype,
        report=dict(report),
        created_at=created_at,
    )
    session.add(row)
    session.flush()
    return row.id


def list_comparisons(
    session: Session, model: str | None = None, task: str | None = None, limit: int = 20
) -> list[dict[str, Any]]:
    """Return comparisons of a model (name or fingerprint), a task, both or all, newest first, each with the keys of
    `COMPARISON`; `report` as it was stored.
    """
    comparison_rows = session.scalars(newest(session, ComparisonRow, model, task).limit(limit))
    return [{name: getattr(row, name) for name in COMPARISON} for row in comparison_rows]


# --- costs and trials ---


def save_cost_profile(session: Session, profile: CostProfile) -> None:
    """Store measured costs in place of those of the same model, device, dtype and context bucket.

    Stored costs of better quality are kept, unless other software measured them.
    """
    same_key = {name: getattr(profile, name) for name in ("device", "dtype", "context_bucket", "n_layers")}
    if any(
        not profile.may_replace(stored_profile)
        for stored_profile in list_cost_profiles(session, profile.fingerprint, **same_key)
    ):
        return
    session.execute(delete(CostProfileRow).filter_by(fingerprint=profile.fingerprint, **same_key))
    session.add(CostProfileRow(**profile.to_json(), created_at=now()))


def find_cost_profile(
    session: Session, fingerprint: str, device: str, dtype: str, context_bucket: int
) -> CostProfile | None:
    """Return the newest measured costs, or None."""
    profiles_found = list_cost_profiles(session, fingerprint, device=device, dtype=dtype, context_bucket=context_bucket)
    return profiles_found[0] if profiles_found else None


def list_cost_profiles(
    session: Session, /, fingerprint: str | None = None, **conditions: str | int
) -> list[CostProfile]:
    """Return all measured costs of a model, or of all models, newest first; `conditions`: column values to match."""
    query = select(CostProfileRow).filter_by(**conditions).order_by(CostProfileRow.id.desc())
    if fingerprint is not None:
        query = query.filter_by(fingerprint=fingerprint)
    profiles_found = []
    for row in session.scalars(query):
        with reading(CostProfileRow, row.id):
            profiles_found.append(CostProfile.from_json(vars(row)))
    return profiles_found


class Tried(NamedTuple):
    """A trial's figures, with the layer set as stored JSON text that is parsed on demand.

    A page shows few of 10,000 trials, and building records of all takes several times as long as reading them this way.
    """

    id: int
    step: int
    origin: str
    matchness: float
    score: float
    adopted: bool
    seconds: float
    n_layers: int
    skip_attn: str
    skip_mlp: str
    quantised: str
    experts: str = "{}"

    @property
    def key(self) -> tuple[str, str, tuple[str, str]]:
        """Return a key that is equal for equal layer sets: what is left out, and how the rest is run."""
        return self.skip_attn, self.skip_mlp, (self.quantised, self.experts)

    @property
    def layer_set(self) -> LayerSet:
        """Return the layer set.

        Raises: StoreError: as `reading`.
        """
        with reading(TrialRow, self.id):
            attn, mlp = (frozenset(json.loads(text)) for text in (self.skip_attn, self.skip_mlp))
            forms = (tuple(json.loads(text).items()) for text in (self.quantised, self.experts))
            return LayerSet(self.n_layers, attn, mlp, *forms)


def list_tried(session: Session, job: str, task: str) -> list[Tried]:
    """Return a job's trials for a task in step order, without parsing their layer sets."""
    query = trial_columns(TrialRow).where(TrialRow.job_id == job, TrialRow.task == task)
    return list(map(Tried._make, session.execute(query.order_by(TrialRow.step))))


def trial_columns(table: type[TrialRow | ServedTrialRow]) -> Select[Any]:
    """Select the columns of `Tried`, not ORM objects: building the objects would take as long as the query."""
    columns, json_columns = table.__table__.c, ("skip_attn", "skip_mlp", "quantised", "experts")
    return select(*(cast(columns[name], Text) if name in json_columns else columns[name] for name in Tried._fields))


class StoredSearch(NamedTuple):
    """The search of a job's task, in figures."""

    job: str
    state: str
    model: str
    created_at: str
    task: str
    n_trials: int
    best_score: float
    best_matchness: float


def list_searches(session: Session, job: str | None = None, limit: int = 100) -> list[StoredSearch]:
    """Return the searches of the newest jobs that have trials, or of one job."""
    query = select(JobRow.id, JobRow.state, JobRow.request, JobRow.created_at)
    has_trials = exists().where(TrialRow.job_id == JobRow.id) if job is None else JobRow.id == job
    jobs = session.execute(
        query.where(has_trials).order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(limit)
    ).all()
    figures_query = select(
        TrialRow.job_id, TrialRow.task, func.count(), func.max(TrialRow.score), func.max(TrialRow.matchness)
    ).where(TrialRow.job_id.in_([row.id for row in jobs]))
    figures_by_job: dict[str, list[Any]] = {}
    for job_id, *figures in session.execute(
        figures_query.group_by(TrialRow.job_id, TrialRow.task).order_by(TrialRow.task)
    ):
        figures_by_job.setdefault(job_id, []).append(figures)
    return [
        StoredSearch(row.id, row.state, str(mapping(row.request).get("model", "")), row.created_at, *figures)
        for row in jobs
        for figures in figures_by_job.get(row.id, [])
    ]


def list_trials(session: Session, job: str, task: str) -> list[Trial]:
    """Return a job's trials for a task in step order; none if nothing was tried."""
    return trials_by_task(session, job, task).get(task, [])


def trials_by_task(session: Session, job: str, task: str | None = None) -> dict[str, list[Trial]]:
    """Return a job's trials for a task, None for all that it has, in step order."""
    by_task: dict[str, list[Trial]] = {}
    query = select(TrialRow).where(TrialRow.job_id == job).order_by(TrialRow.task, TrialRow.step)
    for row in session.scalars(query if task is None else query.where(TrialRow.task == task)):
        by_task.setdefault(row.task, []).append(to_record(Trial, row))
    return by_task
