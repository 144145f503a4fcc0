"""Chooses the backend that stores jobs, follows a job until it finishes, and displays its progress."""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ..core import events
from ..core.errors import (
    InvalidInput,
    JobCancelled,
    JobFailed,
    StoreError,
    StoreUnavailable,
    safe_url,
)
from ..core.events import (
    PHASES,
    Event,
    Progress,
    TaskFinished,
    TrialsDone,
    event_line,
    event_task,
    state_words,
)
from ..core.requests import Job, JobBoard, JobEvent
from ..terminal import commands, inputs, options
from ..terminal.inputs import on_command_line
from ..terminal.output import INTERRUPTED, console, note
from ..terminal.render import number, sparkline

if TYPE_CHECKING:
    from ..client import Client
    from ..core.types import Trial
    from ..store import Store
    from ..worker.queue import RedisQueue

POLL_S = 0.5  # Seconds between two polls of a job.
PAGE = 1000  # Maximum number of events fetched per poll.
PATIENCE_S = 5.0  # Seconds that a job may stay queued before the reason is printed.
AWAY_S = 120.0  # Seconds of database outage after which following a job fails.
RETRY_S = 1.0  # Seconds between two attempts to reach the database during an outage.
REFRESH_PER_S = 4  # Redraws of the live display per second.
# A live display shows these phases, so no lines are printed for them.
LIVE_PHASES = ("load", "profile", "accumulate", "optimise")
KEPT_VALUES = 4000  # Maximum number of matchness values in the live curve.


class JobClient:
    """Access to the jobs of an open backend; `database` is the URL of its database without the password."""

    def __init__(self, jobs: JobBoard, database: str) -> None:
        self.jobs, self.database = jobs, database

    def updates(self, job: str) -> Iterator[JobEvent | Job | str]:
        """Yield a job's events, and the job itself after each poll; the finished job comes last.

        A yielded string reports that the database is unreachable; polling continues.

        Raises: StoreUnavailable: the database has been unreachable for two minutes.
        """
        after, progress, away_since = 0, None, math.inf
        while True:
            try:
                # Read the job before its events: if the job has finished, its last events are then included.
                job_now = self.jobs.get(job)
                events = self.jobs.events(job, after, PAGE)
            except StoreUnavailable as error:
                if away_since == math.inf:
                    away_since = time.monotonic()
                    yield f"{error}; still trying"
                if time.monotonic() - away_since > AWAY_S:
                    raise
                time.sleep(RETRY_S)
                continue
            away_since = math.inf
            yield from events
            after = events[-1].id if events else after
            if len(events) == PAGE:
                continue
            if job_now.progress is not None and job_now.progress != progress and not job_now.is_finished:
                progress = job_now.progress
                yield JobEvent(0, "progress", progress, "")
            yield job_now
            if job_now.is_finished:
                return
            time.sleep(POLL_S)


class QueueClient(JobClient):
    """Access to jobs in a database; Redis, if given, delivers them to workers."""

    def __init__(self, store: Store, queue: RedisQueue | None) -> None:
        from ..worker.queue import JobService

        logger = logging.getLogger("swiftopt")
        if not logger.handlers:
            # Silence the queue's log: `obstacle` reports the same problems in clearer words.
            logger.addHandler(logging.NullHandler())
        super().__init__(JobService(store, queue), safe_url(store.url))


class ServerClient(JobClient):
    def __init__(self, client: Client) -> None:
        super().__init__(client, safe_url(client.url))
        self._client = client

    def updates(self, job: str) -> Iterator[JobEvent | Job]:
        return self._client.follow(job)


@dataclass(frozen=True, slots=True)
class Backend:
    """Where jobs are stored: on a server, or in a database (None: the default one) whose jobs Redis delivers.

    Without Redis, jobs can be listed and controlled, but are not delivered to workers.
    """

    server: str | None = None
    redis: str | None = None
    db: str | None = None

    @classmethod
    def from_options(cls, server: str | None, redis: str | None, db: str | None) -> Backend:
        """Choose the server if one is configured, unless the command line names a Redis or database.

        Raises: InvalidInput: the command line names a server as well as a Redis or database.
        """
        named_options = {name for name in ("server", "redis", "db") if on_command_line(name)}
        if "server" in named_options and len(named_options) > 1:
            conflicting = sorted(named_options - {"server"})[0]
            raise InvalidInput(f"--server stores jobs in its own database: remove --{conflicting}, or --server")
        return (
            cls(server=server)
            if server and (not named_options or "server" in named_options)
            else cls(redis=redis, db=db)
        )

    @contextmanager
    def open(self) -> Iterator[JobClient]:
        """Give access to the jobs.

        Raises: SettingsError, StoreError: the backend cannot be used.
        """
        if self.server:
            from ..client import Client

            with Client(self.server) as client:
                yield ServerClient(client)
            return
        with inputs.open_store(self.db) as store:
            if self.redis is None:
                # Without a service, only this call ends runs whose process was killed.
                with suppress(StoreError):
                    store.jobs.expire()
                yield QueueClient(store, None)
                return
            from ..worker.queue import RedisQueue

            with closing(RedisQueue(self.redis)) as queue:
                yield QueueClient(store, queue)

    def command(self, *arguments: str) -> str:
        """Return `swiftopt WORDS` in quotes, with those options of this backend that are on the command line."""
        values = {"server": self.server, "redis": self.redis, "db": self.db}
        access_options = [
            (f"--{name}", safe_url(value)) for name, value in values.items() if value and on_command_line(name)
        ]
        return (
            f"`{shlex.join(['swiftopt', *arguments, *(argument for option in access_options for argument in option)])}`"
        )


@options.adapt_values
def _as_backend(redis: str | None, server: str | None, db: str | None, **values: Any) -> dict[str, Any]:
    return {**values, "backend": Backend.from_options(server, redis, db)}


# Options --redis, --server and --db; the command receives the chosen `Backend` as `backend`.
backend_options = commands.together(options.redis, options.server, options.db, _as_backend)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has succeeded, with its results in order of arrival."""

    job: Job
    tasks: tuple[TaskFinished, ...]


def result_of(backend: Backend, client: JobClient, job: Job) -> Ended:
    """Follow a job to its end and return its results; if it fails, print how to fetch its completions.

    Raises: JobFailed, JobCancelled: the job ended without a result. Exit: after Ctrl-C; the job continues.
    """
    try:
        return follow(client, job, TuneProgress(console(stderr=True, quiet=job.is_finished)))
    except KeyboardInterrupt:
        if job.is_finished:
            raise
        watch_command, cancel_command = (backend.command("jobs", verb, job.id) for verb in ("watch", "cancel"))
        note(f"job {job.id} continues; watch it with {watch_command}, cancel it with {cancel_command}")
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (JobFailed, JobCancelled):
        n_outputs = client.jobs.get(job.id).n_outputs
        if n_outputs:
            fetch = backend.command("jobs", "outputs", job.id, "--out", "FILE")
            note(f"{n_outputs} completions are kept: fetch them with {fetch}")
        raise


def follow(client: JobClient, job: Job, progress: TuneProgress) -> Ended:
    """Show a job's events until it ends; if it stays queued, print the reason.

    Raises: JobFailed, JobCancelled: the job ended without a result. ServiceUnreachable, StoreError: the server or
        database of the job has not answered for two minutes.
    """
    events_so_far: list[Event] = []
    waiting_since, said_why = time.monotonic(), False
    with progress:
        for update in client.updates(job.id):
            if isinstance(update, str):
                progress.say(update)
            elif isinstance(update, Job):
                job = update
                if job.state == "queued" and not said_why and time.monotonic() - waiting_since >= PATIENCE_S:
                    waiting_since = time.monotonic()  # If no reason is found, ask again after PATIENCE_S.
                    if reason := client.jobs.obstacle(job):
                        progress.say(reason)
                        said_why = True
            elif (event := update.event) is not None:
                progress(event)
                if isinstance(event, events.StateChanged):
                    waiting_since = time.monotonic()
                elif isinstance(event, TrialsDone | TaskFinished):
                    events_so_far.append(event)
    if job.state == "failed":
        raise JobFailed(f"job {job.id} failed: {job.error or 'no reason was given'}")
    if job.state == "cancelled":
        raise JobCancelled(f"job {job.id} was cancelled")
    return Ended(job, finished_tasks(events_so_far))


def finished_tasks(events: Iterable[Event]) -> tuple[TaskFinished, ...]:
    """Return the finished tasks among a job's events, each once, with the trials of its search in their order."""
    trials: defaultdict[str, list[Trial]] = defaultdict(list)
    task_by_name: dict[str, TaskFinished] = {}
    for event in events:
        if isinstance(event, TrialsDone):
            trials[event.task] += event.trials
        elif isinstance(event, TaskFinished):
            task_by_name[event.task] = event
    return tuple(
        replace(task, trials=tuple(sorted(trials[name], key=lambda trial: trial.step)))
        for name, task in task_by_name.items()
    )


# --- progress


@dataclass(frozen=True, slots=True)
class RunState:
    """State of the progress display; `others` holds the states of other tasks in progress, by task."""

    task: str = ""
    phase: str = "load"
    detail: str = ""
    prompt_id: str = ""
    index: int = 0
    n_prompts: int = 0
    progress: Progress | None = None
    matchness: tuple[float, ...] = ()
    others: Mapping[str, RunState] = field(default_factory=dict)

    def after(self, event: Event) -> RunState:
        """Return the state once `event` has happened."""
        state = self if event_task(event) in ("", self.task) else self._of(event_task(event))
        match event:
            case events.StateChanged():
                return RunState(phase=state_words(event), matchness=self.matchness)
            case events.PhaseChanged():
                return replace(state, phase=event.phase, detail=event.detail)
            case events.PromptStarted():
                return replace(state, prompt_id=event.prompt_id, index=event.index, n_prompts=event.n_prompts)
            case Progress():
                best = max((m for m in (*state.matchness, event.best_matchness) if m is not None), default=None)
                return replace(state, phase=event.phase, progress=replace(event, best_matchness=best))
            case events.TrialsDone():
                values = (*state.matchness, *(trial.matchness for trial in event.trials))
                return replace(state, matchness=values[-KEPT_VALUES:])
            case _:
                return state

    def _of(self, task: str) -> RunState:
        """Switch to the last state of another task; several tasks of a stream are decoded at once."""
        states = {**self.others, self.task: replace(self, others={})}
        state = states.pop(task, RunState(task=task, phase="", index=self.index))
        return replace(state, n_prompts=self.n_prompts, others=states)


def live_view(state: RunState, width: int) -> RenderableType:
    """Show the current phase, the progress bar, the figures and the matchness curve, in at most four lines."""
    head = Text(_head(state, width - 2))
    head.truncate(width - 2, overflow="ellipsis")
    lines: list[RenderableType] = []
    if state.n_prompts:
        columns = min(40, width - 2)
        n_filled = round(columns * min(1.0, state.index / state.n_prompts))
        lines.append(Text.assemble("  ", ("━" * n_filled, "cyan"), ("━" * (columns - n_filled), "dim")))
    if state.progress is not None:
        lines.append(Text("  " + progress_words(state.progress, width - 2)))
    if state.matchness:
        lines.append(Text("  " + sparkline(state.matchness, min(60, width - 2)), style="green"))
    return Group(head, *lines)


def _head(state: RunState, width: int) -> str:
    """Return task, phase, prompt and detail in the longest form that fits `width`, else in the shortest form."""
    phase, detail = PHASES.get(state.phase, state.phase), state.detail or state.prompt_id
    positions = (f"prompt {state.index + 1} of {state.n_prompts}", f"{state.index + 1}/{state.n_prompts}")
    heading_parts = [
        (state.task, phase, position if state.n_prompts else "", last_part)
        for last_part in (detail, "")
        for position in positions
    ]
    headings = [" · ".join(filter(None, parts)) for parts in heading_parts]
    return next((heading for heading in headings if cell_len(heading) <= width), headings[-1])


def progress_words(progress: Progress, width: int = 80) -> str:
    """Return the figures of a round on one line, as many as fit `width`."""
    figures = (
        f"{progress.tok_s:.1f} tok/s",
        f"matchness {number(progress.matchness)} (best {number(progress.best_matchness)})",
        f"{progress.n_trials} trials",
        f"α {number(progress.acceptance_rate)}",
        f"M {number(progress.mean_generated_length, 1)}",
        f"r {progress.skip_ratio:.2f}",
    )
    lines = accumulate(figures, lambda line, figure: f"{line}  {figure}")
    return max((line for line in lines if cell_len(line) <= width), key=len, default="")


class TuneProgress:
    """Context manager that shows the events of a run while it is open."""

    def __init__(self, console: Console) -> None:
        self.state = RunState()
        self.n_finished = 0  # Number of completions already written to disk.
        self._console = console
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._shown: set[tuple[str, str, str]] = set()

    def __enter__(self) -> TuneProgress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live_options: dict[str, Any] = {
                "refresh_per_second": REFRESH_PER_S,
                "transient": True,
                "redirect_stdout": False,
            }
            self._spinner.update(text=live_view(self.state, self._console.width - 2))
            self._live = Live(self._spinner, console=self._console, **live_options)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        self.state = self.state.after(event)
        if self._live is not None:
            self._spinner.update(text=live_view(self.state, self._console.width - 2))
        self.n_finished += isinstance(event, events.PromptFinished)
        line = event_line(event, self.state.n_prompts)
        if line is not None and self._is_news(event):
            self.say(line)

    def say(self, line: str) -> None:
        """Print a permanent line above the live display."""
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._console.print(line)  # Rich wraps the line: a wrap by the terminal breaks the display.

    def _is_news(self, event: Event) -> bool:
        """Return whether an event deserves a permanent line; phases repeat with every prompt."""
        if isinstance(event, events.StateChanged):
            self._shown.clear()  # Another worker may take over and report all phases again.
        if isinstance(event, events.PhaseChanged):
            key = (event.task, event.phase, "" if event.phase == "profile" else event.detail)
            is_new = key not in self._shown
            self._shown.add(key)
            return is_new and (self._live is None or event.phase not in LIVE_PHASES)
        return self._live is None or not isinstance(event, events.PromptFinished)
