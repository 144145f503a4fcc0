"""Every step of the schema, up and down, over rows that were there before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
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
    func,
    select,
)

from swiftopt.core.errors import LayerSetNotFound
from swiftopt.core.types import LayerSet, LayerSetRecord, Plan
from swiftopt.store import Store
from swiftopt.store.database import connect, writing
from swiftopt.store.schema import downgrade, known_revisions, revision, upgrade

OLDEST_FIRST = known_revisions()[::-1]
STEPS = list(pairwise(OLDEST_FIRST))
VALUES = {"state": "succeeded", "created_at": "2026-11-21T00:00:00Z", "skip_attn": [7, 10], "request": {"model": "µ"}}

Rows = dict[str, list[dict[str, Any]]]  # by table


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    made = writing(connect(database_url))
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


def move(engine: Engine, to: str, *, up: bool) -> None:
    with engine.begin() as connection:
        (upgrade if up else downgrade)(connection, to)
        assert revision(connection) == to


@pytest.mark.parametrize(("old", "new"), STEPS)
def test_rows_of_the_older_schema_survive_the_way_up_and_down(engine: Engine, old: str, new: str) -> None:
    move(engine, old, up=True)
    fill(engine, range(1, 4))
    before = read(engine)
    assert all(len(rows) == 3 for rows in before.values()) and len(before) >= 8
    move(engine, new, up=True)
    assert read(engine, before) == before
    fill(engine, range(4, 6))
    both = read(engine, before)
    move(engine, old, up=False)
    assert read(engine) == both
    move(engine, new, up=True)
    assert read(engine, before) == both


@pytest.mark.parametrize("state", ["running", "succeeded", "failed", "cancelled"])
def test_jobs_end_survives_the_way_up_and_down(engine: Engine, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setitem(VALUES, "state", state)
    move(engine, OLDEST_FIRST[0], up=True)
    fill(engine, range(1, 2))
    move(engine, OLDEST_FIRST[-1], up=True)
    assert read(engine)["swiftopt_jobs"][0]["state"] == state
    move(engine, OLDEST_FIRST[0], up=False)
    after = read(engine)["swiftopt_jobs"][0]["state"]
    assert after == ("cancelled" if state == "running" else state)  # nothing goes on with it there


def test_way_down_to_nothing_and_up_again_leaves_an_empty_database_that_works(engine: Engine) -> None:
    move(engine, OLDEST_FIRST[-1], up=True)
    fill(engine, range(1, 3))
    with engine.begin() as connection:
        downgrade(connection, "base")
    assert tables(engine) == []
    move(engine, OLDEST_FIRST[-1], up=True)
    with engine.connect() as connection:
        assert {connection.scalar(select(func.count()).select_from(table)) for table in tables(connection)} == {0}
    fill(engine, range(1, 2))


@pytest.mark.parametrize("new", OLDEST_FIRST[1:])
def test_step_that_fails_leaves_the_database_as_it_was(engine: Engine, new: str) -> None:
    old = OLDEST_FIRST[OLDEST_FIRST.index(new) - 1]
    move(engine, old, up=True)
    fill(engine, range(1, 3))
    before = read(engine)
    with pytest.raises(ZeroDivisionError), engine.begin() as connection:
        upgrade(connection, new)
        raise ZeroDivisionError
    with engine.connect() as connection:
        assert revision(connection) == old
    assert read(engine) == before


BEFORE_PLANS, WITH_PLANS = "0002_queued_jobs", "0003_plans_of_any_method"
SET = LayerSetRecord("m", "t", LayerSet(8, frozenset({3}), frozenset({4})), "f", device="cpu", dtype="float32")


def test_plan_of_a_layer_set_gets_its_version_figures_and_hardware_on_the_way_up(engine: Engine) -> None:
    move(engine, BEFORE_PLANS, up=True)
    fill(engine, range(1, 3))
    move(engine, WITH_PLANS, up=True)
    after = read(engine)
    for plan, layer_set in zip(after["swiftopt_plans"], after["swiftopt_layer_sets"], strict=True):
        same = ("model_id", "task", "version", "measured_speedup", "measured_low", "measured_high", "device", "dtype")
        assert [plan[name] for name in same] == [layer_set[name] for name in same]
        assert (plan["learned_id"], plan["draft_model"]) == (None, None)


def test_way_down_drops_comparisons_plans_and_best_means_what_was_chosen_without_them(
    engine: Engine, database_url: str
) -> None:
    move(engine, WITH_PLANS, up=True)
    with Store.open(database_url) as store:
        stored = [store.add_layer_set(SET) for _ in range(2)]  # 1, 2
        store.rollback("m", "t")  # 1
        store.add_plan("m", "t", Plan("spd", device="cpu", dtype="float32"))  # 3
        store.add_plan("m", "t", Plan("self-sd", stored[0], device="cpu", dtype="float32"))  # 4
        store.rollback("m", "t")  # 3
        store.promote("m", "t", 2)
        store.rollback("m", "t")  # 3 again
    with engine.begin() as connection:
        downgrade(connection, BEFORE_PLANS)
        upgrade(connection, WITH_PLANS)
    with Store.open(database_url) as store:
        assert store.layer_sets() == stored[::-1]
        assert (store.lookup("m", "t").version, store.lookup("m", "t").plan.layer_set) == (1, stored[0])
        with pytest.raises(LayerSetNotFound, match="stored are 1, 2"):
            store.plan("m", "t", 3)
        with pytest.raises(LayerSetNotFound, match="version 1 is the first"):
            store.rollback("m", "t")
