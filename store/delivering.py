"""From submission to a worker and back: which attempt of a job is due, who holds it, and what its end means.

Every change is one UPDATE that names the state and attempt it expects; one that finds 0 rows was overtaken.
"""

from __future__ import annotations

import random
import secrets

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session, load_only

from ..core.errors import Conflict
from ..core.events import StateChanged
from ..core.jobs import UNFINISHED, Delivery, JobSpec, JobState, Lease
from ..core.times import now
from . import rows
from .clock import clock_s
from .counters import count
from .job_rows import report, storable
from .tables import JobRow, StreamRow

MAX_FRUITLESS = 3  # attempts in a row that ended without a new checkpoint, after which a job has failed
# What decides where a job goes; a request or snapshot that was changed by hand must not keep it, and others, from that.
WITHOUT_JSON = load_only(
    JobRow.queue, JobRow.wanted, JobRow.n_checkpoints, JobRow.n_checkpoints_before, JobRow.n_fruitless
)
BACKOFF_S, MAX_BACKOFF_S = 2.0, 60.0  # before the attempt after the first fruitless one; doubled for each further one


def submit(session: Session, spec: JobSpec) -> tuple[JobRow, bool]:
    """The job for `spec`, and whether it is new: an unfinished one with the same fingerprint is the same job.

    Raises: Conflict: the idempotency key was used for something else.
    """
    if spec.idempotency_key is not None:
        known = session.scalar(select(JobRow).where(JobRow.idempotency_key == spec.idempotency_key))
        if known is not None:
            if known.fingerprint != spec.fingerprint:
                raise Conflict(
                    f"the idempotency key {spec.idempotency_key!r} belongs to job {known.id} with other values:"
                    " use a new key"
                )
            return known, False
    same = select(JobRow).where(JobRow.fingerprint == spec.fingerprint, JobRow.state.in_(UNFINISHED))
    known = session.scalar(same)
    if known is not None:
        known.idempotency_key = known.idempotency_key or spec.idempotency_key
        return known, False
    return _insert(session, spec, "queued"), True


def begin_here(session: Session, spec: JobSpec, worker: str, lease_s: float) -> JobRow:
    """A job that runs in this process from the start; it is never delivered, nor held back by one that is alike."""
    row = _insert(session, spec, "running")
    row.worker, row.started_at, row.fingerprint = worker, now(), None
    session.flush()
    session.execute(update(JobRow).where(JobRow.id == row.id).values(lease_until=clock_s() + lease_s))
    session.refresh(row)
    return row


def claim(session: Session, lease: Lease, worker: str, lease_s: float) -> bool:
    """Take a queued attempt; False if it is not there (any more)."""
    taken = _change(
        session,
        lease,
        JobRow.state == "queued",
        state="running",
        worker=worker,
        lease_until=clock_s() + lease_s,
        n_checkpoints_before=JobRow.n_checkpoints,
    )
    if taken:
        first = update(JobRow).where(JobRow.id == lease.job, JobRow.started_at.is_(None))
        session.execute(first.values(started_at=now()))
        report(session, lease.job, StateChanged("running", lease.attempt, f"on {worker}"))
        count(session, "attempts", label="started")
    return taken


def due(session: Session) -> list[Delivery]:
    """Queued attempts whose time has come, oldest first."""
    query = select(JobRow.id, JobRow.attempt, JobRow.queue).where(JobRow.state == "queued", JobRow.due_at <= clock_s())
    found = session.execute(query.order_by(JobRow.due_at, JobRow.id))
    return [Delivery(job, attempt, queue) for job, attempt, queue in found if queue is not None]


def redeliver(session: Session, lost: Delivery) -> Delivery | None:
    """A new attempt in place of one that the queue has lost; None if it was claimed meanwhile."""
    lease = Lease(lost.job, lost.attempt)
    if not _change(session, lease, JobRow.state == "queued", attempt=lost.attempt + 1):
        return None
    return Delivery(lost.job, lost.attempt + 1, lost.queue)


def hand_back(session: Session, lease: Lease, reason: str) -> bool:
    """Queue the job again at once, without counting the attempt; False if the lease was lost.

    A job that is to pause rests instead, and one without a queue fails: nobody else may take it.
    """
    row = _locked(session, lease)
    if row is None:
        return False
    if row.queue is None:
        return end(session, lease, "failed", reason)
    if row.wanted == "pause":
        return end(session, lease, "paused")
    _requeue(session, lease, clock_s(), reason)
    count(session, "attempts", label="handed_back")
    return True


def end(session: Session, lease: Lease, state: JobState, error: str | None = None) -> bool:
    """The job's end, or its pause; False if the lease was lost."""
    ended = _change(
        session,
        lease,
        JobRow.state == "running",
        state=state,
        error=None if error is None else storable(error),
        wanted=None,
        lease_until=None,
        worker=None,
        finished_at=None if state == "paused" else now(),
    )
    if ended:
        report(session, lease.job, StateChanged(state, lease.attempt, error or ""))
        count(session, "attempts", label=state)
    return ended


def attempt_failed(session: Session, lease: Lease, error: str) -> bool:
    """Queue the job again, later each time, or end it after `MAX_FRUITLESS` attempts in a row without a checkpoint.

    A job without a queue has nobody to go on with it, and fails. False if the lease was lost.
    """
    row = _locked(session, lease)
    if row is None:
        return False
    made_progress = row.n_checkpoints > row.n_checkpoints_before
    row.n_fruitless = 0 if made_progress else row.n_fruitless + 1
    session.flush()
    if row.queue is None:
        return end(session, lease, "failed", error)
    if row.wanted == "pause":
        return end(session, lease, "paused")
    if row.n_fruitless >= MAX_FRUITLESS:
        return end(session, lease, "failed", f"{error} ({row.n_fruitless} attempts in a row came no further)")
    delay = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** max(0, row.n_fruitless - 1)) * random.uniform(0.5, 1.0)
    _requeue(session, lease, clock_s() + delay, error)
    session.execute(update(JobRow).where(JobRow.id == lease.job).values(error=storable(error)))
    count(session, "attempts", label="failed" if not made_progress else "interrupted")
    return True


def expired(session: Session) -> list[tuple[Lease, str | None]]:
    """Running attempts whose lease ran out, with their workers."""
    query = select(JobRow.id, JobRow.attempt, JobRow.worker).where(
        JobRow.state == "running", (JobRow.lease_until < clock_s()) | JobRow.lease_until.is_(None)
    )
    return [(Lease(job, attempt), worker) for job, attempt, worker in session.execute(query)]


def attempt_lost(session: Session, lease: Lease, worker: str | None) -> bool:
    """As `attempt_failed`, if the lease is still not renewed."""
    query = select(JobRow.id).where(JobRow.id == lease.job, JobRow.attempt == lease.attempt).with_for_update()
    found = session.scalar(query.where((JobRow.lease_until < clock_s()) | JobRow.lease_until.is_(None)))
    return found is not None and attempt_failed(session, lease, f"worker {worker or 'unknown'} gave no sign of life")


def stream_lines(session: Session, job: str) -> str | None:
    """The job's prompts as JSON Lines."""
    return session.scalar(
        select(StreamRow.lines).join(JobRow, JobRow.stream == StreamRow.sha256).where(JobRow.id == job)
    )


def _insert(session: Session, spec: JobSpec, state: JobState) -> JobRow:
    if spec.stream is not None and spec.lines is not None and session.get(StreamRow, spec.stream) is None:
        session.add(StreamRow(sha256=spec.stream, lines=spec.lines, created_at=now()))
    row = JobRow(
        id=secrets.token_hex(6),
        kind=spec.kind,
        state=state,
        queue=spec.queue,
        fingerprint=spec.fingerprint,
        idempotency_key=spec.idempotency_key,
        request=dict(spec.request),
        stream=spec.stream,
        n_prompts=spec.n_prompts,
        attempt=1,
        due_at=clock_s(),
        created_at=rows.now_ms(),
    )
    session.add(row)
    session.flush()
    session.refresh(row)
    report(session, row.id, StateChanged(state, 1))
    return row


def _locked(session: Session, lease: Lease) -> JobRow | None:
    """The row of a running attempt, locked until the transaction ends; None if the lease was lost."""
    query = select(JobRow).where(JobRow.id == lease.job, JobRow.attempt == lease.attempt, JobRow.state == "running")
    return session.scalar(query.options(WITHOUT_JSON).with_for_update())


def _requeue(session: Session, lease: Lease, due_at: ColumnElement[float], why: str) -> None:
    """Let the next attempt be taken from `due_at` on."""
    attempt = lease.attempt + 1
    _change(
        session,
        lease,
        JobRow.state == "running",
        state="queued",
        attempt=attempt,
        lease_until=None,
        due_at=due_at,
        worker=None,
    )
    report(session, lease.job, StateChanged("queued", attempt, why))


def _change(session: Session, lease: Lease, where: ColumnElement[bool], **values: object) -> bool:
    """Change the job if it is at that attempt and as expected; whether it was."""
    changed = update(JobRow).where(JobRow.id == lease.job, JobRow.attempt == lease.attempt, where).values(**values)
    return bool(session.execute(changed.execution_options(synchronize_session=False)).rowcount)  # type: ignore[attr-defined]
