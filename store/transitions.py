"""What people ask of a job: pause, resume, stop, cancel, retry; each is one transaction on its locked row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from ..core.errors import Conflict
from ..core.events import JobState, StateChanged
from ..core.jobs import DEFAULT_QUEUE, END_STATES, UNFINISHED, Job, JobKind, JobSpec, Verb
from ..core.types import now
from .database import clock_s
from .jobs import count, find, report, to_jobs
from .tables import JobRow


def act(session: Session, job: str, verb: Verb) -> Job:
    """Pause, resume, stop, cancel or retry a job; the job as it is then. Done twice, it is done once.

    A running job is only asked to pause or stop, and does so at its next step.

    Raises: NotFound: no such job. Conflict: it is not in a state for that; it says what to do instead.
    """
    row = find(session, job, locked=True)
    {"pause": _pause, "resume": _resume, "stop": _stop, "cancel": _cancel, "retry": _retry}[verb](session, row)
    session.flush()
    session.refresh(row)
    return to_jobs(session, [row])[0]


def _pause(session: Session, row: JobRow) -> None:
    if row.queue is None and row.state == "running":
        _refuse(row, "paused", "it runs in the process that began it, stop or cancel it")
    if row.state == "running":
        row.wanted = "pause"
    elif row.state == "queued":
        _enter(session, row, "paused", "before a worker took it")
    elif row.state != "paused":
        _refuse(row, "paused", "`retry` begins it again" if row.state != "succeeded" else "it is done")


def _resume(session: Session, row: JobRow) -> None:
    if row.state == "paused":
        _queue(session, row, "resumed")
    elif row.state in ("running", "queued"):
        row.wanted = None if row.wanted == "pause" else row.wanted
    else:
        _refuse(row, "resumed", "`retry` begins it again" if row.state != "succeeded" else "it is done")


def _stop(session: Session, row: JobRow) -> None:
    if row.state in END_STATES:
        _refuse(row, "stopped", "it has ended already")
    if row.state != "running" and not row.n_checkpoints:
        _refuse(row, "stopped", "it has found nothing yet, cancel it instead")
    row.wanted = "stop"
    if row.state == "paused":  # a worker puts the best set so far together
        _queue(session, row, "to be stopped")


def _cancel(session: Session, row: JobRow) -> None:
    if row.state == "cancelled":
        return
    if row.state in END_STATES:
        _refuse(row, "cancelled", "it has ended already")
    row.wanted, row.lease_until, row.finished_at = None, None, now()
    _enter(session, row, "cancelled", "on request")
    count(session, "attempts", "cancelled")


def _retry(session: Session, row: JobRow) -> None:
    if row.state in UNFINISHED:
        _refuse(row, "retried", "it has not ended yet")
    if row.state == "succeeded":
        _refuse(row, "retried", "submit it again to tune anew")
    if row.queue is None and row.stream is None and row.kind == "tune":
        _refuse(row, "retried", "its prompts were not stored, run it again")
    # a local run had no fingerprint: from now on it is a job like those that were submitted
    fingerprint = row.fingerprint or _spec(row).fingerprint
    same = select(JobRow.id).where(JobRow.fingerprint == fingerprint, JobRow.state.in_(UNFINISHED))
    other = session.scalar(same)
    if other is not None:
        _refuse(row, "retried", f"job {other} does the same already")
    row.queue = row.queue or DEFAULT_QUEUE
    row.fingerprint = fingerprint
    row.wanted, row.error, row.finished_at, row.n_fruitless = None, None, None, 0
    _queue(session, row, "retried")


def _spec(row: JobRow) -> JobSpec:
    request = row.request if isinstance(row.request, Mapping) else {}  # a list, where it was changed by hand
    return JobSpec(cast(JobKind, row.kind), row.queue or DEFAULT_QUEUE, request, row.stream)


def _queue(session: Session, row: JobRow, why: str) -> None:
    row.attempt += 1
    session.flush()
    row.due_at = clock_s()
    _enter(session, row, "queued", why)


def _enter(session: Session, row: JobRow, state: JobState, why: str) -> None:
    row.state = state
    row.worker = None
    report(session, row.id, StateChanged(state, row.attempt, why))


def _refuse(row: JobRow, done: str, why: str) -> NoReturn:
    raise Conflict(f"job {row.id} is {row.state} and cannot be {done}: {why}")
