"""Jobs in the database, delivered by Redis, which only holds the ids of attempts that wait for a worker.

A reconciler makes both agree again after lost workers, a flushed or restarted Redis, and outages of either.
"""

from __future__ import annotations

import logging
import threading
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

from ..core.errors import Conflict, InvalidInput, NotFound, ServiceUnreachable, SettingsError, StoreError, safe_url
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

SERIALIZER = "json"  # rq's own default is pickle: whoever can write to Redis would run code in the worker
TASK = "swiftopt.worker.attempt.Attempts.run"  # a name for rq's records; the worker never imports what Redis names
UNLIMITED = -1  # rq's own default ends a job after 180 s; leases end ours
FAILED_TTL_S = 60  # seconds that rq keeps its record of an attempt whose process died
SOCKET_TIMEOUT_S = 5.0
RETRIES = 2  # Retries of one command on a broken connection.

PERIOD_S = 5.0  # between two passes
LOCK_S = 15.0  # Another process may reconcile after so long, in place of one that died.
# An attempt that left its queue and is not claimed within this time was lost on the way; a worker needs far less.
CLAIM_S = 8.0
# After an outage of the database, workers that could not renew their leases get this long to do so.
SPARE_S = 15.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """Version and persistence of a server; `append_only` and `saves`: whether its data survive a restart."""

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
        beat, queue = worker.last_heartbeat, ",".join(worker.queue_names())
        age_s = (datetime.now(UTC) - beat.replace(tzinfo=UTC)).total_seconds() if beat else float("inf")
        state, job = str(worker.get_state()), worker.get_current_job_id()
        return cls(worker.name, queue, state, job, age_s, str(worker.hostname or ""), int(worker.pid or 0))


class RedisQueue:
    """Access the queues of one Redis or Valkey server.

    Raises: ServiceUnreachable: in every method, when the server does not answer; SettingsError: the URL is none.
    """

    def __init__(self, url: str, blocking_s: float = 0.0) -> None:
        """Connect; `blocking_s`: seconds that a command may wait for a job, beyond the time to answer."""
        self.url = url
        # Only a refused connection is tried again: a server that accepts and does not answer would time out again.
        retry = Retry(ExponentialWithJitterBackoff(base=0.1, cap=1.0), RETRIES, (RedisConnectionError,))
        limits = {"socket_timeout": SOCKET_TIMEOUT_S + blocking_s, "socket_connect_timeout": SOCKET_TIMEOUT_S}
        try:
            self.connection = Redis.from_url(url, retry=retry, **limits)
        except ValueError as error:
            raise SettingsError(
                f"{safe_url(url)} names no Redis server: use redis://HOST:6379/0 or unix:///PATH"
            ) from error

    def deliver(self, delivery: Delivery) -> bool:
        """Append an attempt to its queue; False if rq still knows it: it waits, or was just taken."""
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
            return {entry.decode(errors="replace") for entry in ids_waiting}  # anybody may have put anything there

    def depth(self, queue: str = DEFAULT_QUEUE) -> int:
        with _errors(self.url):
            return int(self._queue(queue).count)

    def ping(self) -> None:
        with _errors(self.url):
            self.connection.ping()

    def facts(self) -> RedisFacts:
        saves = ""
        with _errors(self.url):
            info: Any = self.connection.info()
            with suppress(RedisError):  # a hosted server may forbid CONFIG
                config: Any = self.connection.config_get("save")
                saves = config.get("save", "")
        version = str(info.get("valkey_version") or info.get("redis_version", "?"))
        return RedisFacts(
            version=version,
            server=str(info.get("server_name") or "redis"),
            append_only=bool(info.get("aof_enabled", 0)),
            saves=bool(saves),
            eviction=str(info.get("maxmemory_policy", "")),
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
    """Submit, see and steer jobs in the database; without a queue, or while Redis is away, submitted jobs wait.

    Args:   served: models that this process decodes with, whose engines may still load them.
    Raises: StoreError: in every method, when the database cannot be used.
    """

    def __init__(self, store: Store, queue: RedisQueue | None, served: Sequence[ServedModel] = ()) -> None:
        self.store, self.queue, self.served = store, queue, served
        self.get, self.latest = store.jobs.get, store.jobs.latest
        self.events, self.outputs = store.jobs.events, store.jobs.outputs

    def submit(
        self,
        request: TuneRequest,
        prompts: Sequence[Prompt],
        queue: str = DEFAULT_QUEUE,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Return the job for the request on these prompts and whether it is new; the row precedes the delivery.

        Raises: Conflict: the idempotency key was used for something else. SwiftoptError: as `check_tuning`.
        """
        check_tuning(request, prompts, elsewhere=not self.store.is_local)
        return self.submit_spec(tune_spec(request, prompts, queue, idempotency_key))

    def submit_spec(self, spec: JobSpec) -> tuple[Job, bool]:
        """Submit a job of any kind; return it and whether it is new."""
        job, is_new = self.store.jobs.submit(spec)
        if is_new:
            self.deliver(job)
        return job, is_new

    def act(self, job: str, verb: Verb) -> Job:
        """Pause, resume, stop, cancel or retry; a job that is queued by it is delivered at once.

        Raises: Conflict: it is not in a state for that, or another attempt would fail like the last.
        """
        if verb == "retry" and (problem := retry_problem(self.store, self.get(job))):
            raise Conflict(f"job {job} cannot be retried: {problem}")
        job_after = self.store.jobs.act(job, verb)
        log_state(Lease(job_after.id, job_after.attempt), job_after.state, verb=verb)
        self.deliver(job_after)
        return job_after

    def obstacle(self, job: Job) -> str | None:
        """Return why a queued job does not run, in a sentence; None for other jobs, and where somebody can take it."""
        if job.state != "queued" or job.queue is None or has_engine(self.store.jobs, self.served, job):
            return None
        if self.queue is None:
            return (
                "no Redis is named, which brings jobs to workers, and no served model takes this one: name a Redis by"
                " --redis or SWIFTOPT_REDIS_URL"
            )
        try:
            listening = any(worker.queue == job.queue for worker in self.queue.workers())
        except ServiceUnreachable as error:
            return f"the job waits in the database: {error}"
        words = f"no worker listens on queue {job.queue!r}: start one with {worker_command(job.queue)}"
        return None if listening else words

    def deliver(self, job: Job) -> None:
        """Deliver a queued attempt to Redis; if that fails, the reconciler does so when Redis is back."""
        if self.queue is None or job.queue is None or job.state != "queued":
            return
        try:
            self.queue.deliver(Delivery(job.id, job.attempt, job.queue))
        except ServiceUnreachable as error:
            logger.warning("delivery=postponed job=%s reason=%r", job.id, str(error))


def retry_problem(store: Store, job: Job) -> str:
    """Return why another attempt of a job that has ended would fail like the last, in a sentence; empty: it may not."""
    if job.kind != "tune" or job.stream is None or job.state not in ("failed", "cancelled"):
        return ""
    lines = (store.jobs.stream(job.stream) or "").encode().splitlines(keepends=True)
    try:
        prompts = parse_stream(lines, f"the stream of job {job.id}", DEFAULT_TASK)
        check_tuning(TuneRequest.from_json(job.request), prompts, elsewhere=not store.is_local)
    except (InvalidInput, NotFound) as error:
        return str(error)
    return ""


class Reconciler:
    """Reconcile in at most one process at a time, chosen by a lock in the database.

    Raises: StoreError, ServiceUnreachable: in `step`, when the database or Redis does not answer.
    """

    def __init__(self, jobs: Jobs, queue: RedisQueue, owner: str) -> None:
        self._jobs, self._queue, self._owner = jobs, queue, owner
        self._missing_since: dict[str, float] = {}  # by id of the delivery; monotonic seconds
        self._spare_until = 0.0  # monotonic seconds

    def step(self) -> None:
        """Run one pass: end attempts whose lease ran out; deliver what is due and not in its queue."""
        if not self._jobs.lock("reconciler", self._owner, LOCK_S):
            return
        if time.monotonic() >= self._spare_until:
            for lost in self._jobs.expire():
                log_state(lost.lease, lost.state, "LeaseLost", lost.reason)
        due = self._jobs.due()
        waiting = {
            attempt_id for queue in {delivery.queue for delivery in due} for attempt_id in self._queue.waiting(queue)
        }
        missing = {delivery.id: delivery for delivery in due if delivery.id not in waiting}
        self._missing_since = {
            attempt_id: since for attempt_id, since in self._missing_since.items() if attempt_id in missing
        }
        for delivery in missing.values():
            try:
                self._deliver(delivery)
            except ValueError as error:  # an id or queue that was changed by hand; the others must not wait for it
                words = "delivery=impossible job=%r queue=%r reason=%r"
                logger.warning(words, delivery.job, delivery.queue, str(error))

    def run(self, stop: threading.Event) -> None:
        """Run a pass every PERIOD_S until `stop` is set; outages of Redis or the database are logged."""
        while not stop.wait(PERIOD_S):
            self.try_step()

    def try_step(self) -> None:
        try:
            self.step()
        except (StoreError, ServiceUnreachable) as error:
            if isinstance(error, StoreError):
                self._spare_until = time.monotonic() + SPARE_S
            logger.warning("reconciler=waiting reason=%r", str(error))

    def _deliver(self, delivery: Delivery) -> None:
        """Deliver an attempt; if rq knows it, a worker is about to claim it or died before it could."""
        since = self._missing_since.setdefault(delivery.id, time.monotonic())
        if self._queue.deliver(delivery):
            del self._missing_since[delivery.id]  # a worker may leave it to an engine again and again
            logger.info("delivered job=%s attempt=%d queue=%s", delivery.job, delivery.attempt, delivery.queue)
        elif time.monotonic() - since >= CLAIM_S:
            again = self._jobs.redeliver(delivery)
            if again is not None:
                self._queue.deliver(again)
                logger.warning("redelivered job=%s attempt=%d queue=%s", again.job, again.attempt, again.queue)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise ServiceUnreachable(
            f"Redis at {safe_url(url)} cannot be used ({reason}): start it, or check the URL"
        ) from error
