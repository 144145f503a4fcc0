"""Laws of a full disk: the server says so where operators look, serves on, and says when there is room again."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from api import LOOKUP, client_of, filled, submission
from sqlalchemy import event

from swiftopt.server import storage
from swiftopt.server.storage import StorageCheck
from swiftopt.store import Store

FULL = "cannot grow because the disk is full: free some space"


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PERIOD_S", 0.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("to mount a file system takes root's rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def readiness(client: object) -> tuple[int, str, str]:
    answer = client.get("/readyz")  # type: ignore[attr-defined]
    values = answer.json()
    return answer.status_code, values["status"], values["storage"]


def test_full_disk_and_its_end_are_reported_to_operators(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "swiftopt")
    with filled(str(small_disk / "jobs.db")) as store:
        client = client_of(store)
        assert readiness(client) == (200, "ok", "ok")
        with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
            while True:
                filler.write(bytes(4096))
        status, state, reason = readiness(client)
        assert (status, state) == (200, "degraded") and f"the disk of {small_disk} is full" in reason
        assert f"Nothing can be stored: {reason}" in client.get("/").text
        assert "swiftopt_storage_writable 0.0" in client.get("/metrics").text
        assert client.get(LOOKUP).status_code == 200
        logged = [record for record in caplog.records if record.name == "swiftopt.server.storage"]
        assert [record.levelname for record in logged] == ["ERROR"], "once, not at each look"
        assert reason in logged[0].getMessage()

        (small_disk / "filler").unlink()
        assert readiness(client) == (200, "ok", "ok")
        assert "Nothing can be stored" not in client.get("/").text
        assert "swiftopt_storage_writable 1.0" in client.get("/metrics").text
        assert client.post("/v1/jobs", json=submission()).status_code == 202


def test_database_at_its_size_limit_is_reported_as_full(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        event.listen(store.engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 1"))
        store.engine.dispose()  # the connections that there are have no limit
        status, state, reason = readiness(client_of(store))
    assert (status, state) == (200, "degraded") and FULL in reason


def test_storage_is_checked_once_per_period(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PERIOD_S", 600.0)
    with Store.open(sqlite_url) as store:
        statements: list[str] = []
        event.listen(store.engine, "before_cursor_execute", lambda *values: statements.append(values[2]))
        check = StorageCheck(store)
        assert check.problem() == "" and statements
        n_first = len(statements)
        assert [check.problem() for _ in range(20)] == [""] * 20 and len(statements) == n_first


def test_repeated_probe_does_not_grow_the_database(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        sizes = []
        for _ in range(4):
            store.check_writable()
            with store.engine.connect() as connection:
                sizes.append(connection.exec_driver_sql("PRAGMA page_count").scalar())
    assert len(set(sizes)) == 1
