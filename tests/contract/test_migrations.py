"""Every step of the schema, over rows that were there before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from first_schema import create
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    inspect,
    select,
)

from swiftopt.store import Store
from swiftopt.store.database import connect, writing
from swiftopt.store.migrations import HEAD, REVISIONS, revision, upgrade
from swiftopt.store.tables import Base

STEPS = list(pairwise(REVISIONS))
VALUES = {"state": "succeeded", "created_at": "2026-11-21T00:00:00Z", "skip_attn": [7, 10], "request": {"model": "µ"}}

Rows = dict[str, list[dict[str, Any]]]  # by table


@pytest.fixture
def engine(empty_database_url: str) -> Iterator[Engine]:
    made = writing(connect(empty_database_url))
    yield made
    made.dispose()


def tables(bind: Engine | Connection) -> list[Table]:
    """Ours, as the database has them now, those that others point at first."""
    found = MetaData()
    found.reflect(bind)
    return [table for table in found.sorted_tables if "version" not in table.name]


def value(column: Column[Any], number: int) -> Any:
    """Something that fits the column and tells its rows apart."""
    targets = [key.column for key in column.foreign_keys]
    if any(target.table is column.table for target in targets):
        return None
    if targets:
        return value(targets[0], number)
    if column.name in VALUES:
        return VALUES[column.name]
    if isinstance(column.type, JSON):
        return {"number": number}
    if isinstance(column.type, LargeBinary):
        return bytes([number, 0, 255])
    if isinstance(column.type, Boolean):
        return number % 2 == 0
    if isinstance(column.type, BigInteger):
        return 2**40 + number
    if isinstance(column.type, Integer):
        return number
    return number / 3 if isinstance(column.type, Double) else f"{column.name} {number}"


def fill(engine: Engine, numbers: range) -> None:
    """One row per table and number."""
    with engine.begin() as connection:
        for table in tables(connection):
            for number in numbers:
                connection.execute(table.insert().values({c.name: value(c, number) for c in table.columns}))


def read(engine: Engine, like: Rows | None = None) -> Rows:
    """All rows, or of the tables and columns in `like` what it has of them."""
    rows: Rows = {}
    with engine.connect() as connection:
        for table in tables(connection):
            if like is None or table.name in like:
                columns = [c for c in table.columns if like is None or c.name in like[table.name][0]]
                query = select(*columns).order_by(*table.primary_key.columns)
                rows[table.name] = [dict(row._mapping) for row in connection.execute(query)]
    return rows


def begin(engine: Engine, at: str) -> None:
    """An empty database of that schema."""
    with engine.begin() as connection:
        create(connection, at)
        assert revision(connection) == at


def move(engine: Engine, old: str, new: str) -> None:
    with engine.begin() as connection:
        upgrade(connection, old, new)
        assert revision(connection) == new


@pytest.mark.parametrize(("old", "new"), STEPS)
def test_step_keeps_all_rows_and_leaves_the_database_as_it_was_when_it_fails(
    engine: Engine, old: str, new: str
) -> None:
    begin(engine, old)
    fill(engine, range(1, 4))
    before = read(engine)
    assert all(len(rows) == 3 for rows in before.values()) and len(before) >= 8
    with pytest.raises(ZeroDivisionError), engine.begin() as connection:
        upgrade(connection, old, new)
        raise ZeroDivisionError
    with engine.connect() as connection:
        assert revision(connection) == old
    assert read(engine) == before
    move(engine, old, new)
    assert read(engine, before) == before
    fill(engine, range(4, 6))
    assert {name: len(rows) for name, rows in read(engine, before).items()} == dict.fromkeys(before, 5)


def test_jobs_end_survives_all_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    states = ("running", "succeeded", "failed", "cancelled")
    begin(engine, REVISIONS[0])
    for number, state in enumerate(states):
        monkeypatch.setitem(VALUES, "state", state)
        fill(engine, range(number, number + 1))
    move(engine, REVISIONS[0], HEAD)
    jobs = read(engine)["swiftopt_jobs"]
    ends = {"running": 0, "succeeded": None, "failed": None, "cancelled": None}
    assert {job["state"]: job["lease_until"] for job in jobs} == ends and len(jobs) == len(states)
    assert {(job["kind"], job["attempt"], job["n_checkpoints"]) for job in jobs} == {("tune", 1, 0)}


def shape(engine: Engine) -> dict[str, dict[str, Any]]:
    """What the database says of each of our tables, in an order of its own."""
    seen = inspect(engine)
    parts: dict[str, Any] = {
        "columns": seen.get_multi_columns(),
        "key": {table: [key] for table, key in seen.get_multi_pk_constraint().items()},
        "unique": seen.get_multi_unique_constraints(),
        "foreign": seen.get_multi_foreign_keys(),
        "indexes": seen.get_multi_indexes(),
    }
    return {
        name: {part: sorted(json.dumps(one, default=str) for one in its[schema, name]) for part, its in parts.items()}
        for schema, name in parts["columns"]
        if "version" not in name
    }


@pytest.fixture(scope="session")
def new_shapes() -> dict[str, Any]:
    """The shape of a new database by its kind, once it is known."""
    return {}


@pytest.mark.parametrize("old", REVISIONS[:-1])
def test_older_database_becomes_what_a_new_one_is(
    engine: Engine, empty_database_url: str, new_shapes: dict[str, Any], old: str
) -> None:
    begin(engine, old)
    move(engine, old, HEAD)
    migrated = shape(engine)
    if engine.dialect.name not in new_shapes:
        Base.metadata.drop_all(engine)
        Store.open(empty_database_url).close()
        new_shapes[engine.dialect.name] = shape(engine)
    assert new_shapes[engine.dialect.name] == migrated
    assert len(migrated) == len(Base.metadata.tables) - 1  # but the schema's own


BEFORE_PLANS, WITH_PLANS = "0002_queued_jobs", "0003_plans_of_any_method"


def test_plan_of_a_layer_set_gets_its_version_figures_and_hardware_on_the_way_up(engine: Engine) -> None:
    begin(engine, BEFORE_PLANS)
    fill(engine, range(1, 3))
    move(engine, BEFORE_PLANS, WITH_PLANS)
    after = read(engine)
    for plan, layer_set in zip(after["swiftopt_plans"], after["swiftopt_layer_sets"], strict=True):
        same = ("model_id", "task", "version", "measured_speedup", "measured_low", "measured_high", "device", "dtype")
        assert [plan[name] for name in same] == [layer_set[name] for name in same]
        assert (plan["learned_id"], plan["draft_model"]) == (None, None)


def test_plan_gets_alpha_and_m_of_the_layer_set_that_it_was_stored_with_alone(engine: Engine) -> None:
    """Another plan that decodes with the set has figures of its own, which are not known any more."""
    begin(engine, "0010_quality_of_costs")
    fill(engine, range(1, 3))
    with engine.begin() as connection:
        plans = next(table for table in tables(connection) if table.name == "swiftopt_plans")
        connection.execute(plans.update().where(plans.c.id == 2).values(version=7))
    move(engine, "0010_quality_of_costs", "0011_figures_of_plans")
    after = read(engine)
    first, other = after["swiftopt_plans"]
    own, _ = after["swiftopt_layer_sets"]
    names = "acceptance_rate", "mean_generated_length"
    assert [first[name] for name in names] == [own[name] for name in names] != [None, None]
    assert [other[name] for name in names] == [None, None]
