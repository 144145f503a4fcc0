"""The database tables, and the conversion of core's records to rows and back by field names; rows stay in the store.

Every table name starts with `swiftopt_`, so that a database can be shared (Optuna also has a table `trials`). A field
with a column of the same name needs no conversion code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from ..core.errors import StoreError
from ..core.layer_sets import LayerSet
from ..core.records import FoundPlan, LayerSetRecord, LearnedRecord, Plan
from ..core.requests import JobKind, Wanted

NAMING = {
    "pk": "pk_%(table_name)s",
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
}
UNFINISHED_SQL = "state IN ('queued', 'running', 'paused')"


class Base(DeclarativeBase):
    """Base of all tables; timestamps are ISO 8601 text in UTC."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {float: Double}  # noqa: RUF012  (SQLAlchemy reads it)


class SchemaRow(Base):
    """The database's schema version, in one row. Not named `alembic_version`: Optuna would take that for its own."""

    __tablename__ = "swiftopt_alembic_version"

    version_num: Mapped[str] = mapped_column(primary_key=True)


class ModelRow(Base):
    """A model. `fingerprint` is null while the model is known only from an imported set."""

    __tablename__ = "swiftopt_models"

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str | None] = mapped_column(unique=True)
    architecture: Mapped[str]
    n_layers: Mapped[int]
    n_parameters: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[str]


class NameRow(Base):
    """An alias, hub id or path, and the model to which it refers now."""

    __tablename__ = "swiftopt_model_names"

    name: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey(ModelRow.id), index=True)


class StreamRow(Base):
    """The prompts of jobs as JSON Lines, once per content."""

    __tablename__ = "swiftopt_streams"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    lines: Mapped[str]
    created_at: Mapped[str]


class JobRow(Base):
    """A job; `queue` null: it runs in the process that started it. `lease_until` and `due_at` are seconds since 1970 by
    the database's clock, so that clocks of workers may differ.

    `n_checkpoints_before` is the value of `n_checkpoints` at the start of the attempt; `n_fruitless` counts the latest
    consecutive attempts without a new checkpoint.
    """

    __tablename__ = "swiftopt_jobs"
    __table_args__ = (
        Index(None, "created_at", "id"),  # Index for listing jobs in order of creation.
        Index(None, "state", "created_at", "id"),
        Index("ix_swiftopt_jobs_due", "state", "due_at", "id"),  # Index for polls of what is due among thousands.
        # Prevents two unfinished jobs with the same fingerprint, even if they are submitted at the same moment.
        Index(
            "uq_swiftopt_jobs_fingerprint",
            "fingerprint",
            unique=True,
            sqlite_where=text(UNFINISHED_SQL),
            postgresql_where=text(UNFINISHED_SQL),
        ),
        Index("uq_swiftopt_jobs_idempotency_key", "idempotency_key", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[JobKind] = mapped_column(String, server_default="tune")
    state: Mapped[str]
    queue: Mapped[str | None]
    fingerprint: Mapped[str | None]
    idempotency_key: Mapped[str | None]
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    stream: Mapped[str | None]  # SHA-256 of the StreamRow that holds the job's prompts.
    n_prompts: Mapped[int] = mapped_column(server_default="0")
    attempt: Mapped[int] = mapped_column(server_default="1")
    worker: Mapped[str | None]
    wanted: Mapped[Wanted | None] = mapped_column(String)
    lease_until: Mapped[float | None]
    due_at: Mapped[float | None]
    n_checkpoints: Mapped[int] = mapped_column(server_default="0")
    n_checkpoints_before: Mapped[int] = mapped_column(server_default="0")
    n_fruitless: Mapped[int] = mapped_column(server_default="0")
    # Loaded on demand: up to a megabyte, and only an attempt that begins needs it.
    snapshot: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None]
    created_at: Mapped[str]
    started_at: Mapped[str | None]
    finished_at: Mapped[str | None]


class EventRow(Base):
    """An event of a job, in order of `id`; `data` is the event as JSON."""

    __tablename__ = "swiftopt_events"
    __table_args__ = (Index(None, "job_id", "id"), Index("ix_swiftopt_events_type", "job_id", "type", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey(JobRow.id))
    type: Mapped[str]
    data: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[str]


class OutputRow(Base):
    """A finished completion, with the event that reported it. Each prompt, or turn of a prompt, has at most one."""

    __tablename__ = "swiftopt_outputs"

    job_id: Mapped[str] = mapped_column(ForeignKey(JobRow.id), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)  # Index of the prompt in the stream, from 0.
    prompt_id: Mapped[str] = mapped_column(primary_key=True)
    event_id: Mapped[int] = mapped_column(ForeignKey(EventRow.id))


class CounterRow(Base):
    """A sum over all jobs for the metrics page; `label` is what the counter is split by, if anything."""

    __tablename__ = "swiftopt_counters"

    name: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]


class UsageRow(Base):
    """Usage of a model by an API key on one day (UTC), summed over all servers; `key` is "" without keys."""

    __tablename__ = "swiftopt_usage"

    day: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    saved_s: Mapped[float]


class LockRow(Base):
    """A lock for work that only one process may do: its owner and its end (seconds since 1970, database clock)."""

    __tablename__ = "swiftopt_locks"

    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    until: Mapped[float]


class OfTask:
    """Columns shared by everything that is stored for a model and task."""

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("swiftopt_models.id"))
    task: Mapped[str]


class Measured:
    """Columns of settings, and of the `Measurement` of decoding with them."""

    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    verdict: Mapped[str]
    measured_speedup: Mapped[float | None]
    measured_interval: Mapped[tuple[float, float] | None] = mapped_column(JSON(none_as_null=True))
    acceptance_rate: Mapped[float | None]
    mean_generated_length: Mapped[float | None]
    device: Mapped[str | None]
    dtype: Mapped[str | None]


class LayerSetRow(OfTask, Measured, Base):
    """An immutable version of a model's set for a task.

    `model` is the name under which it was stored; `prompt_state` the packed state of its prompts.
    """

    __tablename__ = "swiftopt_layer_sets"
    __table_args__ = (UniqueConstraint("model_id", "task", "version"),)

    version: Mapped[int]
    model: Mapped[str] = mapped_column("model_name")
    skip_attn: Mapped[list[int]] = mapped_column(JSON)
    skip_mlp: Mapped[list[int]] = mapped_column(JSON)
    quantised: Mapped[dict[str, str]] = mapped_column(JSON)
    experts: Mapped[dict[str, int]] = mapped_column(JSON, server_default="{}")
    absent: Mapped[list[str]] = mapped_column(JSON, server_default="[]")
    matchness: Mapped[float | None]
    expected_speedup: Mapped[float | None]
    stream_sha256: Mapped[str | None]
    swiftopt_version: Mapped[str]
    created_at: Mapped[str]
    job: Mapped[str | None] = mapped_column("job_id", ForeignKey(JobRow.id), index=True)
    evidence: Mapped[list[list[float]]] = mapped_column(JSON)
    prompt_state: Mapped[bytes | None] = mapped_column(deferred=True)  # Loaded on demand: no lookup needs it.

    owner: Mapped[ModelRow] = relationship(lazy="joined", innerjoin="unnested")  # type: ignore[arg-type]


class LearnedRow(OfTask, Base):
    """Trained heads or a trained probe; `model` is the name under which it was stored."""

    __tablename__ = "swiftopt_learned"
    __table_args__ = (UniqueConstraint("model_id", "task", "kind", "version"),)

    kind: Mapped[str]
    version: Mapped[int]
    model: Mapped[str] = mapped_column("model_name")
    depths: Mapped[list[int]] = mapped_column(JSON)
    n_parameters: Mapped[int] = mapped_column(BigInteger)
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    figures: Mapped[dict[str, float]] = mapped_column(JSON)
    curve: Mapped[list[tuple[int, float]]] = mapped_column(JSON)
    stream_sha256: Mapped[str | None]
    swiftopt_version: Mapped[str]
    created_at: Mapped[str]

    owner: Mapped[ModelRow] = relationship()


class WeightsRow(Base):
    """The bytes of a safetensors file, in a table of their own so that lists do not load them."""

    __tablename__ = "swiftopt_learned_weights"

    learned_id: Mapped[int] = mapped_column(ForeignKey(LearnedRow.id), primary_key=True)
    weights: Mapped[bytes] = mapped_column(LargeBinary)


class PlanRow(OfTask, Measured, Base):
    """An immutable version of a plan for a model and task; a layer set and the plan stored with it share a version."""

    __tablename__ = "swiftopt_plans"
    __table_args__ = (UniqueConstraint("model_id", "task", "version"),)

    version: Mapped[int]
    method: Mapped[str]
    layer_set_id: Mapped[int | None] = mapped_column(ForeignKey(LayerSetRow.id))
    learned_id: Mapped[int | None] = mapped_column(ForeignKey(LearnedRow.id))
    draft_model: Mapped[str | None]
    engine: Mapped[str | None]

    owner: Mapped[ModelRow] = relationship()
    layer_set: Mapped[LayerSetRow | None] = relationship(lazy="joined")
    learned: Mapped[LearnedRow | None] = relationship(lazy="joined")


class MoveRow(OfTask, Base):
    """A move of an alias to a plan, for one device and dtype. Rows are only added; a rollback has an `undoes_id`."""

    __tablename__ = "swiftopt_alias_moves"
    __table_args__ = (
        Index(None, "model_id", "task", "alias"),
        Index("ix_swiftopt_alias_moves_newest", "model_id", "id"),  # Index for replicas' polls.
    )

    alias: Mapped[str]
    device: Mapped[str | None]
    dtype: Mapped[str | None]
    plan_id: Mapped[int] = mapped_column(ForeignKey(PlanRow.id))
    undoes_id: Mapped[int | None] = mapped_column(ForeignKey("swiftopt_alias_moves.id"), unique=True)
    created_at: Mapped[str]

    plan: Mapped[PlanRow] = relationship(lazy="joined", innerjoin=True)


class ComparisonRow(OfTask, Base):
    """The report of a `compare` run; `model` is the name that it was given."""

    __tablename__ = "swiftopt_comparisons"
    __table_args__ = (Index(None, "model_id", "task"),)

    model: Mapped[str] = mapped_column("model_name")
    device: Mapped[str]
    dtype: Mapped[str]
    report: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[str]


class CostProfileRow(Base):
    """Measured seconds of a model's parts; `pass_s` has its widths as text, because JSON keys are texts.

    `formats`: costs of a draft's parts, by measured weight format.
    """

    __tablename__ = "swiftopt_cost_profiles"
    __table_args__ = (UniqueConstraint("fingerprint", "device", "dtype", "context_bucket", "n_layers"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    device: Mapped[str]
    dtype: Mapped[str]
    context_bucket: Mapped[int]
    n_layers: Mapped[int]
    attn_s: Mapped[float]
    mlp_s: Mapped[float]
    head_s: Mapped[float]
    fixed_s: Mapped[float]
    pass_s: Mapped[dict[str, float]] = mapped_column(JSON)
    formats: Mapped[dict[str, Any]] = mapped_column(JSON)
    experts: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    absent: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    software: Mapped[str]
    quality: Mapped[str]
    remark: Mapped[str]
    created_at: Mapped[str]


class TrialColumns:
    """Common columns of the tables of trials: one scored candidate."""

    id: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    n_layers: Mapped[int]
    skip_attn: Mapped[list[int]] = mapped_column(JSON)
    skip_mlp: Mapped[list[int]] = mapped_column(JSON)
    quantised: Mapped[dict[str, str]] = mapped_column(JSON)
    experts: Mapped[dict[str, int]] = mapped_column(JSON, server_default="{}")
    origin: Mapped[str]
    matchness: Mapped[float]
    score: Mapped[float]
    prompt_id: Mapped[str]
    position: Mapped[int]
    seed: Mapped[int] = mapped_column(BigInteger)
    adopted: Mapped[bool]
    seconds: Mapped[float]


class TrialRow(TrialColumns, Base):
    """One scored candidate of a job's task."""

    __tablename__ = "swiftopt_trials"
    __table_args__ = (Index(None, "job_id", "task", "step", unique=True),)

    job_id: Mapped[str] = mapped_column(ForeignKey(JobRow.id))
    task: Mapped[str]


class ServedSearchRow(Base):
    """A search while requests of a served model's task are decoded."""

    __tablename__ = "swiftopt_served_searches"
    __table_args__ = (Index(None, "fingerprint", "task"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    model: Mapped[str] = mapped_column("model_name")
    task: Mapped[str]
    created_at: Mapped[str]


class ServedTrialRow(TrialColumns, Base):
    """One scored candidate of a served model's search."""

    __tablename__ = "swiftopt_served_trials"
    __table_args__ = (Index(None, "search_id", "step", unique=True),)

    search_id: Mapped[str] = mapped_column(ForeignKey(ServedSearchRow.id))


# --- conversion between records and rows

Row = TypeVar("Row", bound=Base)
Record = TypeVar("Record")


def to_row(table: type[Row], record: Any, **overrides: Any) -> Row:
    """Return a new row with the fields of the record and its layer set that are columns; `overrides` win."""
    values = {column.name: getattr(record, column.name) for column in fields(record)}
    if isinstance(layer_set := values.get("layer_set"), LayerSet):
        values |= {"n_layers": layer_set.n_layers, "quantised": dict(layer_set.formats)}
        values |= {"experts": dict(layer_set.experts), "absent": list(layer_set.absent)}
        values |= {"skip_attn": sorted(layer_set.skip_attn), "skip_mlp": sorted(layer_set.skip_mlp)}
    own_columns = {name: value for name, value in values.items() if hasattr(table, name)}
    return table(**{**own_columns, **overrides})


@contextmanager
def reading(table: type[Base], key: object) -> Iterator[None]:
    """Turn any error while a record is made from the row with this key into one that names the row.

    Raises: StoreError: the row was changed by hand, or by a newer swiftopt.
    """
    try:
        yield
    except (StoreError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise StoreError(
            f"row {key} of the table {table.__tablename__} cannot be read ({error}): it was changed by hand, or by a"
            " newer swiftopt; restore it, or delete it and repeat the command that wrote it"
        ) from error


def to_record(kind: type[Record], row: Any, **further_fields: Any) -> Record:
    """Return the record whose fields are the row's columns; `further_fields` are fields without a column.

    Raises: StoreError: as in `reading`.
    """
    with reading(type(row), row.id):
        if isinstance(row, LayerSetRow | TrialColumns):
            n_layers = row.n_layers if isinstance(row, TrialColumns) else row.owner.n_layers
            skipped = frozenset(row.skip_attn), frozenset(row.skip_mlp)
            further = tuple(row.quantised.items()), tuple(row.experts.items())
            absent = () if isinstance(row, TrialColumns) else tuple(row.absent)  # Trials have none: it is the model's.
            further_fields["layer_set"] = LayerSet(n_layers, *skipped, *further, absent)
        names = {column.name for column in fields(kind)} - further_fields.keys()  # type: ignore[arg-type]
        return kind(**{name: _tuples(getattr(row, name)) for name in names}, **further_fields)


def mapping(column: object) -> Mapping[str, Any]:
    """Return the object of a JSON column; an empty one if the row was edited by hand and has none."""
    return column if isinstance(column, Mapping) else {}


def add_row(session: Session, row: Row) -> Row:
    """Add a row and return it as later reads will see it: with lists instead of tuples in JSON columns."""
    session.add(row)
    session.flush()
    session.refresh(row)
    return row


def _tuples(value: Any) -> Any:
    """Turn JSON lists back into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def layer_set_record(row: LayerSetRow) -> LayerSetRecord:
    """Return the record of a row, without its prompt state."""
    return to_record(LayerSetRecord, row, fingerprint=row.owner.fingerprint, prompt_state=None)


def learned_record(row: LearnedRow) -> LearnedRecord:
    """Return the record of a row, without its weights."""
    return to_record(LearnedRecord, row, fingerprint=row.owner.fingerprint or "")


def found_plan(row: PlanRow, alias: str = "", fallback: str | None = None) -> FoundPlan:
    plan = to_record(
        Plan,
        row,
        layer_set=layer_set_record(row.layer_set) if row.layer_set is not None else None,
        learned=learned_record(row.learned) if row.learned is not None else None,
    )
    return FoundPlan(plan, row.version, alias, fallback)
