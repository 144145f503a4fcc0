"""One attempt of a job, as a worker's child runs it: claim it, work under its lease, and record how it ended."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ..core.errors import DeviceMissing, InvalidInput, LeaseLost, NotFound, SettingsError, SwiftoptError
from ..core.jobs import Delivery, Lease
from ..core.requests import TuneRequest
from ..core.streams import parse_stream
from ..store import LEASE_S, Claim, Store
from ..tasks.job import HandedBack, LeaseKeeper, Paused, patiently
from .queue import JobService, RedisQueue

HAND_BACK_S = 5.0  # after SIGTERM, until the next checkpoint; without one the job goes on from its last
NOOP_STEP_S = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Name, services and device of a worker; `device` replaces "auto" in requests.

    `lease_s`: seconds without a renewal after which its attempts count as lost.
    """

    name: str
    database: str
    redis: str
    queue: str
    device: str = "auto"
    lease_s: float = LEASE_S


def run_attempt(context: WorkerContext, store: Store, delivery: Delivery, ending: threading.Event) -> None:
    """Claim and run one attempt, and write its outcome to the job's row; `ending` is set when this process is to end.

    Raises: StoreUnavailable: the database stayed away; the lease runs out, and another worker goes on.
    """
    service = JobService(store, RedisQueue(context.redis))
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
    with LeaseKeeper(store.jobs, lease, fatal=True) as keeper, _deadline(service, lease, ending):
        patiently(_outcome(context, store, claim, keeper, ending))
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


def _outcome(
    context: WorkerContext, store: Store, claim: Claim, keeper: LeaseKeeper, ending: threading.Event
) -> Callable[[], bool]:
    """Do the work; return the call that records its outcome."""
    jobs, lease = store.jobs, claim.lease
    try:
        if claim.job.kind == "noop":
            _sleep(claim, keeper, ending)
        else:
            _tune(context, store, claim, keeper, ending)
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


def _tune(context: WorkerContext, store: Store, claim: Claim, keeper: LeaseKeeper, ending: threading.Event) -> None:
    request = TuneRequest.from_json(claim.job.request)
    if request.device == "auto":
        request = replace(request, device=context.device)
    lines = (line.encode() for line in claim.lines.splitlines(keepends=True))
    prompts = parse_stream(lines, f"the stream of job {claim.job.id}", "default")
    from ..tasks.tune import TuningRun, check_room  # imports torch, so only in the child

    check_room(request, prompts)
    TuningRun(request, prompts, store, claim, keeper, lambda event: None, ending=ending.is_set).tune()


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
