"""The servers that other tests rely on: they keep their data, and they end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
import servers
from servers import Postgres, Valkey, new_database, server_folder

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import servers
with servers.server_folder() as folder, getattr(servers, sys.argv[2])(folder) as server:
    print(server.pid, folder, flush=True)
    time.sleep(600)
"""


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_valkey_keeps_its_data_when_it_is_stopped_or_killed_and_loses_it_when_flushed() -> None:
    with server_folder() as folder, Valkey(folder) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        for end in (server.stop, server.kill):
            end()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            server.start()
            assert client.get("key") == b"value"
        server.flush()
        assert client.get("key") is None


def test_postgres_keeps_its_data_when_it_is_stopped() -> None:
    with server_folder() as folder, Postgres(folder) as server, new_database(server.url) as url:
        plain = url.replace("+psycopg", "")
        with psycopg.connect(plain) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
        server.stop()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(plain)
        server.start()
        with psycopg.connect(plain) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)


@pytest.mark.parametrize("kind", ["Valkey", "Postgres"])
def test_server_is_gone_with_its_children_when_the_test_process_is_killed(kind: str) -> None:
    tests = str(Path(servers.__file__).parent)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tests, kind], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pid, folder = holder.stdout.readline().split()
    holder.stdout.close()
    server = psutil.Process(int(pid))
    processes = [server, *server.children(recursive=True)]
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    deadline = time.monotonic() + 10
    while any(map(lives, processes)):
        assert time.monotonic() < deadline, f"{kind} outlives the process that started it"
        time.sleep(0.02)
    with server_folder():  # the next test run removes what the killed one could not
        assert not Path(folder).exists()


def test_databases_of_two_tests_are_apart_and_dropped_afterwards(postgres_url: str, postgres_server: Postgres) -> None:
    with new_database(postgres_server.url) as other:
        assert other != postgres_url
        kept_open = psycopg.connect(other.replace("+psycopg", ""))
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(other.replace("+psycopg", ""))
    kept_open.close()
