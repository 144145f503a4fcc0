"""The job table as an object: what front doors, the reconciler and a running attempt do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from ..core.errors import StoreError
from ..core.events import Event, PromptFinished, TaskFinished
from ..core.jobs import Delivery, Job, JobEvent, JobSpec, JobState, Lease, Promotion, Verb, Wanted
from ..core.times import now
from ..core.types import Trial
from . import counters, delivering, job_rows, ledger, locks, verbs
from .counters import Count
from .tables import JobRow, StreamRow
from .transactions import Transactions

LEASE_S = 20.0  # seconds without a renewal after which an attempt counts as lost


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a worker has taken, with everything that an earlier attempt left to go on from."""

    job: Job
    lease: Lease
    n_checkpoints: int
    lines: str
    snapshot: Mapping[str, Any] | None
    trials: Mapping[str, Sequence[Trial]]


class Jobs:
    """Jobs, their events, completions and counters; every write of an attempt is fenced by its lease.

    Raises: StoreError: in every method, when the database cannot be used.
    """

    def __init__(self, transactions: Transactions, lease_s: float = LEASE_S) -> None:
        self._do = transactions
        self.lease_s = lease_s

    # --- front doors ---

    def submit(self, spec: JobSpec) -> tuple[Job, bool]:
        """The job for `spec`, and whether it is new: an unfinished one with the same fingerprint is the same job.

        Raises: Conflict: its idempotency key was used for something else.
        """

        def work(session: Session) -> tuple[Job, bool]:
            row, is_new = delivering.submit(session, spec)
            return job_rows.values(session, [row])[0], is_new

        return self._do.write(work)

    def get(self, job: str) -> Job:
        """One job.

        Raises: NotFound: no such job; it names the nearest.
        """
        return self._do.read(lambda s: job_rows.values(s, [job_rows.find(s, job)])[0])

    def latest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs first."""

        def work(session: Session) -> list[Job]:
            query = select(JobRow).order_by(JobRow.created_at.desc(), JobRow.id).limit(limit)
            query = query if state is None else query.where(JobRow.state == state)
            return job_rows.values(session, session.scalars(query).all())

        return self._do.read(work)

    def act(self, job: str, verb: Verb) -> Job:
        """Pause, resume, stop, cancel or retry a job; the job as it is then.

        Raises: NotFound: no such job. Conflict: it is not in a state for that.
        """
        return self._do.write(lambda s: job_rows.values(s, [verbs.act(s, job, verb)])[0])

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """What the job reported behind event number `after`, oldest first.

        Raises: NotFound: no such job.
        """

        def work(session: Session) -> list[JobEvent]:
            job_rows.find(session, job)
            return ledger.list_events(session, job, after, limit)

        return self._do.read(work)

    def outputs(self, job: str) -> list[PromptFinished]:
        """The finished completions in the order of the stream.

        Raises: NotFound: no such job.
        """

        def work(session: Session) -> list[PromptFinished]:
            job_rows.find(session, job)
            return ledger.list_outputs(session, job)

        return self._do.read(work)

    def save_stream(self, sha256: str, lines: str) -> None:
        """Keep an uploaded stream, once per content."""

        def work(session: Session) -> None:
            if session.get(StreamRow, sha256) is None:
                session.add(StreamRow(sha256=sha256, lines=lines, created_at=now()))

        self._do.write(work)

    def stream(self, sha256: str) -> str | None:
        """A kept stream as JSON Lines; None if there is none of that content."""
        return self._do.read(lambda s: s.scalar(select(StreamRow.lines).where(StreamRow.sha256 == sha256)))

    def counts(self) -> list[Count]:
        """The counters of the metrics page."""
        return self._do.read(counters.read)

    def states(self) -> dict[str, int]:
        """How many jobs are in each state."""
        return self._do.read(ledger.count_by_state)

    def ping(self) -> None:
        """Whether the database answers."""
        self._do.read(lambda session: session.execute(text("SELECT 1")))

    # --- delivery ---

    def due(self) -> list[Delivery]:
        """Queued attempts whose time has come, oldest first."""
        return self._do.read(delivering.due)

    def redeliver(self, lost: Delivery) -> Delivery | None:
        """A new attempt in place of one that the queue has lost; None if a worker has it."""

        def work(session: Session) -> Delivery | None:
            new = delivering.redeliver(session, lost)
            if new is not None:
                counters.count(session, "reconciled", label="redelivered")
            return new

        return self._do.write(work)

    def expire(self) -> list[Lease]:
        """End every attempt whose lease ran out: its job is queued again, or has failed."""

        def lose(session: Session, lease: Lease, worker: str | None) -> bool:
            lost = delivering.attempt_lost(session, lease, worker)
            if lost:
                counters.count(session, "reconciled", label="expired")
            return lost

        found = self._do.read(delivering.expired)
        return [
            lease
            for lease, worker in found
            if self._do.write(lambda s, of=lease, by=worker: lose(s, of, by))  # type: ignore[misc]
        ]

    def lock(self, name: str, owner: str, seconds: float) -> bool:
        """Whether `owner` may do what `name` stands for, for that long; nobody else may meanwhile."""
        return self._do.write(lambda session: locks.take(session, name, owner, seconds))

    # --- a running attempt ---

    def begin_here(self, spec: JobSpec, worker: str) -> Claim:
        """A new job that this process runs itself, without a queue."""

        def work(session: Session) -> Claim:
            row = delivering.begin_here(session, spec, worker, self.lease_s)
            job = job_rows.values(session, [row])[0]
            return Claim(job, Lease(job.id, job.attempt), 0, spec.lines or "", None, {})

        return self._do.write(work)

    def claim(self, lease: Lease, worker: str) -> Claim | None:
        """Take a queued attempt; None if somebody else has, or it was replaced.

        A job whose row cannot be read fails here, with the reason, and nobody gets it: None.
        """

        def work(session: Session) -> Claim | None:
            if not delivering.claim(session, lease, worker, self.lease_s):
                return None
            lines = delivering.stream_lines(session, lease.job) or ""
            try:
                row = job_rows.find(session, lease.job)
                session.refresh(row)
                job_rows.check(row)
                trials = ledger.trials_by_task(session, lease.job)
            except (StoreError, JSONDecodeError) as error:
                delivering.end(session, lease, "failed", job_rows.unreadable(lease.job, error))
                return None
            job = job_rows.values(session, [row])[0]
            return Claim(job, lease, row.n_checkpoints, lines, row.snapshot, trials)

        return self._do.write(work)

    def renew(self, lease: Lease) -> Wanted | None:
        """Show that the attempt is alive; what the job is asked to do.

        Raises: LeaseLost: the attempt was replaced, or the job has ended.
        """
        return self._do.write(lambda session: ledger.hold(session, lease, self.lease_s))

    def peek(self, lease: Lease) -> Wanted | None:
        """What the job is asked to do, without a renewal.

        Raises: LeaseLost: as `renew`.
        """
        return self._do.read(lambda session: ledger.peek(session, lease))

    def show(self, lease: Lease, progress: Mapping[str, Any]) -> Wanted | None:
        """Renew, and let others see how far it is.

        Raises: LeaseLost: as `renew`.
        """
        return self._do.write(lambda s: ledger.hold(s, lease, self.lease_s, progress=dict(progress)))

    def note(self, lease: Lease, events: Sequence[Event]) -> Wanted | None:
        """Add events that bring nothing to go on from.

        Raises: LeaseLost: as `renew`.
        """
        return self._do.write(lambda session: ledger.note(session, lease, self.lease_s, events))

    def checkpoint(
        self,
        lease: Lease,
        number: int,
        events: Sequence[Event],
        snapshot: Mapping[str, Any] | None,
        progress: Mapping[str, Any] | None = None,
    ) -> Wanted | None:
        """Events with their trials and completions, and where to go on from, all or nothing.

        `number` counts the job's checkpoints with this one; one that was written already is not written again.

        Raises: LeaseLost: as `renew`.
        """
        return self._do.write(lambda s: ledger.checkpoint(s, lease, self.lease_s, number, events, snapshot, progress))

    def finish_task(
        self,
        lease: Lease,
        number: int,
        task: TaskFinished,
        method: str,
        promotion: Promotion,
        snapshot: Mapping[str, Any],
    ) -> TaskFinished:
        """Store a task's layer set; `promotion` says whether look-ups find it from now on.

        Raises: LeaseLost: as `renew`. LayerSetError: the model has another number of layers.
        """
        return self._do.write(
            lambda session: ledger.finish_task(session, lease, self.lease_s, number, task, method, promotion, snapshot)
        )

    def hand_back(self, lease: Lease, reason: str) -> bool:
        """Queue the job again for another worker; False if the lease was lost."""
        return self._do.write(lambda session: delivering.hand_back(session, lease, reason))

    def end(self, lease: Lease, state: JobState, error: str | None = None) -> bool:
        """The end of the job, or its pause; False if the lease was lost."""
        return self._do.write(lambda session: delivering.end(session, lease, state, error))

    def attempt_failed(self, lease: Lease, error: str) -> bool:
        """Queue the job again after a while, or end it when attempts come no further; False if the lease was lost."""
        return self._do.write(lambda session: delivering.attempt_failed(session, lease, error))
