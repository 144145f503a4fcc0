"""`swiftopt worker`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ..core.errors import SettingsError, SwiftoptError
from .options import db_option, json_option, queue_option, redis_option
from .output import emit_json, note
from .worker_start import check_start, start_log

if TYPE_CHECKING:
    from ..worker.attempt import WorkerContext

FRESH_S = 60.0  # the oldest sign of life of a worker that counts as alive


@click.command(short_help="Run the jobs of a queue.")
@queue_option
@click.option("--device", default="auto", show_default=True, help="Where jobs that name no device run, e.g. cuda:0.")
@click.option("--burst", is_flag=True, help="End when the queue is empty.")
@click.option("--name", help="Name of this worker, its own in the whole service.  [default: host, process, letters]")
@click.option("--check", is_flag=True, help="Only check that a worker could run, and that one does on this machine.")
@redis_option
@db_option
@json_option
@click.pass_context
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

    \b
    Example:
      swiftopt worker --redis redis://127.0.0.1:6379 --device cuda:0
      swiftopt worker --check
    """
    if redis is None:
        raise SettingsError("no Redis is named, and a worker needs one: set SWIFTOPT_REDIS_URL or pass --redis URL")
    from ..store import as_url, default_url
    from ..worker.attempt import WorkerContext
    from ..worker.worker import default_name, run_worker

    database = as_url(db) if db else default_url()
    working = WorkerContext(name or default_name(), database, redis, queue, device)
    if check:
        context.exit(_check(working, as_json))
    start_log()
    check_start(working)
    note(f"worker {working.name} listens on queue {queue!r}")
    run_worker(working, burst)
    if as_json:
        emit_json({"schema": "swiftopt.worker/1", "name": working.name, "queue": queue, "ok": True, "problems": []})


def _check(working: WorkerContext, as_json: bool) -> int:
    problems = list(faults(working))
    if as_json:
        names = {"name": working.name, "queue": working.queue}
        emit_json({"schema": "swiftopt.worker/1", **names, "ok": not problems, "problems": problems})
    elif not problems:
        click.echo(f"a worker of this machine listens on queue {working.queue!r}")
    for problem in problems:
        note(f"error: {problem}")
    return 1 if problems else 0


def faults(working: WorkerContext) -> Iterator[str]:
    """What keeps a worker on this machine from working, each in a sentence."""
    from ..store.schema import look
    from ..worker.queue import RedisQueue
    from .db import schema_fault

    try:
        state = look(working.database)
        if not state.ok:
            yield schema_fault(state)
        redis = RedisQueue(working.redis)
        try:
            here = [found for found in redis.workers() if found.hostname == socket.gethostname()]
        finally:
            redis.close()
    except SwiftoptError as error:
        yield str(error)
        return
    if not any(found.queue == working.queue and found.heartbeat_age_s < FRESH_S for found in here):
        yield f"no worker of this machine listens on queue {working.queue!r}: start one with `swiftopt worker`"
