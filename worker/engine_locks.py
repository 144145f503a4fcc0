"""Locks in the database by which the engine of a served model reserves that model's jobs."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..core.requests import DEFAULT_QUEUE, Job, ServedModel, TuneRequest
from ..store import Jobs


def model_of(request: TuneRequest) -> tuple[Any, ...]:
    """Return what identifies a request's model; where it is a path, also the time of its newest file."""
    path, changed, place = Path(request.model), 0, request.model
    with suppress(OSError):
        # Ignore unreadable files here: loading the model reports them.
        files = [path, *path.iterdir()] if path.is_dir() else [path] if path.is_file() else []
        changed = max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)
        place = str(path.resolve()) if files else place
    return place, request.dtype, request.device, request.speed, changed


def as_request(served: ServedModel) -> TuneRequest:
    """Return a tuning request for a model as an engine serves it."""
    return TuneRequest(served.path, "", dtype=served.dtype, device=served.device, speed=served.speed)


def engine_lock(request: TuneRequest) -> str:
    """Return the name of the lock that an engine of this machine holds on jobs of its model."""
    model = hashlib.sha256(repr(model_of(replace(request, device=""))).encode()).hexdigest()
    return f"engine {socket.gethostname()} {model} {request.device}"


def has_engine(jobs: Jobs, served: Sequence[ServedModel], job: Job) -> bool:
    """Return whether an engine takes a job: of `served`, which may still be loading, or one that holds a lock."""
    if job.queue != DEFAULT_QUEUE or job.kind != "tune":
        return False
    try:
        request = TuneRequest.from_json(job.request)
    except InvalidInput:
        # The job's attempt reports the error.
        return False
    model_part = _model_part(engine_lock(request))
    locks = [engine_lock(as_request(model)) for model in served if model.tune] + jobs.locks(model_part)
    devices = {lock.removeprefix(model_part) for lock in locks if _model_part(lock) == model_part}
    return request.device in devices or (request.device == "auto" and bool(devices))


def _model_part(lock: str) -> str:
    """Return a lock's name up to its device."""
    return lock[: lock.rindex(" ") + 1]
