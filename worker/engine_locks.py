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
    """Return the identity of a request's model; for a path, it includes the time of the newest file."""
    path, newest_ns, resolved_path = Path(request.model), 0, request.model
    with suppress(OSError):
        # Ignore unreadable files here: loading the model reports them.
        files = [path, *path.iterdir()] if path.is_dir() else [path] if path.is_file() else []
        newest_ns = max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)
        resolved_path = str(path.resolve()) if files else resolved_path
    return resolved_path, request.dtype, request.device, request.speed, newest_ns


def as_request(model: ServedModel) -> TuneRequest:
    """Return a tuning request for a model as an engine serves it."""
    return TuneRequest(model.path, "", dtype=model.dtype, device=model.device, speed=model.speed)


def engine_lock(request: TuneRequest) -> str:
    """Return the name of the lock that an engine of this machine holds on jobs of its model."""
    model = hashlib.sha256(repr(model_of(replace(request, device=""))).encode()).hexdigest()
    return f"engine {socket.gethostname()} {model} {request.device}"


def has_engine(jobs: Jobs, served_models: Sequence[ServedModel], job: Job) -> bool:
    """Return whether an engine takes a job: one of `served_models`, even if still loading, or one that holds a lock."""
    if job.queue != DEFAULT_QUEUE or job.kind != "tune":
        return False
    try:
        request = TuneRequest.from_json(job.request)
    except InvalidInput:
        # The job's attempt reports the error.
        return False
    model_part = _model_part(engine_lock(request))
    locks = [engine_lock(as_request(model)) for model in served_models if model.tune] + jobs.locks(model_part)
    devices = {lock.removeprefix(model_part) for lock in locks if _model_part(lock) == model_part}
    return request.device in devices or (request.device == "auto" and bool(devices))


def _model_part(lock: str) -> str:
    """Return a lock's name up to its device."""
    return lock[: lock.rindex(" ") + 1]
