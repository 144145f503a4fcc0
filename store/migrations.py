"""The schema of a database, and the steps that migrate an older one; one of a newer swiftopt is refused.

A schema is named after the release that first writes it, and so is the migration step that creates it; changes before
that release add a number. A new database is created from `tables` alone. If a later release changes a table, a step
spells out the change, because `tables` will change again; tests compare every migrated older database with a new one.

Functions that open a database raise SchemaTooNew if a newer swiftopt wrote it, and StoreError if it cannot be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    ForeignKey,
    Integer,
    String,
    func,
    insert,
    inspect,
    select,
    update,
)

from ..core.errors import SchemaTooNew, StoreError
from .database import connect, connected, exists, store_errors, without_password, writing
from .tables import Base, SchemaRow

if TYPE_CHECKING:
    from alembic.operations import Operations

FIRST = "0.1.0"


def _add_what_fleets_need(op: Operations) -> None:
    """Add the trials of served models, usage by day, and indexes for the polls of many replicas.

    Some databases of the schema 0.1.0 already have the tables of trials.
    """
    op.create_table(
        "swiftopt_served_searches",
        Column("id", String, primary_key=True),
        *(Column(name, String, nullable=False) for name in ("fingerprint", "model_name", "task", "created_at")),
        if_not_exists=True,
    )
    op.create_index(
        "ix_swiftopt_served_searches_fingerprint",
        "swiftopt_served_searches",
        ["fingerprint", "task"],
        if_not_exists=True,
    )
    op.create_table(
        "swiftopt_served_trials",
        Column("id", Integer, primary_key=True),
        *(Column(name, Integer, nullable=False) for name in ("step", "n_layers", "position")),
        *(Column(name, JSON, nullable=False) for name in ("skip_attn", "skip_mlp", "quantised")),
        *(Column(name, String, nullable=False) for name in ("origin", "prompt_id")),
        *(Column(name, Double, nullable=False) for name in ("matchness", "score", "seconds")),
        Column("seed", BigInteger, nullable=False),
        Column("adopted", Boolean, nullable=False),
        Column("search_id", String, ForeignKey("swiftopt_served_searches.id"), nullable=False),
        if_not_exists=True,
    )
    op.create_index(
        "ix_swiftopt_served_trials_search_id",
        "swiftopt_served_trials",
        ["search_id", "step"],
        unique=True,
        if_not_exists=True,
    )
    op.create_table(
        "swiftopt_usage",
        *(Column(name, String, primary_key=True) for name in ("day", "key", "model")),
        *(
            Column(name, BigInteger, nullable=False)
            for name in ("requests", "prompt_tokens", "completion_tokens", "cached_tokens")
        ),
        Column("saved_s", Double, nullable=False),
    )
    op.create_index("ix_swiftopt_jobs_due", "swiftopt_jobs", ["state", "due_at", "id"])
    op.create_index("ix_swiftopt_alias_moves_newest", "swiftopt_alias_moves", ["model_id", "id"])


def _add_experts(op: Operations) -> None:
    """Add the number of experts to layer sets, and the costs of experts to cost profiles."""
    for table in ("swiftopt_layer_sets", "swiftopt_trials", "swiftopt_served_trials"):
        op.add_column(table, Column("experts", JSON, nullable=False, server_default="{}"))
    op.add_column("swiftopt_cost_profiles", Column("experts", JSON, nullable=True))


def _add_absent(op: Operations) -> None:
    """Add to cost profiles the sub-layers that a model's layers do not have."""
    op.add_column("swiftopt_cost_profiles", Column("absent", JSON, nullable=True))


def _add_absent_to_layer_sets(op: Operations) -> None:
    """Add to layer sets the sub-layers that their model's layers do not have, which counts exclude."""
    op.add_column("swiftopt_layer_sets", Column("absent", JSON, nullable=False, server_default="[]"))


# Migration steps by the schema that they lead to, oldest first. The first schema needs no step.
STEPS: Mapping[str, Callable[[Operations], None]] = {
    "0.1.0.1": _add_what_fleets_need,
    "0.1.0.2": _add_experts,
    "0.1.0.3": _add_absent,
    "0.1.0.4": _add_absent_to_layer_sets,
}
REVISIONS = (FIRST, *STEPS)
HEAD = REVISIONS[-1]
# Prefix of the names of schemas before release 0.1.0: 0001_layer_sets to 0011_figures_of_plans.
UNRELEASED = "00"
# Key of the PostgreSQL advisory lock held during a migration.
LOCK_KEY = 0x5317F7


def upgrade(
    connection: Connection, stored_revision: str, steps: Mapping[str, Callable[[Operations], None]] = STEPS
) -> None:
    """Run the steps that follow a schema in the connection's transaction; loads alembic, which few databases need."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    operations = Operations(MigrationContext.configure(connection, opts={"target_metadata": Base.metadata}))
    names = [FIRST, *steps]
    for name in names[names.index(stored_revision) + 1 :]:
        steps[name](operations)
    connection.execute(update(SchemaRow).values(version_num=names[-1]))


@dataclass(frozen=True, slots=True)
class SchemaState:
    """A database's schema; `revision` is None for an empty one, or a file that does not exist."""

    database: str  # Database URL without its password, for errors.
    revision: str | None
    head: str = HEAD

    @property
    def ok(self) -> bool:
        """Return whether the database has the schema that this swiftopt writes."""
        return self.revision == self.head

    @property
    def refusal(self) -> StoreError | None:
        """Return the error if this schema cannot be migrated to the newest; None if it can, or is empty."""
        if self.revision is None or self.revision in REVISIONS:
            return None
        if self.revision.startswith(UNRELEASED):
            return StoreError(
                f"the database {self.database} was written before swiftopt's first release (its schema is"
                f" {self.revision}): move it away, or choose another with --db, and tune again"
            )
        return SchemaTooNew(
            f"the database {self.database} was written by a newer swiftopt (its schema is {self.revision}, this version"
            f" knows up to {self.head}): install that version, or choose another database with --db"
        )


def look(url: str) -> SchemaState:
    """Return the database's schema, without changing or creating it."""
    if not exists(url):
        return SchemaState(without_password(url), None)
    with connected(url) as connection:
        return SchemaState(without_password(url), revision(connection))


def bring_to_head(url: str) -> tuple[SchemaState, SchemaState]:
    """Create or migrate the database as opening a store does; return its schema before and after."""
    schema = look(url)
    connect_at_head(url).dispose()
    return schema, look(url)


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
        # Read again under the lock: another process may have migrated meanwhile.
        stored_version = revision(connection)
        if refusal := SchemaState(without_password(url), stored_version).refusal:
            raise refusal
        if stored_version is None:
            Base.metadata.create_all(connection, checkfirst=False)
            connection.execute(insert(SchemaRow).values(version_num=HEAD))
        elif stored_version != HEAD:
            upgrade(connection, stored_version)
