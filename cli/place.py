"""Where jobs are kept, as the options say: a server, or a database with the Redis that delivers from it."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..core.errors import InvalidInput, ServiceUnreachable, StoreError
from ..core.jobs import Job, JobBoard, JobEvent
from ..core.urls import safe_url
from .options import open_store

if TYPE_CHECKING:
    from ..client import Client
    from ..store import Store
    from ..worker.queue import RedisQueue

POLL_S = 0.5  # between two looks at a job
PAGE = 1000  # events per look


@dataclass(frozen=True, slots=True)
class Place:
    """The server's URL; or the Redis (None: jobs can be seen and steered, but wait) and database (None: default)."""

    server: str | None = None
    redis: str | None = None
    db: str | None = None


class Board:
    """An open place. `jobs` does the work; `database` is what to call it, without a password."""

    def __init__(self, jobs: JobBoard, database: str) -> None:
        self.jobs, self.database = jobs, database

    def updates(self, job: str, after: int = 0) -> Iterator[JobEvent | Job]:
        """What the job reports, as `Client.follow`; the job itself comes now and then, and last of all at its end."""
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

    def complaint(self, queue: str) -> str | None:
        """Why jobs in the queue wait, in words; None where that is not known."""
        return None


class QueueBoard(Board):
    """Jobs in a database, with the Redis that brings them to workers."""

    def __init__(self, store: Store, queue: RedisQueue | None) -> None:
        from ..worker.queue import JobService

        logger = logging.getLogger("swiftopt")
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())  # what it would log, `complaint` says better
        super().__init__(JobService(store, queue), safe_url(store.url))
        self._queue = queue

    def complaint(self, queue: str) -> str | None:
        if self._queue is None:
            return "no Redis is named, so the job waits: name it with --redis or SWIFTOPT_REDIS_URL"
        try:
            listening = [worker for worker in self._queue.workers() if worker.queue == queue]
        except ServiceUnreachable as error:
            return f"the job waits in the database: {error}"
        return None if listening else f"no worker listens on queue {queue!r}: start one with `swiftopt worker`"


class ServerBoard(Board):
    """Jobs behind a server."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, safe_url(client.url))
        self._client = client

    def complaint(self, queue: str) -> str | None:
        redis = self._client.ready().get("redis")
        return None if redis in (None, "ok") else f"the job waits in the server's database: its Redis is {redis}"

    def updates(self, job: str, after: int = 0) -> Iterator[JobEvent | Job]:
        return self._client.follow(job, after)


def chosen(place: Place) -> Place:
    """The place without what does not count: a server wins, unless a Redis or database stands on the command line.

    Raises: InvalidInput: the command line names both.
    """
    given = {name for name in ("server", "redis", "db") if _on_command_line(name)}
    if "server" in given and len(given) > 1:
        other = sorted(given - {"server"})[0]
        raise InvalidInput(f"--server keeps its jobs in a database of its own: leave out --{other}, or --server")
    if place.server and (not given or "server" in given):
        return Place(server=place.server)
    return Place(redis=place.redis, db=place.db)


@contextmanager
def opened(place: Place) -> Iterator[Board]:
    """The board of a place.

    Raises: SettingsError, StoreError: the place cannot be used.
    """
    if place.server:
        from ..client import Client

        with Client(place.server) as client:
            yield ServerBoard(client)
        return
    with open_store(place.db) as store:
        if place.redis is None:
            with suppress(StoreError):  # where no service runs, nobody else ends the runs whose process was killed
                store.jobs.expire()
            yield QueueBoard(store, None)
            return
        from ..worker.queue import RedisQueue

        queue = RedisQueue(place.redis)
        try:
            yield QueueBoard(store, queue)
        finally:
            queue.close()


def command(place: Place, *words: str) -> list[str]:
    """`swiftopt WORDS` for the same place: with its options, where they stand on the command line."""
    values = {"server": place.server, "redis": place.redis, "db": place.db}
    given = {name: safe_url(value) for name, value in values.items() if value and _on_command_line(name)}
    return ["swiftopt", *words, *(part for name, value in given.items() for part in (f"--{name}", value))]


def waits(board: Board, job: Job) -> str | None:
    """Why a queued job is not running, in words."""
    return board.complaint(job.queue) if job.state == "queued" and job.queue is not None else None


def _on_command_line(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def quoted(words: Sequence[str]) -> str:
    """A command line to copy."""
    return f"`{shlex.join(words)}`"
