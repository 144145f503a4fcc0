"""Following a job to its end: the display of a local run, fed with what the job reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import JobCancelled, JobFailed, StoreError, StoreUnavailable
from ..core.event_json import event_from_json
from ..core.events import Event, StateChanged, TaskFinished, TrialsDone
from ..core.jobs import Job, JobEvent
from .output import note
from .place import Board, Place, command, quoted, waits

if TYPE_CHECKING:
    from ..core.types import Trial
    from .live import TuneProgress

PATIENCE_S = 5.0  # how long a job may wait before we say why
AWAY_S = 120.0  # how long the database may be away
RETRY_S = 1.0  # between two tries to reach it


@dataclass(slots=True)
class Findings:
    """What the events so far tell of the result."""

    trials: dict[str, list[Trial]] = field(default_factory=dict)
    finished: dict[str, TaskFinished] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, TrialsDone):
            self.trials.setdefault(event.task, []).extend(event.trials)
        elif isinstance(event, TaskFinished):
            self.finished[event.task] = event

    def tasks(self) -> list[TaskFinished]:
        """The results in the order in which they came, each with the trials of its search."""
        return [
            replace(task, trials=tuple(sorted(self.trials.get(name, ()), key=lambda trial: trial.step)))
            for name, task in self.finished.items()
        ]


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has succeeded, with its results."""

    job: Job
    tasks: tuple[TaskFinished, ...]


class Detached(Exception):
    """The user stopped following; the job goes on."""


def follow(board: Board, job: Job, progress: TuneProgress) -> Ended:
    """Show what the job reports until it ends.

    Raises: JobFailed, JobCancelled: it ended without a result. Detached: Ctrl-C. ServiceUnreachable, StoreError: what
        keeps the job does not answer for two minutes.
    """
    findings, hint = Findings(), _Hint(progress)
    try:
        with progress:
            for update in _patient(board, job, progress):
                if isinstance(update, JobEvent):
                    event = event_of(update)
                    if event is not None:
                        findings.add(event)
                        progress(event)
                    hint.heard(event)
                else:
                    job = update
                    hint.look(board, job)
    except KeyboardInterrupt:
        raise Detached from None
    return ended(job, findings)


def look_back(board: Board, job: Job) -> Ended:
    """The results of a job that has ended.

    Raises: JobFailed, JobCancelled: it ended without one.
    """
    findings = Findings()
    for update in board.updates(job.id):
        event = event_of(update) if isinstance(update, JobEvent) else None
        if event is not None:
            findings.add(event)
    return ended(job, findings)


def ended(job: Job, findings: Findings) -> Ended:
    """The results, or the error.

    Raises: JobFailed, JobCancelled: the job ended without a result.
    """
    if job.state == "failed":
        raise JobFailed(f"job {job.id} has failed: {job.error or 'no reason was given'}")
    if job.state == "cancelled":
        raise JobCancelled(f"job {job.id} was cancelled")
    return Ended(job, tuple(findings.tasks()))


def tell_detached(place: Place, job: str) -> None:
    """How to come back to a job, and how to end it."""
    again, cancel = command(place, "jobs", "watch", job), command(place, "jobs", "cancel", job)
    note(f"job {job} goes on; watch it with {quoted(again)}, cancel it with {quoted(cancel)}")


def tell_outputs(place: Place, job: Job) -> None:
    """Where the completions of a job without a result are."""
    if job.n_outputs:
        fetch = command(place, "jobs", "outputs", job.id, "--out", "FILE")
        note(f"{job.n_outputs} completions are kept: fetch them with {quoted(fetch)}")


def write_outputs(board: Board, job: str, out: Path) -> int:
    """Add the job's completions to a file, in the order of the stream; how many.

    Raises: OutputError: the file cannot be written.
    """
    from ..tasks.outputs import CompletionWriter

    found = board.jobs.outputs(job)
    with CompletionWriter(out) as writer:
        for event in found:
            writer.write(event.prompt, event.completion)
    return len(found)


class _Hint:
    """Says once, after a while, why a job waits."""

    def __init__(self, progress: TuneProgress) -> None:
        self._progress = progress
        self._since = time.monotonic()
        self._told = False

    def heard(self, event: Event | None) -> None:
        """A change of state starts the clock again."""
        if isinstance(event, StateChanged):
            self._since = time.monotonic()

    def look(self, board: Board, job: Job) -> None:
        """Say it, if it is time."""
        if self._told or job.state != "queued" or time.monotonic() - self._since < PATIENCE_S:
            return
        self._since = time.monotonic()  # where there is nothing to say, look again later
        reason = waits(board, job)
        if reason is not None:
            self._told = True
            self._progress.say(reason)


def _patient(board: Board, job: Job, progress: TuneProgress) -> Iterator[JobEvent | Job]:
    """The job's updates, also over a time in which the database is away."""
    after, away_since, told = 0, None, False
    while True:
        try:
            for update in board.updates(job.id, after):
                after = max(after, update.id) if isinstance(update, JobEvent) else after
                away_since, told = None, False
                yield update
            return
        except StoreUnavailable as error:
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > AWAY_S:
                raise
            if not told:
                progress.say(f"{error}; still trying")
                told = True
            time.sleep(RETRY_S)


def event_of(update: JobEvent) -> Event | None:
    """The event; None for one of a newer swiftopt, which we cannot show."""
    values = {key: value for key, value in update.data.items() if key != "type"}
    with suppress(StoreError):
        return event_from_json(update.type, values)
    return None
