"""Support for tasks that run as jobs: job descriptions, lease renewal, and retries during database outages."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from ..core.errors import LeaseLost, StoreError, StoreUnavailable, SwiftoptError
from ..core.logs import Outage
from ..core.requests import JobSpec, Lease, TuneRequest, Wanted
from ..core.streams import stream_lines, stream_sha256
from ..core.types import Prompt

if TYPE_CHECKING:
    from ..store import Jobs

PEEK_S = 1.0  # Seconds between two reads of the verb (pause, stop, …) that a user sent to the job.
RENEW_S = 5.0  # Seconds between two renewals of the lease.
GRACE_S = 0.5  # Seconds for the work to stop after its lease was lost, before the process is killed.
# Longest wait for an unreachable database. Then the attempt fails, and another worker continues the job.
PATIENCE_S = 600.0
MAX_RETRY_INTERVAL_S = 5.0  # Maximum seconds between two tries of a query.

ModelTurn = Callable[[], AbstractContextManager[None]]  # Context in which only the calling thread may use the model.
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Cancelled(SwiftoptError):
    """The request was cancelled, or its engine closed."""


class HandedBack(Exception):
    """The worker is ending: another one continues the job from its last checkpoint."""


class Paused(Exception):
    """The job was paused: it continues from its last checkpoint when it is resumed."""


class LeaseKeeper:
    """Renews a lease in a thread while the work runs in its context.

    `wanted` is the latest verb that was sent to the job. `lost` is true once the attempt was replaced or its job has
    ended.

    Args: fatal: kill the process GRACE_S after the lease was lost, because another process may use the device now.
    """

    def __init__(self, jobs: Jobs, lease: Lease, *, fatal: bool) -> None:
        self.wanted: Wanted | None = None
        self.lost = False
        self._jobs, self._lease, self._fatal = jobs, lease, fatal
        self._outage = Outage(logger, f"lease=not renewed job={lease.job}", f"lease=renewed job={lease.job}")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        renewed_s = time.monotonic()
        renew_s = min(RENEW_S, self._jobs.lease_s / 4)
        while not self._done.wait(min(PEEK_S, renew_s)):
            try:
                if time.monotonic() - renewed_s >= renew_s:
                    self.wanted = self._jobs.renew(self._lease)
                    renewed_s = time.monotonic()
                else:
                    self.wanted = self._jobs.peek(self._lease)
                self._outage.over()
            except LeaseLost:
                self.lost = True
                break
            except StoreError as error:
                # The work goes on: without the database, no other worker can take the job either.
                self._outage.failed(error)
        if self.lost and self._fatal and not self._done.wait(GRACE_S):
            log_state(self._lease, state_without_lease(self._jobs, self._lease))
            os._exit(0)


def state_without_lease(jobs: Jobs, lease: Lease) -> str:
    """Return the state to log for an attempt whose lease was lost."""
    with suppress(SwiftoptError):
        if jobs.get(lease.job).state == "cancelled":
            return "cancelled"
    return "replaced"


def log_state(lease: Lease, state: str, error: BaseException | str = "", reason: str = "", **fields: object) -> None:
    """Log the state of a job's attempt as one line of key=value pairs, with the traceback of an unexpected error.

    Args:   error: an exception, logged by its class name, or a text. fields: further key=value pairs.
    """
    values = {"job": lease.job, "attempt": lease.attempt, "state": state, **fields}
    if error:
        values["error"] = error if isinstance(error, str) else type(error).__name__
    text = " ".join(f"{key}={value}" for key, value in values.items()) + (f" reason={reason!r}" if reason else "")
    level = logging.ERROR if state == "failed" else logging.WARNING if error else logging.INFO
    traced_error = None if isinstance(error, str | SwiftoptError) else error
    logger.log(level, "%s", text, exc_info=traced_error)


def with_retries(query: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Return the result of `query`; retry it while the database is unreachable.

    Raises: StoreUnavailable: the database stayed unreachable for `patience_s`.
    """

    def log(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        logger.warning("database=away try=%d reason=%r", state.attempt_number, str(error))

    attempts = Retrying(
        retry=retry_if_exception_type(StoreUnavailable),
        wait=wait_random_exponential(multiplier=0.2, max=MAX_RETRY_INTERVAL_S),
        stop=stop_after_delay(patience_s),
        before_sleep=log,
        reraise=True,
    )
    return attempts(query)


def tune_spec(
    request: TuneRequest, prompts: Sequence[Prompt], queue: str | None, idempotency_key: str | None = None
) -> JobSpec:
    """Return a tuning job for the store: the request with its prompts, so that workers need no stream file.

    A local path of a model is made absolute, because workers run in other folders.
    """
    if os.path.exists(path := os.path.expanduser(request.model)):
        request = replace(request, model=os.path.abspath(path))
    return JobSpec(
        kind="tune",
        queue=queue,
        request=request.to_json(),
        stream=stream_sha256(prompts),
        lines=stream_lines(prompts),
        n_prompts=len(prompts),
        idempotency_key=idempotency_key,
    )
