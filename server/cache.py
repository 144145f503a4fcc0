"""Answers to look-ups, encoded once and kept for two seconds at most; equal questions that meet are one query."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from anyio import CapacityLimiter, to_thread

from ..core.errors import NotFound
from .problems import MEDIA_TYPE, as_problem, kind_of

FRESH_S = 0.5  # after which a question also asks the database again
LONGEST_S = 2.0  # after which it waits for that
MAX_ANSWERS = 10_000
THREADS = 4  # for misses: their own, so that slow requests elsewhere do not hold look-ups up


class Query(NamedTuple):
    """A look-up; `version` takes the place of `alias`."""

    model: str
    task: str
    alias: str = "best"
    device: str | None = None
    dtype: str | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The body for a query, or the problem; good until `until` on the monotonic clock."""

    status: int
    media_type: str
    body: bytes
    etag: str
    until: float


class Answers:
    """`find` is called in a thread, once for equal queries that meet; its NotFound is an answer, too.

    Raises: SwiftoptError: what `find` raises else; it is not kept.
    """

    def __init__(self, find: Callable[[Query], dict[str, Any]]) -> None:
        self._find = find
        self._known: dict[Query, Answer] = {}
        self._asked: dict[Query, asyncio.Task[Answer]] = {}
        self._threads: CapacityLimiter | None = None

    async def get(self, query: Query) -> Answer:
        """The answer, at most `LONGEST_S` old; one older than `FRESH_S` is given while a new one is on its way."""
        known = self._known.get(query)
        left_s = known.until - time.monotonic() if known is not None else 0.0
        if known is not None and left_s > LONGEST_S - FRESH_S:
            return known
        task = self._asked.get(query)
        if task is None:
            task = self._asked[query] = asyncio.create_task(self._load(query))
            task.add_done_callback(lambda done: self._done(query, done))
        if known is not None and left_s > 0:
            return known
        return await asyncio.shield(task)  # one caller that hangs up must not end it for the others

    async def _load(self, query: Query) -> Answer:
        self._threads = self._threads or CapacityLimiter(THREADS)  # needs a running loop
        asked_at = time.monotonic()  # an answer ages from the moment of the question
        answer = await to_thread.run_sync(self._answer, query, asked_at + LONGEST_S, limiter=self._threads)
        self._known.pop(query, None)
        self._known[query] = answer
        while len(self._known) > MAX_ANSWERS:
            del self._known[next(iter(self._known))]  # the oldest
        return answer

    def _answer(self, query: Query, until: float) -> Answer:
        try:
            status, media_type, values = 200, "application/json", self._find(query)
        except NotFound as error:
            status, media_type, values = 404, MEDIA_TYPE, as_problem(404, kind_of(error), str(error))
        body = json.dumps(values).encode()
        return Answer(status, media_type, body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', until)

    def _done(self, query: Query, task: asyncio.Task[Answer]) -> None:
        self._asked.pop(query, None)
        if not task.cancelled():
            task.exception()  # fetched here in case every caller has hung up
