"""Figures of the queue and its workers, with no-op jobs."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures import Figure, seconds
from servers import Postgres, Valkey, new_database, server_folder
from workers import Site, gone, site, until

from swiftopt.core.requests import JobSpec

LONG_S = 600.0  # of a no-op job that is never let run to its end
N_RECOVERIES, N_JOBS, N_WORKERS, N_SAME = 20, 1000, 4, 100


def recovery(folder: Path, redis: Valkey) -> list[Figure]:
    """Kill the worker that has the job, again and again; a new one takes the killed one's place."""
    times, orphans = [], []
    with site(str(folder / "recovery.db"), redis.url, folder) as found:
        workers = [found.start(), found.start()]
        for number in range(N_RECOVERIES):
            job = found.noop(LONG_S, number)
            running = found.running(job)
            victim = next(w for w in workers if f"-{w.pid}-" in str(running.worker))
            child = victim.child()
            clock = time.monotonic()
            victim.kill()
            until(lambda child=child: gone(child), 60)  # type: ignore[misc]
            orphans.append(time.monotonic() - clock)
            found.running(job, attempt=2, within_s=120)
            times.append(time.monotonic() - clock)
            found.service.act(job, "cancel")
            workers = [w for w in workers if w is not victim] + [found.start()]
    how = "SIGKILL of the worker, until another worker's attempt runs; two workers, no API process, default settings"
    return [
        seconds("recovery", times, 45, how),
        seconds("orphan", orphans, 2, "SIGKILL of the worker, until its child has ended"),
    ]


def flush(folder: Path, redis: Valkey) -> list[Figure]:
    """A flush, then a restart without data, with 20 jobs that wait behind one that runs."""
    return [_emptied("flushed", redis.flush, folder, redis), _emptied("restarted empty", _again(redis), folder, redis)]


def _again(redis: Valkey) -> Callable[[], None]:
    """What restarts it without its data."""

    def again() -> None:
        redis.kill()
        shutil.rmtree(redis.folder / "appendonlydir")
        time.sleep(2)
        redis.start()

    return again


def _emptied(name: str, empty: Callable[[], None], folder: Path, redis: Valkey) -> Figure:
    with site(str(folder / f"{name}.db"), redis.url, folder) as found:
        found.start()
        jobs = [found.noop(4, -1), *(found.noop(0, number) for number in range(20))]
        found.running(jobs[0])
        empty()
        clock = time.monotonic()
        times = []
        for job in jobs:
            assert found.ended(job, within_s=120).state == "succeeded"
            times.append(time.monotonic() - clock)
        assert all(_n_runs(found, job) == 1 for job in jobs)
    how = f"Redis {name} while a job of 4 s runs and 20 wait, until each has run, once, on the one worker"
    return seconds(f"Redis {name}", times, 30, how)


def cancel(folder: Path, redis: Valkey) -> list[Figure]:
    """Cancel a queued job and a running one."""
    queued, running, children = [], [], []
    with site(str(folder / "cancel.db"), redis.url, folder) as found:
        worker = found.start()
        for number in range(20):
            first, second = found.noop(LONG_S, 2 * number), found.noop(LONG_S, 2 * number + 1)
            found.running(first)
            child = worker.child()
            for job, times in ((second, queued), (first, running)):
                clock = time.monotonic()
                found.service.act(job, "cancel")
                assert found.job(job).state == "cancelled"
                times.append(time.monotonic() - clock)
            until(lambda child=child: gone(child), 60)  # type: ignore[misc]
            children.append(time.monotonic() - clock)
    return [
        seconds("cancel, queued", queued, 2, "from the call to the state"),
        seconds("cancel, running", running, 2, "from the call to the state"),
        seconds("cancel, running: child", children, 2, "from the call until the child has ended"),
    ]


def dedup(folder: Path, redis: Valkey) -> list[Figure]:
    """Identical submissions at once."""
    figures = []
    with server_folder() as place, Postgres(place) as postgres, new_database(postgres.url) as url:
        for name, database in (("SQLite", str(folder / "dedup.db")), ("PostgreSQL", url)):
            with site(database, redis.url, folder) as found, ThreadPoolExecutor(32) as pool:
                spec = JobSpec("noop", "default", {"seconds": 0})
                made = list(pool.map(lambda _, of=found, s=spec: of.service.submit_spec(s), range(N_SAME)))  # type: ignore[misc]
                ids, n_new, depth = {job.id for job, _ in made}, sum(new for _, new in made), found.queue.depth()
                found.queue.connection.flushdb()
            measured = f"{len(ids)} job, {n_new} new, {depth} in the queue"
            how = f"{N_SAME} submissions from 32 threads"
            ok = (len(ids), n_new, depth) == (1, 1, 1)
            figures.append(Figure(f"identical submissions, {name}", measured, "one job", ok, how))
    return figures


def noop(folder: Path, redis: Valkey) -> list[Figure]:
    """A queue full of jobs that do nothing."""
    with server_folder() as place, Postgres(place) as postgres, new_database(postgres.url) as url:
        return [
            _overhead(name, database, folder, redis)
            for name, database in (("SQLite", str(folder / "noop.db")), ("PostgreSQL", url))
        ]


def _overhead(name: str, database: str, folder: Path, redis: Valkey) -> Figure:
    with site(database, redis.url, folder) as found:
        jobs = [found.noop(0, number) for number in range(N_JOBS)]
        clock = time.monotonic()
        for _ in range(N_WORKERS):
            found.start()
        until(lambda: found.store.jobs.states().get("succeeded") == N_JOBS, 600, step_s=0.2)
        each_ms = 1e3 * (time.monotonic() - clock) / N_JOBS
        runs = Counter(_n_runs(found, job) for job in jobs)
    measured = f"{each_ms:.1f} ms per job; jobs by number of runs: {dict(runs)}"
    ok = each_ms <= 50 and runs == {1: N_JOBS}
    how = f"{N_JOBS} queued jobs, {N_WORKERS} workers, from their start to the last job's end"
    return Figure(f"no-op jobs, {name}", measured, "≤ 50 ms per job, each run once", ok, how, {"ms": round(each_ms, 1)})


def _n_runs(found: Site, job: str) -> int:
    return [state for state, _ in found.states(job)].count("running")
