"""The step of a later release, over rows that were there before, and databases that no step leads from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from job_table import dump, finished, rewind, running, trials_done
from sqlalchemy import Column, Engine, String, inspect, text

from swiftopt.core.errors import SchemaTooNew, StoreError
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.store import Store
from swiftopt.store.database import connect, writing
from swiftopt.store.migrations import FIRST, HEAD, look, revision, upgrade
from swiftopt.store.tables import Base, SchemaRow

if TYPE_CHECKING:
    from alembic.operations import Operations

PLANS, LATER = "swiftopt_plans", "0.2.0"


@pytest.fixture
def engine(empty_database_url: str) -> Iterator[Engine]:
    """A database with a job, its events, a trial, a completion, and a layer set with its plan and alias."""
    with Store.open(empty_database_url) as store:
        lease = running(store.jobs)
        store.jobs.checkpoint(lease, 1, [trials_done(0), finished()], {"step": 1})
        store.add_layer_set(LayerSetRecord("m", "t", LayerSet(8, frozenset({3})), job=lease.job))
    made = writing(connect(empty_database_url))
    yield made
    made.dispose()


def add_column(op: Operations) -> None:
    op.add_column(PLANS, Column("colour", String, nullable=False, server_default="blue"))
    op.execute(f"UPDATE {PLANS} SET colour = 'green' WHERE task = 't'")


def rows(engine: Engine) -> dict[str, list[Any]]:
    """All but the name of the schema."""
    return {name: rows for name, rows in dump(engine).items() if name != SchemaRow.__tablename__}


def test_step_keeps_all_rows_and_leaves_the_database_as_it_was_when_it_fails(engine: Engine) -> None:
    before = rows(engine)
    assert len(before[PLANS]) == len(before["swiftopt_trials"]) == 1
    with pytest.raises(ZeroDivisionError), engine.begin() as connection:
        upgrade(connection, FIRST, {LATER: add_column})
        raise ZeroDivisionError
    with engine.connect() as connection:
        assert revision(connection) == HEAD
        assert "colour" not in {column["name"] for column in inspect(connection).get_columns(PLANS)}
    assert rows(engine) == before
    with engine.begin() as connection:
        upgrade(connection, FIRST, {LATER: add_column})
    with engine.connect() as connection:
        assert revision(connection) == LATER
        assert connection.scalar(text(f"SELECT colour FROM {PLANS}")) == "green"
    assert rows(engine) == before


@pytest.mark.parametrize("has_tables", [False, True], ids=["the first", "a later one"])
def test_database_of_the_schema_0_1_0_becomes_as_a_new_one_and_keeps_its_rows(
    engine: Engine, empty_database_url: str, has_tables: bool
) -> None:
    before = rows(engine)
    with engine.begin() as connection:
        rewind(connection, has_tables)
    assert look(empty_database_url).revision == FIRST
    with Store.open(empty_database_url) as store:
        assert store.schema().ok and not store.served_searches() and not store.usage_since("2026-01-01")
    assert rows(engine) == before
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": is_named})
        assert compare_metadata(context, Base.metadata) == []
    fewer = LayerSet(8, absent=("mlp:0", "attn:5"), experts=(("mlp", 2), ("mlp:3", 1)))
    with Store.open(empty_database_url) as store:
        assert store.layer_set("m", "t", 1).layer_set == LayerSet(8, frozenset({3}))
        version = store.add_layer_set(LayerSetRecord("m", "t", fewer)).version
        assert version == 2 and store.layer_set("m", "t", version).layer_set == fewer


def is_named(_: object, name: str | None, kind: str, *__: object) -> bool:
    """SQLite's constraints come back without their names."""
    return kind in ("table", "column", "index")


def test_steps_run_in_their_order_from_the_one_after_the_stored_schema(engine: Engine) -> None:
    ran: list[str] = []
    steps = {name: lambda op, name=name: ran.append(name) for name in (LATER, "0.3.0", "1.0.0")}
    with engine.begin() as connection:
        upgrade(connection, LATER, steps)
        assert (ran, revision(connection)) == (["0.3.0", "1.0.0"], "1.0.0")


@pytest.mark.parametrize(
    ("stored", "error", "sentence"),
    [
        ("9.9.0", SchemaTooNew, f"newer swiftopt .*9.9.0, .*up to {HEAD}.*: install that version"),
        ("0011_figures_of_plans", StoreError, "first release .*0011_figures_of_plans.*: move it away"),
    ],
)
def test_database_that_no_step_leads_from_is_refused_and_not_touched(
    engine: Engine, empty_database_url: str, stored: str, error: type[Exception], sentence: str
) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {SchemaRow.__tablename__} SET version_num = '{stored}'"))
    before = dump(engine)
    with pytest.raises(error, match=sentence):
        Store.open(empty_database_url)
    assert dump(engine) == before and look(empty_database_url).revision == stored
