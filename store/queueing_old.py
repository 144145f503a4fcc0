"""From submission to a worker and back: which attempt of a job is due, who holds it, and what its end means.

Every change is one UPDATE that names the state and attempt it expects; one that finds 0 rows was overtaken.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from json import JSONDecodeError
from typing import Any

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.orm import Session, load_only

from ..core.errors import Conflict, StoreError
from ..core.events import JobState, StateChanged
from ..core.jobs import UNFINISHED, Delivery, Job, JobSpec, Lease
from ..core.types import Trial, now
from .database import clock_s
from .jobs import at_attempt, check, count, find, report, save_stream, storable, to_jobs
from .results import trials_by_task
from .rows import to_row
from .tables import JobRow, LockRow, StreamRow

MAX_FRUITLESS = 3  # attempts in a row that ended without a new checkpoint, after which a job has failed
# What decides where a job goes; a request or snapshot that was changed by hand must not keep it, and others, from that.
WITHOUT_JSON = load_only(
    JobRow.queue, JobRow.wanted, JobRow.n_checkpoints, JobRow.n_checkpoints_before, JobRow.n_fruitless
)
BACKOFF_S, MAX_BACKOFF_S = 2.0, 60.0  # before the attempt after the first fruitless one; doubled for each further one


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a worker has taken, with everything that an earlier attempt left to go on from."""

    job: Job
    lease: Lease
    n_checkpoints: int
    lines: str
    snapshot: Mapping[str, Any] | None
    trials: Mapping[str, Sequence[Trial]]


# --- submission and delivery ---


def submit(session: Session, spec: JobSpec) -> tuple[Job, bool]:
    """Return the job for `spec`, and whether it is new: an unfinished one with the same fingerprint is the same job.

    Raises: Conflict: its idempotency key was used for something else.
    """
    known = _known(session, spec)
    row = known or _insert(session, spec, "queued")
    return to_jobs(session, [row])[0], known is None


def _known(session: Session, spec: JobSpec) -> JobRow | None:
    """Return the job that was submitted under the same key, or is unfinished and does the same."""
    if spec.idempotency_key is not None:
        known = session.scalar(select(JobRow).where(JobRow.idempotency_key == spec.idempotency_key))
        if known is not None:
            if known.fingerprint != spec.fingerprint:
                raise Conflict(
                    f"the idempotency key {spec.idempotency_key!r} belongs to job {known.id} with other values:"
                    " use a new key"
                )
            return known
    same = select(JobRow).where(JobRow.fingerprint == spec.fingerprint, JobRow.state.in_(UNFINISHED))
    known = session.scalar(same)
    if known is not None:
        known.idempotency_key = known.idempotency_key or spec.idempotency_key
    return known


def _insert(session: Session, spec: JobSpec, state: JobState) -> JobRow:
    if spec.stream is not None and spec.lines is not None:
        save_stream(session, spec.stream, spec.lines)
    created_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")  # jobs are listed by it
    row = to_row(
        JobRow,
        spec,
        id=secrets.token_hex(6),
        state=state,
        fingerprint=spec.fingerprint,
        attempt=1,
        due_at=clock_s(),
        created_at=created_at,
    )
    session.add(row)
    session.flush()
    session.refresh(row)
    report(session, row.id, StateChanged(state, 1))
    return row


def due(session: Session) -> list[Delivery]:
    """Return the queued attempts whose time has come, oldest first."""
    query = select(JobRow.id, JobRow.attempt, JobRow.queue).where(JobRow.state == "queued", JobRow.due_at <= clock_s())
    found = session.execute(query.order_by(JobRow.due_at, JobRow.id))
    return [Delivery(job, attempt, queue) for job, attempt, queue in found if queue is not None]


def redeliver(session: Session, lost: Delivery) -> Delivery | None:
    """Begin a new attempt in place of one that the queue has lost; None if a worker has it."""
    lease = Lease(lost.job, lost.attempt)
    if not _change(session, lease, "queued", attempt=lost.attempt + 1):
        return None
    count(session, "reconciled", "redelivered")
    return Delivery(lost.job, lost.attempt + 1, lost.queue)


def expired(session: Session) -> list[tuple[Lease, str | None]]:
    """Return the running attempts whose lease ran out, with their workers."""
    query = select(JobRow.id, JobRow.attempt, JobRow.worker).where(
        JobRow.state == "running", (JobRow.lease_until < clock_s()) | JobRow.lease_until.is_(None)
    )
    return [(Lease(job, attempt), worker) for job, attempt, worker in session.execute(query)]


def expire(session: Session, lease: Lease, worker: str | None) -> bool:
    """End an attempt as `attempt_failed` does, if its lease is still not renewed; whether it was."""
    query = select(JobRow.id).where(JobRow.id == lease.job, JobRow.attempt == lease.attempt).with_for_update()
    found = session.scalar(query.where((JobRow.lease_until < clock_s()) | JobRow.lease_until.is_(None)))
    if found is None or not attempt_failed(session, lease, f"worker {worker or 'unknown'} gave no sign of life"):
        return False
    count(session, "reconciled", "expired")
    return True


def take_lock(session: Session, name: str, owner: str, seconds: float) -> bool:
    """Return whether `owner` may do what `name` stands for, for that long; nobody else may meanwhile."""
    free = update(LockRow).where(LockRow.name == name, or_(LockRow.owner == owner, LockRow.until < clock_s()))
    taken = session.execute(free.values(owner=owner, until=clock_s() + seconds).returning(LockRow.name))
    if taken.one_or_none() is not None:
        return True
    if session.get(LockRow, name) is not None:
        return False
    session.add(LockRow(name=name, owner=owner, until=0.0))
    session.flush()  # fails, and the write begins anew, if another process took it first
    session.execute(update(LockRow).where(LockRow.name == name).values(until=clock_s() + seconds))
    return True


# --- attempts ---


def begin_here(session: Session, lease_s: float, spec: JobSpec, worker: str) -> Claim:
    """Take a new job that this process runs itself; it is never delivered, nor held back by one that is alike."""
    row = _insert(session, spec, "running")
    row.worker, row.started_at, row.fingerprint = worker, now(), None
    session.flush()
    session.execute(update(JobRow).where(JobRow.id == row.id).values(lease_until=clock_s() + lease_s))
    session.refresh(row)
    job = to_jobs(session, [row])[0]
    return Claim(job, Lease(job.id, job.attempt), 0, spec.lines or "", None, {})


def claim(session: Session, lease_s: float, lease: Lease, worker: str) -> Claim | None:
    """Take a queued attempt; None if somebody else has, or it was replaced.

    A job whose row cannot be read fails here, with the reason, and nobody gets it: None.
    """
    if not _take(session, lease_s, lease, worker):
        return None
    lines = session.scalar(
        select(StreamRow.lines).join(JobRow, JobRow.stream == StreamRow.sha256).where(JobRow.id == lease.job)
    )
    try:
        row = find(session, lease.job)
        session.refresh(row)
        check(row)
        trials = trials_by_task(session, lease.job)
    except (StoreError, JSONDecodeError) as error:
        no_json = f"job {lease.job} cannot be read (it holds what is no JSON: {error}): it was changed by hand, "
        end(session, lease, "failed", str(error) if isinstance(error, StoreError) else no_json + "submit it again")
        return None
    return Claim(to_jobs(session, [row])[0], lease, row.n_checkpoints, lines or "", row.snapshot, trials)


def _take(session: Session, lease_s: float, lease: Lease, worker: str) -> bool:
    """Let the worker hold a queued attempt; False if it is not there (any more)."""
    taken = _change(
        session,
        lease,
        "queued",
        state="running",
        worker=worker,
        lease_until=clock_s() + lease_s,
        n_checkpoints_before=JobRow.n_checkpoints,
    )
    if taken:
        first = update(JobRow).where(JobRow.id == lease.job, JobRow.started_at.is_(None))
        session.execute(first.values(started_at=now()))
        report(session, lease.job, StateChanged("running", lease.attempt, f"on {worker}"))
        count(session, "attempts", "started")
    return taken


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
    count(session, "attempts", "handed_back")
    return True


def end(session: Session, lease: Lease, state: JobState, error: str | None = None) -> bool:
    """End or pause the job; False if the lease was lost."""
    ended = _change(
        session,
        lease,
        "running",
        state=state,
        error=None if error is None else storable(error),
        wanted=None,
        lease_until=None,
        worker=None,
        finished_at=None if state == "paused" else now(),
    )
    if ended:
        report(session, lease.job, StateChanged(state, lease.attempt, error or ""))
        count(session, "attempts", state)
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
    count(session, "attempts", "failed" if not made_progress else "interrupted")
    return True


def _locked(session: Session, lease: Lease) -> JobRow | None:
    """Return the row of a running attempt, locked until the transaction ends; None if the lease was lost."""
    query = select(JobRow).where(at_attempt(lease))
    return session.scalar(query.options(WITHOUT_JSON).with_for_update())


def _requeue(session: Session, lease: Lease, due_at: ColumnElement[float], why: str) -> None:
    """Let the next attempt be taken from `due_at` on."""
    attempt = lease.attempt + 1
    _change(
        session,
        lease,
        "running",
        state="queued",
        attempt=attempt,
        lease_until=None,
        due_at=due_at,
        worker=None,
    )
    report(session, lease.job, StateChanged("queued", attempt, why))


def _change(session: Session, lease: Lease, expected: JobState, **values: object) -> bool:
    """Change the job if it is at that attempt and in the expected state, and return whether it was."""
    changed = update(JobRow).where(at_attempt(lease, expected)).values(**values)
    return bool(session.execute(changed.execution_options(synchronize_session=False)).rowcount)  # type: ignore[attr-defined]
