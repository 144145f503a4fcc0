"""The store's database: its schema, where it is, and what a user reads when it cannot be used."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, inspect, text

from swiftopt.core.errors import SchemaTooNew, StoreError
from swiftopt.core.types import LayerSet, LayerSetRecord, Trial
from swiftopt.store import Store, as_url, default_url
from swiftopt.store.migrations import HEAD, VERSION_TABLE
from swiftopt.store.schema import downgrade, known_revisions, revision, upgrade
from swiftopt.store.tables import Base

RECORD = LayerSetRecord("m", "t", LayerSet(40, frozenset({7}), frozenset({8})))


@pytest.fixture(params=["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    assert request.param == "sqlite"
    return as_url(str(tmp_path / "a.db"))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Our own connection to the database of `store`, past its methods."""
    made = create_engine(url)
    yield made
    made.dispose()


# --- schema -----------------------------------------------------------------------------------------------------------


def test_migrations_build_the_tables_that_the_code_uses(store: Store, engine: Engine) -> None:
    options = {
        "compare_type": True,
        "include_object": lambda _o, name, kind, *_: kind != "table" or "version" not in name,
    }
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []
        assert revision(connection) == HEAD == known_revisions()[0]


def test_downgrade_drops_our_tables_only_and_upgrade_brings_them_back(store: Store, engine: Engine) -> None:
    job = store.create_job({})
    store.add_trials(job, "t", [Trial(0, RECORD.layer_set, "random", 0.5, 0.5)])
    store.add_layer_set(dataclasses.replace(RECORD, job=job))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE trials (id INTEGER)"))  # as Optuna has one
        connection.execute(text("INSERT INTO trials VALUES (3)"))
        downgrade(connection, "base")
    assert set(inspect(engine).get_table_names()) == {"trials", VERSION_TABLE}
    with engine.begin() as connection:
        upgrade(connection)
        assert connection.execute(text("SELECT id FROM trials")).scalar() == 3
    assert store.layer_sets() == []
    assert store.add_layer_set(RECORD).version == 1


def test_rows_stay_when_the_store_is_opened_again(url: str) -> None:
    with Store.open(url) as first:
        stored = first.add_layer_set(RECORD)
    with Store.open(url) as second:
        assert second.layer_sets() == [stored]


def test_databases_can_be_created_by_several_threads_at_once(tmp_path: Path) -> None:
    def create(name: int) -> int | None:
        with Store.open(str(tmp_path / f"{name}.db")) as store:
            return store.add_layer_set(RECORD).version

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(create, range(6))) == [1] * 6


def test_database_of_a_newer_swiftopt_is_refused(url: str, store: Store, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999_future'"))
    with pytest.raises(SchemaTooNew, match=f"newer swiftopt .*9999_future, .*up to {HEAD}.*install that version"):
        Store.open(url)


def test_opening_prints_nothing_leaves_logging_alone_and_needs_no_torch(url: str) -> None:
    script = (
        "import logging, sys; from swiftopt.store import Store; Store.open(sys.argv[1]).close();"
        "assert 'torch' not in sys.modules; root = logging.getLogger();"
        "assert (root.handlers, root.level) == ([], logging.WARNING)"
    )
    ran = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True)
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
    assert refusal(str(tmp_path / "letter.txt")).endswith("letter.txt is no database: choose another file with --db")
    assert "cannot be created" in refusal(str(tmp_path / "letter.txt" / "x" / "a.db"))
    assert f"{tmp_path} cannot be opened" in refusal(str(tmp_path))
    assert "names no database" in refusal("mongodb://host/name")


def test_open_does_not_tell_the_password_when_the_server_cannot_be_used() -> None:
    assert "secret" not in refusal("postgresql://user:secret@127.0.0.1:1/name")


def test_write_is_refused_when_another_process_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Store.open(f"sqlite:///{path}?timeout=0.05") as store:
        other = sqlite3.connect(path)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="stays locked by another process"):
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
from swiftopt.store import Store
store = Store.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))  # no file may grow beyond this any more
try:
    store.create_job({"long": "x" * 200_000})
except StoreError as error:
    sys.exit(str(error))
"""
    path = str(tmp_path / "a.db")
    ran = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"the database {path} cannot ") and "disk" in ran.stderr
    assert ran.stderr.count("\n") == 1
