"""Errors as RFC 9457 problem details: one stable `type` per class of error, one sentence as `detail`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..core.errors import Busy, Conflict, InvalidInput, NotFound, ServiceUnreachable, StoreUnavailable, SwiftoptError
from ..core.serialization import explained, explained_body

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

OWN = ("/v1/layer-sets", "/v1/jobs", "/v1/streams", "/v1/tuning")  # of the routes under /v1 those that OpenAI has not
OPENAI = ("/v1/", "/tokenize", "/detokenize")  # all others have OpenAI's errors, and so has what is not there
OPENAI_TYPES = {404: "NotFoundError", 422: "BadRequestError", 429: "RateLimitError", 503: "ServiceUnavailableError"}


class Problem(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str = Field(description="A stable URN per class of error.")
    title: str
    status: int
    detail: str = Field(description="One sentence: what, where, what to do.")


class OpenAIError(BaseModel):
    """An error, as OpenAI has it."""

    class Told(BaseModel):
        """What was wrong; `code` is the HTTP status, `param` the field."""

        message: str
        type: str
        param: str | None
        code: int

    error: Told


class UnusableField(InvalidInput):
    """A field of a request that cannot be used; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param)


class Refused(HTTPException):
    """How a request is turned away: `kind` ends the problem's type, `param` names a field."""

    def __init__(
        self, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None, param: str | None = None
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.kind, self.param = kind, param

    def response(self, path: str) -> Response:
        """Return the response in the form that clients of the route at `path` read."""
        if not has_openai_errors(path):
            values = as_problem(self.status_code, self.kind, self.detail)
            return Response(json.dumps(values), self.status_code, self.headers, MEDIA_TYPE)
        status = 400 if self.status_code == 422 else self.status_code
        values = openai_error(status, self.detail, self.param)
        return Response(json.dumps(values), status, self.headers, "application/json")


def has_openai_errors(path: str) -> bool:
    """Return whether the errors of a route have OpenAI's form."""
    return path.startswith(OPENAI) and not path.startswith(OWN)


def as_problem(status: int, kind: str, detail: str) -> dict[str, Any]:
    """Return the problem's object."""
    title = kind.replace("-", " ").capitalize()
    return {"type": URN + kind, "title": title, "status": status, "detail": detail}


def openai_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the error in OpenAI's form."""
    kind = OPENAI_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def status_of(error: SwiftoptError) -> int:
    """Return the HTTP status that an error answers with."""
    return next(status for kind, status in STATUS if isinstance(error, kind))


def kind_of(error: SwiftoptError) -> str:
    """Return the name in a problem's type: LayerSetNotFound -> layer-set-not-found."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


def install(app: FastAPI) -> None:
    """Let every error of the app be a problem."""
    for kind in (SwiftoptError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _respond)


async def _respond(request: Request, error: Exception) -> Response:
    return refused_by(error).response(request.url.path)


def refused_by(error: Exception) -> Refused:
    """Return how a request is turned away that ended with the error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, SwiftoptError):
        status = status_of(error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
        return Refused(status, kind_of(error), str(error), headers, error.param)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        kind, detail = HTTP.get(error.status_code, (phrase.lower().replace(" ", "-"), error.detail))
        return Refused(error.status_code, kind, detail, error.headers)
    return Refused(500, "internal", "the server failed at this request: its log says why, tell its operator")


def _invalid(error: RequestValidationError) -> Refused:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        where, why = first["loc"][-1], first.get("ctx", {}).get("error", "")
        words = f"the body is not valid JSON ({why}, character {where}): send one JSON object"
        return Refused(400, "malformed", words)
    if first["loc"][0] == "body":
        within = [{**each, "loc": each["loc"][1:]} for each in error.errors() if each["loc"][0] == "body"]
        words, place = explained_body(within, error.body)
        return Refused(422, "invalid-input", words, param=place or None)
    parts = [str(part)[:100] for part in first["loc"]]
    return Refused(422, "invalid-input", explained(parts, first["type"], first["msg"], first["input"]))
