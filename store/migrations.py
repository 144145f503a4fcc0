"""The schema of a database, and the steps that migrate an older one; one of a newer swiftopt is refused.

Each step is named after the schema that it leads to.

A new database is made from `tables` alone, and a step takes from there what it adds. So where a later step changes a
table or column that an earlier one adds, the earlier one must then spell out what it adds. Tests hold every older
database, brought here, against a new one.

Raises, in what opens a database: SchemaTooNew: a newer swiftopt has written it. StoreError: it cannot be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Column, Connection, Engine, Table, func, insert, inspect, select, update

from ..core.errors import SchemaTooNew
from .database import connect, connected, exists, shown, store_errors, writing
from .tables import Base, SchemaRow

if TYPE_CHECKING:
    from alembic.operations import BatchOperations, Operations

# What plans had from their layer set alone.
OWN = ("model_id", "task", "version")
COPIED = (*OWN, "measured_speedup", "measured_low", "measured_high", "device", "dtype")


def upgrade(connection: Connection, found: str, to: str) -> None:
    """Run the steps between two schemas in the connection's transaction; loads alembic, which few databases need."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    op = Operations(MigrationContext.configure(connection, opts={"target_metadata": Base.metadata}))
    for name in REVISIONS[REVISIONS.index(found) + 1 : REVISIONS.index(to) + 1]:
        STEPS[name](op)
    connection.execute(update(SchemaRow).values(version_num=to))


def _queued_jobs(op: Operations) -> None:
    """Let a queue deliver jobs; a run that was going on under the old schema has no lease and counts as lost."""
    _create(op, "streams", "events", "outputs", "counters", "locks")
    _add(op, "jobs", "kind", "queue", "fingerprint", "idempotency_key", "stream", "n_prompts", "attempt", "worker")
    _add(op, "jobs", "wanted", "lease_until", "due_at", "n_checkpoints", "n_checkpoints_before", "n_fruitless")
    _add(op, "jobs", "snapshot", "progress", "started_at")
    op.execute("UPDATE swiftopt_jobs SET lease_until = 0 WHERE state = 'running'")
    op.drop_index("ix_swiftopt_trials_job_id", "swiftopt_trials")
    op.execute(
        "DELETE FROM swiftopt_trials WHERE id NOT IN (SELECT MIN(id) FROM swiftopt_trials GROUP BY job_id, task, step)"
    )
    for index in (*_table("jobs").indexes, *_table("trials").indexes):
        index.create(op.get_bind())


def _plans_of_any_method(op: Operations) -> None:
    """Let plans need no layer set: they take over what theirs say. Add heads, probes and comparisons."""
    _create(op, "learned", "learned_weights", "comparisons")
    _add(op, "plans", *COPIED, "learned_id", "draft_model")
    of_its_set = "(SELECT {0} FROM swiftopt_layer_sets WHERE swiftopt_layer_sets.id = swiftopt_plans.layer_set_id)"
    op.execute("UPDATE swiftopt_plans SET " + ", ".join(f"{name} = {of_its_set.format(name)}" for name in COPIED))
    with _plans(op) as plans:
        for name in OWN:
            plans.alter_column(name, nullable=False)
        plans.alter_column("layer_set_id", nullable=True)
        plans.drop_constraint(op.f("uq_swiftopt_plans_layer_set_id"), type_="unique")
        plans.create_unique_constraint(op.f("uq_swiftopt_plans_model_id"), list(OWN))
        plans.create_foreign_key(op.f("fk_swiftopt_plans_model_id"), "swiftopt_models", ["model_id"], ["id"])
        plans.create_foreign_key(op.f("fk_swiftopt_plans_learned_id"), "swiftopt_learned", ["learned_id"], ["id"])


@contextmanager
def _plans(op: Operations) -> Iterator[BatchOperations]:
    """Change the plans. SQLite rebuilds the table, and rows that refer to it must not be there meanwhile."""
    on_sqlite = op.get_bind().dialect.name == "sqlite"
    if on_sqlite:
        op.execute("CREATE TEMPORARY TABLE swiftopt_aside AS SELECT * FROM swiftopt_alias_moves")
        op.execute("DELETE FROM swiftopt_alias_moves")
    with op.batch_alter_table("swiftopt_plans") as plans:
        yield plans
    if on_sqlite:
        op.execute("INSERT INTO swiftopt_alias_moves SELECT * FROM swiftopt_aside")
        op.execute("DROP TABLE swiftopt_aside")


def _jobs_in_their_order(op: Operations) -> None:
    """Add the indexes that jobs are listed by, and events of a kind found by; one of states was there without time."""
    op.drop_index("ix_swiftopt_jobs_state", "swiftopt_jobs")
    for index in (*_table("jobs").indexes, *_table("events").indexes):
        index.create(op.get_bind(), checkfirst=True)


def _figures_of_plans(op: Operations) -> None:
    """Let plans have α and M; one that was stored with its layer set takes over what that says."""
    names = "acceptance_rate", "mean_generated_length"
    _add(op, "plans", *names)
    same = " AND ".join(f"own.{name} = swiftopt_plans.{name}" for name in OWN)
    its_own = f"swiftopt_layer_sets own WHERE own.id = swiftopt_plans.layer_set_id AND {same}"
    op.execute(
        "UPDATE swiftopt_plans SET " + ", ".join(f"{name} = (SELECT own.{name} FROM {its_own})" for name in names)
    )


def _create(op: Operations, *tables: str) -> None:
    Base.metadata.create_all(op.get_bind(), [_table(name) for name in tables])


def _adding(**columns: str) -> Callable[[Operations], None]:
    """Return the step that adds the named columns to each of these tables; null in rows that were there before."""

    def step(op: Operations) -> None:
        for table, names in columns.items():
            _add(op, table, *names.split())

    return step


def _add(op: Operations, table: str, *columns: str) -> None:
    """Add columns in place, since rebuilding a table deletes rows that refer to it; rows get the default, or null."""
    for name in columns:
        made = _table(table).c[name]
        default = made.server_default
        op.add_column(f"swiftopt_{table}", Column(name, made.type, nullable=default is None, server_default=default))


def _table(name: str) -> Table:
    return Base.metadata.tables[f"swiftopt_{name}"]


# Oldest first. The first has no step: databases of it exist, but none is made any more.
STEPS: dict[str, Callable[[Operations], None]] = {
    "0002_queued_jobs": _queued_jobs,
    "0003_plans_of_any_method": _plans_of_any_method,
    "0004_quantised_drafts": _adding(cost_profiles="formats", trials="quantised"),
    "0005_prompt_states": _adding(layer_sets="prompt_state"),
    "0006_evidence": _adding(layer_sets="evidence"),
    "0007_engines": _adding(plans="engine"),
    "0008_jobs_in_their_order": _jobs_in_their_order,
    "0009_software_of_costs": _adding(cost_profiles="software"),
    "0010_quality_of_costs": _adding(cost_profiles="quality remark"),
    "0011_figures_of_plans": _figures_of_plans,
}
REVISIONS = ("0001_layer_sets", *STEPS)
HEAD = REVISIONS[-1]
LOCK_KEY = 0x5317F7  # The key of the advisory lock that a migration holds in PostgreSQL.


@dataclass(frozen=True, slots=True)
class SchemaState:
    """A database's schema; `revision` is None for an empty one, or a file that does not exist."""

    database: str  # as errors show it: no password
    revision: str | None
    head: str = HEAD

    @property
    def ok(self) -> bool:
        """Return whether the database has the schema that this swiftopt writes."""
        return self.revision == self.head

    @property
    def newer(self) -> bool:
        """Return whether only a newer swiftopt can have written it."""
        return self.revision is not None and self.revision not in REVISIONS


def look(url: str) -> SchemaState:
    """Return the database's schema, without changing or creating it."""
    if not exists(url):
        return SchemaState(shown(url), None)
    with connected(url) as connection:
        return SchemaState(shown(url), revision(connection))


def bring_to_head(url: str) -> tuple[SchemaState, SchemaState]:
    """Create or migrate the database as opening a store does; return its schema before and after."""
    before = look(url)
    connect_at_head(url).dispose()
    return before, look(url)


def connect_at_head(url: str) -> Engine:
    """Return an engine for the database, created and migrated to the newest schema as needed."""
    engine = connect(url)
    try:
        with store_errors(url):
            with engine.connect() as connection:
                stored_version = revision(connection)
            if stored_version != HEAD:
                _bring(engine, url)
    except BaseException:
        engine.dispose()
        raise
    return engine


def revision(connection: Connection) -> str | None:
    """Return the schema's revision; None for an empty database."""
    if not inspect(connection).has_table(SchemaRow.__tablename__):
        return None
    return connection.scalar(select(SchemaRow.version_num))


def _bring(engine: Engine, url: str) -> None:
    with writing(engine).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
        stored_version = revision(connection)  # again, now that no other process can do the same
        if stored_version is None:
            Base.metadata.create_all(connection, checkfirst=False)
            connection.execute(insert(SchemaRow).values(version_num=HEAD))
        elif stored_version not in REVISIONS:
            raise SchemaTooNew(
                f"the database {shown(url)} was written by a newer swiftopt (its schema is {stored_version}, this"
                f" version knows up to {HEAD}): install that version, or choose another database with --db"
            )
        elif stored_version != HEAD:
            upgrade(connection, stored_version, HEAD)
