"""Where the database is, how it is opened, and what its errors say to a user."""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from platformdirs import user_data_dir
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import SAWarning, SQLAlchemyError

from ..core.errors import StoreError

LOCK_WAIT_S = 30  # seconds that a SQLite write waits for another process's write

# What a driver's message contains -> what to tell the user.
ADVICE = (
    ("database is locked", "stays locked by another process: wait until that one is done, or end it"),
    ("readonly database", "is read-only: give yourself permission to write it, or choose another with --db"),
    ("disk is full", "cannot grow because the disk is full: free some space"),
    ("disk i/o error", "cannot be read or written (disk full, or a failing or network disk): check the disk"),
    ("not a database", "is no database: choose another file with --db"),
    ("malformed", "is damaged: restore a copy of it, or choose another file with --db"),
    ("unable to open", "cannot be opened: check that the path is a file you may write, or choose another with --db"),
)


def default_url() -> str:
    """`SWIFTOPT_DATABASE_URL` if it is set, else a SQLite file in the user's data folder."""
    named = os.environ.get("SWIFTOPT_DATABASE_URL")
    return as_url(named or str(Path(user_data_dir("swiftopt"), "swiftopt.db")))


def as_url(text: str) -> str:
    """A SQLAlchemy URL as it is; a plain path as the URL of that SQLite file."""
    if "://" in text:
        return text
    path = Path(text).expanduser().absolute()
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def shown(url: str) -> str:
    """The URL as errors may show it: a plain path for a SQLite file, and no password."""
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        return "(unreadable URL)"  # it may hold a password
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        return parsed.database
    return parsed.render_as_string(hide_password=True)


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn what the database driver raises into a StoreError of one sentence."""
    try:
        yield
    except SQLAlchemyError as error:
        message = str(getattr(error, "orig", None) or error).split("\n")[0].rstrip(".")
        advice = next((advice for part, advice in ADVICE if part in message.lower()), None)
        raise StoreError(
            f"the database {shown(url)} {advice}"
            if advice
            else f"the database {shown(url)} cannot be used ({message}): check it, or choose another with --db"
        ) from error


def connect(url: str) -> Engine:
    """An engine; for a SQLite file its folder is created.

    Raises: StoreError: the URL cannot be read, its driver is missing, or the folder cannot be created.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed, pool_pre_ping=True)
        _make_folder(parsed)
        wait = {} if "timeout" in parsed.query else {"timeout": LOCK_WAIT_S}
        with warnings.catch_warnings():
            warnings.simplefilter("error", SAWarning)  # an option that the driver does not know
            engine = create_engine(parsed, connect_args=wait)
    except SAWarning as error:
        options = ", ".join(sorted(parsed.query))
        raise StoreError(f"the database {shown(url)} has options that SQLite lacks ({options}): remove them") from error
    except ImportError as error:
        raise StoreError(
            f"the database {shown(url)} needs the package {error.name!r}, which is missing: install it with pip"
        ) from error
    except (SQLAlchemyError, ValueError) as error:  # ValueError: a port that is no number
        raise StoreError(
            f"{shown(url)} names no database: use a path or a URL such as postgresql://user@host/name"
        ) from error
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin)
    return engine


def writing(engine: Engine) -> Engine:
    """The same engine for transactions that write."""
    return engine.execution_options(swiftopt_writes=True)


def _make_folder(url: URL) -> None:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        return
    folder = Path(url.database).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the folder {folder} of the database cannot be created ({error.strerror}): choose another with --db"
        ) from error


def _set_pragmas(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # else the driver begins transactions itself, late, and never for a read
    connection.execute("PRAGMA foreign_keys=ON")
    # The driver's `timeout` is busy_timeout. Setting WAL needs a lock, so a database that has it is left alone.
    if connection.execute("PRAGMA journal_mode").fetchone() == ("delete",):
        connection.execute("PRAGMA journal_mode=WAL")


def _begin(connection: Connection) -> None:
    # A write takes SQLite's lock at once: upgrading a read lock later fails without waiting when another has written.
    options: dict[str, Any] = dict(connection.get_execution_options())
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("swiftopt_writes") else "BEGIN")
