"""Jobs over HTTP: submit, list, show, steer, and download what they produced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..core.completions import output_line
from ..core.events import PromptFinished
from ..core.jobs import JobState, Verb, job_to_json
from .bodies import JobSubmission
from .parts import Shared
from .shapes import JobList, JobObject
from .streams import prompts_of

LINES_PER_CHUNK = 32

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JobId = Annotated[str, Path(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="The job's id.")]
IdempotencyKey = Annotated[
    str | None,
    Header(pattern=r"^[\x21-\x7e]{1,255}$", description="Makes a repeated submission give the job of the first."),
]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.post(
    "",
    operation_id="submit_job",
    status_code=202,
    response_model=JobObject,
    responses={200: {"model": JobObject, "description": "The same job was there already."}},
)
def submit(parts: Shared, body: JobSubmission, idempotency_key: IdempotencyKey = None) -> Response:
    """Submit a tuning job: 202 with its address; 200 if an unfinished job does the same, or the key is known."""
    prompts, stream, task = prompts_of(parts, body)
    job, is_new = parts.board.submit(body.tune_request(stream, task), prompts, body.queue, idempotency_key)
    return JSONResponse(job_to_json(job), 202 if is_new else 200, {"Location": f"/v1/jobs/{job.id}"})


@router.get("", operation_id="jobs", response_model=JobList)
def jobs(parts: Shared, state: JobState | None = None, limit: Limit = 100) -> Response:
    """The newest jobs first."""
    found = [job_to_json(job) for job in parts.board.latest(state, limit)]
    return JSONResponse({"schema": "swiftopt.jobs-list/1", "jobs": found})


@router.get("/{job}", operation_id="job", response_model=JobObject)
def show(parts: Shared, job: JobId) -> Response:
    """One job as it is now."""
    return JSONResponse(job_to_json(parts.board.get(job)))


@router.get(
    "/{job}/outputs",
    operation_id="job_outputs",
    response_class=Response,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
def outputs(parts: Shared, job: JobId) -> Response:
    """The finished completions in the order of the stream, as JSON Lines: those of `swiftopt tune --out`."""
    finished = parts.board.outputs(job)
    headers = {"Content-Disposition": f'attachment; filename="{job}.jsonl"'}
    return StreamingResponse(_chunks(finished), headers=headers, media_type="application/jsonl")


@router.post("/{job}/{verb}", operation_id="steer_job", response_model=JobObject)
def steer(parts: Shared, job: JobId, verb: Verb) -> Response:
    """Pause, resume, stop, cancel or retry a job; it as it is then. A running job pauses or stops at its next step."""
    return JSONResponse(job_to_json(parts.board.act(job, verb)))


def _chunks(finished: list[PromptFinished]) -> Iterator[str]:
    for start in range(0, len(finished), LINES_PER_CHUNK):
        chunk = finished[start : start + LINES_PER_CHUNK]
        yield "".join(output_line(done.prompt, done.completion) + "\n" for done in chunk)
