"""Bring Redis and SQL into agreement: after lost workers, a flushed or restarted Redis, and outages of either."""

from __future__ import annotations

import logging
import threading
import time

from ..core.errors import ServiceUnreachable, StoreError
from ..core.jobs import Delivery
from ..store import Jobs
from .queue import RedisQueue

PERIOD_S = 5.0  # between two passes
LOCK_S = 15.0  # after which another process may reconcile in place of one that died
# An attempt that left its queue and is not claimed within this time was lost on the way; a worker needs far less.
CLAIM_S = 8.0
# After an outage of the database, workers that could not renew their leases get this long to do so.
SPARE_S = 15.0

logger = logging.getLogger(__name__)


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
            for lease in self._jobs.expire():
                logger.warning("attempt=lost job=%s attempt=%d", lease.job, lease.attempt)
        due = self._jobs.due()
        waiting: set[str] = set()
        for queue in {delivery.queue for delivery in due}:
            waiting |= self._queue.waiting(queue)
        absent = [delivery for delivery in due if delivery.id not in waiting]
        known = {delivery.id for delivery in absent}
        self._missing_since = {key: since for key, since in self._missing_since.items() if key in known}
        for delivery in absent:
            try:
                self._bring(delivery)
            except ValueError as error:  # an id or queue that was changed by hand; the others must not wait for it
                logger.warning(
                    "delivery=impossible job=%r queue=%r reason=%r", delivery.job, delivery.queue, str(error)
                )

    def run(self, stop: threading.Event) -> None:
        """Run a pass every PERIOD_S until `stop` is set; outages of Redis or the database are logged."""
        while not stop.wait(PERIOD_S):
            self.try_step()

    def try_step(self) -> None:
        """Run a pass; log its failure."""
        try:
            self.step()
        except (StoreError, ServiceUnreachable) as error:
            if isinstance(error, StoreError):
                self._spare_until = time.monotonic() + SPARE_S
            logger.warning("reconciler=waiting reason=%r", str(error))

    def _bring(self, delivery: Delivery) -> None:
        """Deliver an attempt; if rq knows it, a worker is about to claim it or died before it could."""
        since = self._missing_since.setdefault(delivery.id, time.monotonic())
        if self._queue.deliver(delivery):
            logger.info("delivered job=%s attempt=%d queue=%s", delivery.job, delivery.attempt, delivery.queue)
        elif time.monotonic() - since >= CLAIM_S:
            again = self._jobs.redeliver(delivery)
            if again is not None:
                self._queue.deliver(again)
                logger.warning("redelivered job=%s attempt=%d queue=%s", again.job, again.attempt, again.queue)
