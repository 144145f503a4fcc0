"""Usage by API key and model: what answers say, added up, told to the key's owner and to admins alone."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from api import Served, client_of, filled, problem, serving
from prometheus_client import generate_latest
from tiny_files import save

import swiftopt
from swiftopt.core.errors import SettingsError, StoreError
from swiftopt.core.usage import KeyUsage
from swiftopt.server.settings import KeyRing, ServerSettings, new_key
from swiftopt.server.usage import UsageTable, stored_usage

KEYS = {name: new_key(name) for name in ("ci", "laptop", "ops")}
ENTRIES = f"{KEYS['ci'][1]}:notes,{KEYS['laptop'][1]},{KEYS['ops'][1]}::admin"
TEXT = "w3 w5 w3 w5 w7"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name][0]}"}


def tokens(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The usage of an answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@contextmanager
def server_of_keys(where: Path, *options: str) -> Iterator[Served]:
    model = ["--model", f"tiny={save(where / 'tiny')}", "--dtype", "float32", "--rate", "0", "--threads", "1"]
    with serving(str(where / "a.db"), where / "log", *model, *options, SWIFTOPT_API_KEYS=ENTRIES) as served:
        yield served


def usage_of(served: Served, name: str, **query: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What a key is told, by key and model."""
    response = served.client.get("/v1/usage", headers=bearer(name), params=query)
    assert response.status_code == 200, response.text
    return {(row["key"], row["model"]): row for row in response.json()["keys"]}


@pytest.mark.slow
def test_usage_is_the_sum_of_the_answers_and_outlives_the_engine(tmp_path: Path) -> None:
    with server_of_keys(tmp_path, "--no-tune") as served:

        def ask(name: str, path: str = "/v1/completions", **body: Any) -> Any:
            asked = {"model": "tiny", "max_tokens": 5, "ignore_eos": True, **(body or {"prompt": TEXT})}
            answer = served.client.post(path, json=asked, headers=bearer(name))
            return answer.json().get("usage"), answer.status_code

        told = [ask("ci"), ask("ci"), ask("ci", prompt=[TEXT, "w9 w8"], n=2)]
        assert [status for _, status in told] == [200] * 3
        row = usage_of(served, "ci")["ci", "tiny"]
        sums = {name: sum(usage[name] for usage, _ in told) for name in ("prompt_tokens", "completion_tokens")}
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage, _ in told)
        assert row == {"key": "ci", "model": "tiny", "requests": 3, **sums, "cached_tokens": cached, "saved_s": 0.0}
        assert cached > 0 and sums["completion_tokens"] == 5 * 2 + 4 * 5

        assert ask("laptop", prompt=TEXT, temperature=9)[1] == 400, "which never reached the model"
        with served.client.stream(
            "POST",
            "/v1/completions",
            json={"model": "tiny", "prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "stream": True},
            headers=bearer("laptop"),
        ) as response:
            next(response.iter_lines())
        until = time.monotonic() + 30
        while not (rows := usage_of(served, "laptop")):  # the server notices that the client is gone
            assert time.monotonic() < until
        cancelled = rows["laptop", "tiny"]
        assert (cancelled["requests"], cancelled["prompt_tokens"]) == (1, 5) and cancelled["completion_tokens"] <= 200

        engine = next(
            child
            for child in psutil.Process(served.process.pid).children(recursive=True)
            if "swiftopt.worker.serving" in child.cmdline()
        )
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait(30)
        assert ask("ci")[1] == 200, "by the next engine"
        assert usage_of(served, "ci")["ci", "tiny"]["requests"] == 4

        assert set(usage_of(served, "ops")) == {("ci", "tiny"), ("laptop", "tiny")}
        assert set(usage_of(served, "ops", key="laptop")) == {("laptop", "tiny")}
        assert set(usage_of(served, "laptop", key="laptop")) == {("laptop", "tiny")}
        refused = served.client.get("/v1/usage", headers=bearer("laptop"), params={"key": "ci"})
        assert "'ci'" in problem(refused, 403, "not-your-key")
        assert served.client.get("/v1/usage").status_code == 401

        with swiftopt.Client(served.url, KEYS["ops"][0]) as client:
            assert {(usage.key, usage.requests) for usage in client.usage().keys} == {("ci", 4), ("laptop", 1)}
            assert [usage.key for usage in client.usage("ci").keys] == ["ci"]
        text = served.client.get("/metrics").text
        assert 'swiftopt_usage_requests_total{key="ci",model_name="tiny"} 4.0\n' in text
        assert f'swiftopt_usage_cached_tokens_total{{key="ci",model_name="tiny"}} {row["cached_tokens"]}' in text
        secrets = [part for key, entry in KEYS.values() for part in (key, entry.partition(":")[2])]
        assert not [secret for secret in secrets if secret in text or secret in served.log.read_text()]


def test_server_without_keys_shows_usage_without_names(sqlite_url: str) -> None:
    with filled(sqlite_url) as store, client_of(store) as client:
        table: UsageTable = client.app.state.swiftopt.usage  # type: ignore[attr-defined]
        table.add(None, "tiny", tokens(4, 3), 0.5)
        table.add(None, "tiny", tokens(6, 2, 4), -0.1)
        (row,) = client.get("/v1/usage").json()["keys"]
    assert row == KeyUsage(None, "tiny", 2, 10, 5, 4, 0.4).to_json()
    text = generate_latest(table).decode()
    assert 'swiftopt_usage_saved_seconds{key="",model_name="tiny"} 0.4\n' in text
    assert 'swiftopt_usage_prompt_tokens_total{key="",model_name="tiny"} 10.0\n' in text


def test_usage_of_all_servers_is_by_day_without_double_counts(database_url: str) -> None:
    with filled(database_url) as store, client_of(store) as client, client_of(store) as other:
        tables: list[UsageTable] = [each.app.state.swiftopt.usage for each in (client, other)]  # type: ignore[attr-defined]
        tables[0].add("ci", "tiny", tokens(4, 3), 0.5)
        tables[1].add("ci", "tiny", tokens(6, 2, 4), -0.1)
        tables[1].add("ops", "tiny", tokens(1, 1), 0.0)
        tables[1].store_in(store)
        for _ in range(2):
            rows = client.get("/v1/usage", params={"since": "2026-01-01"}).json()
            assert rows["keys"] == [
                KeyUsage("ci", "tiny", 2, 10, 5, 4, 0.4).to_json(),
                KeyUsage("ops", "tiny", 1, 1, 1).to_json(),
            ]
            assert rows["since"] == "2026-01-01"
        assert client.get("/v1/usage", params={"since": "2999-01-01"}).json()["keys"] == []
        assert len(client.get("/v1/usage").json()["keys"]) == 1, "this server's own"
        problem(client.get("/v1/usage", params={"since": "yesterday"}), 422, "invalid-input")
        with stored_usage(store, tables[0]):
            tables[0].add("ci", "tiny", tokens(1, 0), 0.0)
        assert [row.requests for row in store.usage_since("2026-01-01")] == [3, 1], "what is new at the end"


def test_usage_is_kept_while_the_database_is_away(tmp_path: Path) -> None:
    table = UsageTable()
    table.add("ci", "tiny", tokens(4, 3), 0.5)
    with filled(str(tmp_path / "a.db")) as store:
        with sqlite3.connect(tmp_path / "a.db") as database:
            database.execute("ALTER TABLE swiftopt_usage RENAME TO gone")
        with pytest.raises(StoreError):
            table.store_in(store)
        with stored_usage(store, table):
            pass
        with sqlite3.connect(tmp_path / "a.db") as database:
            database.execute("ALTER TABLE gone RENAME TO swiftopt_usage")
        table.store_in(store)
        assert [row.requests for row in store.usage_since("2026-01-01")] == [1]


def test_metrics_have_as_many_series_as_keys_and_models() -> None:
    table = UsageTable()
    for i in range(100):
        table.add(("ci", "ops")[i % 2], ("a", "b", "c")[i % 3], tokens(1, 1), 0.0)
    counts = [len(family.samples) for family in table.collect()]
    assert counts == [6] * 5


def test_role_follows_the_task_of_an_entry() -> None:
    ring = KeyRing(ENTRIES)
    assert [(key.task, key.is_admin) for key in map(ring.find, ("ci", "laptop", "ops")) if key is not None] == [
        ("notes", False),
        (None, False),
        (None, True),
    ]
    for role in ("root", "admin:more"):
        with pytest.raises(SettingsError, match=r"entry 1 .*name:sha256hex:task:admin"):
            KeyRing(f"{KEYS['ops'][1]}::{role}")


def test_an_admins_rights_end_with_its_entry(sqlite_url: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEYS['ops'][1]}::admin\n{KEYS['ci'][1]}\n")
    with filled(sqlite_url) as store, client_of(store, ServerSettings(keys=KeyRing(file=file))) as client:
        client.app.state.swiftopt.usage.add("ci", "tiny", tokens(4, 3), 0.0)  # type: ignore[attr-defined]
        ask = {"headers": bearer("ops"), "params": {"key": "ci"}}
        assert [row["key"] for row in client.get("/v1/usage", **ask).json()["keys"]] == ["ci"]
        file.write_text(f"{KEYS['ops'][1]}\n{KEYS['ci'][1]}\n")
        problem(client.get("/v1/usage", **ask), 403, "not-your-key")
