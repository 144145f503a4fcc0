"""The OpenAPI document, and the page made of it.

    python -m swiftopt.server.openapi

writes both; a test compares them with what the app says, so that no change goes unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .app import bare_app

DOCS = Path(__file__).parent.parent / "docs"
SNAPSHOT, PAGE = DOCS / "openapi.json", DOCS / "api.md"
INTRODUCTION = """\
# HTTP API

This page is made of the OpenAPI document by `python -m swiftopt.server.openapi`; a test compares the two. The document
itself is `openapi.json` beside this page, and a server gives its own at `/openapi.json`.

**Keys.** With `SWIFTOPT_API_KEYS` (`name:sha256hex`, separated by commas) or `SWIFTOPT_API_KEYS_FILE` (one entry per
line, `#` begins a comment) set, everything under `/v1/` wants `Authorization: Bearer KEY`. `swiftopt serve --new-key
NAME` makes a key and its entry. Several entries are valid at once and the file is read again when it changes: add the
new key, move the callers, delete the old one. `/livez`, `/readyz`, `/health`, `/metrics` and `/openapi.json` want no
key. A server without keys only listens on this machine.

**Errors** are `application/problem+json` (RFC 9457): `type` is a stable URN per class of error, `detail` one sentence.
400 malformed, 401 no or a wrong key, 404 not found (it names the nearest), 408 a body that stopped coming, 409 the job
is not in a state for that, 413 too large, 415 wrong media type, 422 a value that cannot be used, 429 too many requests
and 503 the database is away (both with `Retry-After`), 500 the server's own mistake.

**Limits.** A body has at most 32 MiB (`--max-body-mb`). A key, or an address where no keys are set, may send 600
requests a minute (`--rate`); `GET /v1/layer-sets/{model}/{task}` is not counted.

**Names in paths.** The model is percent-encoded: `HuggingFaceTB%2FSmolLM2-135M`; a task has no slash.

**Events.** `GET /v1/jobs/{job}/events` is a stream of server-sent events: `id` is the event's number, `event` its type,
`data` its values as JSON. A client that was cut off sends `Last-Event-ID` and gets what it missed. `progress` has no
id; `end` carries the job and is the last one.

**Streams by name** are files under the folders of `--stream-folder` or `SWIFTOPT_STREAM_FOLDERS`, read by the server.\
"""


def page(found: dict[str, Any]) -> str:
    """The document as a page for people."""
    parts = [INTRODUCTION]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(method.upper(), path, operation))
    parts.append("## Request bodies")
    for name in ("JobSubmission", "StreamSource", "Sampling", "TuningSettings", "LookupQuery"):
        parts.append(_fields(name, found["components"]["schemas"][name]))
    return "\n\n".join(parts) + "\n"


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"## {method} {path}", "", operation["description"], ""]
    for parameter in operation.get("parameters", []):
        words = parameter.get("description", "") or parameter["schema"].get("title", "")
        lines.append(f"- `{parameter['name']}` ({parameter['in']}): {words}")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        lines.append(f"- body `{kind}`: {_name(content['schema'])}")
    for status, response in operation["responses"].items():
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
