"""The store's database: its schema, where it is, and what a user reads when it cannot be used."""

from __future__ import annotations

import dataclasses
import socket
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from servers import Postgres, new_database, server_folder
from sqlalchemy import URL, Engine, NullPool, create_engine, inspect, make_url, text
from sqlalchemy.orm import Session

from swiftopt.core.errors import StoreError, StoreUnavailable
from swiftopt.core.events import TrialsDone
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.requests import JobSpec
from swiftopt.core.types import Trial
from swiftopt.store import Store, as_url, default_url
from swiftopt.store.database import Transactions, connect

RECORD = LayerSetRecord("m", "t", LayerSet(40, frozenset({7}), frozenset({8})))


@pytest.fixture
def admin(empty_database_url: str) -> Iterator[Engine]:
    """Our own connection to the empty database, past the store's methods."""
    made = create_engine(empty_database_url)
    yield made
    made.dispose()


# --- schema -----------------------------------------------------------------------------------------------------------


def test_database_may_hold_tables_of_others(empty_database_url: str, admin: Engine) -> None:
    connect(empty_database_url).dispose()  # which creates the file's folder
    with admin.begin() as connection:
        connection.execute(text("CREATE TABLE trials (id INTEGER)"))  # as Optuna has one
        connection.execute(text("INSERT INTO trials VALUES (3)"))
    with Store.open(empty_database_url) as store:
        lease = store.jobs.begin_here(JobSpec("tune", None), "here").lease
        trials = TrialsDone("t", (Trial(0, RECORD.layer_set, "random", 0.5, 0.5),))
        store.jobs.checkpoint(lease, 1, [trials], None)
        assert store.add_layer_set(dataclasses.replace(RECORD, job=lease.job)).version == 1
    with admin.connect() as connection:
        assert connection.execute(text("SELECT id FROM trials")).scalar() == 3
    assert all(name == "trials" or name.startswith("swiftopt_") for name in inspect(admin).get_table_names())


def test_rows_stay_when_the_store_is_opened_again(empty_database_url: str) -> None:
    with Store.open(empty_database_url) as first:
        stored = first.add_layer_set(RECORD)
    with Store.open(empty_database_url) as second:
        assert second.layer_sets() == [stored]


def test_database_can_be_created_by_several_stores_at_once(empty_database_url: str) -> None:
    def create(_: int) -> int | None:
        with Store.open(empty_database_url) as store:
            return store.add_layer_set(RECORD).version

    with ThreadPoolExecutor(4) as pool:
        assert sorted(filter(None, pool.map(create, range(6)))) == [1, 2, 3, 4, 5, 6]


def test_databases_can_be_created_by_several_threads_at_once(tmp_path: Path) -> None:
    def create(name: int) -> int | None:
        with Store.open(str(tmp_path / f"{name}.db")) as store:
            return store.add_layer_set(RECORD).version

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(create, range(6))) == [1] * 6


def test_opening_prints_nothing_leaves_logging_alone_and_needs_no_torch(empty_database_url: str) -> None:
    script = (
        "import logging, sys; from swiftopt.store import Store; Store.open(sys.argv[1]).close();"
        "assert 'torch' not in sys.modules; root = logging.getLogger();"
        "assert (root.handlers, root.level) == ([], logging.WARNING)"
    )
    ran = subprocess.run([sys.executable, "-c", script, empty_database_url], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# --- where it is, and what can go wrong with it -----------------------------------------------------------------------


def test_default_url_is_the_environments_or_a_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", "postgresql://host/name")
    assert default_url() == "postgresql://host/name"
    monkeypatch.delenv("SWIFTOPT_DATABASE_URL")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_url().startswith("sqlite:///") and default_url().endswith("/swiftopt/swiftopt.db")


def test_path_becomes_the_url_of_exactly_that_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Store.open("a b?c=d%20.db").close()
    assert (tmp_path / "a b?c=d%20.db").is_file()
    assert as_url("sqlite:///x.db") == "sqlite:///x.db"


def refusal(url: str) -> str:
    """The one sentence with which opening fails."""
    with pytest.raises(StoreError) as caught:
        Store.open(url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_open_refuses_what_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear reader, " * 100)
    assert refusal(str(tmp_path / "letter.txt")).endswith("letter.txt is not a database: choose another file with --db")
    assert "cannot be created" in refusal(str(tmp_path / "letter.txt" / "x" / "a.db"))
    assert f"{tmp_path} cannot be opened" in refusal(str(tmp_path))
    for url in ("mongodb://host/name", "mysql://user@host/name", "postgres://user@host/name"):
        assert f"{url} is not a database that swiftopt can use: use the path of a SQLite file" in refusal(url)


def test_open_does_not_tell_the_password_when_the_server_cannot_be_used() -> None:
    assert "secret" not in refusal("postgresql://user:secret@127.0.0.1:1/name")


def test_write_is_refused_when_another_process_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Store.open(f"sqlite:///{path}?timeout=0.05") as store:
        other = sqlite3.connect(path)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="is locked by another process"):
            store.add_layer_set(RECORD)
        assert store.layer_sets() == []  # reading goes on
        other.close()


def test_write_is_refused_and_reading_goes_on_when_the_file_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Store.open(str(path)) as store:
        store.add_layer_set(RECORD)
    with Store.open(f"sqlite:///file:{path}?mode=ro&uri=true") as store:
        assert len(store.layer_sets()) == 1
        with pytest.raises(StoreError, match="is read-only"):
            store.add_layer_set(RECORD)


def test_write_is_refused_in_one_sentence_when_the_disk_is_full(tmp_path: Path) -> None:
    script = """
import resource, sys
from swiftopt.core.errors import StoreError
from swiftopt.core.requests import JobSpec
from swiftopt.store import Store
store = Store.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))  # no file may grow beyond this any more
try:
    store.jobs.begin_here(JobSpec("tune", None, {"long": "x" * 200_000}), "here")
except StoreError as error:
    sys.exit(str(error))
"""
    path = str(tmp_path / "a.db")
    ran = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"the database {path} cannot ") and "disk" in ran.stderr
    assert ran.stderr.count("\n") == 1


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


@pytest.fixture
def guest(postgres_url: str) -> Iterator[URL]:
    """The database's URL for a role that has a password and may read nothing."""
    role = f"guest_{uuid.uuid4().hex[:12]}"
    engine = create_engine(postgres_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'right horse'"))
    yield make_url(postgres_url).set(username=role, password="right horse")
    with engine.connect() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def test_wrong_password_or_user_is_refused_and_not_shown(guest: URL) -> None:
    for wrong in (guest.set(password="wrong horse"), guest.set(username="nobody_of_that_name"), guest.set(password="")):
        told = refusal(wrong.render_as_string(hide_password=False))
        assert told.endswith("refuses the user or the password: check both in its URL")
        assert "horse" not in told


def test_missing_database_is_said_to_be_missing(postgres_url: str) -> None:
    told = refusal(make_url(postgres_url).set(database="not_there").render_as_string(hide_password=False))
    assert "not_there" in told and "does not exist on its server: create it" in told


def test_user_without_rights_is_told_so(postgres_url: str, guest: URL) -> None:
    assert "denies its user a permission" in refusal(guest.render_as_string(hide_password=False))  # to create tables
    Store.open(postgres_url).close()
    assert "denies its user a permission" in refusal(guest.render_as_string(hide_password=False))  # to read


@pytest.mark.parametrize(
    "url", ["postgresql://u@127.0.0.1:1/d", "postgresql://u@localhost:1/d", "postgresql://u@/d?host=/not-there"]
)
def test_server_that_does_not_run_is_unavailable(url: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached: check that its server runs"):
        Store.open(url)


def test_server_that_does_not_answer_is_given_up_after_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d?connect_timeout=2"
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            Store.open(url)


def test_store_goes_on_when_its_server_comes_back() -> None:
    with (
        server_folder() as folder,
        Postgres(folder) as server,
        new_database(server.url) as url,
        Store.open(url) as store,
    ):
        store.add_layer_set(RECORD)
        for end in (server.stop, server.kill):
            end()
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                store.add_layer_set(RECORD)
            server.start()
        assert store.add_layer_set(RECORD).version == 2


def test_connection_lost_in_the_middle_is_unavailable_and_the_next_write_works(postgres_url: str) -> None:
    with Store.open(postgres_url) as store, create_engine(postgres_url, poolclass=NullPool).connect() as admin:

        def work(session: Session) -> None:
            ours = session.execute(text("SELECT pg_backend_pid()")).scalar()
            admin.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": ours})
            session.execute(text("SELECT 1"))

        with pytest.raises(StoreUnavailable):
            Transactions(store.engine, postgres_url).write(work)
        assert store.add_layer_set(RECORD).version == 1


def test_server_without_a_free_connection_is_unavailable(guest: URL, postgres_url: str) -> None:
    with create_engine(postgres_url, poolclass=NullPool).begin() as connection:
        connection.execute(text(f"ALTER ROLE {guest.username} CONNECTION LIMIT 0"))
    with pytest.raises(StoreUnavailable, match="has no free connection left"):
        Store.open(guest.render_as_string(hide_password=False))


COUNT_UP = "UPDATE tally SET value = value + 1 WHERE name = {}"

# Two writers each run the first statement, wait for the other, and run the second.
MEETINGS = {
    "both insert one key": (
        "REPEATABLE READ",
        ("SELECT count(*) AS seen FROM tally", "INSERT INTO tally SELECT 'c' || count(*), 1 FROM tally"),
        {"a": 0, "b": 0, "c2": 1, "c3": 1},
    ),
    "both change what both have read": (
        "REPEATABLE READ",
        ("SELECT * FROM tally", COUNT_UP.format("'a'")),
        {"a": 2, "b": 0},
    ),
    "each waits for the other's lock": (
        "READ COMMITTED",
        (
            "UPDATE tally SET value = value + 1 WHERE name = :mine",
            "UPDATE tally SET value = value + 1 WHERE name = :its",
        ),
        {"a": 2, "b": 2},
    ),
}


@pytest.mark.parametrize("meeting", MEETINGS)
def test_writes_that_meet_are_tried_again(postgres_url: str, meeting: str) -> None:
    isolation, statements, after = MEETINGS[meeting]
    engine = create_engine(postgres_url, isolation_level=isolation, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE tally (name TEXT PRIMARY KEY, value INTEGER)"))
        connection.execute(text("INSERT INTO tally VALUES ('a', 0), ('b', 0)"))
    together, tries = Barrier(2), []

    def write(names: str) -> None:
        first = True

        def work(session: Session) -> None:
            nonlocal first
            tries.append(names)
            session.execute(text(statements[0]), {"mine": names[0]})
            if first:
                first = False
                together.wait(10)
            session.execute(text(statements[1]), {"its": names[1]})

        Transactions(engine, postgres_url).write(work)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ("ab", "ba")))
    with engine.connect() as connection:
        assert {name: value for name, value in connection.execute(text("SELECT * FROM tally"))} == after
    assert len(tries) > 2
