"""What the routes share: the parts behind one app, the kinds of fields in requests, and the events of streams.

There are no globals, so that several apps can live in one process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sse_starlette import ServerSentEvent

from ..core.requests import JobBoard
from ..store import Store
from ..worker.queue import RedisQueue
from .engines import Engines
from .middleware import RateLimit
from .settings import ServerSettings

LOGINS_PER_MIN = 20  # to the dashboard

# no control characters: PostgreSQL stores no NUL, and a name has no line break
Word = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
Task = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^/\x00-\x1f\x7f]+$")]
Depth = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Strict(BaseModel):
    """Unknown keys and values of another type are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class State:
    """What the routes work with; `queue` None: no Redis was named."""

    store: Store
    board: JobBoard
    queue: RedisQueue | None
    settings: ServerSettings
    engines: Engines
    tokens: RateLimit  # of each caller
    tries: dict[str, Any] = field(default_factory=dict)  # of `dashboard.playground`, the oldest first
    logins: RateLimit = field(default_factory=lambda: RateLimit(LOGINS_PER_MIN))  # of each address


async def state_of(request: Request) -> State:
    """Return the state of the app that serves the request."""
    return cast(State, request.app.state.swiftopt)


Shared = Annotated[State, Depends(state_of)]


def sse(data: Mapping[str, Any], event: str | None = None, number: int | None = None) -> ServerSentEvent:
    """Return a server-sent event with a JSON object."""
    return ServerSentEvent(json.dumps(data), event=event, id=None if number is None else str(number))
