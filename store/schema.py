"""Brings a database to the newest schema and refuses one from the future; loads alembic only where it is needed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from ..core.errors import SchemaTooNew
from .database import shown, writing
from .migrations import HEAD, VERSION_TABLE
from .tables import Base

if TYPE_CHECKING:
    from alembic.config import Config

FOLDER = Path(__file__).parent / "migrations"
ALEMBIC = threading.Lock()  # alembic keeps the migration that runs in module globals


def ensure_head(engine: Engine, url: str) -> None:
    """Migrate to the newest schema, if the database is not there yet.

    Raises: SchemaTooNew: a newer swiftopt has migrated it.
    """
    with engine.connect() as connection:
        if revision(connection) == HEAD:
            return
    try:
        _migrate(engine, url)
    except (IntegrityError, ProgrammingError):
        # Two processes met at a new PostgreSQL database; the other one has created the tables.
        with engine.connect() as connection:
            if revision(connection) != HEAD:
                raise


def revision(connection: Connection) -> str | None:
    """The schema's revision; None for an empty database."""
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
    """Every revision that this version of swiftopt has, newest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in ScriptDirectory(FOLDER).walk_revisions()]


def _migrate(engine: Engine, url: str) -> None:
    with writing(engine).begin() as connection:
        found = revision(connection)  # again, now that no other process can migrate
        if found is not None and found not in known_revisions():
            raise SchemaTooNew(
                f"the database {shown(url)} was written by a newer swiftopt (its schema is {found}, this version knows "
                f"up to {HEAD}): install that version, or choose another database with --db"
            )
        if found != HEAD:
            upgrade(connection)


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
