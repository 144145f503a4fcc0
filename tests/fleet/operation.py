"""A fleet's services at work: jobs under kills, a database that is lost, and a migration while others ask."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from api import serving
from figures import Figure
from job_table import rewind
from servers import Postgres, Valkey
from sqlalchemy import NullPool, create_engine
from workers import Site, site, until

from swiftopt.core.errors import StoreUnavailable
from swiftopt.store import Store
from swiftopt.store.migrations import FIRST, bring_to_head, look

from .filled import Size, fingerprint
from .lookups import Plan, asking, storing

N_WORKERS, JOB_S = 4, 0.05
KILL_EVERY_S = (3.0, 6.0)
AWAY_S = 5.0  # For which the database is lost.
WITHIN_S = 900.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The services of a section: a filled database and a Redis."""

    postgres: Postgres
    valkey: Valkey
    url: str
    size: Size
    folder: Path
    seconds: float  # Of a load.
    n_jobs: int
    replicas: int

    def plan(self, way: str, at: str = "", seconds: float | None = None, **changes: object) -> Plan:
        """The load of its replicas."""
        at = at or self.url
        values = {"replicas": self.replicas, **changes}
        return Plan(way, at, self.size, seconds or self.seconds, **values)  # type: ignore[arg-type]


# --- jobs


def run_jobs(fleet: Fleet) -> list[Figure]:
    """Jobs that sleep, on workers that are killed, beside the replicas' lookups; Redis is killed once, too."""
    with (
        site(fleet.url, fleet.valkey.url, fleet.folder) as found,
        serving(fleet.url, fleet.folder / "api.log", "--redis", fleet.valkey.url, "--rate", "0"),
    ):
        n_before, began_s = found.store.jobs.states().get("succeeded", 0), time.monotonic()
        jobs = [found.noop(JOB_S, number) for number in range(fleet.n_jobs)]
        submitted_s = time.monotonic() - began_s
        for _ in range(N_WORKERS):
            found.start()
        with asking(fleet.plan("as_replicas")) as end, storing(found.store, fleet.size):
            n_kills = _disturb(found, fleet, n_before + len(jobs))
            took_s = time.monotonic() - began_s
            load = end()
        lost = [job for job in jobs if found.job(job).state != "succeeded"]
        twice = [job for job in jobs if _ends(found, job) > 1]
        attempts = Counter(found.job(job).attempt for job in jobs)
    measured = (
        f"{len(lost)} lost, {len(twice)} run twice; {n_kills} workers killed; {len(jobs) / took_s:.0f} jobs a second,"
        f" {len(jobs) / submitted_s:.0f} submitted; lookups meanwhile {load.words}"
    )
    how = (
        f"{len(jobs):,} jobs of {JOB_S} s on {N_WORKERS} workers, a worker killed every {KILL_EVERY_S[0]:g} to"
        f" {KILL_EVERY_S[1]:g} s, Valkey killed once; beside them the replicas' lookups and an API process"
    )
    values = {"attempts": dict(attempts), "kills": n_kills, "seconds": took_s, "lost": lost, "twice": twice}
    return [Figure("jobs", measured, "0 lost, 0 run twice", not lost and not twice and n_kills > 0, how, values)]


def _disturb(found: Site, fleet: Fleet, n_succeeded: int) -> int:
    """Kill workers until so many jobs have succeeded; return how many were killed."""
    rng, n_kills, deadline_s = random.Random(0), 0, time.monotonic() + WITHIN_S
    next_kill_s = time.monotonic() + KILL_EVERY_S[0]
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        if n_kills and found.store.jobs.states().get("succeeded", 0) >= n_succeeded:
            return n_kills
        if time.monotonic() >= next_kill_s:
            next_kill_s = time.monotonic() + rng.uniform(*KILL_EVERY_S)
            victim = rng.choice([worker for worker in found.workers if worker.process.poll() is None])
            victim.signal(signal.SIGKILL)
            victim.process.wait()
            n_kills += 1
            if n_kills == 2:
                fleet.valkey.kill()
                fleet.valkey.start()
            found.start()
    raise TimeoutError(f"not all jobs ended within {WITHIN_S:g} s: {found.store.jobs.states()}\n{found.logs()}")


def _ends(found: Site, job: str) -> int:
    """How often a job succeeded."""
    return sum(state == "succeeded" for state, _ in found.states(job))


# --- a lost database


def lose_database(fleet: Fleet) -> list[Figure]:
    """PostgreSQL is killed during lookups, and is back after some seconds."""
    killed_at: list[float] = []

    def kill_and_start() -> None:
        time.sleep(fleet.seconds / 3)
        killed_at.append(time.monotonic())
        fleet.postgres.kill()
        time.sleep(AWAY_S)
        fleet.postgres.start()
        killed_at.append(time.monotonic())

    with Store.open(fleet.url) as store:
        before = store.lookup_state(fingerprint(0))
        with asking(fleet.plan("as_replicas", seconds=fleet.seconds + AWAY_S)) as end:
            kill_and_start()
            back_s = until(lambda: _answers(store), 60) - killed_at[1]
            load = end()
        same = store.lookup_state(fingerprint(0)) == before
    measured = (
        f"{load.n_failed} queries refused while it was away, answers again {1e3 * back_s:.0f} ms after it was back;"
        f" all in all {load.words}"
    )
    how = f"PostgreSQL killed (SIGKILL) under the replicas' lookups and started again after {AWAY_S:g} s"
    ok = same and load.n_failed > 0 and back_s < 1
    values = {"back_s": back_s, "same": same, "refused": load.n_failed}
    return [Figure("database lost", measured, "answers within 1 s of its return", ok, how, values)]


def _answers(store: Store) -> float | None:
    """The time, if the database answers."""
    try:
        store.models()
    except StoreUnavailable:
        return None
    return time.monotonic()


# --- a migration


def migrate(fleet: Fleet) -> list[Figure]:
    """The schema 0.1.0 becomes the newest while replicas ask whether an alias was moved, which every schema knows."""
    took_s: list[float] = []
    with asking(fleet.plan("as_replicas")) as end:
        time.sleep(fleet.seconds / 2)  # They have opened the database: whoever opens it migrates it.
        engine = create_engine(fleet.url, poolclass=NullPool)
        with engine.begin() as connection:
            rewind(connection)
        assert look(fleet.url).revision == FIRST
        began_s = time.monotonic()
        before, after = bring_to_head(fleet.url)
        took_s.append(time.monotonic() - began_s)
        load = end()
    assert before.revision == FIRST and after.ok
    longest_ms = load.ms(1.0)
    measured = f"{took_s[0]:.2f} s; lookups meanwhile p99 {load.ms(0.99):.1f} ms, longest {longest_ms:.0f} ms"
    stored = f"{fleet.size.jobs:,} jobs and {fleet.size.jobs * fleet.size.trials:,} trials stored"
    how = f"`swiftopt db upgrade` from {FIRST} under the polls of {fleet.replicas} replicas; {stored}"
    ok = load.n_failed == 0 and longest_ms < 1000
    values = {"seconds": took_s[0], "failed": load.n_failed, "longest_ms": longest_ms}
    return [Figure("migration", measured, "no query fails, none waits 1 s", ok, how, values)]
