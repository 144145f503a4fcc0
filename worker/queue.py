"""Jobs in the database, delivered by Redis, which only stores the ids of attempts that wait for a worker.

A reconciler restores agreement after lost workers, a flushed or restarted Redis, and outages of either.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry
from rq import Queue
from rq.exceptions import DuplicateJobError
from rq.worker import Worker as RqWorker

from ..core.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    ServiceUnreachable,
    SettingsError,
    StoreError,
    connection_problem,
    safe_url,
)
from ..core.logs import Outage
from ..core.requests import (
    DEFAULT_QUEUE,
    Delivery,
    Job,
    JobSpec,
    Lease,
    ServedModel,
    TuneRequest,
    Verb,
    worker_command,
)
from ..core.streams import parse_stream
from ..core.types import DEFAULT_TASK, Prompt
from ..store import Jobs, Store
from ..tasks.admission import check_tuning
from ..tasks.job import log_state, tune_spec
from .engine_locks import has_engine

SERIALIZER = "json"  # rq's default, pickle, would let anyone with write access to Redis run code in the worker.
# Function name in rq's records. The worker never imports a name that it reads from Redis.
TASK = "swiftopt.worker.attempt.Attempts.run"
UNLIMITED = -1  # Timeout for rq: none, because leases end lost attempts. rq's default is 180 s.
FAILED_TTL_S = 60  # Seconds that rq keeps the record of an attempt whose process died.
SOCKET_TIMEOUT_S = 5.0
RETRIES = 2  # Retries of a Redis command after a connection error.

PERIOD_S = 5.0  # Seconds between two passes of the reconciler.
LOCK_S = 15.0  # Lifetime of the reconciler's lock: another process takes over this long after one died.
# Seconds from leaving the queue to the claim, after which an attempt counts as lost. A worker needs far less.
CLAIM_S = 8.0
# Seconds after a database outage in which no lease is expired, so that workers can renew theirs.
EXPIRY_PAUSE_S = 15.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """A Redis server's version and persistence: it survives a restart with `append_only` or `saves`."""

    version: str
    server: str
    append_only: bool
    saves: bool
    eviction: str


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker as it last reported itself."""

    name: str
    queue: str
    state: str
    job: str | None
    heartbeat_age_s: float
    hostname: str
    pid: int

    @classmethod
    def of(cls, worker: RqWorker) -> WorkerFacts:
        heartbeat, queue = worker.last_heartbeat, ",".join(worker.queue_names())
        age_s = (datetime.now(UTC) - heartbeat.replace(tzinfo=UTC)).total_seconds() if heartbeat else float("inf")
        state, job = str(worker.get_state()), worker.get_current_job_id()
        return cls(worker.name, queue, state, job, age_s, str(worker.hostname or ""), int(worker.pid or 0))


class RedisQueue:
    """Access the queues of one Redis or Valkey server.

    Raises: ServiceUnreachable: in every method, if the server does not answer; SettingsError: the URL is not a Redis
            URL.
    """

    def __init__(self, url: str, blocking_s: float = 0.0) -> None:
        """Connect; `blocking_s`: seconds that a command may wait for a job, beyond the time to answer."""
        self.url = url
        # Retry only connection errors: a server that accepts connections but does not answer would time out again.
        retry = Retry(ExponentialWithJitterBackoff(base=0.1, cap=1.0), RETRIES, (RedisConnectionError,))
        limits = {"socket_timeout": SOCKET_TIMEOUT_S + blocking_s, "socket_connect_timeout": SOCKET_TIMEOUT_S}
        try:
            self.connection = Redis.from_url(url, retry=retry, **limits)
        except ValueError as error:
            raise SettingsError(
                f"{safe_url(url)} is not a Redis URL: use redis://HOST:6379/0 or unix:///PATH"
            ) from error

    def deliver(self, delivery: Delivery) -> bool:
        """Append an attempt to its queue; return False if rq still has it, waiting or just taken."""
        with _errors(self.url):
            try:
                self._queue(delivery.queue).enqueue_call(
                    TASK,
                    job_id=delivery.id,
                    unique=True,
                    timeout=UNLIMITED,
                    result_ttl=0,
                    failure_ttl=FAILED_TTL_S,
                    description=delivery.id,
                )
            except DuplicateJobError:
                return False
            return True

    def waiting(self, queue: str) -> set[str]:
        with _errors(self.url):
            ids_waiting: Any = self.connection.lrange(self._queue(queue).key, 0, -1)
            # The queue may hold any bytes: other programs can write to it.
            return {attempt_id.decode(errors="replace") for attempt_id in ids_waiting}

    def depth(self, queue: str = DEFAULT_QUEUE) -> int:
        with _errors(self.url):
            return int(self._queue(queue).count)

    def ping(self) -> None:
        with _errors(self.url):
            self.connection.ping()

    def facts(self) -> RedisFacts:
        saves = ""
        with _errors(self.url):
            redis_info: Any = self.connection.info()
            with suppress(RedisError):
                # Hosted Redis servers may forbid CONFIG.
                config: Any = self.connection.config_get("save")
                saves = config.get("save", "")
        version = str(redis_info.get("valkey_version") or redis_info.get("redis_version", "?"))
        return RedisFacts(
            version=version,
            server=str(redis_info.get("server_name") or "redis"),
            append_only=bool(redis_info.get("aof_enabled", 0)),
            saves=bool(saves),
            eviction=str(redis_info.get("maxmemory_policy", "")),
        )

    def workers(self) -> list[WorkerFacts]:
        """Return every registered worker; dead ones are included until their key expires."""
        with _errors(self.url):
            rq_workers: Sequence[Any] = RqWorker.all(connection=self.connection, serializer=SERIALIZER)
            return [WorkerFacts.of(worker) for worker in rq_workers]

    def close(self) -> None:
        self.connection.close()

    def _queue(self, name: str) -> Queue:
        return Queue(name, connection=self.connection, serializer=SERIALIZER)


class JobService:
    """Submit, list and control jobs in the database; without a queue, or while Redis is unavailable, they wait.

    Args:   served_models: models served by this process, even if their engines are still loading.
    Raises: StoreError: in every method, if the database cannot be used.
    """

    def __init__(self, store: Store, queue: RedisQueue | None, served_models: Sequence[ServedModel] = ()) -> None:
        self.store, self.queue, self.served = store, queue, served_models
        self.get, self.latest = store.jobs.get, store.jobs.latest
        self.events, self.outputs = store.jobs.events, store.jobs.outputs

    def submit(
        self,
        request: TuneRequest,
        prompts: Sequence[Prompt],
        queue: str = DEFAULT_QUEUE,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Return the job for the request on these prompts and whether it is new; its row is written first.

        Raises: Conflict: the idempotency key was used for something else. SwiftoptError: as `check_tuning`.
        """
        check_tuning(request, prompts, runs_elsewhere=not self.store.is_local, queued=True)
        return self.submit_spec(tune_spec(request, prompts, queue, idempotency_key))

    def submit_spec(self, spec: JobSpec) -> tuple[Job, bool]:
        """Submit a job of any kind; return it and whether it is new."""
        job, is_new = self.store.jobs.submit(spec)
        if is_new:
            self.deliver(job)
        return job, is_new

    def act(self, job: str, verb: Verb) -> Job:
        """Pause, resume, stop, cancel or retry a job; a job that becomes queued is delivered at once.

        Raises: Conflict: it is not in a state for that, or another attempt would fail like the last.
        """
        if verb == "retry" and (problem := retry_problem(self.store, self.get(job))):
            raise Conflict(f"job {job} cannot be retried: {problem}")
        job_after = self.store.jobs.act(job, verb)
        log_state(Lease(job_after.id, job_after.attempt), job_after.state, verb=verb)
        self.deliver(job_after)
        return job_after

    def obstacle(self, job: Job) -> str | None:
        """Return a sentence why no worker can take a queued job; None if one can, and for other jobs."""
        if job.state != "queued" or job.queue is None or has_engine(self.store.jobs, self.served, job):
            return None
        if self.queue is None:
            return (
                "no Redis is configured to bring jobs to workers, and no served model takes this job: set a Redis with"
                " --redis or SWIFTOPT_REDIS_URL"
            )
        try:
            listening = any(worker.queue == job.queue for worker in self.queue.workers())
        except ServiceUnreachable as error:
            return f"the job waits in the database: {error}"
        problem = f"no worker listens on queue {job.queue!r}: start one with {worker_command(job.queue)}"
        return None if listening else problem

    def deliver(self, job: Job) -> None:
        """Deliver a queued attempt to Redis; if that fails, the reconciler does so when Redis is back."""
        if self.queue is None or job.queue is None or job.state != "queued":
            return
        try:
            self.queue.deliver(Delivery(job.id, job.attempt, job.queue))
        except ServiceUnreachable as error:
            logger.warning("delivery=postponed job=%s reason=%r", job.id, str(error))


def retry_problem(store: Store, job: Job) -> str:
    """Return a sentence why a retry of an ended job would fail again; empty if it may succeed."""
    if job.kind != "tune" or job.stream is None or job.state not in ("failed", "cancelled"):
        return ""
    lines = (store.jobs.stream(job.stream) or "").encode().splitlines(keepends=True)
    try:
        prompts = parse_stream(lines, f"the stream of job {job.id}", DEFAULT_TASK)
        check_tuning(TuneRequest.from_json(job.request), prompts, runs_elsewhere=not store.is_local, queued=True)
    except (InvalidInput, NotFound) as error:
        return str(error)
    return ""


class Reconciler:
    """Reconcile in at most one process at a time, chosen by a lock in the database.

    Raises: StoreError, ServiceUnreachable: in `step`, when the database or Redis does not answer.
    """

    def __init__(self, jobs: Jobs, queue: RedisQueue, owner: str) -> None:
        self._jobs, self._queue, self._owner = jobs, queue, owner
        # Delivery id -> monotonic time at which it was first missing from its queue.
        self._missing_since: dict[str, float] = {}
        self._delivered: set[str] = set()  # Ids of deliveries that are due and in the log.
        self._spare_until = 0.0  # Monotonic time before which no lease is expired.
        self._outage = Outage(logger, "reconciler=waiting", "reconciler=working")

    def step(self) -> None:
        """Run one pass: end attempts whose lease expired, and deliver due attempts missing from their queue."""
        if not self._jobs.lock("reconciler", self._owner, LOCK_S):
            self._outage.forget()
            return
        if time.monotonic() >= self._spare_until:
            for lost_attempt in self._jobs.expire():
                log_state(lost_attempt.lease, lost_attempt.state, "LeaseLost", lost_attempt.reason)
        self._queue.ping()  # Without a due delivery nothing else would notice that Redis does not answer.
        due_deliveries = self._jobs.due()
        waiting = {
            attempt_id
            for queue in {delivery.queue for delivery in due_deliveries}
            for attempt_id in self._queue.waiting(queue)
        }
        missing = {delivery.id: delivery for delivery in due_deliveries if delivery.id not in waiting}
        self._missing_since = {
            attempt_id: missing_s for attempt_id, missing_s in self._missing_since.items() if attempt_id in missing
        }
        self._delivered &= {delivery.id for delivery in due_deliveries}
        for delivery in missing.values():
            try:
                self._deliver(delivery)
            except ValueError as error:
                # Skip a row whose id or queue is invalid (edited by hand), so that the others are delivered.
                message = "delivery=impossible job=%r queue=%r reason=%r"
                logger.warning(message, delivery.job, delivery.queue, str(error))
        self._outage.over()

    def try_step(self) -> None:
        """Run a pass; log when an outage of Redis or the database begins and ends."""
        try:
            self.step()
        except (StoreError, ServiceUnreachable) as error:
            if isinstance(error, StoreError):
                self._spare_until = time.monotonic() + EXPIRY_PAUSE_S
            self._outage.failed(error)

    def _deliver(self, delivery: Delivery) -> None:
        """Deliver an attempt. If rq still has it after CLAIM_S, a worker died before the claim: deliver a new one."""
        missing_s = self._missing_since.setdefault(delivery.id, time.monotonic())
        if self._queue.deliver(delivery):
            del self._missing_since[delivery.id]  # Restart the timer: workers may requeue it for an engine repeatedly.
            # A worker that leaves the attempt to an engine gets it again every few seconds.
            level = logging.DEBUG if delivery.id in self._delivered else logging.INFO
            self._delivered.add(delivery.id)
            logger.log(level, "delivered job=%s attempt=%d queue=%s", delivery.job, delivery.attempt, delivery.queue)
        elif time.monotonic() - missing_s >= CLAIM_S:
            new_delivery = self._jobs.redeliver(delivery)
            if new_delivery is not None:
                self._queue.deliver(new_delivery)
                logger.warning(
                    "redelivered job=%s attempt=%d queue=%s", new_delivery.job, new_delivery.attempt, new_delivery.queue
                )


@contextmanager
def _errors(url: str) -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        problem = f"Redis at {safe_url(url)} cannot be used ({connection_problem(error)})"
        raise ServiceUnreachable(f"{problem}: start it, or check the URL") from error
