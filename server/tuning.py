"""What the served models learn from their requests: what is in use, what is being tried; and how to stop or fix it."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ..core.errors import EngineGone, InvalidInput
from .engines import EngineProcess
from .schemas import Strict, Task, Word
from .state import Shared, engines_of

router = APIRouter(prefix="/v1", tags=["tuning"])


class Steering(Strict):
    """Which model and task a verb is for; `way` is what `pin` pins the task to (null: let it be judged again)."""

    model: Word | None = None
    task: Task | None = None
    way: Literal["best", "plain"] | None = None


@router.get("/tuning", operation_id="tuning", response_class=Response)
async def tuning(app: Shared) -> Response:
    """By model and task: what is in use, what is being tried, what that costs, and what it has brought."""
    engines = list(engines_of(app).of.values())
    found = await asyncio.gather(*(_told(engine) for engine in engines))
    models = {engine.served.name: told for engine, told in zip(engines, found, strict=True)}
    return JSONResponse({"schema": "swiftopt.tuning/1", "models": models})


@router.post("/tuning:{verb}", operation_id="steer_tuning", response_class=Response)
async def steer(app: Shared, verb: Literal["pause", "resume", "pin"], body: Steering) -> Response:
    """Pause or resume learning, or pin a task to its best drafts or to plain decoding; the tuning as it is then."""
    engines = engines_of(app)
    if verb == "pin" and body.task is None:
        raise InvalidInput("pin is for one task: name it as `task`")
    chosen = [engines.find(body.model)] if body.model else list(engines.of.values())
    for engine in chosen:
        await engine.tell("tuning", verb=verb, task=body.task, way=body.way)
    return await tuning(app)


async def _told(engine: EngineProcess) -> dict[str, object]:
    try:
        found = await engine.tell("tuning")
    except EngineGone as error:
        return {"unavailable": str(error)}
    return {key: value for key, value in found.items() if key not in ("id", "event")}
