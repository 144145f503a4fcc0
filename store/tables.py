"""The tables; each starts with `swiftopt_`, so that a database may be shared (Optuna has a table `trials`, too)."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, MetaData, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

NAMING = {
    "pk": "pk_%(table_name)s",
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
}


class Base(DeclarativeBase):
    """Holds the metadata; timestamps are text, UTC, ISO 8601."""

    metadata = MetaData(naming_convention=NAMING)


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
    """An alias, hub id or path, and the model that it stands for now."""

    __tablename__ = "swiftopt_model_names"

    name: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey(ModelRow.id), index=True)


class JobRow(Base):
    """A tuning run, local or queued."""

    __tablename__ = "swiftopt_jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    error: Mapped[str | None]
    created_at: Mapped[str]
    finished_at: Mapped[str | None]


class LayerSetRow(Base):
    """An immutable version of a model's set for a task; `model_name` is the name under which it was stored."""

    __tablename__ = "swiftopt_layer_sets"
    __table_args__ = (UniqueConstraint("model_id", "task", "version"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey(ModelRow.id))
    task: Mapped[str]
    version: Mapped[int]
    model_name: Mapped[str]
    skip_attn: Mapped[list[int]] = mapped_column(JSON)
    skip_mlp: Mapped[list[int]] = mapped_column(JSON)
    quantised: Mapped[dict[str, str]] = mapped_column(JSON)
    matchness: Mapped[float | None]
    acceptance_rate: Mapped[float | None]
    mean_generated_length: Mapped[float | None]
    expected_speedup: Mapped[float | None]
    measured_speedup: Mapped[float | None]
    measured_low: Mapped[float | None]
    measured_high: Mapped[float | None]
    verdict: Mapped[str]
    device: Mapped[str | None]
    dtype: Mapped[str | None]
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    stream_sha256: Mapped[str | None]
    swiftopt_version: Mapped[str]
    created_at: Mapped[str]
    job_id: Mapped[str | None] = mapped_column(ForeignKey(JobRow.id), index=True)

    model: Mapped[ModelRow] = relationship(lazy="joined", innerjoin=True)


class PlanRow(Base):
    """How to decode with a layer set; immutable like it, and of the same version."""

    __tablename__ = "swiftopt_plans"

    id: Mapped[int] = mapped_column(primary_key=True)
    layer_set_id: Mapped[int] = mapped_column(ForeignKey(LayerSetRow.id), unique=True)
    method: Mapped[str]
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    verdict: Mapped[str]

    layer_set: Mapped[LayerSetRow] = relationship(lazy="joined", innerjoin=True)


class MoveRow(Base):
    """An alias now means a plan, for one device and dtype. Rows are only added; a rollback is one with `undoes_id`."""

    __tablename__ = "swiftopt_alias_moves"
    __table_args__ = (Index(None, "model_id", "task", "alias"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey(ModelRow.id))
    task: Mapped[str]
    alias: Mapped[str]
    device: Mapped[str | None]
    dtype: Mapped[str | None]
    plan_id: Mapped[int] = mapped_column(ForeignKey(PlanRow.id))
    undoes_id: Mapped[int | None] = mapped_column(ForeignKey("swiftopt_alias_moves.id"), unique=True)
    created_at: Mapped[str]

    plan: Mapped[PlanRow] = relationship(lazy="joined", innerjoin=True)


class CostProfileRow(Base):
    """Measured seconds of a model's parts; `pass_s` has its widths as text, as JSON wants it."""

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
    created_at: Mapped[str]


class TrialRow(Base):
    """One scored candidate of a job's task."""

    __tablename__ = "swiftopt_trials"
    __table_args__ = (Index(None, "job_id", "task", "step"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey(JobRow.id))
    task: Mapped[str]
    step: Mapped[int]
    n_layers: Mapped[int]
    skip_attn: Mapped[list[int]] = mapped_column(JSON)
    skip_mlp: Mapped[list[int]] = mapped_column(JSON)
    origin: Mapped[str]
    matchness: Mapped[float]
    score: Mapped[float]
    prompt_id: Mapped[str]
    position: Mapped[int]
    seed: Mapped[int] = mapped_column(BigInteger)
    adopted: Mapped[bool]
    seconds: Mapped[float]
