"""Jobs through the database, delivered by Redis at once where it answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..core.errors import ServiceUnreachable
from ..core.events import PromptFinished
from ..core.jobs import DEFAULT_QUEUE, Delivery, Job, JobEvent, JobSpec, JobState, Verb
from ..core.requests import TuneRequest
from ..core.types import Prompt
from ..store import Store
from ..tasks.job import tune_spec
from .redis_queue import RedisQueue

logger = logging.getLogger(__name__)


class JobService:
    """`JobBoard` of those who reach the database; without a queue, or with Redis away, submitted jobs wait for both.

    Raises: StoreError: in every method, when the database cannot be used.
    """

    def __init__(self, store: Store, queue: RedisQueue | None) -> None:
        self.store = store
        self.queue = queue

    def submit(
        self,
        request: TuneRequest,
        prompts: Sequence[Prompt],
        queue: str = DEFAULT_QUEUE,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """The job for the request on these prompts, and whether it is new; the row is written before Redis is asked.

        Raises: Conflict: the idempotency key was used for something else.
        """
        return self.submit_spec(tune_spec(request, prompts, queue, idempotency_key))

    def submit_spec(self, spec: JobSpec) -> tuple[Job, bool]:
        """As `submit`, for a job of any kind."""
        job, is_new = self.store.jobs.submit(spec)
        if is_new:
            self.deliver(job)
        return job, is_new

    def get(self, job: str) -> Job:
        """One job as it is now."""
        return self.store.jobs.get(job)

    def latest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs first."""
        return self.store.jobs.latest(state, limit)

    def act(self, job: str, verb: Verb) -> Job:
        """Pause, resume, stop, cancel or retry; a job that is queued by it is delivered at once."""
        found = self.store.jobs.act(job, verb)
        if found.state == "queued":
            self.deliver(found)
        return found

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """What the job reported behind event number `after`, oldest first."""
        return self.store.jobs.events(job, after, limit)

    def outputs(self, job: str) -> list[PromptFinished]:
        """The finished completions in the order of the stream."""
        return self.store.jobs.outputs(job)

    def deliver(self, job: Job) -> None:
        """Hand the attempt to Redis; where that fails, the reconciler does it when Redis is back."""
        if self.queue is None or job.queue is None:
            return
        try:
            self.queue.deliver(Delivery(job.id, job.attempt, job.queue))
        except ServiceUnreachable as error:
            logger.warning("delivery=postponed job=%s reason=%r", job.id, str(error))
