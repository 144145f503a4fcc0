"""The first schema: models, layer sets, plans, aliases, cost profiles, jobs and trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001_layer_sets"
down_revision = None


def upgrade() -> None:
    """Create the tables, those that others point at first."""
    _create_models()
    _create_jobs()
    _create_layer_sets()
    _create_aliases()
    _create_cost_profiles()


def downgrade() -> None:
    """Drop the tables with their rows; there is no older schema to keep them in."""
    for name in (
        "cost_profiles",
        "alias_moves",
        "plans",
        "layer_sets",
        "trials",
        "jobs",
        "model_names",
        "models",
    ):
        op.drop_table(f"swiftopt_{name}")


def _create_models() -> None:
    op.create_table(
        "swiftopt_models",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=True),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("n_layers", sa.Integer(), nullable=False),
        sa.Column("n_parameters", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_models")),
        sa.UniqueConstraint("fingerprint", name=op.f("uq_swiftopt_models_fingerprint")),
    )
    op.create_table(
        "swiftopt_model_names",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_swiftopt_model_names")),
        _points_at("swiftopt_model_names", "model_id", "swiftopt_models"),
    )
    op.create_index(op.f("ix_swiftopt_model_names_model_id"), "swiftopt_model_names", ["model_id"])


def _create_jobs() -> None:
    op.create_table(
        "swiftopt_jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.Column("finished_at", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_jobs")),
    )
    op.create_table(
        "swiftopt_trials",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("n_layers", sa.Integer(), nullable=False),
        sa.Column("skip_attn", sa.JSON(), nullable=False),
        sa.Column("skip_mlp", sa.JSON(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("matchness", sa.Double(), nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("prompt_id", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("adopted", sa.Boolean(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_trials")),
        _points_at("swiftopt_trials", "job_id", "swiftopt_jobs"),
    )
    op.create_index(op.f("ix_swiftopt_trials_job_id"), "swiftopt_trials", ["job_id", "task", "step"])


def _create_layer_sets() -> None:
    op.create_table(
        "swiftopt_layer_sets",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("skip_attn", sa.JSON(), nullable=False),
        sa.Column("skip_mlp", sa.JSON(), nullable=False),
        sa.Column("quantised", sa.JSON(), nullable=False),
        sa.Column("matchness", sa.Double(), nullable=True),
        sa.Column("acceptance_rate", sa.Double(), nullable=True),
        sa.Column("mean_generated_length", sa.Double(), nullable=True),
        sa.Column("expected_speedup", sa.Double(), nullable=True),
        sa.Column("measured_speedup", sa.Double(), nullable=True),
        sa.Column("measured_low", sa.Double(), nullable=True),
        sa.Column("measured_high", sa.Double(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=True),
        sa.Column("dtype", sa.String(), nullable=True),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("stream_sha256", sa.String(), nullable=True),
        sa.Column("swiftopt_version", sa.String(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_layer_sets")),
        sa.UniqueConstraint("model_id", "task", "version", name=op.f("uq_swiftopt_layer_sets_model_id")),
        _points_at("swiftopt_layer_sets", "model_id", "swiftopt_models"),
        _points_at("swiftopt_layer_sets", "job_id", "swiftopt_jobs"),
    )
    op.create_index(op.f("ix_swiftopt_layer_sets_job_id"), "swiftopt_layer_sets", ["job_id"])


def _create_aliases() -> None:
    op.create_table(
        "swiftopt_plans",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("layer_set_id", sa.Integer(), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_plans")),
        sa.UniqueConstraint("layer_set_id", name=op.f("uq_swiftopt_plans_layer_set_id")),
        _points_at("swiftopt_plans", "layer_set_id", "swiftopt_layer_sets"),
    )
    op.create_table(
        "swiftopt_alias_moves",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=True),
        sa.Column("dtype", sa.String(), nullable=True),
        sa.Column("plan_id", sa.Integer(), nullable=False),
        sa.Column("undoes_id", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_alias_moves")),
        sa.UniqueConstraint("undoes_id", name=op.f("uq_swiftopt_alias_moves_undoes_id")),
        _points_at("swiftopt_alias_moves", "model_id", "swiftopt_models"),
        _points_at("swiftopt_alias_moves", "plan_id", "swiftopt_plans"),
        _points_at("swiftopt_alias_moves", "undoes_id", "swiftopt_alias_moves"),
    )
    op.create_index(op.f("ix_swiftopt_alias_moves_model_id"), "swiftopt_alias_moves", ["model_id", "task", "alias"])


def _create_cost_profiles() -> None:
    key = ("fingerprint", "device", "dtype", "context_bucket", "n_layers")
    op.create_table(
        "swiftopt_cost_profiles",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("context_bucket", sa.Integer(), nullable=False),
        sa.Column("n_layers", sa.Integer(), nullable=False),
        sa.Column("attn_s", sa.Double(), nullable=False),
        sa.Column("mlp_s", sa.Double(), nullable=False),
        sa.Column("head_s", sa.Double(), nullable=False),
        sa.Column("fixed_s", sa.Double(), nullable=False),
        sa.Column("pass_s", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_cost_profiles")),
        sa.UniqueConstraint(*key, name=op.f("uq_swiftopt_cost_profiles_fingerprint")),
    )


def _points_at(table: str, column: str, other: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=op.f(f"fk_{table}_{column}"))
