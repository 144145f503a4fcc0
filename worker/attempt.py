"""Attempts of jobs, as a worker's child runs them: claim one, work under its lease, and record how it ended."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import DeviceMissing, InvalidInput, LeaseLost, NotFound, SettingsError, SwiftoptError
from ..core.requests import DEFAULT_QUEUE, Delivery, Lease, TuneRequest
from ..core.streams import parse_stream
from ..core.types import DEFAULT_TASK
from ..store import LEASE_S, Claim, Jobs, Store
from ..tasks.job import HandedBack, LeaseKeeper, Paused, patiently
from .queue import JobService, RedisQueue

if TYPE_CHECKING:
    from ..models.runtime import Runtime

MOST_IN_A_ROW = 100  # attempts of one child
HAND_BACK_S = 5.0  # after SIGTERM, until the next checkpoint; without one the job goes on from its last
NOOP_STEP_S = 0.05

Turn = Callable[[], AbstractContextManager[None]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Name, services and device of a worker; `device` replaces "auto" in requests.

    `redis` "": no queue is told of a job that is handed back, and the reconciler finds it. `lease_s`: seconds without a
    renewal after which its attempts count as lost.
    """

    name: str
    database: str
    redis: str
    queue: str
    device: str = "auto"
    lease_s: float = LEASE_S


class KeptModel:
    """The model that was loaded last, for the next job that wants it.

    Args: runtime: one that is loaded already, the model of `request`.
    """

    def __init__(self, request: TuneRequest | None = None, runtime: Runtime | None = None) -> None:
        self._wanted = None if request is None else _model_of(request)
        self._runtime = runtime

    def is_wanted_by(self, request: TuneRequest) -> bool:
        """Return whether a request wants that very model, and its files are as they were."""
        return self._wanted == _model_of(request)

    def load(self, request: TuneRequest, on_step: Callable[[str], None]) -> Runtime:
        """Return the model of a request.

        Raises: ModelNotFound, UnsupportedModel, SettingsError: see `swiftopt.models.loading.load`.
        """
        gc.disable()  # as in `__main__`
        from ..tasks.tune import load_model  # imports torch, so only in the child

        gc.enable()

        if self._runtime is None or not self.is_wanted_by(request):
            self._wanted, self._runtime = _model_of(request), None  # the one before gives its memory back first
            self._runtime = load_model(request, on_step)
        return self._runtime


def _model_of(request: TuneRequest) -> tuple[Any, ...]:
    """Return what distinguishes a request's model; where it is a path, also the time of its newest file."""
    path, changed, place = Path(request.model), 0, request.model
    with suppress(OSError):  # loading says what is wrong
        files = [path, *path.iterdir()] if path.is_dir() else [path] if path.is_file() else []
        changed = max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)
        place = str(path.resolve()) if files else place
    return place, request.dtype, request.device, request.speed, changed


def engine_lock(request: TuneRequest) -> str:
    """Return the name of the lock that an engine of this machine holds on jobs of its model."""
    model = hashlib.sha256(repr(_model_of(request)).encode()).hexdigest()
    return f"engine {socket.gethostname()} {model}"


def run_attempts(
    context: WorkerContext,
    store: Store,
    first: Delivery,
    ending: threading.Event,
    on_begin: Callable[[Delivery], None],
) -> None:
    """Run an attempt, and as long as it succeeds that of the queue's next job, if that wants the model that is loaded.

    One whose model an engine of this machine has loaded is left to that engine, which looks for it.

    Args: on_begin: told of each attempt before it begins. Otherwise as `run_attempt`.
    """
    kept, delivery = KeptModel(), first
    for _ in range(MOST_IN_A_ROW):
        if patiently(partial(_is_engines, context, store, delivery)):
            logger.info("attempt=left job=%s attempt=%d reason='its model is served'", delivery.job, delivery.attempt)
            return
        on_begin(delivery)
        run_attempt(context, store, delivery, ending, kept)
        following = None if ending.is_set() else patiently(partial(_following, context, store, delivery, kept))
        if following is None:
            return
        delivery = following


def _is_engines(context: WorkerContext, store: Store, delivery: Delivery) -> bool:
    """Return whether an engine of this machine takes the attempt."""
    try:
        job = store.jobs.get(delivery.job)
        if delivery.queue != DEFAULT_QUEUE or job.kind != "tune":
            return False
        return not store.jobs.lock(engine_lock(request_of(context, job.request)), context.name, 0.0)
    except (NotFound, InvalidInput):  # the attempt itself says so
        return False


def _following(context: WorkerContext, store: Store, done: Delivery, kept: KeptModel) -> Delivery | None:
    """Return the queue's next attempt if the one before succeeded and the next wants its model, else None."""
    following = next((each for each in store.jobs.due() if each.queue == context.queue), None)
    if following is None or store.jobs.get(done.job).state != "succeeded":
        return None
    job = store.jobs.get(following.job)
    try:
        is_alike = job.kind == "tune" and kept.is_wanted_by(request_of(context, job.request))
    except InvalidInput:  # its own attempt says so
        return None
    return following if is_alike else None


def request_of(context: WorkerContext, values: Mapping[str, Any]) -> TuneRequest:
    """Return a job's request, on this worker's device."""
    request = TuneRequest.from_json(values)
    return replace(request, device=context.device) if request.device == "auto" else request


def run_attempt(
    context: WorkerContext,
    store: Store,
    delivery: Delivery,
    ending: threading.Event,
    kept: KeptModel,
    turn: Turn | None = None,
) -> None:
    """Claim and run one attempt, and write its outcome to the job's row; `ending` is set when this process is to end.

    Args:   turn: of an engine that decodes with the same model, see `TuningRun`; a lost lease does not end its process.
    Raises: StoreUnavailable: the database stayed away; the lease runs out, and another worker goes on.
    """
    service = JobService(store, RedisQueue(context.redis) if context.redis else None)
    lease = Lease(delivery.job, delivery.attempt)
    if ending.is_set():
        if patiently(lambda: store.jobs.redeliver(delivery)) is not None:
            service.deliver(store.jobs.get(lease.job))
        return
    claim = patiently(lambda: store.jobs.claim(lease, context.name))
    if claim is None:
        _tell_overtaken(store, lease)
        return
    logger.info("attempt=begun job=%s attempt=%d kind=%s", lease.job, lease.attempt, claim.job.kind)
    with LeaseKeeper(store.jobs, lease, fatal=turn is None) as keeper, _deadline(service, lease, ending):
        work = partial(_tune, context, store, kept, turn) if claim.job.kind != "noop" else _sleep
        patiently(_outcome(store.jobs, lease, partial(work, claim, keeper, ending)))
    logger.info("attempt=over job=%s attempt=%d", lease.job, lease.attempt)
    if ending.is_set():
        service.deliver(store.jobs.get(lease.job))


def _tell_overtaken(store: Store, lease: Lease) -> None:
    try:
        store.jobs.get(lease.job)
        logger.info("attempt=overtaken job=%s attempt=%d", lease.job, lease.attempt)
    except NotFound:
        logger.warning("delivery=foreign job=%s reason='whoever submitted it has another database'", lease.job)


def describe(error: BaseException) -> str:
    """Return what went wrong as one sentence for the job's row."""
    text = (str(error) or type(error).__name__).strip().split("\n")[0]
    if isinstance(error, SwiftoptError):
        return text
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"the device ran out of memory ({text}): use a smaller model, dtype or batch, or a larger device"
    return f"{type(error).__name__}: {text}"


def _outcome(jobs: Jobs, lease: Lease, work: Callable[[], None]) -> Callable[[], bool]:
    """Do the work; return the call that records its outcome."""
    try:
        work()
    except HandedBack:
        return partial(jobs.hand_back, lease, "its worker is ending")
    except Paused:
        return partial(jobs.hand_back, lease, "resumed before it rested")  # it rests, unless somebody was faster
    except LeaseLost as error:
        logger.warning("attempt=replaced job=%s attempt=%d reason=%r", lease.job, lease.attempt, str(error))
        return lambda: False
    except DeviceMissing as error:  # another worker may have it
        return partial(jobs.attempt_failed, lease, describe(error))
    except InvalidInput as error:  # the same on every worker: another attempt would end alike
        return partial(jobs.end, lease, "failed", str(error))
    except Exception as error:
        logger.exception("attempt=failed job=%s attempt=%d", lease.job, lease.attempt)
        return partial(jobs.attempt_failed, lease, describe(error))
    return partial(jobs.end, lease, "succeeded")


def _tune(
    context: WorkerContext,
    store: Store,
    kept: KeptModel,
    turn: Turn | None,
    claim: Claim,
    keeper: LeaseKeeper,
    ending: threading.Event,
) -> None:
    request = request_of(context, claim.job.request)
    lines = (line.encode() for line in claim.lines.splitlines(keepends=True))
    prompts = parse_stream(lines, f"the stream of job {claim.job.id}", DEFAULT_TASK)
    from ..tasks.tune import TuningRun, check_room

    check_room(request, prompts)
    run = TuningRun(
        request, prompts, store, claim, keeper, lambda event: None, ending=ending.is_set, load=kept.load, turn=turn
    )
    run.tune()


def _sleep(claim: Claim, keeper: LeaseKeeper, ending: threading.Event) -> None:
    """Run a no-op job: wait for `seconds`, as interruptible as a tuning job."""
    seconds = claim.job.request.get("seconds", 0)
    if not isinstance(seconds, int | float):
        raise SettingsError(f"seconds of a no-op job is {seconds!r}: use a number")
    until = time.monotonic() + seconds
    while time.monotonic() < until and keeper.wanted != "stop":
        if keeper.lost:
            raise LeaseLost(f"attempt {claim.lease.attempt} of job {claim.lease.job} was replaced: leave it")
        if ending.is_set():
            raise HandedBack
        if keeper.wanted == "pause":
            raise Paused
        time.sleep(NOOP_STEP_S)


@contextmanager
def _deadline(service: JobService, lease: Lease, ending: threading.Event) -> Iterator[None]:
    """Hand the job back at its last checkpoint if the work reaches no new one soon after SIGTERM."""
    done = threading.Event()

    def wait() -> None:
        while not done.is_set():
            if ending.wait(NOOP_STEP_S * 4):
                break
        if done.wait(HAND_BACK_S):
            return
        try:
            if service.store.jobs.hand_back(lease, "its worker is ending"):
                service.deliver(service.store.jobs.get(lease.job))
        except SwiftoptError as error:  # the lease runs out instead
            logger.warning("attempt=left job=%s reason=%r", lease.job, str(error))
        finally:
            os._exit(0)

    threading.Thread(target=wait, name="hand-back", daemon=True).start()
    try:
        yield
    finally:
        done.set()
