"""`swiftopt worker`: checks what is needed before the first job, then runs the jobs of a queue."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import click

from ..core.errors import SettingsError, SwiftoptError
from . import options
from .options import database_url, open_store
from .output import answer, emit_json, note

if TYPE_CHECKING:
    from ..worker.attempt import WorkerContext
    from ..worker.queue import RedisQueue

FRESH_S = 60.0  # a worker whose last heartbeat is older counts as gone
BEATS_S = 20.0  # a worker that lives has sent a heartbeat within this time
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# torch is asked in a process of its own: what it starts for CUDA would not survive the worker's forks.
ASK_TORCH = """
import sys
from swiftopt.core.errors import SwiftoptError
from swiftopt.models.sources import check_device
try:
    check_device(sys.argv[1])
except SwiftoptError as error:
    sys.exit(str(error))
"""


@click.command(short_help="Run the jobs of a queue.")
@options.queue
@click.option("--device", default="auto", show_default=True, help="Where jobs that name no device run, e.g. cuda:0.")
@click.option("--burst", is_flag=True, help="End when the queue is empty.")
@click.option("--name", help="Name of this worker, its own in the whole service.  [default: host, process, letters]")
@click.option("--check", is_flag=True, help="Only check that a worker could run, and that one does on this machine.")
@options.redis
@options.db
@options.json
@click.pass_context
@options.example("worker --redis redis://127.0.0.1:6379 --device cuda:0", "worker --check")
def worker(
    context: click.Context,
    queue: str,
    device: str,
    burst: bool,
    name: str | None,
    check: bool,
    redis: str | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Take jobs from a queue and run them, one at a time; start one worker per GPU.

    Ctrl-C or SIGTERM hands the job back at its next step, and another worker goes on from there. --json prints one
    object at the end.
    """
    if redis is None:
        raise SettingsError("no Redis is named, and a worker needs one: set SWIFTOPT_REDIS_URL or pass --redis URL")
    from ..worker.attempt import WorkerContext
    from ..worker.worker import default_name, run_worker

    working = WorkerContext(name or default_name(), database_url(db), redis, queue, device)
    problems: list[str] = []
    value = {"schema": "swiftopt.worker/1", "name": working.name, "queue": queue, "ok": True, "problems": problems}
    if check:
        problems += problems_of(working)
        value["ok"] = not problems
        found = f"a worker of this machine listens on queue {queue!r}"
        answer(as_json, value, lambda: None if problems else click.echo(found))
        for problem in problems:
            note(f"error: {problem}")
        context.exit(1 if problems else 0)
    start_log()
    check_start(working)
    note(f"worker {working.name} listens on queue {queue!r}")
    run_worker(working, burst)
    if as_json:
        emit_json(value)


def problems_of(working: WorkerContext) -> Iterator[str]:
    """Yield what keeps a worker on this machine from working, each in a sentence."""
    from ..store.schema import look
    from ..worker.queue import RedisQueue
    from .db import schema_problem

    try:
        state = look(working.database)
        if not state.ok:
            yield schema_problem(state)
        with closing(RedisQueue(working.redis)) as redis:
            here = [found for found in redis.workers() if found.hostname == socket.gethostname()]
    except SwiftoptError as error:
        yield str(error)
        return
    if not any(found.queue == working.queue and found.heartbeat_age_s < FRESH_S for found in here):
        yield f"no worker of this machine listens on queue {working.queue!r}: start one with `swiftopt worker`"


# --- before the first job


class OneLineErrors(logging.Filter):
    """Logs errors that have a sentence, and outages of Redis, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; always true."""
        from redis.exceptions import RedisError

        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, SwiftoptError | RedisError):
            return True
        reason = str(error).split("\n")[0]
        if isinstance(error, RedisError) and record.name.startswith("rq"):  # which believes that it ends now
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "redis=away reason=%r", (reason,)
        else:
            record.msg, record.args = "%s reason=%r", (record.getMessage(), reason)
        record.exc_info = record.exc_text = None
        return True


def start_log() -> None:
    """Send the log to stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(OneLineErrors())
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)


def check_start(working: WorkerContext) -> None:
    """Check for what would make every job fail, or the worker end at once.

    Raises: SettingsError: the device is unknown or not here, or the name is taken. ServiceUnreachable, StoreError:
        Redis or the database cannot be used.
    """
    from ..models.sources import check_dtype_and_device
    from ..worker.queue import RedisQueue

    check_dtype_and_device("auto", working.device)
    with closing(RedisQueue(working.redis)) as queue:
        queue.ping()
        open_store(working.database).close()
        check_device_is_here(working.device)
        check_name(working.name, queue)


def check_device_is_here(device: str) -> None:
    """Check that this machine has a CUDA device; jobs would fail on it for good.

    Raises: SettingsError: it has not.
    """
    if not device.startswith("cuda"):
        return
    asked = subprocess.run([sys.executable, "-c", ASK_TORCH, device], capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().split("\n")[-1] or f"torch ended with {asked.returncode}"
        raise SettingsError(f"a worker for {device} cannot run on this machine: {reason}")


def check_name(name: str, queue: RedisQueue) -> None:
    """Check that no other worker has the name: the first of them to end would take it off both.

    Raises: SettingsError: one of this machine has it; for another machine's there is a remark.
    """
    for found in queue.workers():
        if found.name != name or found.heartbeat_age_s > BEATS_S:
            continue
        if found.hostname != socket.gethostname():
            note(
                f"note: a worker named {name} lives on {found.hostname}: if it still runs, give this one another --name"
            )
        elif found.pid != os.getpid() and _is_running(found.pid):
            raise SettingsError(f"a worker named {name} runs here already (process {found.pid}): choose another --name")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True
