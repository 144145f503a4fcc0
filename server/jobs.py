"""Jobs over HTTP: submit, list, show, steer, download what they produced, and follow their events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..core.errors import StoreUnavailable
from ..core.events import JobState, PromptFinished
from ..core.jobs import EventPage, Job, JobBoard, JobEvent, JobList, Verb
from ..core.serialization import LARGEST
from ..core.streams import output_line
from .schemas import JobSubmission
from .state import Shared
from .streams import prompts_of

POLL_S = 0.5  # between two looks at the database
OUTAGE_S = 2.0  # and while it is away
PAGE = 500
KEEP_ALIVE_S = 15  # seconds between comments on a silent stream


After = Annotated[int | None, Query(ge=0, le=LARGEST, description="Only events behind this id.")]
LastEventId = Annotated[
    int | None, Header(ge=0, le=LARGEST, description="As `after`; a client that reconnects sends it.")
]
Format = Annotated[Literal["json", "sse"] | None, Query(description="Overrules the header Accept.")]
PageSize = Annotated[int, Query(ge=1, le=1000, description="Of a JSON page.")]
LINES_PER_CHUNK = 32

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JobId = Annotated[str, Path(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="The job's id.")]
IdempotencyKey = Annotated[
    str | None,
    Header(pattern=r"^[\x21-\x7e]{1,255}$", description="Makes a repeated submission give the job of the first."),
]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.get(
    "/{job}/events",
    operation_id="job_events",
    response_model=EventPage,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    request: Request,
    app: Shared,
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
        found = await run_in_threadpool(app.board.events, job, start, limit)
        return JSONResponse(EventPage(tuple(found), found[-1].id if found else start).to_json())
    await run_in_threadpool(app.board.get, job)  # a wrong id is a 404, not a stream
    return EventSourceResponse(_follow(app.board, job, start), ping=KEEP_ALIVE_S)


@router.post(
    "",
    operation_id="submit_job",
    status_code=202,
    response_model=Job,
    responses={200: {"model": Job, "description": "The same job was there already."}},
)
def submit(app: Shared, body: JobSubmission, idempotency_key: IdempotencyKey = None) -> Response:
    """Submit a tuning job: 202 with its address; 200 if an unfinished job does the same, or the key is known."""
    prompts, stream, task = prompts_of(app, body)
    job, is_new = app.board.submit(body.tune_request(stream, task), prompts, body.queue, idempotency_key)
    return JSONResponse(job.to_json(), 202 if is_new else 200, {"Location": f"/v1/jobs/{job.id}"})


@router.get("", operation_id="jobs", response_model=JobList)
def jobs(app: Shared, state: JobState | None = None, limit: Limit = 100) -> Response:
    """The newest jobs first."""
    return JSONResponse(JobList(tuple(app.board.latest(state, limit))).to_json())


@router.get("/{job}", operation_id="job", response_model=Job)
def show(app: Shared, job: JobId) -> Response:
    """One job as it is now."""
    return JSONResponse(app.board.get(job).to_json())


@router.get(
    "/{job}/outputs",
    operation_id="job_outputs",
    response_class=Response,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
def outputs(app: Shared, job: JobId) -> Response:
    """The finished completions in the order of the stream, as JSON Lines: those of `swiftopt tune --out`."""
    finished = app.board.outputs(job)
    headers = {"Content-Disposition": f'attachment; filename="{job}.jsonl"'}
    return StreamingResponse(_chunks(finished), headers=headers, media_type="application/jsonl")


@router.post("/{job}/{verb}", operation_id="steer_job", response_model=Job)
def steer(app: Shared, job: JobId, verb: Verb) -> Response:
    """Pause, resume, stop, cancel or retry a job; it as it is then. A running job pauses or stops at its next step."""
    return JSONResponse(app.board.act(job, verb).to_json())


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
            yield _event("end", job.to_json())
            return
        await asyncio.sleep(POLL_S)


def _look(board: JobBoard, job_id: str, after: int) -> tuple[Job, list[JobEvent]]:
    job = board.get(job_id)  # before its events, so that a job seen as ended has no more of them
    return job, board.events(job_id, after, PAGE)


def _event(name: str, data: Mapping[str, Any], number: int | None = None) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(data), event=name, id=None if number is None else str(number))


def _chunks(finished: list[PromptFinished]) -> Iterator[str]:
    for start in range(0, len(finished), LINES_PER_CHUNK):
        chunk = finished[start : start + LINES_PER_CHUNK]
        yield "".join(output_line(done.prompt, done.completion) + "\n" for done in chunk)
