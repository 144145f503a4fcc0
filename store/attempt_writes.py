"""What a running attempt writes, in transactions that its lease opens.

`lease_s` are the seconds until the renewed lease runs out. Raises, in every function: LeaseLost: the attempt was
replaced, or the job has ended or was cancelled; nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ..core.errors import LeaseLost
from ..core.events import Event, PromptFinished, TaskFinished, TrialsDone
from ..core.requests import Lease, Promotion, Wanted
from .database import clock_s
from .jobs import Count, add_counts, at_attempt, completion_counts, report, storable
from .plans import add_version, has_best, offer
from .rows import layer_set_record, trial_row
from .tables import JobRow, LayerSetRow, OutputRow


def renew(
    session: Session,
    lease_s: float,
    lease: Lease,
    events: Sequence[Event] = (),
    progress: Mapping[str, Any] | None = None,
) -> Wanted | None:
    """Show that the attempt is alive, and return what the job is asked to do.

    `events` that bring nothing to go on from, such as the loading of a model, are added; others see `progress`.
    """
    wanted = _hold(session, lease_s, lease, progress)
    for event in events:
        report(session, lease.job, event)
    return wanted


def peek(session: Session, lease: Lease) -> Wanted | None:
    """Return what the job is asked to do, without a renewal."""
    return cast("Wanted | None", _mine(session, lease).wanted)


def checkpoint(
    session: Session,
    lease_s: float,
    lease: Lease,
    number: int,
    events: Sequence[Event],
    snapshot: Mapping[str, Any] | None,
    progress: Mapping[str, Any] | None = None,
) -> Wanted | None:
    """Renew, and add events with their trials and completions, and where to go on from: all or nothing.

    `number` counts the job's checkpoints with this one. One that was written before changes nothing: a database that
    goes away in a commit leaves its client in the dark, which therefore tries again.
    """
    row = _mine(session, lease, locked=True)
    if row.n_checkpoints >= number:
        return cast("Wanted | None", row.wanted)
    kept = None if snapshot is None else dict(snapshot)
    wanted = _hold(session, lease_s, lease, progress, n_checkpoints=number, n_fruitless=0, snapshot=kept)
    model = storable(str(row.request.get("model", ""))) if isinstance(row.request, Mapping) else ""
    counts = [count for event in events for count in _keep(session, lease.job, model, event)]
    add_counts(session, counts)  # in one go: its order keeps two checkpoints from waiting for each other
    return wanted


def finish_task(
    session: Session,
    lease_s: float,
    lease: Lease,
    number: int,
    task: TaskFinished,
    method: str,
    promotion: Promotion,
    snapshot: Mapping[str, Any],
) -> TaskFinished:
    """Store a task's layer set, its event and the snapshot in which the task is done: all or nothing, and once.

    `promotion` says whether look-ups find the set from now on.

    Raises: LayerSetError: the model has another number of layers.
    """
    if _mine(session, lease, locked=True).n_checkpoints >= number:
        mine = (LayerSetRow.job == lease.job, LayerSetRow.task == task.task)
        found = session.scalars(select(LayerSetRow).where(*mine).order_by(LayerSetRow.id.desc())).first()
        return replace(task, record=layer_set_record(found)) if found else task
    _hold(session, lease_s, lease, n_checkpoints=number, n_fruitless=0, snapshot=dict(snapshot))
    row, plan = add_version(session, task.record, method)
    if promotion == "always" or (promotion == "if none" and not has_best(session, plan)):
        offer(session, plan)
    stored = replace(task, record=layer_set_record(row))
    report(session, lease.job, stored)
    return stored


def _hold(
    session: Session, lease_s: float, lease: Lease, progress: Mapping[str, Any] | None = None, **values: Any
) -> Wanted | None:
    """Renew the lease and change what the attempt may change; what the job is asked to do."""
    if progress is not None:
        values["progress"] = dict(progress)
    mine = update(JobRow).where(at_attempt(lease))
    renewed = mine.values(lease_until=clock_s() + lease_s, **values).returning(JobRow.wanted)
    found = session.execute(renewed.execution_options(synchronize_session=False)).one_or_none()
    if found is None:
        raise _lost(lease)
    return cast("Wanted | None", found[0])


def _mine(session: Session, lease: Lease, *, locked: bool = False) -> JobRow:
    query = select(JobRow).where(at_attempt(lease))
    row = session.scalar(query.with_for_update() if locked else query)
    if row is None:
        raise _lost(lease)
    return row


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"attempt {lease.attempt} of job {lease.job} was replaced, or the job has ended: leave it")


def _keep(session: Session, job: str, model: str, event: Event) -> list[Count]:
    """Add the event with its trials or completion, and return what it adds to the counters."""
    row = report(session, job, event)
    if isinstance(event, TrialsDone):
        session.add_all(trial_row(job, event.task, trial) for trial in event.trials)
        seconds = sum(trial.seconds for trial in event.trials)
        both = (("trials", float(len(event.trials))), ("trial_seconds", seconds))
        return [Count(name, model, event.task, value=value) for name, value in both]
    if isinstance(event, PromptFinished):
        session.flush()
        session.add(OutputRow(job_id=job, place=event.index, prompt_id=event.prompt.id, event_id=row.id))
        return completion_counts(model, event.prompt.task, event.completion)
    return []
