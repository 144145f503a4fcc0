"""An rq worker that forks a child per attempt, which ends with it, and never imports torch itself."""

from __future__ import annotations

import gc
import logging
import os
import resource
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job as RqJob
from rq.worker import WorkerStatus
from sqlalchemy.orm import Session

from ..core.errors import StoreError
from ..core.processes import die_with
from ..core.requests import Delivery, JobSpec, Lease
from ..store import Jobs, Store
from ..store.database import as_url, store_errors, writing
from ..store.migrations import connect_at_head
from ..tasks.job import log_state, state_without_lease
from .attempt import Attempts, WorkerContext
from .queue import PERIOD_S, SERIALIZER, Reconciler, RedisQueue

WORKER_TTL_S = 20  # rq waits for a job 15 s less than its TTL, then runs maintenance: the reconciler runs every 5 s.
MONITOR_S = 5.0  # Seconds between two heartbeats while a child works.
BEAT_S = 1.0  # Minimum seconds between two heartbeats that rq's loop sends.
LONGEST_WAIT_S = 5.0  # Longest wait between two attempts to reconnect to Redis.
RESTART_S = 1.0  # Wait before a restart after rq has given up on Redis.
TIDY_S = 600.0  # Seconds between two clean-ups of rq's registries.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.02  # Polling interval for a child's end where pidfd_open is missing.

T = TypeVar("T")

logger = logging.getLogger(__name__)


class JobWorker(Worker):
    """Takes attempts from one queue; verbs come through SQL, and commands in Redis are ignored.

    Redis decides only *which* attempt runs: the child runs `Attempts.run` on the id, never a function that Redis names.
    Only the parent talks to Redis, and a child works on while Redis is away.
    """

    max_connection_wait_time = LONGEST_WAIT_S

    def __init__(self, context: WorkerContext, store: Store, queue: RedisQueue) -> None:
        super().__init__(
            [Queue(context.queue, connection=queue.connection, serializer=SERIALIZER)],
            name=context.name,
            connection=queue.connection,
            serializer=SERIALIZER,
            worker_ttl=WORKER_TTL_S,
            maintenance_interval=round(PERIOD_S),
            log_job_description=False,
        )
        self.context, self.store = context, store
        self.is_ending = False
        self._sigterm = threading.Event()  # Set in a child when it receives SIGTERM.
        self._begun_pipe = (-1, -1)  # Pipe on which the child reports the id of each attempt that it begins.
        self._reconciler = Reconciler(store.jobs, queue, context.name)
        self._pid = os.getpid()
        self._maintained_s = self._heartbeat_s = time.monotonic()

    def _set_ip_address(self, connection: Redis) -> None:
        self.ip_address = "unknown"  # Skip rq's CLIENT command: Redis may be unreachable or forbid it.

    def subscribe(self) -> None:
        """Do nothing, because anyone who can write to Redis could kill jobs with rq's commands."""

    unsubscribe = subscribe

    def check_for_suspension(self, burst: bool) -> None:
        """Do nothing, because suspension would also come from Redis."""

    def register_birth(self) -> None:
        # Delete the record of a killed worker with the same name, which would make rq refuse this one.
        self.connection.delete(self.key)
        super().register_birth()  # type: ignore[no-untyped-call]

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Record in Redis that the worker is alive, at most once per BEAT_S."""
        now_s = time.monotonic()
        if pipeline is not None or now_s - self._heartbeat_s >= BEAT_S:
            self._heartbeat_s = now_s
            super().heartbeat(timeout, pipeline)

    def execute_job(self, job: RqJob, queue: Queue) -> None:
        with self.connection.pipeline() as pipeline:
            pipeline.lrem(queue.intermediate_queue_key, 1, job.id)
            self.set_current_job_id(job.id, pipeline=pipeline)
            self.execution = Execution.create(job, self.get_heartbeat_ttl(job), pipeline, self.name)
            self.set_state(WorkerStatus.BUSY, pipeline=pipeline)
            pipeline.execute()
        self.fork_work_horse(job, queue)
        self.monitor_work_horse(job, queue)
        with self.connection.pipeline() as pipeline, suppress(RedisError):
            pipeline.delete(job.key)
            self.cleanup_execution(job, pipeline)
            pipeline.execute()
        self._state = WorkerStatus.IDLE

    def fork_work_horse(self, job: RqJob, queue: Queue) -> None:
        """Fork with SIGTERM blocked until parent and child can handle it."""
        self.store.close()
        self._begun_pipe = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            super().fork_work_horse(job, queue)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
            os.close(self._begun_pipe[1])
        if self.is_ending:
            self.handle_warm_shutdown_request()

    def setup_work_horse_signals(self) -> None:
        """Set up the child: end with the parent, listen for SIGTERM, leave Ctrl-C to the parent."""
        die_with(self._pid)  # Effective on Linux only; on other systems the child ends when its lease is lost.
        signal.signal(signal.SIGTERM, lambda *_: self._sigterm.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)

    def perform_job(self, job: RqJob, queue: Queue) -> bool:
        """Run the attempt, and following ones for the same model, in the child."""
        delivery = delivery_of(job.id, queue.name)
        if delivery is None:
            logger.warning("delivery=ignored id=%r queue=%s", job.id, queue.name)
        else:
            Attempts(self.context, self.store, self._sigterm).run_all(delivery, self._note)
        return True

    def _note(self, delivery: Delivery) -> None:
        os.write(self._begun_pipe[1], f"{delivery.id}\n".encode())

    def monitor_work_horse(self, job: RqJob, queue: Queue) -> None:
        """Send heartbeats until the child ends; ignore errors of Redis."""
        while (exit_status := wait_for(self._horse_pid, MONITOR_S)) is None:
            with suppress(RedisError):
                self.maintain_heartbeats(job)
        pid, self._horse_pid = self._horse_pid, 0
        status, usage = exit_status
        latest = _last_id(self._begun_pipe[0]) or job.id
        if status != os.EX_OK:
            self.child_died(latest, pid, describe_death(status, usage.ru_maxrss))

    def handle_warm_shutdown_request(self) -> None:
        """Let the child hand its job back, on SIGTERM or Ctrl-C."""
        self.is_ending = True
        if self._horse_pid:
            with suppress(ProcessLookupError):
                os.kill(self._horse_pid, signal.SIGTERM)

    def set_shutdown_requested_date(self) -> None:
        with suppress(RedisError):
            super().set_shutdown_requested_date()  # type: ignore[no-untyped-call]

    def run_maintenance_tasks(self) -> None:
        """Reconcile between two jobs; every TIDY_S also remove rq's records of processes that died."""
        self.last_cleaned_at = datetime.now(UTC)  # type: ignore[assignment]
        self._reconciler.try_step()
        if time.monotonic() - self._maintained_s >= TIDY_S:
            self._maintained_s = time.monotonic()
            self.clean_registries()  # type: ignore[no-untyped-call]

    def child_died(self, attempt: str, pid: int, reason: str) -> None:
        """Record in the job's row why the child died during the attempt, so that the next attempt can begin."""
        lease = delivery_of(attempt, self.context.queue)
        if lease is None:
            return
        jobs = self.store.jobs
        try:
            jobs.claim(lease, self.name)  # Claim the attempt if the child died before it claimed it.
            state = jobs.attempt_failed(lease, reason) or state_without_lease(jobs, lease)
            log_state(lease, state, "ChildDied", reason, pid=pid)
        except StoreError as error:
            # The reconciler records the failure when the lease runs out.
            log_state(lease, "running", "ChildDied", reason, pid=pid)
            logger.warning("worker=waiting reason=%r", str(error))


def run_worker(context: WorkerContext, burst: bool = False) -> None:
    """Run jobs until SIGTERM or Ctrl-C, or with `burst` until the queue is empty; waits during outages of Redis.

    Raises: StoreError, ServiceUnreachable: the database or Redis does not answer at the start.
    """
    queue = RedisQueue(context.redis, blocking_s=WORKER_TTL_S)
    queue.ping()
    store = warm_store(context.database, context.lease_s)
    while True:
        worker = JobWorker(context, store, queue)
        with suppress(RedisError, StopRequested):
            worker.work(burst=burst, logging_level="WARNING")
        with suppress(StopRequested):
            if not (burst or worker.is_ending):
                time.sleep(RESTART_S)
        if burst or worker.is_ending:
            return


def default_name() -> str:
    """Return a unique worker name: host, process id, and random letters."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def delivery_of(rq_id: str, queue: str) -> Delivery | None:
    """Parse an id in Redis as an attempt; None if it is not one."""
    job, _, attempt = rq_id.rpartition("-a")
    return Delivery(job, int(attempt), queue) if job and attempt.isdecimal() and len(attempt) < 10 else None


def _last_id(descriptor: int) -> str | None:
    """Return the last id in a pipe, and close it; do not wait for others that may hold its other end."""
    os.set_blocking(descriptor, False)
    with open(descriptor, "rb", buffering=0) as pipe:
        ids = (pipe.read(1 << 16) or b"").split()
    return ids[-1].decode() if ids else None


def describe_death(status: int, peak_kib: int) -> str:
    """Describe why a child ended, from its wait(2) status and peak memory (KiB)."""
    peak = f"its peak memory was {peak_kib / (1 << 20):.1f} GiB"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        guess = ", probably out of memory" if number == signal.SIGKILL else ""
        return f"the worker's child was killed by signal {number} ({name}){guess}; {peak}"
    return f"the worker's child ended with exit code {os.waitstatus_to_exitcode(status)}; {peak}"


def wait_for(pid: int, seconds: float) -> tuple[int, resource.struct_rusage] | None:
    """Return a child's wait(2) status and resource usage; None if it still runs after `seconds`."""
    deadline = time.monotonic() + seconds
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], seconds)  # Wait until the child ends.
        finally:
            os.close(descriptor)
    while True:
        ended_pid, status, usage = os.wait4(pid, os.WNOHANG)
        if ended_pid:
            return status, usage
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_S)


class _Rehearsal(Jobs):
    """Jobs in one transaction, which is never committed."""

    session: Session

    def read(self, transaction: Callable[[Session], T]) -> T:
        return transaction(self.session)

    write = read


def warm_store(url: str, lease_s: float) -> Store:
    """Open the store without an open connection and with every statement of a plain attempt compiled.

    Close it before a fork: two processes cannot share a connection. It opens again when it is used.

    Raises: StoreError: as `Store.open`.
    """
    url = as_url(url)
    engine = connect_at_head(url)
    jobs = _Rehearsal(engine, url)
    with store_errors(url), Session(writing(engine)) as jobs.session:
        # Run each statement of an attempt once. The transaction is rolled back, so the job is never stored.
        for is_stopped in (False, True):
            job, _ = jobs.submit(JobSpec("noop", "rehearsal", {"n": secrets.token_hex(8)}))
            lease = Lease(job.id, job.attempt)
            jobs.claim(lease, "rehearsal")
            jobs.renew(lease)
            jobs.peek(lease)
            if is_stopped:
                jobs.hand_back(lease, "rehearsal")
            else:
                jobs.end(lease, "succeeded")
        jobs.session.rollback()
    engine.dispose()
    store = Store(engine, url)
    store.jobs.lease_s = lease_s
    gc.collect()
    # Freeze existing objects: a collection would write to, and so copy, memory pages shared with forked children.
    gc.freeze()
    return store
