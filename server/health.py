"""Whether the process lives, whether it can serve, and its metrics; none of them needs a key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from ..core.errors import ServiceUnreachable, StoreError
from .metrics import registry
from .parts import Parts, Shared
from .shapes import Liveness, Readiness

router = APIRouter(tags=["operation"])
_UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": Readiness, "description": "The database cannot be used."}}


@router.get("/livez", operation_id="livez", response_model=Liveness)
async def livez() -> Response:
    """The process answers; nothing else is looked at."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz", operation_id="readyz", response_model=Readiness, responses=_UNREADY)
def readyz(parts: Shared) -> Response:
    """Database, migrations, Redis; 503 when the database is away. Without Redis look-ups and submissions work."""
    return _ready(parts)


@router.get("/health", operation_id="health", response_model=Readiness, responses=_UNREADY)
def health(parts: Shared) -> Response:
    """As /readyz."""
    return _ready(parts)


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(parts: Shared) -> Response:
    """Prometheus metrics."""
    own = registry(parts.store, parts.queue, parts.lookup_times)
    return Response(generate_latest(own), media_type=CONTENT_TYPE_LATEST)


def _ready(parts: Parts) -> Response:
    found = {"status": "ok", "database": "ok", "migrations": "ok", "redis": _redis(parts)}
    try:
        state = parts.store.schema()
        if not state.ok:
            found["migrations"] = f"at {state.revision}, this server needs {state.head}: run `swiftopt db upgrade`"
    except StoreError as error:
        found["database"], found["migrations"] = str(error), "unknown"
    if found["database"] != "ok" or found["migrations"] != "ok":
        found["status"] = "unavailable"
    return JSONResponse(found, 200 if found["status"] == "ok" else 503)


def _redis(parts: Parts) -> str:
    if parts.queue is None:
        return "not configured"
    try:
        parts.queue.ping()
    except ServiceUnreachable:
        return "unreachable, jobs wait"
    return "ok"
