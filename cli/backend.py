"""Where jobs are kept, as the options say, and how a job is followed to its end."""

from __future__ import annotations

import functools
import logging
import math
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import (
    InvalidInput,
    JobCancelled,
    JobFailed,
    ServiceUnreachable,
    StoreError,
    StoreUnavailable,
    safe_url,
)
from ..core.events import Event, StateChanged, TaskFinished, TrialsDone, event_from_json
from ..core.requests import Job, JobBoard, JobEvent
from . import options
from .options import on_command_line, open_store, together
from .output import INTERRUPTED, console, note
from .progress import TuneProgress

if TYPE_CHECKING:
    from ..client import Client
    from ..core.types import Trial
    from ..store import Store
    from ..worker.queue import RedisQueue

POLL_S = 0.5  # between two looks at a job
PAGE = 1000  # events per look
PATIENCE_S = 5.0  # how long a job may wait before we say why
AWAY_S = 120.0  # how long the database may be away while a job is followed
RETRY_S = 1.0  # between two tries to reach it


class JobClient:
    """Access to the jobs of an open backend; `database` is its name for people, without a password."""

    def __init__(self, jobs: JobBoard, database: str) -> None:
        self.jobs, self.database = jobs, database

    def updates(self, job: str, after: int = 0) -> Iterator[JobEvent | Job]:
        """Yield a job's events behind number `after`, and now and then the job itself, which comes last at its end."""
        progress = None
        while True:
            seen = self.jobs.get(job)  # before its events, so that those of its end are there when it has ended
            while events := self.jobs.events(job, after, PAGE):
                yield from events
                after = events[-1].id
            if seen.progress is not None and seen.progress != progress and not seen.is_finished:
                progress = seen.progress
                yield JobEvent(0, "progress", progress, "")
            yield seen
            if seen.is_finished:
                return
            time.sleep(POLL_S)

    def why_waiting(self, job: Job) -> str | None:
        """Return why a queued job does not run, in words; None for other jobs, and where that is not known."""
        return self._obstacle(job.queue) if job.state == "queued" and job.queue is not None else None

    def _obstacle(self, queue: str) -> str | None:
        return None


class QueueClient(JobClient):
    """Access to jobs in a database, with the Redis that brings them to workers."""

    def __init__(self, store: Store, queue: RedisQueue | None) -> None:
        from ..worker.queue import JobService

        logger = logging.getLogger("swiftopt")
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())  # what it would log, `why_waiting` says better
        super().__init__(JobService(store, queue), safe_url(store.url))
        self._queue = queue

    def _obstacle(self, queue: str) -> str | None:
        if self._queue is None:
            return "no Redis is named, so the job waits: name it with --redis or SWIFTOPT_REDIS_URL"
        try:
            listening = [worker for worker in self._queue.workers() if worker.queue == queue]
        except ServiceUnreachable as error:
            return f"the job waits in the database: {error}"
        return None if listening else f"no worker listens on queue {queue!r}: start one with `swiftopt worker`"


class ServerClient(JobClient):
    """Access to jobs behind a server."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, safe_url(client.url))
        self._client = client

    def updates(self, job: str, after: int = 0) -> Iterator[JobEvent | Job]:
        return self._client.follow(job, after)

    def _obstacle(self, queue: str) -> str | None:
        redis = self._client.ready().get("redis")
        return None if redis in (None, "ok") else f"the job waits in the server's database: its Redis is {redis}"


@dataclass(frozen=True, slots=True)
class Backend:
    """Where jobs are kept: a server's URL; else a database (None: the default one) and the Redis that delivers from it.

    Without Redis, jobs can be seen and steered, but none is delivered to a worker.
    """

    server: str | None = None
    redis: str | None = None
    db: str | None = None

    @classmethod
    def chosen(cls, server: str | None, redis: str | None, db: str | None) -> Backend:
        """Choose by the options: a server wins, unless Redis or database are named on the command line.

        Raises: InvalidInput: the command line names both.
        """
        given = {name for name in ("server", "redis", "db") if on_command_line(name)}
        if "server" in given and len(given) > 1:
            other = sorted(given - {"server"})[0]
            raise InvalidInput(f"--server keeps its jobs in a database of its own: leave out --{other}, or --server")
        return cls(server=server) if server and (not given or "server" in given) else cls(redis=redis, db=db)

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
        with open_store(self.db) as store:
            if self.redis is None:
                with suppress(StoreError):  # where no service runs, nobody else ends the runs whose process was killed
                    store.jobs.expire()
                yield QueueClient(store, None)
                return
            from ..worker.queue import RedisQueue

            with closing(RedisQueue(self.redis)) as queue:
                yield QueueClient(store, queue)

    def command(self, *words: str) -> str:
        """Return `swiftopt WORDS` in quotes, with those options of this backend that are on the command line."""
        values = {"server": self.server, "redis": self.redis, "db": self.db}
        given = [(f"--{name}", safe_url(value)) for name, value in values.items() if value and on_command_line(name)]
        return f"`{shlex.join(['swiftopt', *words, *(part for option in given for part in option)])}`"


def backend_options(command: Any) -> Any:
    """Add --redis, --server and --db to a command, which gets the `Backend` that they choose as `backend`."""

    @functools.wraps(command)
    def call(*args: Any, redis: str | None, server: str | None, db: str | None, **values: Any) -> Any:
        return command(*args, backend=Backend.chosen(server, redis, db), **values)

    return together(options.redis, options.server, options.db)(call)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has succeeded, with its results in the order in which they came."""

    job: Job
    tasks: tuple[TaskFinished, ...]


def result_of(backend: Backend, client: JobClient, job: Job) -> Ended:
    """Return a job's results, after following it to its end; says where its completions are if there are none.

    Raises: JobFailed, JobCancelled: it ended without a result. Exit: Ctrl-C, after which the job goes on.
    """
    try:
        return follow(client, job, TuneProgress(console(stderr=True, quiet=job.is_finished)))
    except KeyboardInterrupt:
        if job.is_finished:
            raise
        watch, cancel = (backend.command("jobs", verb, job.id) for verb in ("watch", "cancel"))
        note(f"job {job.id} goes on; watch it with {watch}, cancel it with {cancel}")
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (JobFailed, JobCancelled):
        n_outputs = client.jobs.get(job.id).n_outputs
        if n_outputs:
            fetch = backend.command("jobs", "outputs", job.id, "--out", "FILE")
            note(f"{n_outputs} completions are kept: fetch them with {fetch}")
        raise


def follow(client: JobClient, job: Job, progress: TuneProgress) -> Ended:
    """Show what the job reports until it ends, and after a while why it waits.

    Raises: JobFailed, JobCancelled: it ended without a result. ServiceUnreachable, StoreError: what keeps the job does
        not answer for two minutes.
    """
    found: list[Event] = []
    waiting_since, said_why = time.monotonic(), False
    with progress:
        for update in _patient_updates(client, job.id, progress):
            if isinstance(update, Job):
                job = update
                if job.state == "queued" and not said_why and time.monotonic() - waiting_since >= PATIENCE_S:
                    waiting_since = time.monotonic()  # where there is nothing to say, look again later
                    if reason := client.why_waiting(job):
                        progress.say(reason)
                        said_why = True
            elif (event := event_of(update)) is not None:
                progress(event)
                if isinstance(event, StateChanged):
                    waiting_since = time.monotonic()
                elif isinstance(event, TrialsDone | TaskFinished):
                    found.append(event)
    if job.state == "failed":
        raise JobFailed(f"job {job.id} has failed: {job.error or 'no reason was given'}")
    if job.state == "cancelled":
        raise JobCancelled(f"job {job.id} was cancelled")
    return Ended(job, finished_tasks(found))


def finished_tasks(events: Iterable[Event]) -> tuple[TaskFinished, ...]:
    """Return the finished tasks among a job's events, each once, with the trials of its search in their order."""
    trials: defaultdict[str, list[Trial]] = defaultdict(list)
    finished: dict[str, TaskFinished] = {}
    for event in events:
        if isinstance(event, TrialsDone):
            trials[event.task] += event.trials
        elif isinstance(event, TaskFinished):
            finished[event.task] = event
    return tuple(
        replace(task, trials=tuple(sorted(trials[name], key=lambda trial: trial.step)))
        for name, task in finished.items()
    )


def event_of(update: JobEvent) -> Event | None:
    """Return a stored event as it was reported; None for one of a newer swiftopt, which cannot be shown."""
    with suppress(StoreError):
        return event_from_json(update.type, {key: value for key, value in update.data.items() if key != "type"})
    return None


def _patient_updates(client: JobClient, job: str, progress: TuneProgress) -> Iterator[JobEvent | Job]:
    """Yield the job's updates, also over a time in which the database is away."""
    after, away_since = 0, math.inf
    while True:
        try:
            for update in client.updates(job, after):
                after = max(after, update.id) if isinstance(update, JobEvent) else after
                away_since = math.inf
                yield update
            return
        except StoreUnavailable as error:
            if away_since == math.inf:
                away_since = time.monotonic()
                progress.say(f"{error}; still trying")
            if time.monotonic() - away_since > AWAY_S:
                raise
            time.sleep(RETRY_S)
