"""The tables of what was trained and compared, and of the plans made of it; weights lie apart from what lists read."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from .tables import Base, LayerSetRow, ModelRow


class LearnedRow(Base):
    """Trained heads or a trained probe; `model_name` is the name under which it was stored."""

    __tablename__ = "swiftopt_learned"
    __table_args__ = (UniqueConstraint("model_id", "task", "kind", "version"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey(ModelRow.id))
    task: Mapped[str]
    kind: Mapped[str]
    version: Mapped[int]
    model_name: Mapped[str]
    depths: Mapped[list[int]] = mapped_column(JSON)
    n_parameters: Mapped[int] = mapped_column(BigInteger)
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    figures: Mapped[dict[str, float]] = mapped_column(JSON)
    curve: Mapped[list[tuple[int, float]]] = mapped_column(JSON)
    stream_sha256: Mapped[str | None]
    swiftopt_version: Mapped[str]
    created_at: Mapped[str]

    model: Mapped[ModelRow] = relationship()


class WeightsRow(Base):
    """The bytes of a safetensors file."""

    __tablename__ = "swiftopt_learned_weights"

    learned_id: Mapped[int] = mapped_column(ForeignKey(LearnedRow.id), primary_key=True)
    weights: Mapped[bytes] = mapped_column(LargeBinary)


class PlanRow(Base):
    """An immutable version of how to decode for a model and task; a layer set and the plan made with it share one."""

    __tablename__ = "swiftopt_plans"
    __table_args__ = (UniqueConstraint("model_id", "task", "version"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey(ModelRow.id))
    task: Mapped[str]
    version: Mapped[int]
    method: Mapped[str]
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    verdict: Mapped[str]
    layer_set_id: Mapped[int | None] = mapped_column(ForeignKey(LayerSetRow.id))
    learned_id: Mapped[int | None] = mapped_column(ForeignKey(LearnedRow.id))
    draft_model: Mapped[str | None]
    measured_speedup: Mapped[float | None]
    measured_low: Mapped[float | None]
    measured_high: Mapped[float | None]
    device: Mapped[str | None]
    dtype: Mapped[str | None]

    model: Mapped[ModelRow] = relationship()
    layer_set: Mapped[LayerSetRow | None] = relationship(lazy="joined")
    learned: Mapped[LearnedRow | None] = relationship(lazy="joined")


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


class ComparisonRow(Base):
    """What `compare` measured, side by side; `model_name` is the name that it was given."""

    __tablename__ = "swiftopt_comparisons"
    __table_args__ = (Index(None, "model_id", "task"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey(ModelRow.id))
    task: Mapped[str]
    model_name: Mapped[str]
    device: Mapped[str]
    dtype: Mapped[str]
    report: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[str]
