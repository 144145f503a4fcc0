"""The app: routes, errors and middleware around one store and one job board; and its OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .. import __version__
from ..core.jobs import JobBoard
from ..optimizer.strategies import STRATEGIES
from ..store import Store
from . import completions, health, jobs, lookups, problems, responses, streams, tuning
from .cache import Answers
from .engines import Engines
from .middleware import GUARDED, Gate
from .schemas import OpenAIError, Problem
from .settings import ServerSettings
from .state import QueueView, State

ROUTERS = (
    lookups.router,
    streams.router,
    jobs.router,
    completions.router,
    responses.router,
    tuning.router,
    health.router,
)
PROBLEM = {
    "description": "What was wrong, in one sentence.",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
OPENAI_ERROR = {
    "description": "What was wrong, in OpenAI's form.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIError"}}},
}


def bare_app() -> FastAPI:
    """The routes without anything behind them: enough for the OpenAPI document."""
    app = FastAPI(
        title="swiftopt",
        version=__version__,
        description="Layer sets to decode with, and the jobs that find them.",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    for router in ROUTERS:
        app.include_router(router)
    problems.install(app)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app


def create_app(
    store: Store,
    board: JobBoard,
    settings: ServerSettings | None = None,
    queue: QueueView | None = None,
    engines: Engines | None = None,
) -> FastAPI:
    """An app over the store; `queue` None: no Redis, so jobs only wait; `engines` live as long as the app."""
    settings = settings or ServerSettings()
    app = bare_app()
    answers = Answers(partial(lookups.find_plan, store))
    app.state.swiftopt = State(store, board, queue, settings, answers, health.lookup_times(), engines)
    app.router.lifespan_context = partial(_living, engines)
    app.add_middleware(Gate, settings=settings)
    return app


@asynccontextmanager
async def _living(engines: Engines | None, app: FastAPI) -> AsyncIterator[None]:
    """Run the engines' processes while the app is served."""
    if engines is None:
        yield
        return
    engines.start()
    try:
        yield
    finally:
        await engines.close()


def document(app: FastAPI) -> dict[str, Any]:
    """The app's document: FastAPI's, with problems as errors, bearer keys, and the bodies as they are sent."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in found["paths"].items():
            for operation in operations.values():
                _amend(path, operation)
        schemas = found["components"]["schemas"]
        schemas["Problem"] = Problem.model_json_schema()
        schemas["OpenAIError"] = OpenAIError.model_json_schema(
            ref_template="#/components/schemas/OpenAIError/$defs/{model}"
        )
        schemas["TuningSettings"]["properties"]["strategy"]["enum"] = list(STRATEGIES)
        for unused in ("HTTPValidationError", "ValidationError", "LayerSet", "Plan"):
            schemas.pop(unused, None)
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = found
    return app.openapi_schema


def _amend(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own shape of errors, which is never sent
    responses["4XX"] = responses["5XX"] = OPENAI_ERROR if path.startswith(problems.OPENAI) else PROBLEM
    if path.startswith(GUARDED):
        operation["security"] = [{"key": []}, {}]
    ok = responses.get("200", {})
    if operation["operationId"] == "layer_set":
        ok["headers"] = {"ETag": {"schema": {"type": "string"}}, "Cache-Control": {"schema": {"type": "string"}}}
        responses["304"] = {"description": "The caller's copy is still right."}
