"""Where the prompts of a submitted job come from: its body, an upload, or a file under a configured folder."""

from __future__ import annotations

import difflib
import io
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response

from ..core.errors import NotFound, SettingsError, StreamError, StreamNotFound
from ..core.streams import parse_stream, stream_lines, stream_sha256
from ..core.types import Prompt
from .schemas import JobSubmission, StreamObject, Task
from .settings import MIB
from .state import Shared, State

DEFAULT_TASK = "default"
OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer must not block

router = APIRouter(prefix="/v1", tags=["streams"])

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
    """The job's prompts, a name for their origin, and the task of lines that name none.

    Raises: NotFound: no such upload or file. StreamError: a line is no prompt. SettingsError: the name is none.
    """
    source = body.stream
    if source.upload:
        return _uploaded(app, body), f"upload {source.upload[:12]}", DEFAULT_TASK
    if source.name:
        task = body.task or PurePosixPath(source.name).stem
        data = read_named(app.settings.stream_folders, source.name, app.settings.max_body_bytes)
        return parse_stream(io.BytesIO(data), source.name, task, body.limit), source.name, task
    task = body.task or DEFAULT_TASK
    lines = (json.dumps(line).encode() + b"\n" for line in source.prompts)
    return parse_stream(lines, "stream.prompts", task, body.limit), "prompts", task


def _uploaded(app: State, body: JobSubmission) -> list[Prompt]:
    if body.task is not None:
        raise SettingsError("an uploaded stream has its tasks already: name them with POST /v1/streams?task=…")
    lines = app.store.jobs.stream(body.stream.upload)
    if lines is None:
        raise NotFound(f"no stream {body.stream.upload} was uploaded: send it to POST /v1/streams first")
    return parse_stream(io.BytesIO(lines.encode()), "the upload", DEFAULT_TASK, body.limit)


def read_named(folders: Sequence[Path], name: str, max_bytes: int) -> bytes:
    """A regular file under one of the folders, whatever symbolic links lie on the way.

    Raises: SettingsError: the name is no plain relative path, or leads out of the folder or to no file.
        StreamNotFound: there is no such file; it names the nearest.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable() or len(name) > 512:
        raise SettingsError(f"stream name {name!r} is no plain relative path: name a file under a stream folder")
    if not folders:
        raise StreamNotFound(f"this server has no stream folder for {name!r}: send the prompts, or upload them")
    for folder in folders:
        try:
            return _read(folder, name, max_bytes)
        except FileNotFoundError:
            continue
        except OSError as error:  # too long a name, a loop of links, no permission
            raise SettingsError(f"stream {name!r} cannot be read ({error.strerror}): name another file") from error
    raise StreamNotFound(f"there is no stream {name!r} in the server's stream folders{_nearest(folders, name)}")


def _read(folder: Path, name: str, max_bytes: int) -> bytes:
    """Raises: FileNotFoundError and other OSError; SettingsError: it leads outside, is no file, or is too large."""
    real = Path(os.path.realpath(folder / name, strict=True))
    if not real.is_relative_to(folder):
        raise SettingsError(f"stream {name!r} leads out of the server's stream folder: name a file inside it")
    # What was looked at may have been swapped since: go down again, following no link.
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in real.relative_to(folder).parts:
        try:
            below = os.open(part, OPENED, dir_fd=at)
        finally:
            os.close(at)
        at = below
    with open(at, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise SettingsError(f"stream {name!r} is no regular file: name a JSON Lines file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SettingsError(f"stream {name!r} is larger than {max_bytes / MIB:g} MiB: split it")
    return data


def _nearest(folders: Sequence[Path], name: str) -> str:
    known = sorted(str(path.relative_to(folder)) for folder in folders for path in folder.glob("*.jsonl"))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    return f": did you mean {near[0]!r}?" if near else ": check the name, or upload it"


@router.post(
    "/streams", operation_id="upload_stream", status_code=201, response_model=StreamObject, openapi_extra=UPLOAD
)
async def upload_stream(
    request: Request,
    app: Shared,
    task: Annotated[Task, Query(description="Task of lines that name none.")] = DEFAULT_TASK,
) -> Response:
    """Store a stream for jobs to name by its SHA-256; every line is checked at once, an error names it."""
    if request.headers["content-type"].lower().startswith("multipart/"):
        async with request.form(max_files=1, max_fields=0) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise StreamError("the form has no file: send the stream as its part 'file'")
            data = await file.read()
    else:
        data = await request.body()
    return await run_in_threadpool(_store, app, data, task)


def _store(app: State, data: bytes, task: str) -> Response:
    prompts = parse_stream(io.BytesIO(data), "the upload", task)
    sha256 = stream_sha256(prompts)
    app.store.jobs.save_stream(sha256, stream_lines(prompts))
    return JSONResponse({"schema": "swiftopt.stream/1", "sha256": sha256, "n_prompts": len(prompts)}, 201)
