"""Heads and probes with their weights, comparisons, and plans that need no layer set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from alembic import op
from alembic.operations.base import BatchOperations

revision = "0003_plans_of_any_method"
down_revision = "0002_queued_jobs"

PLANS, MOVES = "swiftopt_plans", "swiftopt_alias_moves"
OWN = ("model_id", "task", "version")  # what plans had from their layer set alone
COPIED = (*OWN, "measured_speedup", "measured_low", "measured_high", "device", "dtype")
PLAN_COLUMNS: tuple[sa.Column[Any], ...] = (
    sa.Column("model_id", sa.Integer(), nullable=True),
    sa.Column("task", sa.String(), nullable=True),
    sa.Column("version", sa.Integer(), nullable=True),
    sa.Column("learned_id", sa.Integer(), nullable=True),
    sa.Column("draft_model", sa.String(), nullable=True),
    sa.Column("measured_speedup", sa.Double(), nullable=True),
    sa.Column("measured_low", sa.Double(), nullable=True),
    sa.Column("measured_high", sa.Double(), nullable=True),
    sa.Column("device", sa.String(), nullable=True),
    sa.Column("dtype", sa.String(), nullable=True),
)

# The plan that a layer set was stored with is the first that points at it; later ones are comparisons'.
FIRST = f"SELECT MIN(id) FROM {PLANS} WHERE layer_set_id IS NOT NULL GROUP BY layer_set_id"
NEWER = f"SELECT id FROM {PLANS} WHERE id NOT IN ({FIRST})"


def upgrade() -> None:
    """Add the tables and columns; plans take over what their layer sets say."""
    _create_learned()
    _create_comparisons()
    for column in PLAN_COLUMNS:
        op.add_column(PLANS, column._copy())
    op.execute(f"UPDATE {PLANS} SET " + ", ".join(f"{name} = {_of_layer_set(name)}" for name in COPIED))
    with _plans() as plans:
        for name in OWN:
            plans.alter_column(name, nullable=False)
        plans.alter_column("layer_set_id", nullable=True)
        plans.drop_constraint(op.f("uq_swiftopt_plans_layer_set_id"), type_="unique")
        plans.create_unique_constraint(op.f("uq_swiftopt_plans_model_id"), list(OWN))
        plans.create_foreign_key(op.f("fk_swiftopt_plans_model_id"), "swiftopt_models", ["model_id"], ["id"])
        plans.create_foreign_key(op.f("fk_swiftopt_plans_learned_id"), "swiftopt_learned", ["learned_id"], ["id"])


def downgrade() -> None:
    """Drop what was added, and the plans of comparisons, as if `best` had never meant them."""
    _forget_moves()
    op.execute(f"DELETE FROM {PLANS} WHERE id IN ({NEWER})")
    with _plans() as plans:
        plans.drop_constraint(op.f("fk_swiftopt_plans_learned_id"), type_="foreignkey")
        plans.drop_constraint(op.f("fk_swiftopt_plans_model_id"), type_="foreignkey")
        plans.drop_constraint(op.f("uq_swiftopt_plans_model_id"), type_="unique")
        plans.create_unique_constraint(op.f("uq_swiftopt_plans_layer_set_id"), ["layer_set_id"])
        plans.alter_column("layer_set_id", nullable=False)
        for column in reversed(PLAN_COLUMNS):
            plans.drop_column(column.name)
    for name in ("comparisons", "learned_weights", "learned"):
        op.drop_table(f"swiftopt_{name}")


def _of_layer_set(name: str) -> str:
    return f"(SELECT {name} FROM swiftopt_layer_sets WHERE swiftopt_layer_sets.id = {PLANS}.layer_set_id)"


@contextmanager
def _plans() -> Iterator[BatchOperations]:
    """Changes of the plans. SQLite builds the table anew, and what points at it must not be there meanwhile."""
    on_sqlite = op.get_bind().dialect.name == "sqlite"
    if on_sqlite:
        op.execute(f"CREATE TEMPORARY TABLE swiftopt_aside AS SELECT * FROM {MOVES}")
        op.execute(f"DELETE FROM {MOVES}")
    with op.batch_alter_table(PLANS) as plans:
        yield plans
    if on_sqlite:
        op.execute(f"INSERT INTO {MOVES} SELECT * FROM swiftopt_aside")
        op.execute("DROP TABLE swiftopt_aside")


def _forget_moves() -> None:
    """Delete the moves to plans that will go. A rollback goes with the move that it took back, whichever of the two
    leads to such a plan: one without the other would let the alias mean what nobody chose.
    """
    to_newer = f"SELECT id FROM {MOVES} WHERE plan_id IN ({NEWER})"
    undone = f"SELECT undoes_id FROM {MOVES} WHERE undoes_id IS NOT NULL AND plan_id IN ({NEWER})"
    op.execute(f"DELETE FROM {MOVES} WHERE id IN ({to_newer}) OR id IN ({undone}) OR undoes_id IN ({to_newer})")


def _create_learned() -> None:
    op.create_table(
        "swiftopt_learned",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("depths", sa.JSON(), nullable=False),
        sa.Column("n_parameters", sa.BigInteger(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("curve", sa.JSON(), nullable=False),
        sa.Column("stream_sha256", sa.String(), nullable=True),
        sa.Column("swiftopt_version", sa.String(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_learned")),
        sa.UniqueConstraint("model_id", "task", "kind", "version", name=op.f("uq_swiftopt_learned_model_id")),
        sa.ForeignKeyConstraint(["model_id"], ["swiftopt_models.id"], name=op.f("fk_swiftopt_learned_model_id")),
    )
    op.create_table(
        "swiftopt_learned_weights",
        sa.Column("learned_id", sa.Integer(), nullable=False),
        sa.Column("weights", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("learned_id", name=op.f("pk_swiftopt_learned_weights")),
        sa.ForeignKeyConstraint(
            ["learned_id"], ["swiftopt_learned.id"], name=op.f("fk_swiftopt_learned_weights_learned_id")
        ),
    )


def _create_comparisons() -> None:
    op.create_table(
        "swiftopt_comparisons",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_comparisons")),
        sa.ForeignKeyConstraint(["model_id"], ["swiftopt_models.id"], name=op.f("fk_swiftopt_comparisons_model_id")),
    )
    op.create_index(op.f("ix_swiftopt_comparisons_model_id"), "swiftopt_comparisons", ["model_id", "task"])
