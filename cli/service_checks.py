"""The doctor's checks of database, Redis, workers and server; none of them changes anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..core.errors import SwiftoptError
from ..core.urls import safe_url

Status = Literal["ok", "warn", "fail"]

CLOCK_S = 2.0  # difference between two clocks from which times in lists mislead
FRESH_S = 60.0  # the oldest sign of life of a worker that counts as alive


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    text: str


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check whose errors are its answer."""
    try:
        return check()
    except (SwiftoptError, OSError) as error:
        return Check(name, "fail", str(error))


def check_database(url: str) -> Check:
    """Whether the database opens, and has the newest schema."""
    from ..store import Store
    from ..store.schema import look

    state = look(url)
    if state.newer:
        advice = "install that version, or choose another database with --db"
        return Check("database", "fail", f"{state.database}, schema {state.revision} of a newer swiftopt: {advice}")
    if state.revision is None:
        return Check("database", "ok", f"{state.database}, empty: the first command that needs it creates it")
    if not state.ok:
        old = f"{state.database}, schema {state.revision} is behind {state.head}"
        return Check("database", "warn", f"{old}: run `swiftopt db upgrade`, or let the next command do it")
    with Store.open(url) as store:
        n_sets, states = len(store.layer_sets()), store.jobs.states()
    jobs = ", ".join(f"{n} {word}" for word, n in states.items()) or "none"
    return Check("database", "ok", f"{state.database}, schema {state.revision}, {n_sets} layer sets, jobs: {jobs}")


def check_clock(url: str) -> Check:
    """How far this machine's clock is from the database's, which is the one that leases go by."""
    from sqlalchemy import select

    from ..store.database import clock_s, connect, exists, store_errors

    if not exists(url):
        return Check("clock", "ok", "the database's clock will be this machine's")
    engine = connect(url)
    try:
        with store_errors(url), engine.connect() as connection:
            before = time.time()
            theirs = connection.execute(select(clock_s())).scalar_one()
            after = time.time()
    finally:
        engine.dispose()
    apart = max(before - theirs, theirs - after, 0.0)  # what the question took counts for neither
    if apart > CLOCK_S:
        return Check("clock", "warn", f"{apart:.1f} s from the database's: let both machines keep time with NTP")
    return Check("clock", "ok", f"{apart:.1f} s from the database's")


def check_redis(url: str) -> Check:
    """Whether Redis answers and keeps what it is given; the jobs themselves are in the database in any case."""
    from ..worker.queue import RedisQueue

    queue = RedisQueue(url)
    try:
        facts = queue.facts()
    finally:
        queue.close()
    name = f"{facts.server} {facts.version}"
    if facts.eviction not in ("noeviction", ""):
        risk = f"may throw deliveries away when its memory is full (policy {facts.eviction})"
        return Check("redis", "warn", f"{name} {risk}: set maxmemory-policy noeviction")
    if not facts.append_only:
        loss = "only its snapshots" if facts.saves else "nothing"
        advice = "jobs are delivered again from the database; set appendonly yes to spare that"
        return Check("redis", "warn", f"{name} keeps {loss} over a restart: {advice}")
    return Check("redis", "ok", f"{name}, append-only file on, policy {facts.eviction or 'unknown'}")


def check_workers(url: str, queue: str) -> Check:
    """Who listens on the queue."""
    from ..worker.queue import RedisQueue

    redis = RedisQueue(url)
    try:
        found = [worker for worker in redis.workers() if worker.heartbeat_age_s < FRESH_S]
        depth = redis.depth(queue)
    finally:
        redis.close()
    here = [worker.name for worker in found if worker.queue == queue]
    waiting = f"{depth} waiting on queue {queue!r}"
    if not here:
        others = sorted({worker.queue for worker in found})
        elsewhere = f" (workers listen on {', '.join(others)})" if others else ""
        return Check("workers", "warn", f"none, {waiting}{elsewhere}: start one with `swiftopt worker`")
    return Check("workers", "ok", f"{', '.join(sorted(here))}; {waiting}")


def check_server(url: str) -> Check:
    """Whether the server is ready and takes our key."""
    from ..client import Client

    with Client(url) as client:
        health = client.ready()
        client.latest(limit=1)  # readiness needs no key, the jobs do
    parts = {name: str(health.get(name, "unknown")) for name in ("database", "migrations", "redis")}
    text = f"{safe_url(url)}, " + ", ".join(f"{name} {value}" for name, value in parts.items())
    ready = parts["database"] == parts["migrations"] == "ok" and parts["redis"] in ("ok", "not configured")
    return Check("server", "ok" if ready else "warn", text)
