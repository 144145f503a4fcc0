"""Attempts of jobs, as a worker's child or an engine runs them: claim one, work under its lease, record its outcome."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.errors import (
    DeviceMissing,
    HubUnreachable,
    InvalidInput,
    LeaseLost,
    NotFound,
    SettingsError,
    StoreError,
    SwiftoptError,
)
from ..core.events import JobState
from ..core.logs import Outage
from ..core.requests import DEFAULT_QUEUE, Delivery, Lease, ServedModel, TuneRequest
from ..core.streams import parse_stream
from ..core.types import DEFAULT_TASK
from ..store import LEASE_S, Claim, Jobs, Store
from ..tasks.admission import check_tuning
from ..tasks.job import (
    Cancelled,
    HandedBack,
    LeaseKeeper,
    ModelTurn,
    Paused,
    log_state,
    state_without_lease,
    with_retries,
)
from .engine_locks import as_request, engine_lock, model_of
from .queue import EXPIRY_PAUSE_S, JobService, RedisQueue

if TYPE_CHECKING:
    from ..models.runtime import Runtime

MOST_IN_A_ROW = 100  # Attempts that one child process runs before it exits.
LOOK_S = 1.0  # Seconds between two polls for jobs of an engine's model.
# Seconds by which a poll overlaps the one before: a job may be committed that much later than the time it is due from.
OVERLAP_S = 20.0
HOLD_S = 30.0  # Lifetime of an engine's lock, which keeps this machine's workers from jobs of its model.
# Seconds after SIGTERM to reach a new checkpoint. Then the process exits, and the job is requeued at its last one.
HAND_BACK_S = 5.0
NOOP_STEP_S = 0.05
WORKER_ENDS = "its worker is shutting down"
# Errors that a retry may fix: on a worker with the device, or once the hub is back.
TEMPORARY_ERRORS = (DeviceMissing, HubUnreachable)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Name, services and device of a worker; `device` replaces "auto" in requests.

    Without `redis` (""), only the reconciler delivers jobs that were handed back. `lease_s`: seconds without a renewal
    after which its attempts count as lost.
    """

    name: str
    database: str
    redis: str
    queue: str
    device: str = "auto"
    lease_s: float = LEASE_S


class Attempts:
    """Runs attempts of jobs one after another; keeps the latest model loaded for the next job that uses it.

    Args: ending: set when this process must end.
    """

    turn: ModelTurn | None = None  # Set if an engine decodes with the same model, see `TuningRun`.

    def __init__(self, context: WorkerContext, store: Store, ending: threading.Event) -> None:
        self.context, self.store, self.ending = context, store, ending
        self._loaded: tuple[Any, ...] | None = None  # Key of the loaded model, from `model_of`.
        self._runtime: Runtime | None = None

    def run_all(self, first_delivery: Delivery, on_begin: Callable[[Delivery], None]) -> None:
        """Run an attempt and, while attempts succeed, those of the queue's next jobs that use the loaded model.

        An attempt whose model an engine of this machine has loaded is left to that engine. Calls `on_begin` before each
        attempt.
        """
        delivery: Delivery | None = first_delivery
        for _ in range(MOST_IN_A_ROW):
            if delivery is None:
                return
            if with_retries(partial(self._belongs_to_engine, delivery)):
                message = "job=%s attempt=%d state=queued reason='left to the engine of its model'"
                logger.debug(message, delivery.job, delivery.attempt)
                return
            on_begin(delivery)
            self.run(delivery)
            delivery = None if self.ending.is_set() else with_retries(partial(self._next_attempt, delivery))

    def run(self, lease: Delivery) -> None:
        """Claim and run one attempt, and write its outcome to the job's row.

        Raises: StoreUnavailable: the database stayed unavailable; the lease expires, and another worker continues.
        """
        jobs, redis = self.store.jobs, self.context.redis
        service = JobService(self.store, RedisQueue(redis) if redis else None)
        if self.ending.is_set():
            if with_retries(lambda: jobs.redeliver(lease)) is not None:
                service.deliver(jobs.get(lease.job))
            return
        claim = with_retries(lambda: jobs.claim(lease, self.context.name))
        if claim is None:
            self._log_unclaimed(lease)
            return
        log_state(lease, "running", kind=claim.job.kind)
        with LeaseKeeper(jobs, lease, fatal=self.turn is None) as keeper, self._deadline(service, lease):
            run_claim = self._sleep if claim.job.kind == "noop" else self._tune
            attempt_outcome = _outcome(jobs, lease, partial(run_claim, claim, keeper))
            state = with_retries(attempt_outcome.record) or state_without_lease(jobs, lease)
        log_state(lease, state, attempt_outcome.error, attempt_outcome.reason)
        if self.ending.is_set():
            service.deliver(jobs.get(lease.job))

    def _log_unclaimed(self, lease: Delivery) -> None:
        """Log why an attempt could not be claimed."""
        try:
            job = self.store.jobs.get(lease.job)
        except NotFound:
            logger.warning("delivery=foreign job=%s reason='it was submitted to another database'", lease.job)
            return
        if job.state == "failed" and job.attempt == lease.attempt:
            log_state(lease, "failed", "StoreError", job.error or "")
        else:
            log_state(lease, "replaced", reason=f"attempt {job.attempt} is {job.state}")

    def wants_loaded(self, request: Mapping[str, Any]) -> bool:
        """Return whether a tuning job's request is for the loaded model, and its files have not changed."""
        try:
            return self._loaded == model_of(self._request(request))
        except InvalidInput:
            # The job's own attempt reports the error.
            return False

    def _belongs_to_engine(self, delivery: Delivery) -> bool:
        """Return whether an engine on this machine will run the attempt."""
        with suppress(NotFound, InvalidInput):
            # Leave errors to the attempt, which reports them.
            job = self.store.jobs.get(delivery.job)
            if delivery.queue == DEFAULT_QUEUE and job.kind == "tune":
                return not self.store.jobs.lock(engine_lock(self._request(job.request)), self.context.name, 0.0)
        return False

    def _next_attempt(self, finished: Delivery) -> Delivery | None:
        """Return the queue's next attempt if `finished` succeeded and the next one uses the same model, else None."""
        jobs = self.store.jobs
        next_delivery = next(iter(jobs.due(self.context.queue, 1)), None)
        if next_delivery is None or jobs.get(finished.job).state != "succeeded":
            return None
        next_job = jobs.get(next_delivery.job)
        return next_delivery if next_job.kind == "tune" and self.wants_loaded(next_job.request) else None

    def _request(self, request_json: Mapping[str, Any]) -> TuneRequest:
        """Return a job's request, with device "auto" replaced by this worker's device."""
        request = TuneRequest.from_json(request_json)
        return replace(request, device=self.context.device) if request.device == "auto" else request

    def _load(self, request: TuneRequest, on_step: Callable[[str], None]) -> Runtime:
        from ..tasks.tune import load_model

        model_asked = model_of(request)
        if self._runtime is None or self._loaded != model_asked:
            self._loaded, self._runtime = model_asked, None  # Free the previous model's memory before loading.
            self._runtime = load_model(request, on_step)
        return self._runtime

    def _tune(self, claim: Claim, keeper: LeaseKeeper) -> None:
        request = self._request(claim.job.request)
        lines = (line.encode() for line in claim.lines.splitlines(keepends=True))
        prompts = parse_stream(lines, f"the stream of job {claim.job.id}", DEFAULT_TASK)
        check_tuning(request, prompts, queued=True)
        from ..tasks.tune import TuningRun  # Imported late, in the child only: it imports torch.

        is_ending, load, turn = self.ending.is_set, self._load, self.turn
        TuningRun(request, prompts, self.store, claim, keeper, lambda event: None, None, is_ending, load, turn).tune()

    def _sleep(self, claim: Claim, keeper: LeaseKeeper) -> None:
        """Run a no-op job: wait for `seconds`; it can be interrupted like a tuning job."""
        seconds = claim.job.request.get("seconds", 0)
        if not isinstance(seconds, int | float):
            raise SettingsError(f"seconds of a no-op job is {seconds!r}: use a number")
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and keeper.wanted != "stop":
            if keeper.lost:
                raise LeaseLost(f"attempt {claim.lease.attempt} of job {claim.lease.job} was replaced: leave it")
            if self.ending.is_set():
                raise HandedBack
            if keeper.wanted == "pause":
                raise Paused
            time.sleep(NOOP_STEP_S)

    @contextmanager
    def _deadline(self, service: JobService, lease: Lease) -> Iterator[None]:
        """Hand the job back at its last checkpoint if no new one is reached within HAND_BACK_S of SIGTERM."""
        is_done = threading.Event()

        def hand_back_late() -> None:
            while not is_done.is_set() and not self.ending.wait(NOOP_STEP_S * 4):
                pass
            if is_done.wait(HAND_BACK_S):
                return
            try:
                if state := service.store.jobs.hand_back(lease, WORKER_ENDS):
                    log_state(lease, state, reason=WORKER_ENDS)
                    service.deliver(service.store.jobs.get(lease.job))
            except SwiftoptError as error:
                # The job could not be handed back. It is retried when its lease runs out.
                log_state(lease, "running", error, str(error))
            finally:
                os._exit(0)

        threading.Thread(target=hand_back_late, name="hand-back", daemon=True).start()
        try:
            yield
        finally:
            is_done.set()


class EngineJobs(Attempts):
    """Runs the default queue's jobs of the model that an engine has loaded, one at a time, in the engine's turns.

    It needs no Redis. A lock in the database keeps this machine's workers from these jobs.
    """

    def __init__(self, model: ServedModel, store: Store, runtime: Runtime, turn: ModelTurn) -> None:
        worker = f"{socket.gethostname()}-{os.getpid()}-engine"
        context = WorkerContext(worker, store.url, "", DEFAULT_QUEUE, model.device, store.jobs.lease_s)
        super().__init__(context, store, threading.Event())
        request = as_request(model)
        self._loaded, self._runtime = model_of(request), runtime
        self._lock, self._engine_turn = engine_lock(request), turn
        self._other_jobs: set[str] = set()  # Ids of waiting jobs for other models, skipped at the next poll.
        self._due_since = 0.0  # Start of the next poll (database clock), because thousands of jobs may wait for days.
        self._lock_renewed_s, self._spare_until = -HOLD_S, 0.0
        self._outage = Outage(logger, "engine=takes no jobs", "engine=takes jobs")
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After `ending` is set: wait until the running job is handed back, and release the lock on jobs."""
        self._thread.join(HAND_BACK_S)
        with suppress(StoreError):
            self.store.jobs.lock(self._lock, self.context.name, 0.0)

    def _run(self) -> None:
        while not self.ending.is_set():
            try:
                self._hold()
                for delivery in self._due():
                    self.run(delivery)
                self._outage.over()
            except SwiftoptError as error:
                # The database cannot be reached, or the job no longer exists.
                # Like the reconciler, expire no leases right after an outage.
                self._spare_until, self._due_since = time.monotonic() + EXPIRY_PAUSE_S, 0.0
                self._outage.failed(error)
            self.ending.wait(LOOK_S)

    def _due(self) -> Iterator[Delivery]:
        """Yield the attempts that wait for this model and have become due since the last poll.

        After an attempt of its own it checks all of them, because a waiting one may have been delivered again.
        """
        waiting = self.store.jobs.due_tunings(DEFAULT_QUEUE, self._due_since)
        if not self._due_since:
            self._other_jobs &= {due_tuning.delivery.job for due_tuning in waiting}
        if waiting:
            self._due_since = waiting[-1].due_at - OVERLAP_S
        for delivery, request, _ in waiting:
            if delivery.job not in self._other_jobs and not self.ending.is_set():
                if self.wants_loaded(request):
                    self._due_since = 0.0
                    yield delivery
                else:
                    self._other_jobs.add(delivery.job)

    def _hold(self) -> None:
        """Renew the lock that keeps this machine's workers off the jobs; without a reconciler, expire lost attempts."""
        if time.monotonic() - self._lock_renewed_s >= HOLD_S / 3:
            self._lock_renewed_s = time.monotonic()
            self.store.jobs.lock(self._lock, self.context.name, HOLD_S)
            if time.monotonic() < self._spare_until:
                return
            # Release the lock at once (0 s): a reconciler, which also delivers jobs, must not be kept waiting.
            if self.store.jobs.lock("reconciler", self.context.name, 0.0):
                self.store.jobs.expire()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with suppress(StoreError):
            self._hold()
        with self._engine_turn():
            yield


def describe(error: BaseException) -> str:
    """Return an error as one sentence for the job's row."""
    text = (str(error) or type(error).__name__).strip().split("\n")[0]
    if isinstance(error, SwiftoptError):
        return text
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"the device ran out of memory ({text}): use a smaller model, dtype or batch, or a larger device"
    return f"{type(error).__name__}: {text}"


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended; `record` writes it to the job's row and returns the job's state (None: lease lost)."""

    record: Callable[[], JobState | None]
    error: BaseException | str = ""
    reason: str = ""


def _outcome(jobs: Jobs, lease: Lease, run_claim: Callable[[], None]) -> AttemptOutcome:
    """Do the work; return how it ended."""
    try:
        run_claim()
    except (HandedBack, Cancelled):
        return AttemptOutcome(partial(jobs.hand_back, lease, WORKER_ENDS), reason=WORKER_ENDS)
    except Paused:
        # `hand_back` pauses the job, or requeues it if it was resumed in the meantime.
        return AttemptOutcome(partial(jobs.hand_back, lease, "resumed before it paused"), reason="on request")
    except LeaseLost as error:
        return AttemptOutcome(lambda: None, reason=str(error))
    except Exception as error:
        reason = describe(error)
        if isinstance(error, InvalidInput | NotFound) and not isinstance(error, TEMPORARY_ERRORS):
            # Do not retry: another attempt would fail in the same way.
            return AttemptOutcome(partial(jobs.end, lease, "failed", reason), error, reason)
        return AttemptOutcome(partial(jobs.attempt_failed, lease, reason), error, reason)
    return AttemptOutcome(partial(jobs.end, lease, "succeeded"))
