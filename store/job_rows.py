"""Jobs to rows and back."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast, get_args

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ..core.errors import LayerSetError, NotFound, StoreError
from ..core.event_json import event_to_json, event_type
from ..core.events import Event
from ..core.jobs import STATES, Job, JobKind, JobState, Wanted
from ..core.times import now
from ..core.types import LayerSetRecord
from . import rows
from .tables import EventRow, JobRow, LayerSetRow, OutputRow

KINDS: tuple[JobKind, ...] = get_args(JobKind)


def find(session: Session, job: str, *, locked: bool = False) -> JobRow:
    """The job's row; `locked` lets nobody else change it until the transaction ends.

    Raises: NotFound: no such job; it names the nearest.
    """
    plain = job.isascii() and job.isprintable()  # else PostgreSQL, or the driver, does not take it as a text
    row = session.get(JobRow, job, with_for_update=True if locked else None) if plain else None
    if row is None:
        known = session.scalars(select(JobRow.id).order_by(JobRow.created_at.desc()).limit(1000)).all()
        near = difflib.get_close_matches(job, known, n=1, cutoff=0.0)
        hint = f" (the nearest is {near[0]})" if near else ""
        raise NotFound(f"no job {job!r} is stored{hint}: `swiftopt jobs list` shows them")
    return row


def values(session: Session, found: Sequence[JobRow]) -> list[Job]:
    """The jobs, with their layer sets and number of completions."""
    ids = [row.id for row in found]
    outputs = select(OutputRow.job_id, func.count()).where(OutputRow.job_id.in_(ids)).group_by(OutputRow.job_id)
    n_outputs = {job: n for job, n in session.execute(outputs)}
    sets: dict[str, list[LayerSetRecord]] = {}
    for row in session.scalars(select(LayerSetRow).where(LayerSetRow.job_id.in_(ids)).order_by(LayerSetRow.id)):
        with suppress(LayerSetError, TypeError):  # one that was changed by hand must not hide every job
            sets.setdefault(str(row.job_id), []).append(rows.layer_set_record(row))
    return [_value(row, n_outputs.get(row.id, 0), sets.get(row.id, [])) for row in found]


def report(session: Session, job: str, event: Event) -> EventRow:
    """Add an event to the job's history."""
    row = EventRow(job_id=job, type=event_type(event), data=event_to_json(event), created_at=now())
    session.add(row)
    return row


def unreadable(job: str, error: Exception) -> str:
    """Why nobody can go on with a job, for its row."""
    if isinstance(error, StoreError):
        return str(error)
    return f"job {job} cannot be read (it holds what is no JSON: {error}): it was changed by hand, submit it again"


def storable(text: str) -> str:
    """The text as every database takes it: without NUL and halves of surrogate pairs."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def check(row: JobRow) -> None:
    """Raises: StoreError: the row was changed by hand, so that nobody can go on with the job."""
    if row.kind not in KINDS or row.state not in STATES:
        what = f"its kind is {row.kind!r} and its state {row.state!r}"
    elif not isinstance(cast(object, row.request), Mapping):
        what = "its request is no object"
    else:
        return
    raise StoreError(
        f"job {row.id} cannot be read ({what}): it was changed by hand, or by a newer swiftopt; submit it again"
    )


def _value(row: JobRow, n_outputs: int, sets: list[LayerSetRecord]) -> Job:
    """The job; one that cannot be read shows as failed, with the reason, so that a list of jobs does not end at it."""
    state, request, error = cast(JobState, row.state), row.request, row.error
    try:
        check(row)
    except StoreError as reason:
        state, request, error = "failed", {}, str(reason)
    return Job(
        id=row.id,
        kind=cast(JobKind, row.kind),
        state=state,
        queue=row.queue,
        attempt=row.attempt,
        fingerprint=row.fingerprint or "",
        request=request,
        stream=row.stream,
        wanted=cast("Wanted | None", row.wanted),
        worker=row.worker,
        error=error,
        progress=row.progress if isinstance(row.progress, Mapping) else None,
        n_prompts=row.n_prompts,
        n_outputs=n_outputs,
        layer_sets=tuple(sets),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )
