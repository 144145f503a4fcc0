"""What the routes of one app share; there are no globals, so that several apps can live in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol, cast

from fastapi import Depends, Request
from prometheus_client import Histogram

from ..core.errors import ModelNotFound
from ..core.jobs import JobBoard
from ..store import Store
from ..worker.queue import WorkerFacts
from .cache import Answers
from .engines import Engines
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
class State:
    """What the routes work with; `queue` None: no Redis was named; `engines` None: the server decodes nothing."""

    store: Store
    board: JobBoard
    queue: QueueView | None
    settings: ServerSettings
    answers: Answers
    lookup_times: Histogram
    engines: Engines | None = None


def engines_of(state: State) -> Engines:
    """Return the engines.

    Raises: ModelNotFound: this server decodes nothing.
    """
    if state.engines is None:
        raise ModelNotFound("this server decodes nothing: start it with `swiftopt serve --model MODEL`")
    return state.engines


async def state_of(request: Request) -> State:
    """Return the state of the app that serves the request."""
    return cast(State, request.app.state.swiftopt)


Shared = Annotated[State, Depends(state_of)]
