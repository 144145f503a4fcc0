"""Brings a database to the newest schema and refuses one from the future."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, func, insert, inspect, select

from ..core.errors import SchemaTooNew
from .database import connect, connected, exists, shown, store_errors, writing
from .migrations import HEAD, REVISIONS, upgrade
from .tables import Base, SchemaRow

LOCK_KEY = 0x5317F7  # of PostgreSQL's advisory locks in one database: who migrates


@dataclass(frozen=True, slots=True)
class SchemaState:
    """Where a database stands; `revision` is None for an empty one, or a file that does not exist."""

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
    """Return where the database stands, without changing or creating it.

    Raises: StoreError: it cannot be opened.
    """
    if not exists(url):
        return SchemaState(shown(url), None)
    with connected(url) as connection:
        return SchemaState(shown(url), revision(connection))


def bring_to_head(url: str) -> tuple[SchemaState, SchemaState]:
    """Create or migrate the database as opening a store does; return where it stood before, and where it stands now.

    Raises: SchemaTooNew: a newer swiftopt has written it. StoreError: it cannot be opened.
    """
    before = look(url)
    connect_at_head(url).dispose()
    return before, look(url)


def connect_at_head(url: str) -> Engine:
    """Return an engine for the database, created and migrated to the newest schema as needed.

    Raises: SchemaTooNew: a newer swiftopt has migrated it. StoreError: it cannot be opened.
    """
    engine = connect(url)
    try:
        with store_errors(url):
            with engine.connect() as connection:
                found = revision(connection)
            if found != HEAD:
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
        found = revision(connection)  # again, now that no other process can do the same
        if found is None:
            Base.metadata.create_all(connection, checkfirst=False)
            connection.execute(insert(SchemaRow).values(version_num=HEAD))
        elif found not in REVISIONS:
            raise SchemaTooNew(
                f"the database {shown(url)} was written by a newer swiftopt (its schema is {found}, this version knows "
                f"up to {HEAD}): install that version, or choose another database with --db"
            )
        elif found != HEAD:
            upgrade(connection, found, HEAD)
