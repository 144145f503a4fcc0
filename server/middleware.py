"""What surrounds the routes: checks before a request reaches one, its line in the log, errors as JSON, the app's state.

Errors are RFC 9457 problem details, with one stable `type` per class of error and one sentence as `detail`; those of
OpenAI's routes have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter, RateLimiter, SlidingWindowCounterRateLimiter
from prometheus_client import Counter
from pydantic import BaseModel, Field
from sse_starlette import ServerSentEvent
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import Busy, Conflict, InvalidInput, NotFound, ServiceUnreachable, StoreUnavailable, SwiftoptError
from ..core.requests import JobBoard
from ..core.serialization import explained, explained_body
from ..store import Store
from ..worker.queue import RedisQueue
from .engines import Engines
from .settings import MIB, ServerSettings

MEDIA_TYPE = "application/problem+json"
URN = "urn:swiftopt:problem:"
RETRY_AFTER_S = 2  # when the database is away

STATUS: tuple[tuple[type[SwiftoptError], int], ...] = (  # of each class the first that fits
    (InvalidInput, 422),
    (NotFound, 404),
    (Conflict, 409),
    (Busy, 429),
    (StoreUnavailable, 503),
    (ServiceUnreachable, 503),
    (SwiftoptError, 500),
)
HTTP: dict[int, tuple[str, str]] = {  # of HTTP's own errors: type, and what to do
    400: ("malformed", "the body cannot be read: send valid JSON (or a valid multipart form) in UTF-8"),
    404: ("no-such-route", "there is nothing at this address: /openapi.json lists what there is"),
    405: ("method-not-allowed", "this address does not take that method: the header Allow lists those it takes"),
}
OWN = ("/v1/layer-sets", "/v1/jobs", "/v1/streams", "/v1/tuning")  # routes under /v1 that OpenAI does not have
OPENAI_TYPES = {
    **{401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 422: "BadRequestError"},
    **{429: "RateLimitError", 503: "ServiceUnavailableError"},
}

LOGINS_PER_MIN = 20  # to the dashboard
BODY_WAIT_S = 30.0  # without a part of a body that is being sent
GUARDED = ("/v1/", "/tokenize", "/detokenize")  # prefixes of routes that need a key, where keys are set
LOOKUPS = "/v1/layer-sets/"  # single look-ups, cached, do not count against the rate
JSON = ("application/json",)
LINES = ("application/jsonl", "application/x-ndjson", "application/octet-stream", "multipart/form-data")
TAKE_JSON = (
    *("/v1/jobs", "/v1/layer-sets:lookup", "/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/tokenize", "/detokenize", "/v1/tuning:pause", "/v1/tuning:resume", "/v1/tuning:pin"),
)
BODIES = {"/v1/streams": LINES, **dict.fromkeys(TAKE_JSON, JSON)}  # content types by route

access = logging.getLogger("swiftopt.access")


def sse(data: Mapping[str, Any], event: str | None = None, number: int | None = None) -> ServerSentEvent:
    """Return a server-sent event with a JSON object."""
    return ServerSentEvent(json.dumps(data), event=event, id=None if number is None else str(number))


# --- errors


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


class Refused(HTTPException):
    """Turns a request away: `kind` ends the problem's type, `param` names a field."""

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
    """Return whether the errors of a route have OpenAI's form, as those of unknown routes do."""
    return path.startswith(GUARDED) and not path.startswith(OWN)


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
    """Return the error as HTTP answers with it."""
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


# --- limits and state


class RateLimit:
    """At most `per_min` of something for each caller in any minute; 0: no limit.

    What is `counted` is added up over the minute and the one before, where it may be too many to remember one by one.
    """

    def __init__(self, per_min: int, counted: bool = False) -> None:
        kind: type[RateLimiter] = SlidingWindowCounterRateLimiter if counted else MovingWindowRateLimiter
        self._per_min, self._limit = per_min, RateLimitItemPerMinute(per_min) if per_min else None
        self._spent = kind(MemoryStorage())

    def wait_s(self, caller: str) -> int:
        """Return the seconds until the caller may go on; 0: now."""
        if self._limit is None or self._spent.test(self._limit, caller):
            return 0
        return max(1, math.ceil(self._spent.get_window_stats(self._limit, caller).reset_time - time.time()))

    def check(self, caller: str, of: str) -> None:
        """Raise Refused, 429, where the caller has used up its limit `of` something."""
        if wait_s := self.wait_s(caller):
            detail = f"more than {self._per_min} {of} a minute: wait {wait_s} s, then go on"
            raise Refused(429, "too-many-requests", detail, {"Retry-After": str(wait_s)})

    def spend(self, caller: str, n: int = 1) -> None:
        """Count what a caller was given; what is beyond the limit is not counted."""
        if self._limit is not None:
            left = self._spent.get_window_stats(self._limit, caller).remaining
            self._spent.hit(self._limit, caller, cost=min(n, left))


@dataclass(frozen=True, slots=True)
class State:
    """What the routes of one app work with; `queue` None: no Redis was named. Several apps can live in one process."""

    store: Store
    board: JobBoard
    queue: RedisQueue | None
    settings: ServerSettings
    engines: Engines
    tokens: RateLimit  # of each caller
    tries: dict[str, Any] = field(default_factory=dict)  # of `dashboard.served`, the oldest first
    answers: Counter = field(
        default_factory=lambda: Counter(
            "swiftopt_http_requests", "Requests by the status of the answer.", ["status"], registry=None
        )
    )
    logins: RateLimit = field(default_factory=lambda: RateLimit(LOGINS_PER_MIN))  # of each address


async def state_of(request: Request) -> State:
    """Return the state of the app that serves the request."""
    return cast(State, request.app.state.swiftopt)


Shared = Annotated[State, Depends(state_of)]


# --- checks before a route


class AccessMiddleware:
    """Pure ASGI, so that a look-up pays little for it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, answers: Counter) -> None:
        self._app, self._settings, self._answers = app, settings, answers
        self._rate = RateLimit(settings.requests_per_min)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = Headers(scope=scope)
        caller = scope["client"][0] if scope.get("client") else "local"
        try:
            key_owner = self._key_owner(headers)
            caller = key_owner or caller
            scope.setdefault("state", {}).update(key_owner=key_owner, caller=caller)
            if scope["path"].startswith(GUARDED):
                self._check(scope, headers, key_owner, caller)
            await self._app(scope, _limited(receive, self._settings.max_body_bytes), sending)
        except Refused as refused:  # of `_check`: the app handles its own
            await refused.response(scope["path"])(scope, receive, sending)
        finally:
            self._answers.labels(str(status)).inc()
            # raw_path is ASCII without line breaks, and has no query
            path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
            millis = (time.perf_counter() - began) * 1000
            access.info("%s %s %d %.1f ms %s", scope["method"], path[:500], status, millis, caller)

    def _key_owner(self, headers: Headers) -> str | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not self._settings.keys.required or scheme.lower() != "bearer":
            return None
        return self._settings.keys.owner(key.strip())

    def _check(self, scope: Scope, headers: Headers, key_owner: str | None, caller: str) -> None:
        """Raise Refused for a request without a key or beyond its limit, and for a body by its headers."""
        path, method = scope["path"], scope["method"]
        if self._settings.keys.required and key_owner is None:
            raise _unauthorised("authorization" in headers)
        if method != "GET" or not path.startswith(LOOKUPS):
            self._rate.check(caller, "requests")
            self._rate.spend(caller)
        if method != "POST":
            return
        if is_foreign(headers) and not {"*", headers["origin"]} & set(self._settings.origins):
            raise Refused(403, "foreign-origin", "a page of another site may not do that: call the API from a program")
        given = headers.get("content-type", "").partition(";")[0].strip().lower()
        if path in BODIES and given not in BODIES[path]:
            words = f"the body is {given[:100]!r}" if given else "the body has no Content-Type"
            detail = f"{words}: send it as {' or '.join(BODIES[path])}"
            raise Refused(415, "unsupported-media-type", detail, {"Accept-Post": ", ".join(BODIES[path])})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)


class OriginsMiddleware(CORSMiddleware):
    """Lets pages of some origins call what needs a key, and nothing else: the dashboard's forms stay its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(GUARDED)
        await (super().__call__ if is_api else self.app)(scope, receive, send)


def is_foreign(headers: Headers) -> bool:
    """Return whether a page of another site sends it: browsers let it post to a server on the user's own machine."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Count the bytes that come, whatever Content-Length says."""
    received, ended = 0, False

    async def receiving() -> Message:
        nonlocal received, ended
        if ended:
            return await receive()  # only the disconnect is still to come
        try:
            message = await asyncio.wait_for(receive(), BODY_WAIT_S)
        except TimeoutError:
            raise Refused(408, "too-slow", "the body stopped coming: send it again", {"Connection": "close"}) from None
        received += len(message.get("body", b""))
        ended = not message.get("more_body", False)
        if received > max_bytes:
            raise _too_large(max_bytes)
        return message

    return receiving


def _too_large(max_bytes: int) -> Refused:
    detail = f"the body is larger than {max_bytes / MIB:g} MiB: send less, or ask the operator for more"
    return Refused(413, "too-large", detail, {"Connection": "close"})


def _unauthorised(given: bool) -> Refused:
    why = "the key is not one of this server's" if given else "this server wants a key"
    how = 'Bearer realm="swiftopt"' + (', error="invalid_token"' if given else "")
    return Refused(401, "unauthorised", f"{why}: send it as `Authorization: Bearer KEY`", {"WWW-Authenticate": how})
