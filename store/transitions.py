"""All state changes of jobs: submission, delivery to workers, attempts and their end, and the users' verbs.

An attempt's change is one UPDATE conditional on the expected state and attempt, or is made on the locked row; if it
matches no row, it came too late.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn

from sqlalchemy import ColumnElement, and_, func, or_, select, text
from sqlalchemy.orm import Session

from ..core.errors import Conflict, StoreError
from ..core.events import JobState, StateChanged
from ..core.requests import DEFAULT_QUEUE, END_STATES, UNFINISHED, Delivery, Job, JobSpec, Lease, Verb
from ..core.types import Trial, now
from .database import clock_s, insert
from .jobs import at_attempt, change, check, count, find, report, save_stream, storable, stream, to_jobs
from .results import trials_by_task
from .tables import UNFINISHED_SQL, JobRow, LockRow, add_row, mapping, to_row

# Consecutive attempts without a new checkpoint after which a job fails.
MAX_FRUITLESS = 3
BACKOFF_S, MAX_BACKOFF_S = (
    2.0,
    60.0,
)  # Seconds until a job is retried after its first failed attempt (doubled after each further one), and the maximum.
HAS_EXPIRED = or_(JobRow.lease_until < clock_s(), JobRow.lease_until.is_(None))


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a worker has taken, with everything needed to resume an earlier attempt."""

    job: Job
    lease: Lease
    n_checkpoints: int
    lines: str
    snapshot: Mapping[str, Any] | None
    trials: Mapping[str, Sequence[Trial]]


# --- submission and delivery ---


def submit(session: Session, spec: JobSpec) -> tuple[Job, bool]:
    """Return the job for `spec`, and whether it is new; an unfinished job with the same fingerprint is reused.

    Raises: Conflict: its idempotency key was used for another request.
    """
    equal_job = _find_equal(session, spec)
    row = equal_job or _insert(session, spec, "queued", fingerprint=spec.fingerprint)
    return to_jobs(session, [row])[0], equal_job is None


def _find_equal(session: Session, spec: JobSpec) -> JobRow | None:
    """Return the job with the same idempotency key, or an unfinished one with the same fingerprint."""
    if spec.idempotency_key is not None:
        job_row = session.scalar(select(JobRow).where(JobRow.idempotency_key == spec.idempotency_key))
        if job_row is not None:
            if job_row.fingerprint != spec.fingerprint:
                raise Conflict(
                    f"the idempotency key {spec.idempotency_key!r} belongs to job {job_row.id} with another request:"
                    " use a new key"
                )
            return job_row
    job_row = session.scalar(select(JobRow).where(_same_unfinished(spec.fingerprint)))
    if job_row is not None:
        job_row.idempotency_key = job_row.idempotency_key or spec.idempotency_key
    return job_row


def _same_unfinished(fingerprint: str) -> ColumnElement[bool]:
    """Match the unfinished job with a fingerprint. SQLite uses the partial index only for the same SQL condition."""
    return and_(JobRow.fingerprint == fingerprint, text(UNFINISHED_SQL))


def _insert(session: Session, spec: JobSpec, state: JobState, **columns: Any) -> JobRow:
    if spec.stream is not None and spec.lines is not None:
        save_stream(session, spec.stream, spec.lines)
    # In milliseconds, because jobs are listed in the order of this time.
    created_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    columns |= {"id": secrets.token_hex(6), "state": state, "attempt": 1, "due_at": clock_s(), "created_at": created_at}
    row = add_row(session, to_row(JobRow, spec, **columns))
    report(session, row.id, StateChanged(state, 1))
    return row


def due(session: Session, queue: str | None = None, limit: int | None = None) -> list[Delivery]:
    """Return the queued attempts that are due, oldest first; of one queue, or of all."""
    query = select(JobRow.id, JobRow.attempt, JobRow.queue).where(*_is_due(queue))
    due_rows = session.execute(query.order_by(JobRow.due_at, JobRow.id).limit(limit))
    return [Delivery(job, attempt, str(queue)) for job, attempt, queue in due_rows]


def _is_due(queue: str | None) -> list[ColumnElement[bool]]:
    of_queue = JobRow.queue.is_not(None) if queue is None else JobRow.queue == queue
    return [JobRow.state == "queued", JobRow.due_at <= clock_s(), of_queue]


class DueTuning(NamedTuple):
    """A queued tuning attempt that is due, its request, and since when it is due (by the database's clock)."""

    delivery: Delivery
    request: Mapping[str, Any]
    due_at: float


def due_tunings(session: Session, queue: str, since: float) -> list[DueTuning]:
    """Return a queue's tuning attempts that have been due since `since` (by the database's clock), oldest first."""
    query = select(JobRow.id, JobRow.attempt, JobRow.request, JobRow.due_at)
    query = query.where(*_is_due(queue), JobRow.kind == "tune", JobRow.due_at >= since)
    due_rows = session.execute(query.order_by(JobRow.due_at, JobRow.id))
    return [
        DueTuning(Delivery(job, attempt, queue), mapping(request), due_at) for job, attempt, request, due_at in due_rows
    ]


def redeliver(session: Session, lost_delivery: Delivery) -> Delivery | None:
    """Start a new attempt in place of one that the queue lost; None if a worker has taken it already."""
    if change(session, lost_delivery, "queued", attempt=lost_delivery.attempt + 1) is None:
        return None
    count(session, "reconciled", "redelivered")
    return Delivery(lost_delivery.job, lost_delivery.attempt + 1, lost_delivery.queue)


def expired(session: Session) -> list[tuple[Lease, str | None]]:
    """Return the running attempts whose lease ran out, with their workers."""
    query = select(JobRow.id, JobRow.attempt, JobRow.worker).where(JobRow.state == "running", HAS_EXPIRED)
    return [(Lease(job, attempt), worker) for job, attempt, worker in session.execute(query)]


class LostAttempt(NamedTuple):
    """An attempt whose lease ran out, and the new state of its job."""

    lease: Lease
    state: JobState
    reason: str


def expire(session: Session, lease: Lease, worker: str | None) -> LostAttempt | None:
    """End an attempt like `attempt_failed`; None if its lease was renewed in the meantime."""
    reason = f"the heartbeat of worker {worker or 'unknown'} is overdue"
    job_id = session.scalar(select(JobRow.id).where(at_attempt(lease), HAS_EXPIRED).with_for_update())
    state = None if job_id is None else attempt_failed(session, lease, reason)
    if state is None:
        return None
    count(session, "reconciled", "expired")
    return LostAttempt(lease, state, reason)


def take_lock(session: Session, name: str, owner: str, seconds: float) -> bool:
    """Return whether `owner` has the lock `name`, for that many seconds."""
    request = insert(session, LockRow).values(name=name, owner=owner, until=clock_s() + seconds)
    is_free = or_(LockRow.owner == owner, LockRow.until < clock_s())
    values = {"owner": request.excluded.owner, "until": request.excluded.until}
    granted = request.on_conflict_do_update(index_elements=["name"], set_=values, where=is_free).returning(LockRow.name)
    return session.execute(granted).one_or_none() is not None


def held_locks(session: Session, prefix: str) -> list[str]:
    """Return the names of the currently held locks that begin with `prefix`."""
    query = select(LockRow.name).where(LockRow.name.startswith(prefix, autoescape=True), LockRow.until >= clock_s())
    return list(session.scalars(query))


# --- attempts ---


def begin_here(session: Session, lease_s: float, spec: JobSpec, worker: str) -> Claim:
    """Take a new job that this process runs itself; it is never delivered, and may run together with an equal job."""
    lease_until = clock_s() + lease_s
    row = _insert(session, spec, "running", worker=worker, started_at=now(), lease_until=lease_until)
    job = to_jobs(session, [row])[0]
    return Claim(job, Lease(job.id, job.attempt), 0, spec.lines or "", None, {})


def claim(session: Session, lease_s: float, lease: Lease, worker: str) -> Claim | None:
    """Take a queued attempt; None if another worker has taken it, or it was replaced.

    If the job's row cannot be read, the job fails with the reason, and None is returned.
    """
    started = change(
        session,
        lease,
        "queued",
        state="running",
        worker=worker,
        lease_until=clock_s() + lease_s,
        started_at=func.coalesce(JobRow.started_at, now()),
        n_checkpoints_before=JobRow.n_checkpoints,
    )
    if started is None:
        return None
    report(session, lease.job, StateChanged("running", lease.attempt, f"on {worker}"))
    count(session, "attempts", "started")
    try:
        row = find(session, lease.job)
        session.refresh(row)
        check(row, row.snapshot)
        trials = trials_by_task(session, lease.job)
    except StoreError as error:
        end(session, lease, "failed", str(error))
        return None
    lines = "" if row.stream is None else stream(session, row.stream) or ""
    return Claim(to_jobs(session, [row])[0], lease, row.n_checkpoints, lines, row.snapshot, trials)


def hand_back(session: Session, lease: Lease, reason: str) -> JobState | None:
    """Queue the job again at once, without counting the attempt; return its state, None if the lease was lost.

    A job with a pending pause is paused instead. A job without a queue fails, because no other worker may take it.
    """
    row = _locked(session, lease)
    if row is None:
        return None
    if row.queue is None:
        return end(session, lease, "failed", reason)
    if row.wanted == "pause":
        return end(session, lease, "paused")
    _queue(session, row, reason)
    count(session, "attempts", "handed_back")
    return "queued"


def end(session: Session, lease: Lease, state: JobState, error: str | None = None) -> JobState | None:
    """End or pause the job; return its state, None if the lease was lost."""
    ended_row = change(
        session,
        lease,
        state=state,
        error=None if error is None else storable(error),
        wanted=None,
        lease_until=None,
        worker=None,
        finished_at=None if state == "paused" else now(),
    )
    if ended_row is None:
        return None
    report(session, lease.job, StateChanged(state, lease.attempt, error or ""))
    count(session, "attempts", state)
    return state


def attempt_failed(session: Session, lease: Lease, error: str) -> JobState | None:
    """Queue the job again, later each time, or end it after `MAX_FRUITLESS` attempts in a row without a checkpoint.

    A job without a queue fails: no other worker may take it. Returns its state, None if the lease was lost.
    """
    row = _locked(session, lease)
    if row is None:
        return None
    made_progress = row.n_checkpoints > row.n_checkpoints_before
    row.n_fruitless = 0 if made_progress else row.n_fruitless + 1
    session.flush()
    if row.queue is None:
        return end(session, lease, "failed", error)
    if row.wanted == "pause":
        return end(session, lease, "paused")
    if row.n_fruitless >= MAX_FRUITLESS:
        return end(session, lease, "failed", f"{error} ({row.n_fruitless} attempts in a row made no progress)")
    delay = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** max(0, row.n_fruitless - 1)) * random.uniform(0.5, 1.0)
    row.error = storable(error)
    _queue(session, row, error, delay)
    count(session, "attempts", "failed" if not made_progress else "interrupted")
    return "queued"


def _locked(session: Session, lease: Lease) -> JobRow | None:
    """Return the row of a running attempt, locked until the transaction ends; None if the lease was lost."""
    return session.scalar(select(JobRow).where(at_attempt(lease)).with_for_update())


# --- verbs: pause, resume, stop, cancel, retry ---


def act(session: Session, job: str, verb: Verb) -> Job:
    """Pause, resume, stop, cancel or retry a job, and return its new state; repeating a verb has no further effect.

    A running job pauses or stops at its next step.

    Raises: NotFound: no such job. Conflict: the job's state does not allow it; the message says what to do instead.
    """
    row = find(session, job, locked=True)
    {"pause": _pause, "resume": _resume, "stop": _stop, "cancel": _cancel, "retry": _retry}[verb](session, row)
    session.flush()
    session.refresh(row)
    return to_jobs(session, [row])[0]


def _pause(session: Session, row: JobRow) -> None:
    if row.queue is None and row.state == "running":
        _refuse(row, "paused", "it runs in the process that started it, stop or cancel it")
    if row.state == "running":
        row.wanted = "pause"
    elif row.state == "queued":
        _enter(session, row, "paused", "before a worker took it")
    elif row.state != "paused":
        _refuse(row, "paused", "`retry` restarts it" if row.state != "succeeded" else "it is done")


def _resume(session: Session, row: JobRow) -> None:
    if row.state == "paused":
        _queue(session, row, "resumed")
    elif row.state in ("running", "queued"):
        row.wanted = None if row.wanted == "pause" else row.wanted
    else:
        _refuse(row, "resumed", "`retry` restarts it" if row.state != "succeeded" else "it is done")


def _stop(session: Session, row: JobRow) -> None:
    if row.state in END_STATES:
        _refuse(row, "stopped", "it has already ended")
    if row.state != "running" and not row.n_checkpoints:
        _refuse(row, "stopped", "it has no result yet, cancel it instead")
    row.wanted = "stop"
    # Queue the paused job once more: a worker must build the result from the best sets so far.
    if row.state == "paused":
        _queue(session, row, "to be stopped")


def _cancel(session: Session, row: JobRow) -> None:
    if row.state == "cancelled":
        return
    if row.state in END_STATES:
        _refuse(row, "cancelled", "it has already ended")
    row.wanted, row.lease_until, row.finished_at = None, None, now()
    _enter(session, row, "cancelled", "on request")
    count(session, "attempts", "cancelled")


def _retry(session: Session, row: JobRow) -> None:
    if row.state in UNFINISHED:
        _refuse(row, "retried", "it has not ended yet")
    if row.state == "succeeded":
        _refuse(row, "retried", "submit it again to repeat the tuning")
    if row.queue is None and row.stream is None and row.kind == "tune":
        _refuse(row, "retried", "its prompts were not stored, run it again")
    # A local run has no fingerprint. On a retry it becomes a queued job, which needs one.
    fingerprint = row.fingerprint or _spec(row).fingerprint
    equal_job = session.scalar(select(JobRow.id).where(_same_unfinished(fingerprint)))
    if equal_job is not None:
        _refuse(row, "retried", f"job {equal_job} already does the same")
    row.queue = row.queue or DEFAULT_QUEUE
    row.fingerprint = fingerprint
    row.wanted, row.error, row.finished_at, row.n_fruitless = None, None, None, 0
    _queue(session, row, "retried")


def _spec(row: JobRow) -> JobSpec:
    return JobSpec(row.kind, row.queue or DEFAULT_QUEUE, mapping(row.request), row.stream)


def _queue(session: Session, row: JobRow, reason: str, delay_s: float = 0.0) -> None:
    """Queue the job's next attempt, to be taken in `delay_s` seconds or later."""
    row.attempt += 1
    row.lease_until, row.due_at = None, clock_s() + delay_s
    _enter(session, row, "queued", reason)


def _enter(session: Session, row: JobRow, state: JobState, reason: str) -> None:
    row.state = state
    row.worker = None
    report(session, row.id, StateChanged(state, row.attempt, reason))


def _refuse(row: JobRow, action: str, reason: str) -> NoReturn:
    raise Conflict(f"job {row.id} is {row.state} and cannot be {action}: {reason}")
