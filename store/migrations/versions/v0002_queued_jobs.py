"""Jobs that a queue delivers: streams, attempts, leases, checkpoints, events, outputs, counters and locks."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002_queued_jobs"
down_revision = "0001_layer_sets"

UNFINISHED = sa.text("state IN ('queued', 'running', 'paused')")
ENDED = "('succeeded', 'failed', 'cancelled')"

# Added one by one: building the table anew would delete what points at it.
JOB_COLUMNS: tuple[sa.Column[Any], ...] = (
    sa.Column("kind", sa.String(), nullable=False, server_default="tune"),
    sa.Column("queue", sa.String(), nullable=True),
    sa.Column("fingerprint", sa.String(), nullable=True),
    sa.Column("idempotency_key", sa.String(), nullable=True),
    sa.Column("stream", sa.String(), nullable=True),
    sa.Column("n_prompts", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("attempt", sa.Integer(), nullable=False, server_default="1"),
    sa.Column("worker", sa.String(), nullable=True),
    sa.Column("wanted", sa.String(), nullable=True),
    sa.Column("lease_until", sa.Double(), nullable=True),
    sa.Column("due_at", sa.Double(), nullable=True),
    sa.Column("n_checkpoints", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("n_checkpoints_before", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("n_fruitless", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("snapshot", sa.JSON(), nullable=True),
    sa.Column("progress", sa.JSON(), nullable=True),
    sa.Column("started_at", sa.String(), nullable=True),
)


def upgrade() -> None:
    """Add the tables and columns; a run that was going on under the old schema has no lease and counts as lost."""
    for column in JOB_COLUMNS:
        op.add_column("swiftopt_jobs", column._copy())
    op.execute("UPDATE swiftopt_jobs SET lease_until = 0 WHERE state = 'running'")
    op.create_index("ix_swiftopt_jobs_state", "swiftopt_jobs", ["state"])
    op.create_index(
        "uq_swiftopt_jobs_fingerprint",
        "swiftopt_jobs",
        ["fingerprint"],
        unique=True,
        sqlite_where=UNFINISHED,
        postgresql_where=UNFINISHED,
    )
    op.create_index("uq_swiftopt_jobs_idempotency_key", "swiftopt_jobs", ["idempotency_key"], unique=True)
    op.drop_index("ix_swiftopt_trials_job_id", "swiftopt_trials")
    op.execute(
        "DELETE FROM swiftopt_trials WHERE id NOT IN (SELECT MIN(id) FROM swiftopt_trials GROUP BY job_id, task, step)"
    )
    op.create_index("ix_swiftopt_trials_job_id", "swiftopt_trials", ["job_id", "task", "step"], unique=True)
    _create_events()
    _create_service_tables()


def downgrade() -> None:
    """Drop what was added; jobs keep their end, and those without one end as cancelled, for nothing delivers them."""
    for name in ("locks", "counters", "outputs", "events", "streams"):
        op.drop_table(f"swiftopt_{name}")
    op.drop_index("ix_swiftopt_trials_job_id", "swiftopt_trials")
    op.create_index("ix_swiftopt_trials_job_id", "swiftopt_trials", ["job_id", "task", "step"])
    for name in ("uq_swiftopt_jobs_idempotency_key", "uq_swiftopt_jobs_fingerprint", "ix_swiftopt_jobs_state"):
        op.drop_index(name, "swiftopt_jobs")
    op.execute(f"UPDATE swiftopt_jobs SET state = 'cancelled' WHERE state NOT IN {ENDED}")
    for column in reversed(JOB_COLUMNS):
        op.drop_column("swiftopt_jobs", column.name)


def _create_events() -> None:
    op.create_table(
        "swiftopt_streams",
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("lines", sa.String(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_swiftopt_streams")),
    )
    op.create_table(
        "swiftopt_events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_swiftopt_events")),
        sa.ForeignKeyConstraint(["job_id"], ["swiftopt_jobs.id"], name=op.f("fk_swiftopt_events_job_id")),
    )
    op.create_index("ix_swiftopt_events_job_id", "swiftopt_events", ["job_id", "id"])
    op.create_table(
        "swiftopt_outputs",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("prompt_id", sa.String(), nullable=False),
        sa.Column("event_id", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "place", "prompt_id", name=op.f("pk_swiftopt_outputs")),
        sa.ForeignKeyConstraint(["job_id"], ["swiftopt_jobs.id"], name=op.f("fk_swiftopt_outputs_job_id")),
        sa.ForeignKeyConstraint(["event_id"], ["swiftopt_events.id"], name=op.f("fk_swiftopt_outputs_event_id")),
    )


def _create_service_tables() -> None:
    op.create_table(
        "swiftopt_counters",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "model", "task", "label", name=op.f("pk_swiftopt_counters")),
    )
    op.create_table(
        "swiftopt_locks",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_swiftopt_locks")),
    )
