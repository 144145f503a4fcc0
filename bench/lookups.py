"""Look-ups of a layer set over HTTP on loopback: how many a second, and how long one takes at a steady rate.

    python -m swiftopt.bench.lookups

Starts `swiftopt serve` as a process of its own, on a fresh SQLite file with 100 layer sets, and asks it from here:
first as fast as a few connections can, then at 100 a second, each request at its own time whether or not the one before
was answered (so a stall counts for everyone whom it delays). Then again with a Redis named that is not there. Prints a
table and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from ..core.records import LayerSetRecord
from ..core.types import LayerSet
from ..store import Store

N_SETS = 100
N_CONNECTIONS = 8
RATE = 100  # look-ups a second in the steady part
NOWHERE = "redis://127.0.0.1:1/0"  # a port on which nothing listens


def fill(database: str) -> list[str]:
    """Store the layer sets; the paths to ask for."""
    with Store.open(database) as store:
        for number in range(N_SETS):
            layers = frozenset({1 + number % 20, 25})
            store.add_layer_set(LayerSetRecord("org/model-7b", f"task{number}", LayerSet(32, layers, frozenset({7}))))
    return [f"/v1/layer-sets/org%2Fmodel-7b/task{number}" for number in range(N_SETS)]


class Connection:
    """One kept-alive HTTP connection, with as little between request and clock as possible."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = asyncio.Lock()
        self._pair: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> None:
        """Ask, and read the whole answer.

        Raises: RuntimeError: it is not 200.
        """
        async with self._lock:
            if self._pair is None:
                self._pair = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._pair
            writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            await reader.readexactly(length)
            if " 200 " not in head.split("\r\n")[0]:
                raise RuntimeError(f"{path} was answered with {head.splitlines()[0]}")


async def flat_out(port: int, paths: Sequence[str], seconds: float) -> float:
    """Look-ups a second that `N_CONNECTIONS` get through, each asking as soon as it has an answer."""
    began, done = perf_counter(), 0

    async def ask(connection: Connection, offset: int) -> None:
        nonlocal done
        number = offset
        while perf_counter() - began < seconds:
            await connection.get(paths[number % len(paths)])
            number += 1
            done += 1

    await asyncio.gather(*(ask(Connection(port), 13 * i) for i in range(N_CONNECTIONS)))
    return done / (perf_counter() - began)


async def steady(port: int, paths: Sequence[str], seconds: float) -> list[float]:
    """Milliseconds from the moment a look-up was due to its whole answer, ascending."""
    connections = [Connection(port) for _ in range(N_CONNECTIONS)]
    taken: list[float] = []

    async def ask(number: int, due: float) -> None:
        await connections[number % N_CONNECTIONS].get(paths[number % len(paths)])
        taken.append(1e3 * (perf_counter() - due))

    began, asked = perf_counter(), []
    for number in range(int(seconds * RATE)):
        due = began + number / RATE
        await asyncio.sleep(max(0.0, due - perf_counter()))
        asked.append(asyncio.create_task(ask(number, due)))
    await asyncio.gather(*asked)
    return sorted(taken)


def measure(database: str, paths: Sequence[str], redis: str | None, seconds: float) -> dict[str, Any]:
    """Both parts against a fresh server."""
    environment = {name: value for name, value in os.environ.items() if name != "SWIFTOPT_REDIS_URL"}
    command = [sys.executable, "-m", "swiftopt", "serve", "--port", "0", "--json", "--db", database]
    command += ["--redis", redis] if redis else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as server:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
        try:
            asyncio.run(flat_out(port, paths, 1.0))  # warm-up
            per_second = asyncio.run(flat_out(port, paths, seconds))
            taken = asyncio.run(steady(port, paths, seconds))
        finally:
            server.terminate()
    shares = {f"p{share}_ms": round(taken[int(len(taken) * share / 100)], 2) for share in (50, 90, 99)}
    return {"per_second": round(per_second), **shares, "longest_ms": round(taken[-1], 2), "n": len(taken)}


def main() -> None:
    """Measure with and without a Redis that answers nothing."""
    gc.disable()  # what is measured is the server, not this process's own pauses
    parser = argparse.ArgumentParser(description="Look-ups a second, and their latency at 100 a second.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "lookups.db")
        paths = fill(database)
        found = {
            "no Redis": measure(database, paths, None, seconds),
            "Redis down": measure(database, paths, NOWHERE, seconds),
        }
    for name, row in found.items():
        print(f"{name:<11}", "  ".join(f"{key} {value}" for key, value in row.items()))
    print(json.dumps({"schema": "swiftopt.bench-lookups/1", "cores": os.cpu_count(), "results": found}))


if __name__ == "__main__":
    main()
