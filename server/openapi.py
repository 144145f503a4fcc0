"""The routes and their OpenAPI document."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from opentelemetry.trace import TracerProvider

from .. import __version__
from ..optimizer.strategies import STRATEGIES
from . import completions, jobs, lookups, operation, responses
from .errors import MEDIA_TYPE, OpenAIError, Problem, has_openai_errors, install
from .middleware import POLLS
from .settings import GUARDED


def _errors(description: str, media_type: str, schema: str) -> dict[int | str, dict[str, Any]]:
    content = {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {status: {"description": description, "content": content} for status in ("4XX", "5XX")}


PROBLEMS = _errors("What was wrong, in one sentence.", MEDIA_TYPE, "Problem")
OPENAI_ERRORS = _errors("What was wrong, in OpenAI's form.", "application/json", "OpenAIError")
ROUTERS = (
    *(lookups.router, jobs.streams, jobs.router, completions.router, responses.router),
    *(operation.tuning_router, operation.usage_router, operation.router),
)


def bare_app(traces: TracerProvider | None = None) -> FastAPI:
    """Return an app of the routes without a state: enough for the OpenAPI document.

    Args: traces: gets a span of each HTTP request but polls; None: none is made.
    """
    app = FastAPI(
        title="swiftopt",
        version=__version__,
        description="Layer sets to decode with, and the jobs that find them.",
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts.
        redoc_url=None,
        telemetry={
            "tracing": traces is not None,
            "tracer_provider": traces,
            "exclude": lambda scope: scope.get("path") in POLLS,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    for router in ROUTERS:
        app.include_router(router, responses=PROBLEMS)
    install(app)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app


def document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's document with our errors and bearer keys."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in schema["paths"].items():
            for operation in operations.values() if path.startswith(GUARDED) else ():
                operation["security"] = [{"key": []}, {}]
            for operation in operations.values() if has_openai_errors(path) else ():
                operation["responses"].update(OPENAI_ERRORS)
        schemas = schema["components"]["schemas"]
        schemas["Problem"] = Problem.model_json_schema()
        schemas["OpenAIError"] = OpenAIError.model_json_schema(
            ref_template="#/components/schemas/OpenAIError/$defs/{model}"
        )
        schemas["TuningSettings"]["properties"]["strategy"]["enum"] = list(STRATEGIES)
        schemas.pop("Plan", None)  # Drop an unused schema.
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema
