"""What a running attempt writes: all of it in transactions that its lease opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from ..core.errors import LayerSetError, LeaseLost, StoreError
from ..core.event_json import event_from_json
from ..core.events import Event, PromptFinished, TaskFinished, TrialsDone
from ..core.jobs import JobEvent, Lease, Promotion, Wanted
from ..core.types import Trial
from . import aliases, counters, layer_sets, rows
from .clock import clock_s
from .counters import Count
from .job_rows import report, storable
from .tables import EventRow, JobRow, LayerSetRow, OutputRow, TrialRow


def hold(session: Session, lease: Lease, lease_s: float, **values: Any) -> Wanted | None:
    """Renew the lease and change what the attempt may change; what the job is asked to do.

    Raises: LeaseLost: the attempt was replaced, or the job has ended or was cancelled.
    """
    mine = update(JobRow).where(JobRow.id == lease.job, JobRow.attempt == lease.attempt, JobRow.state == "running")
    renewed = mine.values(lease_until=clock_s() + lease_s, **values).returning(JobRow.wanted)
    found = session.execute(renewed.execution_options(synchronize_session=False)).one_or_none()
    if found is None:
        raise lost(lease)
    return cast("Wanted | None", found[0])


def peek(session: Session, lease: Lease) -> Wanted | None:
    """What the job is asked to do, without a write.

    Raises: LeaseLost: as `hold`.
    """
    return cast("Wanted | None", _mine(session, lease).wanted)


def checkpoint(
    session: Session,
    lease: Lease,
    lease_s: float,
    number: int,
    events: Sequence[Event],
    snapshot: Mapping[str, Any] | None,
    progress: Mapping[str, Any] | None,
) -> Wanted | None:
    """Events, trials and completions since the last checkpoint, and where to go on from; what the job is asked to do.

    `number` is how many checkpoints the job has with this one. One that was written before changes nothing: a database
    that goes away in a commit leaves its client in the dark, which therefore tries again.

    Raises: LeaseLost: as `hold`; nothing is written.
    """
    row = _mine(session, lease, locked=True)
    if row.n_checkpoints >= number:
        return cast("Wanted | None", row.wanted)
    more = {} if progress is None else {"progress": dict(progress)}
    kept = None if snapshot is None else dict(snapshot)
    wanted = hold(session, lease, lease_s, n_checkpoints=number, n_fruitless=0, snapshot=kept, **more)
    model = storable(str(row.request.get("model", ""))) if isinstance(row.request, Mapping) else ""
    counts = [count for event in events for count in _keep(session, lease.job, model, event)]
    counters.add(session, counts)  # in one go: its order keeps two checkpoints from waiting for each other
    return wanted


def note(session: Session, lease: Lease, lease_s: float, events: Sequence[Event]) -> Wanted | None:
    """Events that bring nothing to go on from, such as the loading of a model.

    Raises: LeaseLost: as `hold`; nothing is written.
    """
    wanted = hold(session, lease, lease_s)
    for event in events:
        report(session, lease.job, event)
    return wanted


def finish_task(
    session: Session,
    lease: Lease,
    lease_s: float,
    number: int,
    task: TaskFinished,
    method: str,
    promotion: Promotion,
    snapshot: Mapping[str, Any],
) -> TaskFinished:
    """A task's layer set, its alias, the event and the snapshot in which the task is done: all or nothing, and once.

    Raises: LeaseLost: as `hold`; nothing is written.
    """
    if _mine(session, lease, locked=True).n_checkpoints >= number:
        mine = (LayerSetRow.job_id == lease.job, LayerSetRow.task == task.task)
        found = session.scalars(select(LayerSetRow).where(*mine).order_by(LayerSetRow.id.desc())).first()
        return replace(task, record=rows.layer_set_record(found)) if found else task
    hold(session, lease, lease_s, n_checkpoints=number, n_fruitless=0, snapshot=dict(snapshot))
    row, plan = layer_sets.add_version(session, task.record, method)
    if promotion == "always" or (promotion == "if none" and not aliases.stands(session, plan)):
        aliases.offer(session, plan)
    stored = replace(task, record=rows.layer_set_record(row))
    report(session, lease.job, stored)
    return stored


def list_events(session: Session, job: str, after: int, limit: int) -> list[JobEvent]:
    """The job's events behind number `after`, oldest first."""
    query = select(EventRow).where(EventRow.job_id == job, EventRow.id > after).order_by(EventRow.id).limit(limit)
    return [JobEvent(row.id, row.type, row.data, row.created_at) for row in session.scalars(query)]


def list_outputs(session: Session, job: str) -> list[PromptFinished]:
    """The completions in the order of the stream."""
    query = select(EventRow).join(OutputRow, OutputRow.event_id == EventRow.id).where(OutputRow.job_id == job)
    found = [
        event_from_json(row.type, row.data) for row in session.scalars(query.order_by(OutputRow.place, EventRow.id))
    ]
    return [event for event in found if isinstance(event, PromptFinished)]


def trials_by_task(session: Session, job: str) -> dict[str, list[Trial]]:
    """The job's trials in step order.

    Raises: StoreError: they were changed by hand.
    """
    found: dict[str, list[Trial]] = {}
    query = select(TrialRow).where(TrialRow.job_id == job).order_by(TrialRow.task, TrialRow.step)
    for row in session.scalars(query):
        try:
            found.setdefault(row.task, []).append(rows.trial(row))
        except (LayerSetError, TypeError) as error:
            raise StoreError(
                f"trial {row.step} of job {job} cannot be read ({error}): it was changed by hand, submit the job again"
            ) from error
    return found


def count_by_state(session: Session) -> dict[str, int]:
    """How many jobs are in each state."""
    query = select(JobRow.state, func.count()).group_by(JobRow.state)
    return {state: n for state, n in session.execute(query)}


def _mine(session: Session, lease: Lease, *, locked: bool = False) -> JobRow:
    query = select(JobRow).where(JobRow.id == lease.job, JobRow.attempt == lease.attempt, JobRow.state == "running")
    row = session.scalar(query.with_for_update() if locked else query)
    if row is None:
        raise lost(lease)
    return row


def lost(lease: Lease) -> LeaseLost:
    """The error of an attempt that may write no more."""
    return LeaseLost(f"attempt {lease.attempt} of job {lease.job} was replaced, or the job has ended: leave it")


def _keep(session: Session, job: str, model: str, event: Event) -> list[Count]:
    """Add the event with its trials or completion; what it adds to the counters."""
    row = report(session, job, event)
    if isinstance(event, TrialsDone):
        session.add_all(rows.trial_row(job, event.task, trial) for trial in event.trials)
        seconds = sum(trial.seconds for trial in event.trials)
        both = (("trials", float(len(event.trials))), ("trial_seconds", seconds))
        return [Count(name, model, event.task, value=value) for name, value in both]
    if isinstance(event, PromptFinished):
        session.flush()
        session.add(OutputRow(job_id=job, place=event.index, prompt_id=event.prompt.id, event_id=row.id))
        return counters.of_completion(model, event.prompt.task, event.completion)
    return []
