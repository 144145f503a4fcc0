"""`swiftopt db`: what it prints, how it ends, and that looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from swiftopt.cli.main import run
from swiftopt.cli.services import schema_problem
from swiftopt.store import Store
from swiftopt.store.database import without_password
from swiftopt.store.migrations import FIRST, HEAD, SchemaState
from swiftopt.store.tables import SchemaRow


@pytest.fixture
def call(empty_database_url: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """`swiftopt db COMMAND` on the database: exit code, stdout, stderr."""

    def db(command: str, *more: str) -> tuple[int, str, str]:
        code = run(["db", command, "--db", empty_database_url, *more])
        return code, *capsys.readouterr()

    return db


def answer(database: str, revision: str | None) -> dict[str, Any]:
    where = {"schema": "swiftopt.db/1", "database": without_password(database)}
    return where | {"revision": revision, "head": HEAD, "ok": revision == HEAD}


def test_empty_database_is_behind_until_it_is_upgraded(call: Any, empty_database_url: str) -> None:
    assert call("current") == (0, "empty\n", "")
    code, out, told = call("check")
    assert (code, out) == (1, "") and told.endswith("is empty: create its tables with `swiftopt db upgrade`\n")
    assert call("upgrade") == (0, f"{without_password(empty_database_url)} was migrated from empty to {HEAD}\n", "")
    assert call("current") == (0, f"{HEAD}\n", "")
    assert call("check") == (0, f"{without_password(empty_database_url)} has the newest schema: {HEAD}\n", "")
    assert call("upgrade") == (0, f"{without_password(empty_database_url)} already has the newest schema: {HEAD}\n", "")
    Store.open(empty_database_url).close()


def test_schema_that_a_step_leads_from_is_said_to_be_behind() -> None:
    behind = SchemaState("a.db", FIRST, head="9.9.0")
    assert not behind.ok and behind.refusal is None
    advice = "run `swiftopt db upgrade`"
    assert schema_problem(behind) == f"the database a.db has the schema {FIRST}, but this version needs 9.9.0: {advice}"


@pytest.mark.parametrize(
    ("stored", "origin"),
    [("9.9.0", "a newer swiftopt"), ("0001_layer_sets", "before swiftopt's first release")],
)
def test_schema_that_no_step_leads_from_is_named_and_never_touched(
    call: Any, empty_database_url: str, stored: str, origin: str
) -> None:
    Store.open(empty_database_url).close()
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {SchemaRow.__tablename__} SET version_num = '{stored}'"))
    engine.dispose()
    for command, ends_with in (("current", 0), ("check", 1), ("upgrade", 1)):
        code, _, told = call(command)
        assert code == ends_with
        assert not code or (stored in told and origin in told and told.count("\n") == 1)
    assert call("current")[1] == f"{stored}\n"


@pytest.mark.parametrize(("command", "shows", "code"), [("current", None, 0), ("check", None, 1), ("upgrade", HEAD, 0)])
def test_json_is_one_object_with_the_database_and_its_revision(
    call: Any, empty_database_url: str, command: str, shows: str | None, code: int
) -> None:
    ended, out, _ = call(command, "--json")
    assert (ended, json.loads(out)) == (code, answer(empty_database_url, shows))


@pytest.mark.parametrize("command", ["current", "check"])
def test_looking_creates_no_file(tmp_path: Path, command: str) -> None:
    run(["db", command, "--db", str(tmp_path / "folder" / "a.db")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["upgrade", "current", "check"])
def test_password_is_never_shown(postgres_url: str, capsys: pytest.CaptureFixture[str], command: str) -> None:
    url = make_url(postgres_url).set(password="right horse").render_as_string(hide_password=False)
    for asked in (
        url,
        url.replace("postgres:", "no_such_user:"),
        "postgresql://u:horse@127.0.0.1:1/d",
        "x://u:horse@h",
    ):
        run(["db", command, "--db", asked])
        run(["db", command, "--db", asked, "--json"])
        assert "horse" not in "".join(capsys.readouterr())
