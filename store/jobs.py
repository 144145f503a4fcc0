"""The jobs in the database: reads for API and commands, writes of running attempts, events, streams and counters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple, get_args

from sqlalchemy import ColumnElement, Row, and_, func, select, update
from sqlalchemy.orm import Session

from ..core.errors import LayerSetNotFound, LeaseLost, NotFound, StoreError
from ..core.events import (
    Event,
    JobState,
    PromptFinished,
    TaskFinished,
    TrialsDone,
    event_from_json,
    event_type,
)
from ..core.records import LayerSetRecord, PlanInUse
from ..core.requests import STATES, Job, JobEvent, JobKind, Lease, Promotion, Wanted
from ..core.types import Completion, now
from .database import clock_s, insert
from .plans import add_version, has_best, lookup, offer
from .tables import (
    CounterRow,
    EventRow,
    JobRow,
    LayerSetRow,
    OutputRow,
    StreamRow,
    TrialRow,
    layer_set_record,
    mapping,
    reading,
    to_record,
    to_row,
)

# Most held-out completions that `evidence` returns for a verdict.
MOST_HELD_OUT = 64
KINDS: tuple[JobKind, ...] = get_args(JobKind)


# --- reads for API and commands; `get`, `events` and `outputs` raise NotFound, which names the nearest job ---


def get(session: Session, job: str) -> Job:
    """Return one job."""
    return to_jobs(session, [find(session, job)])[0]


def latest(session: Session, state: JobState | None = None, limit: int = 100, offset: int = 0) -> list[Job]:
    """Return jobs, newest first, without the first `offset`."""
    query = select(JobRow).order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(limit).offset(offset)
    query = query if state is None else query.where(JobRow.state == state)
    return to_jobs(session, session.scalars(query).all())


def events(session: Session, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
    """Return the job's events with numbers above `after`, oldest first."""
    find(session, job)
    query = select(EventRow).where(EventRow.job_id == job, EventRow.id > after).order_by(EventRow.id).limit(limit)
    return [to_record(JobEvent, row) for row in session.scalars(query)]


def newest_events(session: Session, job: str, limit: int, type: str | None = None) -> list[JobEvent]:
    """Return the job's latest events, the newest first; `type`: only events of that name."""
    query = select(EventRow).where(EventRow.job_id == job).order_by(EventRow.id.desc()).limit(limit)
    rows = session.scalars(query if type is None else query.where(EventRow.type == type))
    return [to_record(JobEvent, row) for row in rows]


class JobStanding(NamedTuple):
    """State of a job's attempts beyond `Job`; in seconds from now, by the database's clock.

    `lease_s`: until the lease expires; `due_s`: until the attempt may be taken (negative: it has been due that long).
    `n_checkpoints` counts those of all attempts.
    """

    lease_s: float | None
    due_s: float | None
    n_checkpoints: int


def standings(session: Session, jobs: Sequence[str]) -> dict[str, JobStanding]:
    """Return the standing of jobs, by their ids."""
    remaining_s = (JobRow.lease_until - clock_s(), JobRow.due_at - clock_s())
    rows = session.execute(select(JobRow.id, *remaining_s, JobRow.n_checkpoints).where(JobRow.id.in_(jobs)))
    return {job: JobStanding(lease_s, due_s, n) for job, lease_s, due_s, n in rows}


def outputs(session: Session, job: str, limit: int | None = None) -> list[PromptFinished]:
    """Return the finished completions in the order of the stream, at most the first `limit`."""
    find(session, job)
    query = select(EventRow).join(OutputRow, OutputRow.event_id == EventRow.id).where(OutputRow.job_id == job)
    rows = session.scalars(query.order_by(OutputRow.place, EventRow.id).limit(limit))
    return [event for event in map(_event, rows) if isinstance(event, PromptFinished)]


def evidence(session: Session, job: str, task: str) -> tuple[TaskFinished | None, list[PromptFinished]]:
    """Return how a job's task ended, and its latest held-out prompts (at most `MOST_HELD_OUT`), in their order."""
    end_query = select(EventRow).where(EventRow.job_id == job, EventRow.type == event_type(TaskFinished))
    end_events = [(row.id, _event(row)) for row in session.scalars(end_query.order_by(EventRow.id))]
    task_ends = [
        (event_id, event) for event_id, event in end_events if isinstance(event, TaskFinished) and event.task == task
    ]
    if not task_ends:
        return None, []
    event_id, task_finished = task_ends[-1]
    # A task's held-out prompts are decoded last, so their events come directly before its TaskFinished.
    prompt_query = select(EventRow).where(EventRow.job_id == job, EventRow.type == event_type(PromptFinished))
    rows = session.scalars(prompt_query.where(EventRow.id < event_id).order_by(EventRow.id.desc()).limit(MOST_HELD_OUT))
    prompts = [event for event in map(_event, rows) if isinstance(event, PromptFinished)]
    held_out = takewhile(lambda event: event.held_out and event.prompt.task == task, prompts)
    return task_finished, list(held_out)[::-1]


def states(session: Session) -> dict[str, int]:
    query = select(JobRow.state, func.count()).group_by(JobRow.state)
    return {state: n for state, n in session.execute(query)}


# --- job rows ---


def find(session: Session, job: str, *, locked: bool = False) -> JobRow:
    """Return the job's row; `locked`: with a row lock against concurrent changes.

    Raises: NotFound: no such job; it names the nearest.
    """
    # Job ids are printable ASCII. PostgreSQL or its driver refuses some other texts, such as NUL.
    is_plain = job.isascii() and job.isprintable()
    row = session.get(JobRow, job, with_for_update=True if locked else None) if is_plain else None
    if row is None:
        newest_ids = session.scalars(select(JobRow.id).order_by(JobRow.created_at.desc()).limit(1000)).all()
        close_ids = difflib.get_close_matches(job, newest_ids, n=1)
        hint = f" (the nearest is {close_ids[0]})" if close_ids else ""
        raise NotFound(f"no job {job!r} is stored{hint}: `swiftopt jobs list` shows them")
    return row


def at_attempt(lease: Lease, state: JobState = "running") -> ColumnElement[bool]:
    """Match the job's row if the lease's attempt is its latest, and the job is in this state."""
    return and_(JobRow.id == lease.job, JobRow.attempt == lease.attempt, JobRow.state == state)


def change(
    session: Session, lease: Lease, expected: JobState = "running", **values: object
) -> Row[Wanted | None] | None:
    """Update the job if it is in this attempt and state, and return its `wanted`; None: it is not, nothing changed."""
    query = update(JobRow).where(at_attempt(lease, expected)).values(**values).returning(JobRow.wanted)
    return session.execute(query.execution_options(synchronize_session=False)).one_or_none()


def to_jobs(session: Session, rows: Sequence[JobRow]) -> list[Job]:
    """Return the jobs of rows, with their layer sets, the plans in use for these tasks, and number of completions."""
    ids = [job_row.id for job_row in rows]
    query = select(OutputRow.job_id, func.count()).where(OutputRow.job_id.in_(ids)).group_by(OutputRow.job_id)
    n_outputs = {job: n for job, n in session.execute(query)}
    sets: dict[str, list[LayerSetRecord]] = {}
    for job_row in session.scalars(select(LayerSetRow).where(LayerSetRow.job.in_(ids)).order_by(LayerSetRow.id)):
        with suppress(StoreError):  # Leave out an unreadable layer set, so that the jobs can still be listed.
            sets.setdefault(str(job_row.job), []).append(layer_set_record(job_row))
    plans = _plans_in_use(session, [record for task_records in sets.values() for record in task_records])
    return [_to_job(job_row, n_outputs.get(job_row.id, 0), sets.get(job_row.id, []), plans) for job_row in rows]


def _plans_in_use(session: Session, sets: Iterable[LayerSetRecord]) -> dict[LookedUp, PlanInUse]:
    """Return the plans that lookups find for the layer sets' models and tasks, on the devices they were tuned on."""
    plans: dict[LookedUp, PlanInUse] = {}
    for key in map(_lookup_key, sets):
        if key not in plans:
            plans[key] = PlanInUse(key.task)
            with suppress(LayerSetNotFound, StoreError):
                plans[key] = PlanInUse.of(key.task, lookup(session, *key))
    return plans


class LookedUp(NamedTuple):
    """The arguments of a lookup for decoding a task."""

    model: str
    task: str
    device: str | None
    dtype: str | None


def _lookup_key(record: LayerSetRecord) -> LookedUp:
    return LookedUp(record.fingerprint or record.model, record.task, record.device, record.dtype)


def _to_job(row: JobRow, n_outputs: int, sets: Sequence[LayerSetRecord], plans: Mapping[LookedUp, PlanInUse]) -> Job:
    """Return the job of a row. An unreadable row becomes a failed job, so that jobs can still be listed."""
    columns: dict[str, Any] = {"state": row.state, "request": row.request, "error": row.error}
    try:
        check(row)
    except StoreError as reason:
        columns = {"state": "failed", "request": {}, "error": str(reason)}
    return to_record(
        Job,
        row,
        **columns,
        fingerprint=row.fingerprint or "",
        progress=mapping(row.progress) or None,
        n_outputs=n_outputs,
        obstacle=None,
        layer_sets=tuple(sets),
        plans=tuple(plans[key] for key in dict.fromkeys(map(_lookup_key, sets))),
    )


def check(row: JobRow, snapshot: object = None) -> None:
    """Raises: StoreError: as in `reading`: the job cannot continue, from that snapshot if there is one."""
    with reading(JobRow, row.id):
        if row.kind not in KINDS or row.state not in STATES:
            raise ValueError(f"its kind is {row.kind!r} and its state {row.state!r}")
        for name, column in (("request", row.request), ("snapshot", {} if snapshot is None else snapshot)):
            if not isinstance(column, Mapping):
                raise TypeError(f"its {name} is no object")


def storable(text: str) -> str:
    """Return the text with NUL and lone surrogates escaped, which not every database can store."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


# --- events and streams ---


def report(session: Session, job: str, event: Event) -> EventRow:
    row = EventRow(job_id=job, type=event_type(event), data=event.to_json(), created_at=now())
    session.add(row)
    return row


def _event(row: EventRow) -> Event:
    """Raises: StoreError: as `reading`."""
    with reading(EventRow, row.id):
        return event_from_json(row.type, row.data)


def save_stream(session: Session, sha256: str, lines: str) -> None:
    """Store a stream as JSON Lines, unless the same content is stored already."""
    if session.get(StreamRow, sha256) is None:
        session.add(StreamRow(sha256=sha256, lines=lines, created_at=now()))


def stream(session: Session, sha256: str) -> str | None:
    """Return a stored stream as JSON Lines; None if no stream has this SHA-256."""
    return session.scalar(select(StreamRow.lines).where(StreamRow.sha256 == sha256))


# --- writes of a running attempt, allowed only while it holds its lease
#
# `lease_s`: seconds after which the renewed lease expires. Every function raises LeaseLost, and writes nothing, if the
# attempt was replaced, or the job has ended or was cancelled.


def renew(
    session: Session,
    lease_s: float,
    lease: Lease,
    events: Sequence[Event] = (),
    progress: Mapping[str, Any] | None = None,
) -> Wanted | None:
    """Renew the attempt's lease, and return what the job is asked to do.

    Adds `events` that need no checkpoint, such as the loading of a model, and publishes `progress`.
    """
    verb_now = _hold(session, lease_s, lease, progress)
    for event in events:
        report(session, lease.job, event)
    return verb_now


def peek(session: Session, lease: Lease) -> Wanted | None:
    """Return what the job is asked to do, without renewing the lease."""
    return _attempt_row(session, lease).wanted


def checkpoint(
    session: Session,
    lease_s: float,
    lease: Lease,
    number: int,
    events: Sequence[Event],
    snapshot: Mapping[str, Any] | None,
    progress: Mapping[str, Any] | None = None,
) -> Wanted | None:
    """Renew the lease and store events, their trials and completions, and the snapshot, in one transaction.

    `number` counts the job's checkpoints including this one. Repeating a checkpoint changes nothing: a client whose
    connection breaks during a commit cannot know whether it was written, and retries.
    """
    row = _attempt_row(session, lease, locked=True)
    if row.n_checkpoints >= number:
        return row.wanted
    snapshot_json = None if snapshot is None else dict(snapshot)
    verb_now = _hold(session, lease_s, lease, progress, n_checkpoints=number, n_fruitless=0, snapshot=snapshot_json)
    model = storable(str(mapping(row.request).get("model", "")))
    counts = [count for event in events for count in _store_event(session, lease.job, model, event)]
    # Add all counts in one call, which sorts them: two concurrent checkpoints cannot deadlock.
    add_counts(session, counts)
    return verb_now


def finish_task(
    session: Session,
    lease_s: float,
    lease: Lease,
    number: int,
    task: TaskFinished,
    method: str,
    promotion: Promotion,
    snapshot: Mapping[str, Any] | None,
) -> TaskFinished:
    """Store a task's layer set, its event and the snapshot to resume from, atomically and once.

    `promotion`: whether lookups find the set from now on.

    Raises: LayerSetError: the model has another number of layers.
    """
    if _attempt_row(session, lease, locked=True).n_checkpoints >= number:
        of_task = (LayerSetRow.job == lease.job, LayerSetRow.task == task.task)
        stored_row = session.scalars(select(LayerSetRow).where(*of_task).order_by(LayerSetRow.id.desc())).first()
        return replace(task, record=layer_set_record(stored_row)) if stored_row else task
    snapshot_json = None if snapshot is None else dict(snapshot)
    _hold(session, lease_s, lease, n_checkpoints=number, n_fruitless=0, snapshot=snapshot_json)
    row, plan = add_version(session, task.record, method)
    if promotion == "always" or (promotion == "if none" and not has_best(session, plan)):
        offer(session, plan)
    stored_task = replace(task, record=layer_set_record(row))
    report(session, lease.job, stored_task)
    return stored_task


def _hold(
    session: Session, lease_s: float, lease: Lease, progress: Mapping[str, Any] | None = None, **values: Any
) -> Wanted | None:
    """Renew the lease and update the job's row; return what the job is asked to do."""
    if progress is not None:
        values["progress"] = dict(progress)
    wanted_row = change(session, lease, lease_until=clock_s() + lease_s, **values)
    if wanted_row is None:
        raise _lease_lost(lease)
    return wanted_row[0]


def _attempt_row(session: Session, lease: Lease, *, locked: bool = False) -> JobRow:
    query = select(JobRow).where(at_attempt(lease))
    row = session.scalar(query.with_for_update() if locked else query)
    if row is None:
        raise _lease_lost(lease)
    return row


def _lease_lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"attempt {lease.attempt} of job {lease.job} was replaced, or the job has ended: leave it")


def _store_event(session: Session, job: str, model: str, event: Event) -> list[Count]:
    """Store the event with its trials or completion, and return the counts to add to the counters."""
    row = report(session, job, event)
    if isinstance(event, TrialsDone):
        session.add_all(to_row(TrialRow, trial, job_id=job, task=event.task) for trial in event.trials)
        seconds = sum(trial.seconds for trial in event.trials)
        values = (("trials", float(len(event.trials))), ("trial_seconds", seconds))
        return [Count(name, model, event.task, value=value) for name, value in values]
    if isinstance(event, PromptFinished):
        session.flush()
        session.add(OutputRow(job_id=job, place=event.index, prompt_id=event.prompt.id, event_id=row.id))
        return _completion_counts(model, event.prompt.task, event.completion)
    return []


# --- metrics counters, kept in the database because worker processes end with their job ---


class Count(NamedTuple):
    """One counter's value; `label` is the value by which it is split."""

    name: str
    model: str = ""
    task: str = ""
    label: str = ""
    value: float = 1.0


def count(session: Session, name: str, label: str) -> None:
    """Add 1 to a counter that is not split by model."""
    add_counts(session, [Count(name, label=label)])


def add_counts(session: Session, counts: Iterable[Count]) -> None:
    """Add to counters, sorted, so that concurrent transactions cannot deadlock."""
    sums: dict[tuple[str, str, str, str], float] = {}
    for counter in counts:
        sums[counter[:4]] = sums.get(counter[:4], 0.0) + counter.value
    if not sums:
        return
    rows = [Count(*key, value)._asdict() for key, value in sorted(sums.items())]
    inserted = insert(session, CounterRow).values(rows)
    increment = {"value": CounterRow.value + inserted.excluded.value}
    session.execute(inserted.on_conflict_do_update(index_elements=Count._fields[:4], set_=increment))


def counts(session: Session) -> list[Count]:
    columns = [getattr(CounterRow, name) for name in Count._fields]
    return [Count(*row) for row in session.execute(select(*columns).order_by(*columns[:3]))]


def _completion_counts(model: str, task: str, completion: Completion) -> list[Count]:
    """Return a completion's counts: rounds with drafts, drafted and accepted tokens, and accepted ones by position."""
    if not completion.drafted:
        return []
    per_position = completion.accepted_per_position
    return [
        Count("drafts", model, task, value=completion.n_drafts),
        Count("draft_tokens", model, task, value=completion.drafted),
        Count("accepted_tokens", model, task, value=completion.accepted),
        *(Count("accepted_per_position", model, task, str(i), n) for i, n in enumerate(per_position) if n),
    ]
