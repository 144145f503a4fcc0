"""What the doctor and the worker command say of the servers they are told to use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import serving

from swiftopt.cli.main import run
from swiftopt.store import Store
from swiftopt.worker.queue import JobService, RedisQueue


@pytest.fixture(autouse=True)
def home(
    tmp_path: Path,
    empty_database_url: str,
    unconfigured: None,
    small_measurement: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A working folder of its own; the environment names an empty database of each kind."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", empty_database_url)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(args)
    out, err = capsys.readouterr()
    return code, out, err


def test_worker_without_redis_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "worker")
    assert (code, out, err.count("\n")) == (2, "", 1) and "SWIFTOPT_REDIS_URL" in err


def checks(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, str]]:
    found = json.loads(called(capsys, "doctor", *args, "--json")[1])["checks"]
    return {check["name"]: check for check in found}


def test_doctor_sees_redis_workers_clock_and_server(
    empty_database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from swiftopt.server.app import create_app

    with Store.open(empty_database_url) as store, serving(create_app(store, JobService(store, None))) as url:
        found = checks(capsys, "--redis", redis_url, "--server", url)
    assert {name: found[name]["status"] for name in ("database", "clock", "redis", "workers", "server")} == {
        "database": "ok", "clock": "ok", "redis": "ok", "workers": "warn", "server": "ok",
    }  # fmt: skip
    assert "append-only" in found["redis"]["text"] and "swiftopt worker" in found["workers"]["text"]


def test_doctor_warns_of_a_redis_that_evicts(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    queue = RedisQueue(redis_url)
    queue.connection.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = checks(capsys, "--redis", redis_url)["redis"]
    finally:
        queue.connection.config_set("maxmemory-policy", "noeviction")
        queue.close()
    assert found["status"] == "warn" and "maxmemory-policy noeviction" in found["text"]


def test_doctor_changes_no_schema(empty_database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    from sqlalchemy import update

    from swiftopt.store.migrations import look
    from swiftopt.store.tables import SchemaRow

    assert "empty" in checks(capsys)["database"]["text"] and look(empty_database_url).revision is None
    with Store.open() as store:
        stored = {"version_num": "0010_quality_of_costs"}
        store.write(lambda session: session.execute(update(SchemaRow).values(stored)))
    found = checks(capsys)["database"]
    assert found["status"] == "fail" and "move it away" in found["text"]
    assert look(empty_database_url).revision == stored["version_num"]


def test_doctor_fails_for_servers_that_are_away(capsys: pytest.CaptureFixture[str]) -> None:
    found = checks(capsys, "--redis", "redis://:geheim@127.0.0.1:9", "--server", "http://127.0.0.1:9")
    assert (found["redis"]["status"], found["server"]["status"]) == ("fail", "fail")
    assert "workers" not in found and "geheim" not in json.dumps(found)
