"""Location and opening of the database, its transactions, its clock, and its errors as messages for users."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_data_dir
from sqlalchemy import URL, Connection, Double, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SAWarning, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.sql.functions import FunctionElement
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random

from ..core.errors import InvalidInput, StoreError, StoreUnavailable, SwiftoptError, safe_url

T = TypeVar("T")

# Attempts to switch a new file to WAL mode while another process holds its lock, and seconds between them.
WAL_TRIES, WAL_PAUSE_S = 100, 0.02
LOCK_WAIT_S = 30  # Longest wait of a SQLite write for another process's write, in seconds.

# SQLSTATE codes with which PostgreSQL aborts a transaction in favour of another: serialization failure, deadlock.
CONFLICT_SQLSTATES = ("40001", "40P01")

# libpq options that apply unless the URL sets them. Their timeouts detect a vanished server before a job's lease
# expires.
POSTGRES_OPTIONS: dict[str, int | str] = {
    "connect_timeout": 5,  # Seconds.
    "keepalives_idle": 5,  # Seconds.
    "keepalives_interval": 5,  # Seconds.
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,  # Milliseconds.
    # Ends the transaction of a process that is suspended during a write, which would keep its locks otherwise.
    "options": "-c idle_in_transaction_session_timeout=15000",  # Milliseconds.
}

UNREACHABLE = "cannot be reached: check that its server runs, and the host and port in its URL"

# Maps patterns in a driver's error message (in lower case) to the advice for the user.
ADVICE = {
    "readonly database": "is read-only: change its permissions, or choose another with --db",
    "disk is full|no space left": "cannot grow because the disk is full: free some space",
    "disk i/o error": "cannot be read or written (disk full, or a failing or network disk): check the disk",
    "not a database": "is not a database: choose another file with --db",
    "malformed": "is damaged: restore a copy of it, or choose another file with --db",
    "unable to open": "cannot be opened: check that the path is a writable file, or choose another with --db",
    'password authentication failed|role "[^"]*" does not exist|no password supplied': (
        "refuses the user or the password: check both in its URL"
    ),
    "no pg_hba.conf entry": "does not accept this user or machine: allow it in the server's pg_hba.conf",
    'database "[^"]*" does not exist': (
        "does not exist on its server: create it (`createdb NAME`), or choose another with --db"
    ),
    "permission denied": "denies its user a permission: grant the rights, or use the tables' owner",
    "read-only transaction": "is a read-only replica: use the primary server's URL",
}

# Matches driver errors about values that cannot be stored: a NUL character, a number out of range, a name too long for
# an index, or a huge string.
UNSTORABLE = r"\bnul \(0x00\)|integer out of range|bigint out of range|index row size|string or blob too big"

# As ADVICE, but for temporary errors, which are raised as StoreUnavailable.
TEMPORARY_PROBLEMS = {
    "database is locked": "is locked by another process: wait until that one is done, or stop it",
    "too many (clients|connections)|connection slots are reserved|queuepool limit": (
        "has no free connection left: try again, or run fewer clients"
    ),
    "starting up|shutting down|in recovery mode|not yet accepting|administrator command|another server process": (
        "is starting or stopping: try again in a moment"
    ),
    "could not translate host name|failed to resolve host": (
        "is on a host whose name cannot be resolved: check the name in its URL, or the network"
    ),
    "connection refused|connection reset|connection timed out|timeout expired|no route to host"
    "|network is unreachable|server on socket .* no such file|closed the connection|closed unexpectedly"
    "|connection is (closed|lost)|eof detected|could not (receive|send) data": UNREACHABLE,
}


def default_url() -> str:
    """Return `SWIFTOPT_DATABASE_URL` if it is set, else a SQLite file in the user's data folder."""
    url = os.environ.get("SWIFTOPT_DATABASE_URL")
    return as_url(url or str(Path(user_data_dir("swiftopt"), "swiftopt.db")))


def as_url(text: str | Path) -> str:
    """Return a SQLAlchemy URL unchanged, and a plain path as the URL of that SQLite file."""
    if isinstance(text, str) and "://" in text:
        return text
    path = Path(text).expanduser().absolute()
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def without_password(url: str) -> str:
    """Return the URL for error messages: a plain path for a SQLite file, and no password."""
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        return "(unreadable URL)"  # Do not show the URL: it may contain a password.
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        return parsed.database
    return safe_url(url)


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Translate errors of the database driver into ours, with a message of one sentence.

    Raises: StoreUnavailable: the database is currently unreachable or locked. StoreError: it cannot be used.
        InvalidInput: it cannot store a text or number.
    """
    try:
        yield
    except SQLAlchemyError as error:
        raise _translate(error, url) from error
    # Raised by the driver when it encodes a value, before it sends the statement.
    except (UnicodeEncodeError, OverflowError) as error:
        raise _unstorable(error) from error


def _unstorable(error: object) -> InvalidInput:
    first_line = str(error).split("\n")[0].rstrip(".")
    return InvalidInput(
        f"a text or number cannot be stored or looked up ({first_line}): remove NUL and broken characters, and use"
        " shorter names and smaller numbers"
    )


def _translate(error: SQLAlchemyError, url: str) -> SwiftoptError:
    message = str(getattr(error, "orig", None) or error)
    lower_message = message.lower()
    if re.search(UNSTORABLE, lower_message):
        return _unstorable(message)
    for kind, advice_by_pattern in ((StoreError, ADVICE), (StoreUnavailable, TEMPORARY_PROBLEMS)):
        advice = next(
            (advice for pattern, advice in advice_by_pattern.items() if re.search(pattern, lower_message, re.DOTALL)),
            None,
        )
        if advice:
            return kind(f"the database {without_password(url)} {advice}")
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return StoreUnavailable(f"the database {without_password(url)} {UNREACHABLE}")
    first_line = message.split("\n")[0].rstrip(".")
    return StoreError(
        f"the database {without_password(url)} cannot be used ({first_line}): check it, or choose another with --db"
    )


def connect(url: str) -> Engine:
    """Return an engine; the folder of a SQLite file is created.

    Raises: StoreError: the URL cannot be read, its driver is missing, or the folder cannot be created.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise _unreadable(url)
        if parsed.get_backend_name() != "sqlite":
            server_options = _server_options(parsed)
            return create_engine(parsed, pool_pre_ping=True, connect_args=server_options, json_serializer=json_text)
        _make_folder(parsed)
        wait = {} if "timeout" in parsed.query else {"timeout": LOCK_WAIT_S}
        with warnings.catch_warnings():
            warnings.simplefilter("error", SAWarning)  # SQLAlchemy only warns about unknown options.
            engine = create_engine(parsed, connect_args=wait, json_serializer=json_text, json_deserializer=json_of)
    except SAWarning as error:
        options = ", ".join(sorted(parsed.query))
        raise StoreError(
            f"the database {without_password(url)} has options that SQLite lacks ({options}): remove them"
        ) from error
    except ImportError as error:
        raise StoreError(
            f"the database {without_password(url)} needs the package {error.name!r}, which is missing:"
            " install it with pip"
        ) from error
    except (SQLAlchemyError, ValueError) as error:  # ValueError: the port is not a number.
        raise _unreadable(url) from error
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin)
    return engine


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    """Open one connection for a few queries, and close it afterwards.

    Raises: StoreError: as `connect` and `store_errors` do.
    """
    engine = connect(url)
    try:
        with store_errors(url), engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def exists(url: str) -> bool:
    """Return whether the database already exists; for a database server, assume that it does.

    Raises: StoreError: the URL cannot be read.
    """
    file = file_of(url)
    return file is None or file.exists()


def file_of(url: str) -> Path | None:
    """Return the file that a database's URL names as a path; None for all others.

    Raises: StoreError: the URL cannot be read.
    """
    try:
        return _file(make_url(url))
    except (SQLAlchemyError, ValueError) as error:
        raise _unreadable(url) from error


def json_text(value: Any) -> str:
    """Encode as JSON that every database accepts: infinite numbers and NaN become null."""
    try:
        return json.dumps(value, allow_nan=False, default=dict)
    except ValueError:
        return json.dumps(_replace_infinite(value))


def json_of(text: str) -> Any:
    """Decode JSON. Invalid JSON, which SQLite accepts, is returned as text, so that only its own record fails."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _replace_infinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_infinite(element) for key, element in value.items()}
    return [_replace_infinite(element) for element in value] if isinstance(value, list | tuple) else value


def writing(engine: Engine) -> Engine:
    """Return the same engine for transactions that write."""
    return engine.execution_options(swiftopt_writes=True)


def _unreadable(url: str) -> StoreError:
    return StoreError(
        f"{without_password(url)} is not a database that swiftopt can use: use the path of a SQLite file, or a URL of"
        " PostgreSQL such as postgresql://user@host/name"
    )


def _server_options(url: URL) -> dict[str, int | str]:
    if url.get_dialect().driver not in ("psycopg", "psycopg2"):
        return {}
    return {name: value for name, value in POSTGRES_OPTIONS.items() if name not in url.query}


def _file(url: URL) -> Path | None:
    """Return the file that a URL names as a path; None for a server, a database in memory, or one named by a URI."""
    name = url.database or ":memory:"
    named_path = url.get_backend_name() == "sqlite" and name != ":memory:" and not name.startswith("file:")
    return Path(name) if named_path else None


def _make_folder(url: URL) -> None:
    file = _file(url)
    if file is None:
        return
    folder = file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the folder {folder} of the database cannot be created ({error.strerror}): choose another with --db"
        ) from error


def _set_pragmas(connection: sqlite3.Connection, _record: object) -> None:
    # Stop the driver from beginning transactions itself, which it does only at the first write. `_begin` begins them.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys=ON")
    # SQLite's busy_timeout does not apply to the lock for changing the journal mode, so retry here.
    for _ in range(WAL_TRIES):
        if connection.execute("PRAGMA journal_mode").fetchone() != ("delete",):
            return
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            time.sleep(WAL_PAUSE_S)
    # Another process kept the file locked. The next connection tries again; without WAL, writes are only slower.


def _begin(connection: Connection) -> None:
    # A write transaction takes SQLite's write lock when it begins: upgrading a read lock later fails without waiting if
    # another process has written meanwhile.
    options: dict[str, Any] = dict(connection.get_execution_options())
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("swiftopt_writes") else "BEGIN")


# --- transactions ---


def _conflicts(error: BaseException) -> bool:
    """Return whether a write failed because of a concurrent one: both inserted the same row, or they deadlocked."""
    gave_way = isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", None) in CONFLICT_SQLSTATES
    return gave_way or isinstance(error, IntegrityError | StaleDataError)


WRITE_TRIES = Retrying(
    retry=retry_if_exception(_conflicts),
    stop=stop_after_attempt(4),
    # Seconds; random, so that two conflicting transactions do not conflict again.
    wait=wait_random(0, 0.02),
    reraise=True,
)


class Transactions:
    """Base class for reading and writing one database in transactions; threads may share it.

    Raises: StoreError: in every method, with one sentence, if the database cannot be read or written; StoreUnavailable
        if retrying may help.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self.url = url
        self.engine = engine
        self._writer = writing(engine)
        # Reads on PostgreSQL run without a transaction, which saves two round trips, because its transactions would see
        # concurrent commits anyway. SQLite's transactions keep all queries of a read on one state.
        self._reader = engine if self.is_local else engine.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def file(self) -> Path | None:
        """The database file; None for a server, or a database in memory."""
        return _file(self.engine.url)

    @property
    def is_local(self) -> bool:
        """Whether all processes that use the database are on this machine, as with a SQLite file."""
        return self.engine.dialect.name == "sqlite"

    def read(self, transaction: Callable[[Session], T]) -> T:
        """Run `transaction`, which writes nothing."""
        with store_errors(self.url), Session(self._reader) as session:
            return transaction(session)

    def write(self, transaction: Callable[[Session], T]) -> T:
        """Run `transaction` in one transaction; retry it after a conflict with another one (PostgreSQL only)."""
        with store_errors(self.url):
            answer: T = WRITE_TRIES(self._write_once, transaction)
            return answer

    def _write_once(self, transaction: Callable[[Session], T]) -> T:
        with Session(self._writer) as session, session.begin():
            return transaction(session)


def insert(session: Session, table: type[Any]) -> Any:
    """Return the database dialect's own INSERT, which supports ON CONFLICT."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


# --- the clock ---


class clock_s(FunctionElement[float]):
    """Seconds since 1970, with fractions, by the database's own clock when the statement runs.

    Leases are compared only by this clock, so that the clocks of workers may differ.
    """

    name = "clock_s"
    type = Double()
    inherit_cache = True


@compiles(clock_s, "sqlite")
def _sqlite_clock(element: clock_s, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock_s, "postgresql")
def _postgresql_clock(element: clock_s, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"
