"""The API for tests: a real `swiftopt serve` in a process of its own, and a store with something to find."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from starlette.testclient import TestClient

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.server.app import create_app
from swiftopt.server.settings import ServerSettings
from swiftopt.store import Store
from swiftopt.worker.queue import JobService, RedisQueue

START_S = 240
MODEL, TASK = "org/tiny", "notes"
LOOKUP = "/v1/layer-sets/org%2Ftiny/notes"
RECORD = LayerSetRecord(MODEL, TASK, LayerSet(6, frozenset({2}), frozenset({1, 3})), "f" * 16, verdict="use")


def filled(url: str) -> Store:
    """A store with one layer set."""
    store = Store.open(url)
    store.add_layer_set(RECORD)
    return store


def submission(text: str = "Once", **more: Any) -> dict[str, Any]:
    """A small job."""
    return {"model": "smollm2-135m", "stream": {"prompts": [{"prompt": text}]}, **more}


def client_of(store: Store, settings: ServerSettings | None = None, queue: RedisQueue | None = None) -> TestClient:
    app = create_app(store, JobService(store, queue), settings or ServerSettings(requests_per_min=0), queue)
    return TestClient(app, raise_server_exceptions=False)


def problem(response: Any, status: int, kind: str) -> str:
    """Its sentence."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    values = response.json()
    assert (response.status_code, values["status"], values["type"]) == (status, status, f"urn:swiftopt:problem:{kind}")
    assert "\n" not in values["detail"] and "Traceback" not in values["detail"]
    return str(values["detail"])


def token(html: str) -> str:
    """What the page's forms carry."""
    found = re.search(r'name="token" value="([^"]+)"', html)
    assert found is not None, html
    return found[1]


class Served:
    """A running server: its client, its process, and what it wrote to stderr."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.client = httpx2.Client(base_url=url, timeout=30)

    @property
    def address(self) -> tuple[str, int]:
        """For raw sockets."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


def until_ready(served: Served) -> None:
    """Wait until the engine takes requests."""
    until = time.monotonic() + START_S
    while served.client.get("/health").status_code != 200:
        assert served.process.poll() is None and time.monotonic() < until, served.log.read_text()
        time.sleep(0.1)


@contextmanager
def serving(database: str, log: Path, *options: str, **environment: str) -> Iterator[Served]:
    """`swiftopt serve` on a free port."""
    command = [sys.executable, "-m", "swiftopt", "serve", "--port", "0", "--json", "--db", database, *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment}
        )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, log.read_text()
        served = Served(process, json.loads(first)["url"], log)
        with served.client:
            yield served
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def sse(lines: Iterator[str], until: Sequence[str] = ("end",), limit: int = 1000) -> list[tuple[str, str | None, Any]]:
    """(event, id, data) up to the first event of those names, or until there are `limit` of them."""
    found: list[tuple[str, str | None, Any]] = []
    fields: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "data" in fields:
            found.append((fields["event"], fields.get("id"), json.loads(fields["data"])))
            fields = {}
            if found[-1][0] in until or len(found) == limit:
                break
    return found
