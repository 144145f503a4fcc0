"""Brings a database to the newest schema and refuses one from the future; loads alembic only where it is needed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, func, inspect, select, text

from ..core.errors import SchemaTooNew
from .database import connect, exists, shown, store_errors, writing
from .migrations import HEAD, VERSION_TABLE
from .tables import Base

if TYPE_CHECKING:
    from alembic.config import Config

FOLDER = Path(__file__).parent / "migrations"
LOCK_KEY = 0x5317F7  # of PostgreSQL's advisory locks in one database: who migrates
ALEMBIC = threading.Lock()  # alembic keeps the migration that runs in module globals


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
        return self.revision is not None and not self.ok and self.revision not in known_revisions()


def look(url: str) -> SchemaState:
    """Return where the database stands, without changing or creating it.

    Raises: StoreError: it cannot be opened.
    """
    if not exists(url):
        return SchemaState(shown(url), None)
    engine = connect(url)
    try:
        with store_errors(url), engine.connect() as connection:
            return SchemaState(shown(url), revision(connection))
    finally:
        engine.dispose()


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
                _migrate(engine, url)
    except BaseException:
        engine.dispose()
        raise
    return engine


def revision(connection: Connection) -> str | None:
    """Return the schema's revision; None for an empty database."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return found


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run the migrations up to `to` in the connection's transaction."""
    from alembic import command

    with ALEMBIC:
        command.upgrade(_config(connection), to)


def downgrade(connection: Connection, to: str) -> None:
    """Run the migrations down to `to` ("base": none of our tables is left)."""
    from alembic import command

    with ALEMBIC:
        command.downgrade(_config(connection), to)


def known_revisions() -> list[str]:
    """Return every revision that this version of swiftopt has, newest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in ScriptDirectory(FOLDER).walk_revisions()]


def _migrate(engine: Engine, url: str) -> None:
    with writing(engine).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
        found = revision(connection)  # again, now that no other process can migrate
        if found is not None and found not in known_revisions():
            raise _too_new(url, found)
        if found != HEAD:
            upgrade(connection)


def _too_new(url: str, found: str) -> SchemaTooNew:
    return SchemaTooNew(
        f"the database {shown(url)} was written by a newer swiftopt (its schema is {found}, this version knows "
        f"up to {HEAD}): install that version, or choose another database with --db"
    )


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["options"] = {
        "connection": connection,
        "target_metadata": Base.metadata,
        "version_table": VERSION_TABLE,
        "render_as_batch": True,
        "compare_type": True,
    }
    return config
