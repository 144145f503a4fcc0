"""Errors over HTTP: RFC 9457 problem details, and OpenAI's form on its routes.

A problem has one stable `type` per class of error and one sentence as `detail`. OpenAI's form has this sentence as
`message`, and OpenAI's values of `type` and `code`, to which clients react.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from ..core.errors import (
    Busy,
    Conflict,
    ContextOverflow,
    InvalidInput,
    ModelNotFound,
    NotFound,
    ParametersError,
    SchemaError,
    ServiceUnreachable,
    StoreUnavailable,
    SwiftoptError,
    UnsupportedField,
    UnsupportedValue,
)
from ..core.serialization import explain_body_error, explain_error
from .settings import GUARDED

MEDIA_TYPE = "application/problem+json"
URN = "urn:swiftopt:problem:"
RETRY_AFTER_S = 2  # Retry-After header while the database is unreachable, in seconds.

# (exception, HTTP status, OpenAI's code). The first match applies.
ANSWERS: tuple[tuple[type[SwiftoptError], int, str | None], ...] = (
    (ContextOverflow, 422, "context_length_exceeded"),
    (ParametersError, 422, "invalid_function_parameters"),
    (SchemaError, 422, "invalid_json_schema"),
    (UnsupportedValue, 422, "unsupported_value"),
    (UnsupportedField, 422, "unsupported_parameter"),
    (InvalidInput, 422, "invalid_value"),
    (ModelNotFound, 404, "model_not_found"),
    (NotFound, 404, None),
    (Conflict, 409, None),
    (Busy, 429, "rate_limit_exceeded"),
    (StoreUnavailable, 503, None),
    (ServiceUnreachable, 503, None),
    (SwiftoptError, 500, None),
)
HTTP: dict[int, tuple[str, str, str | None]] = {  # Status -> (problem type, what to do, OpenAI's code).
    400: ("malformed", "the body cannot be read: send valid JSON (or a valid multipart form) in UTF-8", None),
    404: ("no-such-route", "there is nothing at this address: /openapi.json lists all routes", "unknown_url"),
    405: (
        "method-not-allowed",
        "this address does not support that method: the header Allow lists the supported ones",
        "method_not_supported",
    ),
}
BODY_CODES = {  # pydantic's error type -> OpenAI's code; {} stands for integer or decimal.
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    **dict.fromkeys(("greater_than", "greater_than_equal"), "{}_below_min_value"),
    **dict.fromkeys(("less_than", "less_than_equal"), "{}_above_max_value"),
}
WRONG_TYPES = ("_type", "_parsing", "_from_float")  # Suffixes of pydantic's error types for wrong types.
# Path prefixes of routes that OpenAI's API does not have.
PATHS_WITH_OWN_ERRORS = ("/v1/layer-sets", "/v1/jobs", "/v1/streams", "/v1/tuning", "/v1/usage")


class Problem(BaseModel):
    """An error in the form of RFC 9457."""

    type: str = Field(description="A stable URN per class of error.")
    title: str
    status: int
    detail: str = Field(description="One sentence: what, where, what to do.")


class OpenAIError(BaseModel):
    """An error in OpenAI's form."""

    class Error(BaseModel):
        """The error; `param` is the invalid field."""

        message: str = Field(description="One sentence: what, where, what to do.")
        type: str = Field(description="`invalid_request_error`, `requests`, `tokens` (429) or `server_error`.")
        param: str | None
        code: str | None = Field(description="OpenAI's code of the error, such as `context_length_exceeded`.")

    error: Error


class Refused(HTTPException):
    """An HTTP error: `kind` is the end of the problem's type, `param` the invalid field, `code` OpenAI's."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.kind, self.param, self.code = kind, param, code

    def response(self, path: str) -> Response:
        """Return the response in the form of the route at `path`."""
        if not has_openai_errors(path):
            values = as_problem(self.status_code, self.kind, self.detail)
            return Response(json.dumps(values), self.status_code, self.headers, MEDIA_TYPE)
        status = 400 if self.status_code == 422 else self.status_code
        return Response(json.dumps(self.openai()), status, self.headers, "application/json")

    def openai(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        if self.status_code == 429:  # OpenAI's error type names the exceeded limit.
            kind = "tokens" if self.kind == "too-many-tokens" else "requests"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def has_openai_errors(path: str) -> bool:
    """Return whether a route's errors have OpenAI's form, as those of unknown routes below /v1 do."""
    return path == "/v1" or (path.startswith(GUARDED) and not path.startswith(PATHS_WITH_OWN_ERRORS))


def as_problem(status: int, kind: str, detail: str) -> dict[str, Any]:
    """Return the JSON object of a problem."""
    title = kind.replace("-", " ").capitalize()
    return {"type": URN + kind, "title": title, "status": status, "detail": detail}


def answer_to(error: SwiftoptError) -> tuple[int, str | None]:
    """Return the HTTP status and OpenAI's code of an error."""
    return next((status, code) for kind, status, code in ANSWERS if isinstance(error, kind))


def kind_of(error: SwiftoptError) -> str:
    """Return an error's name in a problem's type: LayerSetNotFound -> layer-set-not-found."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


def install(app: FastAPI) -> None:
    """Install handlers that answer every error in the form of its route."""
    for kind in (SwiftoptError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _respond)


async def _respond(request: Request, error: Exception) -> Response:
    return refused_at(request, error).response(request.url.path)


def refused_at(request: Request, error: Exception) -> Refused:
    """Return the HTTP error for an exception; for an unknown address it suggests the intended one."""
    refused = refused_by(error)
    if refused.kind == "no-such-route" and (meant := _meant_route(request)):
        refused.detail = f"there is nothing at this address: use {meant}"
    return refused


def _meant_route(request: Request) -> str:
    """Return the intended route of a client whose base URL lacks `/v1` or has it twice; "" if there is none."""
    path = request.url.path
    meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    scope = {**request.scope, "path": meant, "raw_path": meant.encode()}
    return meant if any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes) else ""


def refused_by(error: Exception) -> Refused:
    """Return the HTTP error for an exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, SwiftoptError):
        status, code = answer_to(error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
        return Refused(status, kind_of(error), str(error), headers, error.param, code)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        kind, detail, code = HTTP.get(error.status_code, (phrase, error.detail, None))
        headers = dict(error.headers or {})
        if "GET" in headers.get("Allow", ""):
            headers["Allow"] += ", HEAD"
        return Refused(error.status_code, kind, detail, headers, code=code)
    return Refused(500, "internal", "the server failed on this request: its log has the reason, ask its operator")


def _invalid(error: RequestValidationError) -> Refused:
    first_error = error.errors()[0]
    if first_error["type"] == "json_invalid":
        position, json_problem = first_error["loc"][-1], first_error.get("ctx", {}).get("error", "")
        problem = f"the body is not valid JSON ({json_problem}, character {position}): send one JSON object"
        return Refused(400, "malformed", problem)
    if first_error["loc"][0] == "body":
        body_errors = [
            {**field_error, "loc": field_error["loc"][1:]}
            for field_error in error.errors()
            if field_error["loc"][0] == "body"
        ]
        problem, path, value_errors = explain_body_error(body_errors, error.body)
        return Refused(422, "invalid-input", problem, param=path or None, code=_code_of(value_errors))
    # Parameters are scalars, so only pydantic's name of a type can follow a parameter's name.
    field_path = [str(part)[:100] for part in first_error["loc"][:2]]
    problem = explain_error(field_path, first_error["type"], first_error["msg"], first_error["input"])
    return Refused(422, "invalid-input", problem, code="invalid_value")


def _code_of(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return OpenAI's code for pydantic's errors about one value; it has one error per type of the field."""
    codes = [_body_code(error) for error in errors]
    return next((code for code in codes if code != "invalid_type"), "invalid_type")


def _body_code(error: Mapping[str, Any]) -> str:
    kind, bounds = error["type"], error.get("ctx", {})
    if kind.endswith(WRONG_TYPES):
        return "invalid_type"
    if kind == "too_short" and bounds["min_length"] == 1:
        return "empty_array"
    number = "integer" if all(isinstance(limit, int) for limit in bounds.values()) else "decimal"
    return BODY_CODES.get(kind, "invalid_value").format(number)
