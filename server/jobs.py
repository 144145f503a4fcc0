"""Jobs over HTTP: submit, list, show and control them, download their outputs, and follow their events.

The prompts of a job come from its body, an upload, or a file in a configured folder.
"""

from __future__ import annotations

import asyncio
import difflib
import io
import json
import math
import os
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Header, Query, Request
from fastapi import Path as PathField
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..core.errors import NotFound, SettingsError, StoreUnavailable, StreamError, StreamNotFound
from ..core.events import JobState
from ..core.requests import DEFAULT_QUEUE, MAX_NEW_TOKENS, EventPage, Job, JobBoard, JobList, Speed, TuneRequest, Verb
from ..core.serialization import LARGEST
from ..core.settings import TuningSettings, preset_of, presets
from ..core.streams import encodable, output_line, parse_stream, stream_lines, stream_sha256
from ..core.types import DEFAULT_TASK, Prompt, Sampling
from ..models.sources import DTYPES
from .bodies import Strict
from .middleware import Shared, State, sse
from .schemas import Depth, Task, Word
from .settings import MIB

# O_NONBLOCK: opening a named pipe without a writer must not block.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
POLL_S = 0.5  # Seconds between two queries for new events.
OUTAGE_S = 2.0  # Seconds between two queries while the database is unreachable.
PAGE = 500  # Maximum events of a query.
KEEP_ALIVE_S = 15  # Seconds between keep-alive comments on a silent event stream.
LINES_PER_CHUNK = 32

streams = APIRouter(prefix="/v1", tags=["streams"])
router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

QueueName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
SEARCHED = tuple(name for name, preset in presets().items() if preset.is_tuned)
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
JobId = Annotated[str, PathField(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="The job's id.")]


class StreamSource(Strict):
    """The prompts: exactly one of `prompts`, `name` and `upload`."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    prompts: list[dict[str, Any]] = Field(
        default_factory=list,
        min_length=1,
        description="Stream lines: objects with one of prompt, messages, question, turns; task, id, max_new_tokens.",
    )
    name: Word = Field(default="", description="A file under a stream folder of the server: a plain relative path.")
    upload: Sha256 = Field(default="", description="The SHA-256 that POST /v1/streams returned.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("send exactly one of prompts, name and upload")
        return self


class JobSubmission(Strict):
    """A tuning job."""

    model: Word = Field(description="Alias, hub id, or path on the workers.")
    stream: StreamSource
    task: Task | None = Field(default=None, description="Task of lines that name none; default: the name's stem.")
    preset: Literal[SEARCHED] | None = Field(  # type: ignore[valid-type]
        default=None, description="A paper's search with all of its numbers; explicit `settings` override it."
    )
    settings: TuningSettings = Field(default_factory=TuningSettings)
    sampling: Sampling = Field(default_factory=Sampling)
    max_new_tokens: Count = MAX_NEW_TOKENS
    dtype: Literal[DTYPES] = "auto"  # type: ignore[valid-type]
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?|auto-map)$")] = "auto"
    speed: Speed = Field(default="auto", description="How the worker computes; graphs need CUDA.")
    limit: Depth | None = Field(default=None, description="Use only the first prompts.")
    concurrency: Depth = Field(default=1, description="Number of prompts decoded at once.")
    queue: QueueName = DEFAULT_QUEUE

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, values: Any) -> Any:
        _check_storable(values)
        if not isinstance(values, dict) or values.get("preset") not in SEARCHED:
            return values
        tuning_settings = values.get("settings", {})
        preset = TuningSettings(**preset_of(values["preset"]).tuning).to_json()
        return {
            **values,
            "settings": {**preset, **tuning_settings} if isinstance(tuning_settings, dict) else tuning_settings,
        }

    def tune_request(self, stream: str, task: str) -> TuneRequest:
        """Return the request for a worker, without the prompts, which are stored separately."""
        fields = {name: value for name, value in self if name not in ("queue", "preset")}
        return TuneRequest(**{**fields, "stream": stream, "task": task})


def _check_storable(value: Any) -> None:
    """Raise ValueError if a text or number in the value cannot be stored as JSON by every database."""
    encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    elif isinstance(value, list):
        for element in value:
            _check_storable(element)
    elif isinstance(value, dict):
        for key, element in value.items():
            _check_storable(key)
            _check_storable(element)


class StreamObject(BaseModel):
    """A stored stream."""

    schema_: Literal["swiftopt.stream/1"] = Field(alias="schema")
    sha256: str
    n_prompts: int


_LINES = {"schema": {"type": "string"}, "example": '{"prompt": "..."}\n'}
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "string", "format": "binary"}},
    "additionalProperties": False,
}
UPLOAD = {
    "requestBody": {
        "required": True,
        "description": "JSON Lines: one object per line with one of prompt, messages, question, turns.",
        "content": {
            "application/jsonl": _LINES,
            "application/x-ndjson": _LINES,
            "multipart/form-data": {"schema": _FORM},
        },
    }
}


def prompts_of(app: State, body: JobSubmission) -> tuple[list[Prompt], str, str]:
    """Return the job's prompts, the name of their source, and the task of lines that name none.

    Raises: NotFound: there is no such upload or file. StreamError: a line is not a prompt. SettingsError: the name
            cannot be used, or the task of an upload is set again.
    """
    source = body.stream
    if source.upload:
        if body.task is not None:
            raise SettingsError("an uploaded stream already has its tasks: set them with POST /v1/streams?task=…")
        stream_text = app.store.jobs.stream(source.upload)
        if stream_text is None:
            raise NotFound(f"no stream {source.upload} was uploaded: send it to POST /v1/streams first")
        prompts = parse_stream(io.BytesIO(stream_text.encode()), "the upload", DEFAULT_TASK, body.limit)
        return prompts, f"upload {source.upload[:12]}", DEFAULT_TASK
    if source.name:
        task = body.task or PurePosixPath(source.name).stem
        content = read_named(app.settings.stream_folders, source.name, app.settings.max_body_bytes)
        return parse_stream(io.BytesIO(content), source.name, task, body.limit), source.name, task
    task = body.task or DEFAULT_TASK
    lines = (json.dumps(line).encode() + b"\n" for line in source.prompts)
    return parse_stream(lines, "stream.prompts", task, body.limit), "prompts", task


def read_named(folders: Sequence[Path], name: str, max_bytes: int) -> bytes:
    """Read a regular file under one of the folders; symbolic links may not lead outside.

    Raises: SettingsError: the name is not a plain relative path, leads out of the folder, or is not a file.
        StreamNotFound: there is no such file; the message suggests a similar name.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable() or len(name) > 512:
        raise SettingsError(f"stream name {name!r} is not a plain relative path: use a file under a stream folder")
    if not folders:
        raise StreamNotFound(f"this server has no stream folder for {name!r}: send the prompts, or upload them")
    for folder in folders:
        try:
            return _read(folder, name, max_bytes)
        except FileNotFoundError:
            continue
        except OSError as error:
            # For example a name that is too long, a loop of symbolic links, or missing permission.
            raise SettingsError(f"stream {name!r} cannot be read ({error.strerror}): use another file") from error
    close_names = difflib.get_close_matches(name, stream_names(folders), n=1, cutoff=0.3)
    advice = f"did you mean {close_names[0]!r}?" if close_names else "check the name, or upload it"
    raise StreamNotFound(f"there is no stream {name!r} in the server's stream folders: {advice}")


def _read(folder: Path, name: str, max_bytes: int) -> bytes:
    """Raises: FileNotFoundError and other OSError; SettingsError: it leads outside, is not a file, or is too large."""
    real_path = Path(os.path.realpath(folder / name, strict=True))
    if not real_path.is_relative_to(folder):
        raise SettingsError(f"stream {name!r} is outside the server's stream folder: use a file inside it")
    # Open the path component by component and follow no links, because it may have been replaced since the check.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for component in real_path.relative_to(folder).parts:
        try:
            next_descriptor = os.open(component, OPEN_FLAGS, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = next_descriptor
    with open(descriptor, "rb") as file:
        file_stat = os.fstat(file.fileno())
        if not stat.S_ISREG(file_stat.st_mode):
            raise SettingsError(f"stream {name!r} is not a regular file: use a JSON Lines file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise SettingsError(f"stream {name!r} is larger than {max_bytes / MIB:g} MiB: split it")
    return content


def stream_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the streams in the folders."""
    return sorted({str(path.relative_to(folder)) for folder in folders for path in folder.glob("*.jsonl")})


@streams.post(
    "/streams", operation_id="upload_stream", status_code=201, response_model=StreamObject, openapi_extra=UPLOAD
)
async def upload_stream(
    request: Request,
    app: Shared,
    task: Annotated[Task, Query(description="Task of lines that name none.")] = DEFAULT_TASK,
) -> Response:
    """Store a stream that jobs can name by its SHA-256; every line is checked, and an error names the line."""
    if request.headers["content-type"].lower().startswith("multipart/"):
        async with request.form(max_files=1, max_fields=0) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise StreamError("the form has no file: send the stream as the part 'file'")
            content = await file.read()
    else:
        content = await request.body()
    sha256, n_prompts = await run_in_threadpool(keep_upload, app, content, task)
    return JSONResponse({"schema": "swiftopt.stream/1", "sha256": sha256, "n_prompts": n_prompts}, 201)


def keep_upload(app: State, content: bytes, task: str) -> tuple[str, int]:
    """Store a stream for jobs; return its SHA-256 and the number of its prompts.

    Raises: StreamError: a line is not a prompt.
    """
    prompts = parse_stream(io.BytesIO(content), "the upload", task)
    sha256 = stream_sha256(prompts)
    app.store.jobs.save_stream(sha256, stream_lines(prompts))
    return sha256, len(prompts)


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
    after: Annotated[int | None, Query(ge=0, le=LARGEST, description="Only events after this id.")] = None,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=LARGEST, description="Like `after`; sent by clients that reconnect.")
    ] = None,
    format: Annotated[Literal["json", "sse"] | None, Query(description="Overrides the header Accept.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum events of a JSON page.")] = 1000,
) -> Response:
    """The job's events from the first one, or after `Last-Event-ID`; the last event is `end` with the job.

    `progress` events have no id and are sent when the figures have changed. With `Accept: application/json` or
    `format=json` the answer is one page of the events so far.
    """
    first_event_id = last_event_id if last_event_id is not None else (after or 0)
    if format == "json" or (format is None and "application/json" in request.headers.get("accept", "")):
        page = await run_in_threadpool(app.board.events, job, first_event_id, limit)
        return JSONResponse(EventPage(tuple(page), page[-1].id if page else first_event_id).to_json())
    await run_in_threadpool(app.board.get, job)  # Raise 404 for an unknown id before the stream begins.
    return EventSourceResponse(_follow(app.board, job, first_event_id), ping=KEEP_ALIVE_S)


@router.post(
    "",
    operation_id="submit_job",
    status_code=202,
    response_model=Job,
    responses={200: {"model": Job, "description": "The same job already existed."}},
)
def submit(
    app: Shared,
    body: JobSubmission,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=r"^[\x21-\x7e]{1,255}$",
            description="A repeated submission with this key returns the first one's job.",
        ),
    ] = None,
) -> Response:
    """Submit a tuning job: 202 with its address; 200 if an unfinished job does the same, or the key is known.

    A job that cannot succeed is refused: 422, or 404 if its model does not exist.
    """
    prompts, stream, task = prompts_of(app, body)
    job, is_new = app.board.submit(body.tune_request(stream, task), prompts, body.queue, idempotency_key)
    return JSONResponse(_values(app, job), 202 if is_new else 200, {"Location": f"/v1/jobs/{job.id}"})


def _values(app: State, job: Job) -> dict[str, Any]:
    """Return the answer for a single job, including its obstacle."""
    return replace(job, obstacle=app.board.obstacle(job)).to_json()


@router.get("", operation_id="jobs", response_model=JobList)
def jobs(app: Shared, state: JobState | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """The newest jobs first."""
    return JSONResponse(JobList(tuple(app.board.latest(state, limit))).to_json())


@router.get("/{job}", operation_id="job", response_model=Job)
def show(app: Shared, job: JobId) -> Response:
    """The current state of one job; `obstacle` is the reason while it is queued and no worker can take it."""
    return JSONResponse(_values(app, app.board.get(job)))


@router.get(
    "/{job}/outputs",
    operation_id="job_outputs",
    response_class=Response,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
def outputs(app: Shared, job: JobId) -> Response:
    """The finished completions in the order of the stream, as JSON Lines: those of `swiftopt tune --out`."""
    finished_prompts = app.board.outputs(job)
    lines = (
        output_line(finished_prompt.prompt, finished_prompt.completion) + "\n" for finished_prompt in finished_prompts
    )
    chunks = iter(lambda: "".join(islice(lines, LINES_PER_CHUNK)), "")
    headers = {"Content-Disposition": f'attachment; filename="{job}.jsonl"'}
    return StreamingResponse(chunks, headers=headers, media_type="application/jsonl")


@router.post("/{job}/{verb}", operation_id="steer_job", response_model=Job)
def steer(app: Shared, job: JobId, verb: Verb) -> Response:
    """Pause, resume, stop, cancel or retry a job, and return it. A running job pauses or stops at its next step."""
    return JSONResponse(_values(app, app.board.act(job, verb)))


async def _follow(board: JobBoard, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    """Yield the job's events until it has ended; wait while the database is unreachable."""
    last_sent: Mapping[str, Any] | None = None
    while True:
        # Read the job before its events: if it has ended, the events read afterwards are complete.
        try:
            job = await run_in_threadpool(board.get, job_id)
            page = await run_in_threadpool(board.events, job_id, after, PAGE)
        except StoreUnavailable:
            await asyncio.sleep(OUTAGE_S)
            continue
        for event in page:
            after = event.id
            yield sse(event.data, event.type, event.id)
        if len(page) == PAGE:
            continue
        if job.progress is not None and job.progress != last_sent:
            last_sent = job.progress
            yield sse(last_sent, "progress")
        if job.is_finished:
            yield sse(job.to_json(), "end")
            return
        await asyncio.sleep(POLL_S)
