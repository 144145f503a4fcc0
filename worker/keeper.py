"""Keeps a lease alive beside the work, and hears what the job is asked to do."""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType

from ..core.errors import LeaseLost, StoreError
from ..core.jobs import Lease, Wanted
from ..store.jobs import Jobs

PEEK_S = 1.0  # between two looks at what the job is asked to do
RENEW_S = 5.0  # between two renewals
GRACE_S = 0.5  # that the work gets to notice that its lease is lost, before the process ends

logger = logging.getLogger(__name__)


class HandedBack(Exception):
    """The worker is to end: the job goes on elsewhere from its last checkpoint."""


class Paused(Exception):
    """The job is to rest: it goes on from its last checkpoint when it is resumed."""


class LeaseKeeper:
    """A thread that renews a lease; to be used as a context manager around the work.

    `wanted` is what the job is asked to do, `lost` whether the attempt was replaced or its job has ended. With `fatal`
    the process ends then, `GRACE_S` later, whatever it is doing: the device belongs to somebody else now.
    """

    def __init__(self, jobs: Jobs, lease: Lease, *, fatal: bool) -> None:
        self.wanted: Wanted | None = None
        self.lost = False
        self._jobs, self._lease, self._fatal = jobs, lease, fatal
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        renewed = time.monotonic()
        renew_s = min(RENEW_S, self._jobs.lease_s / 4)
        while not self._done.wait(min(PEEK_S, renew_s)):
            try:
                if time.monotonic() - renewed >= renew_s:
                    self.wanted = self._jobs.renew(self._lease)
                    renewed = time.monotonic()
                else:
                    self.wanted = self._jobs.peek(self._lease)
            except LeaseLost:
                self.lost = True
                break
            except StoreError as error:  # the lease may run out, but nobody can take the job without the database
                logger.warning("lease=not renewed job=%s reason=%r", self._lease.job, str(error))
        if self.lost and self._fatal and not self._done.wait(GRACE_S):
            logger.warning("attempt=replaced job=%s attempt=%d", self._lease.job, self._lease.attempt)
            os._exit(0)
