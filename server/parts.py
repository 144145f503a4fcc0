"""What the routes of one app share; there are no globals, so that several apps can live in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol, cast

from fastapi import Depends, Request

from ..core.jobs import JobBoard
from ..store import Store
from ..worker.queue import WorkerFacts
from .cache import Answers
from .metrics import LookupTimes
from .settings import ServerSettings


class QueueView(Protocol):
    """What health and metrics ask of Redis.

    Raises: ServiceUnreachable: it does not answer.
    """

    def ping(self) -> None:
        """Whether it answers."""

    def workers(self) -> list[WorkerFacts]:
        """Who listens."""

    def depth(self, queue: str) -> int:
        """How many attempts wait in a queue."""


@dataclass(frozen=True, slots=True)
class Parts:
    """`queue` None: no Redis was named."""

    store: Store
    board: JobBoard
    queue: QueueView | None
    settings: ServerSettings
    answers: Answers
    lookup_times: LookupTimes


async def parts_of(request: Request) -> Parts:
    """The parts of the app that serves the request."""
    return cast(Parts, request.app.state.parts)


Shared = Annotated[Parts, Depends(parts_of)]
