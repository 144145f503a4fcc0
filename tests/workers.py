"""Workers as processes of their own, and what tests do to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swiftopt.core.errors import StoreUnavailable
from swiftopt.core.requests import Job, JobSpec
from swiftopt.store import Store
from swiftopt.worker.queue import JobService, Reconciler, RedisQueue

# What `swiftopt worker` runs, with a lease and, if `is_quick`, waits of our own length; and the promise that the parent
# never imports torch.
PROGRAM = """
import logging, sys
logging.basicConfig(level="INFO", format="%(asctime)s %(process)d %(levelname)s %(name)s %(message)s")
from swiftopt.core import collector
from swiftopt.worker import queue, worker
from swiftopt.worker.attempt import WorkerContext
from swiftopt.worker.worker import default_name, run_worker
collector.start()
database, redis, lease_s, is_quick, burst = sys.argv[1:]
if is_quick:
    queue.CLAIM_S, worker.PERIOD_S = 2.0, 1.0
    worker.WORKER_TTL_S = 16  # rq waits 15 s less for a job, and then reconciles
    worker.JobWorker.max_connection_wait_time = 1.0
run_worker(WorkerContext(default_name(), database, redis, "default", lease_s=float(lease_s)), burst=burst == "burst")
sys.exit(3 if "torch" in sys.modules else 0)
"""
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class WorkerProcess:
    """A worker that runs, and the log that it writes."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def child(self, within_s: float = 20.0) -> psutil.Process:
        """The process of the attempt that it works on."""
        return until(lambda: next(iter(psutil.Process(self.pid).children()), None), within_s)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, within_s: float = 60.0) -> int:
        """Ask it to end; its exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(within_s)

    def kill(self) -> None:
        """As a power cut would, for this process alone."""
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Site:
    """A database and a Redis, with those who submit to them and those who work for them."""

    database: str
    redis: str
    folder: Path
    lease_s: float = 20.0
    is_quick: bool = False
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store.open(self.database)
        self.queue = RedisQueue(self.redis)
        self.service = JobService(self.store, self.queue)
        self.reconciler: Reconciler | None = None

    def reconcile(self) -> None:
        """Do from now on, at every look, what the API process does every few seconds."""
        self.reconciler = Reconciler(self.store.jobs, self.queue, "test")
        self.reconciler.step()

    def start(self, burst: bool = False) -> WorkerProcess:
        """One more worker."""
        words = [self.database, self.redis, str(self.lease_s), "quick" * self.is_quick, "burst" if burst else ""]
        return self.run([sys.executable, "-c", PROGRAM, *words])

    def run(self, command: list[str]) -> WorkerProcess:
        """A worker started by another command."""
        log = self.folder / f"worker{len(self.workers)}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, **QUIET})
        self.workers.append(WorkerProcess(process, log))
        return self.workers[-1]

    def noop(self, seconds: float, n: int = 0) -> str:
        """A no-op job; jobs with the same figures are one."""
        return self.service.submit_spec(JobSpec("noop", "default", {"seconds": seconds, "n": n}))[0].id

    def job(self, job: str) -> Job:
        return self.store.jobs.get(job)

    def running(self, job: str, attempt: int = 1, within_s: float = 30.0) -> Job:
        """The job as soon as that attempt or a later one runs."""

        def found() -> Job | None:
            now = self.job(job)
            assert not now.is_finished, (now, self.logs())
            return now if now.state == "running" and now.attempt >= attempt else None

        return self.until(found, within_s)

    def ended(self, job: str, within_s: float = 30.0) -> Job:
        """The job at its end."""

        def found() -> Job | None:
            now = self.job(job)
            return now if now.is_finished else None

        return self.until(found, within_s)

    def until(self, found: Callable[[], Any], within_s: float) -> Any:
        """As `until`, with the workers' logs in the failure."""

        def look() -> Any:
            if self.reconciler is not None:
                self.reconciler.step()
            return found()

        try:
            return until(look, within_s, 0.15)  # to look takes milliseconds of two servers' time
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None

    def states(self, job: str) -> list[tuple[str, int]]:
        """Every state that the job was in, with its attempt."""
        events = self.store.jobs.events(job)
        return [(e.data["state"], e.data["attempt"]) for e in events if e.type == "state_changed"]

    def reasons(self, job: str) -> str:
        """What the changes of state say, a line each."""
        events = self.store.jobs.events(job)
        return "\n".join(str(e.data["detail"]) for e in events if e.type == "state_changed")

    def logs(self) -> str:
        return "\n".join(f"--- {worker.log.name}\n{worker.text()[-3000:]}" for worker in self.workers)

    def close(self) -> None:
        """Kill every worker; the kernel takes their children."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
        self.store.close()
        self.queue.close()


@contextmanager
def site(database: str, redis: str, folder: Path, lease_s: float = 20.0, is_quick: bool = False) -> Iterator[Site]:
    """A site whose workers end with the block; quick ones reconcile every second, and wait a second for a server."""
    found = Site(database, redis, folder, lease_s, is_quick)
    try:
        yield found
    finally:
        found.close()


def until(found: Callable[[], Any], within_s: float, step_s: float = 0.05) -> Any:
    """What `found` returns as soon as it is something; a database that is away is waited for.

    Raises: TimeoutError: it stayed nothing.
    """
    deadline = time.monotonic() + within_s
    while True:
        with suppress(StoreUnavailable, psutil.NoSuchProcess):
            value = found()
            if value:
                return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s} s")
        time.sleep(step_s)


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has, too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
