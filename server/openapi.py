"""The routes, their OpenAPI document, and the page made of it.

    python -m swiftopt.server.openapi

writes document and page; a test compares them with the app. The page before its first operation is written by hand.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .. import __version__
from ..optimizer.strategies import STRATEGIES
from . import completions, jobs, lookups, operation, responses
from .middleware import GUARDED, MEDIA_TYPE, OpenAIError, Problem, has_openai_errors, install

DOCS = Path(__file__).parent.parent / "docs"
SNAPSHOT, PAGE = DOCS / "openapi.json", DOCS / "api.md"


def _errors(description: str, media_type: str, schema: str) -> dict[int | str, dict[str, Any]]:
    content = {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {status: {"description": description, "content": content} for status in ("4XX", "5XX")}


PROBLEMS = _errors("What was wrong, in one sentence.", MEDIA_TYPE, "Problem")
OPENAI_ERRORS = _errors("What was wrong, in OpenAI's form.", "application/json", "OpenAIError")
ROUTERS = (
    *(lookups.router, jobs.streams, jobs.router, completions.router, responses.router),
    *(operation.tuning_router, operation.router),
)


def bare_app() -> FastAPI:
    """Return an app of the routes without a state: enough for the OpenAPI document."""
    app = FastAPI(
        title="swiftopt",
        version=__version__,
        description="Layer sets to decode with, and the jobs that find them.",
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
    )
    for router in ROUTERS:
        app.include_router(router, responses=PROBLEMS)
    install(app)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app


def document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's document with our errors and bearer keys."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in found["paths"].items():
            for described in operations.values() if path.startswith(GUARDED) else ():
                described["security"] = [{"key": []}, {}]
            for described in operations.values() if has_openai_errors(path) else ():
                described["responses"].update(OPENAI_ERRORS)
        schemas = found["components"]["schemas"]
        schemas["Problem"] = Problem.model_json_schema()
        schemas["OpenAIError"] = OpenAIError.model_json_schema(
            ref_template="#/components/schemas/OpenAIError/$defs/{model}"
        )
        schemas["TuningSettings"]["properties"]["strategy"]["enum"] = list(STRATEGIES)
        schemas.pop("Plan", None)  # unused
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = found
    return app.openapi_schema


def page(found: dict[str, Any]) -> str:
    """Return the document as a page of Markdown, after the introduction that is written by hand."""
    parts = [PAGE.read_text(encoding="utf-8").partition("\n\n## ")[0]]
    for path, operations in found["paths"].items():
        for method, described in operations.items():
            parts.append(_operation(method.upper(), path, described))
    parts.append("## Request bodies")
    for name in ("JobSubmission", "StreamSource", "Sampling", "TuningSettings", "LookupQuery"):
        parts.append(_fields(name, found["components"]["schemas"][name]))
    return "\n\n".join(parts) + "\n"


def _operation(method: str, path: str, described: dict[str, Any]) -> str:
    lines = [f"## {method} {path}", "", described["description"], ""]
    for parameter in described.get("parameters", []):
        words = parameter.get("description", "") or parameter["schema"].get("title", "")
        lines.append(f"- `{parameter['name']}` ({parameter['in']}): {words}")
    for kind, content in described.get("requestBody", {}).get("content", {}).items():
        lines.append(f"- body `{kind}`: {_name(content['schema'])}")
    for status, response in described["responses"].items():
        kinds = [f"`{kind}` {_name(content['schema'])}" for kind, content in response.get("content", {}).items()]
        if not status.endswith("XX"):
            lines.append(f"- {status}: {', '.join(kinds) or response['description']}")
    return "\n".join(lines)


def _name(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _fields(name: str, schema: dict[str, Any]) -> str:
    rows = [f"### {name}", "", schema.get("description", ""), "", "| field | type | default |", "|---|---|---|"]
    for field, values in schema["properties"].items():
        default = "required" if field in schema.get("required", []) else json.dumps(values.get("default"))
        rows.append(f"| `{field}` | {_type(values)} | {default} |")
    return "\n".join(rows)


def _type(values: dict[str, Any]) -> str:
    if "anyOf" in values:
        return " or ".join(_type(part) for part in values["anyOf"])
    if "enum" in values:
        return ", ".join(f"`{word}`" for word in values["enum"])
    return str(values.get("type") or _name(values))


def main() -> None:
    """Write the snapshot and the page."""
    found = bare_app().openapi()
    SNAPSHOT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
