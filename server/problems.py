"""Errors as RFC 9457 problem details: one stable `type` per class of error, one sentence as `detail`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..core.errors import Busy, Conflict, InvalidInput, NotFound, ServiceUnreachable, StoreUnavailable, SwiftoptError
from ..core.serialization import explained

MEDIA_TYPE = "application/problem+json"
URN = "urn:swiftopt:problem:"
RETRY_AFTER_S = 2  # when the database is away

# Of each class the first that fits.
STATUS: tuple[tuple[type[SwiftoptError], int], ...] = (
    (InvalidInput, 422),
    (NotFound, 404),
    (Conflict, 409),
    (Busy, 429),
    (StoreUnavailable, 503),
    (ServiceUnreachable, 503),
    (SwiftoptError, 500),
)

# Of errors that are HTTP's own: type, and what to do.
HTTP: dict[int, tuple[str, str]] = {
    400: ("malformed", "the body cannot be read: send valid JSON (or a valid multipart form) in UTF-8"),
    404: ("no-such-route", "there is nothing at this address: /openapi.json lists what there is"),
    405: ("method-not-allowed", "this address does not take that method: the header Allow lists those it takes"),
}


OPENAI = ("/v1/chat/", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")  # routes with OpenAI's errors
OPENAI_TYPES = {404: "NotFoundError", 422: "BadRequestError", 429: "RateLimitError", 503: "ServiceUnavailableError"}


class UnusableField(InvalidInput):
    """A field of a request that cannot be used; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Refused(HTTPException):
    """A request that is turned away before or while its body is read; `kind` ends the problem's type."""

    def __init__(self, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.kind = kind


def as_problem(status: int, kind: str, detail: str) -> dict[str, Any]:
    """The problem's object."""
    title = kind.replace("-", " ").capitalize()
    return {"type": URN + kind, "title": title, "status": status, "detail": detail}


def problem(
    status: int,
    kind: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    path: str = "",
    param: str | None = None,
) -> Response:
    """The problem as a response, in the form that clients of the route at `path` read."""
    if not path.startswith(OPENAI):
        return Response(json.dumps(as_problem(status, kind, detail)), status, dict(headers or {}), MEDIA_TYPE)
    status = 400 if status == 422 else status
    return Response(
        json.dumps(openai_error(status, detail, param)), status, dict(headers or {}), media_type="application/json"
    )


def openai_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The error in OpenAI's form."""
    kind = OPENAI_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def status_of(error: SwiftoptError) -> int:
    """The HTTP status that an error answers with."""
    return next(status for kind, status in STATUS if isinstance(error, kind))


def kind_of(error: SwiftoptError) -> str:
    """LayerSetNotFound -> layer-set-not-found."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


def of_error(error: SwiftoptError, path: str = "") -> Response:
    """The response to an error of ours."""
    status = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return problem(status, kind_of(error), str(error), headers, path, getattr(error, "param", None))


def install(app: FastAPI) -> None:
    """Let every error of the app be a problem."""
    app.add_exception_handler(SwiftoptError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, SwiftoptError)
    return of_error(error, request.url.path)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, Refused):
        return problem(error.status_code, error.kind, str(error.detail), error.headers, request.url.path)
    phrase = HTTPStatus(error.status_code).phrase
    kind, detail = HTTP.get(error.status_code, (phrase.lower().replace(" ", "-"), str(error.detail)))
    return problem(error.status_code, kind, detail, error.headers, request.url.path)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        where, why = first["loc"][-1], first.get("ctx", {}).get("error", "")
        words = f"the body is not valid JSON ({why}, character {where}): send one JSON object"
        return problem(400, "malformed", words, path=request.url.path)
    place = [str(part)[:100] for part in first["loc"]]
    words = explained(place, first["type"], first["msg"], first["input"])
    return problem(422, "invalid-input", words, path=request.url.path, param=place[1] if len(place) > 1 else None)


async def _unexpected(request: Request, error: Exception) -> Response:
    words = "the server failed at this request: its log says why, tell its operator"
    return problem(500, "internal", words, path=request.url.path)
