"""A job's events: followed live as server-sent events, or read as pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ..core.errors import StoreUnavailable
from ..core.jobs import Job, JobBoard, JobEvent, job_to_json
from .jobs import JobId
from .parts import Shared
from .shapes import EventPage

POLL_S = 0.5  # between two looks at the database
OUTAGE_S = 2.0  # and while it is away
PAGE = 500
KEEP_ALIVE_S = 15  # seconds between comments on a silent stream
LARGEST = 2**63 - 1

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

After = Annotated[int | None, Query(ge=0, le=LARGEST, description="Only events behind this id.")]
LastEventId = Annotated[
    int | None, Header(ge=0, le=LARGEST, description="As `after`; a client that reconnects sends it.")
]
Format = Annotated[Literal["json", "sse"] | None, Query(description="Overrules the header Accept.")]
PageSize = Annotated[int, Query(ge=1, le=1000, description="Of a JSON page.")]


@router.get(
    "/{job}/events",
    operation_id="job_events",
    response_model=EventPage,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    request: Request,
    parts: Shared,
    job: JobId,
    after: After = None,
    last_event_id: LastEventId = None,
    format: Format = None,
    limit: PageSize = 1000,
) -> Response:
    """The job's events from the first on, or behind `Last-Event-ID`; `end` with the job is the last one.

    `progress` events come without an id when the figures have changed. With `Accept: application/json` or
    `format=json`: one page of what is there.
    """
    start = last_event_id if last_event_id is not None else (after or 0)
    if format == "json" or (format is None and "application/json" in request.headers.get("accept", "")):
        found = await run_in_threadpool(parts.board.events, job, start, limit)
        return JSONResponse(_page(found, start))
    await run_in_threadpool(parts.board.get, job)  # a wrong id is a 404, not a stream
    return EventSourceResponse(_follow(parts.board, job, start), ping=KEEP_ALIVE_S)


def _page(found: list[JobEvent], start: int) -> dict[str, Any]:
    listed = [
        {"id": event.id, "type": event.type, "data": dict(event.data), "created_at": event.created_at}
        for event in found
    ]
    return {"schema": "swiftopt.events/1", "events": listed, "next_after": found[-1].id if found else start}


async def _follow(board: JobBoard, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    """Events until the job has ended; an outage of the database makes it wait, not end."""
    shown: Mapping[str, Any] | None = None
    while True:
        try:
            job, found = await run_in_threadpool(_look, board, job_id, after)
        except StoreUnavailable:
            await asyncio.sleep(OUTAGE_S)
            continue
        for event in found:
            after = event.id
            yield _event(event.type, event.data, event.id)
        if len(found) == PAGE:
            continue
        if job.progress is not None and job.progress != shown:
            shown = job.progress
            yield _event("progress", shown)
        if job.is_finished:
            yield _event("end", job_to_json(job))
            return
        await asyncio.sleep(POLL_S)


def _look(board: JobBoard, job_id: str, after: int) -> tuple[Job, list[JobEvent]]:
    job = board.get(job_id)  # before its events, so that a job seen as ended has no more of them
    return job, board.events(job_id, after, PAGE)


def _event(name: str, data: Mapping[str, Any], number: int | None = None) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(data), event=name, id=None if number is None else str(number))
