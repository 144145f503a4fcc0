"""Middleware and state shared by the routes: access checks, rate limits, and the access log."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

from fastapi import Depends, Request
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter, RateLimiter, SlidingWindowCounterRateLimiter
from opentelemetry.trace import TracerProvider
from prometheus_client import Counter
from sse_starlette import ServerSentEvent
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core import logs
from ..core.requests import JobBoard
from ..store import Store
from ..worker.queue import RedisQueue
from .engines import Engines
from .errors import Refused
from .settings import GUARDED, ServerSettings
from .storage import StorageCheck
from .transport import too_large
from .usage import UsageTable

LOGINS_PER_MIN = 20  # Maximum log-ins to the dashboard per address and minute.
IDENTITY = "identity"  # Content-Encoding of an uncompressed body.
POLLS = ("/livez", "/readyz", "/health", "/metrics")  # Monitoring asks every few seconds: not logged by default.
REQUEST_ID = "x-request-id"  # Header with a request's id, in the request and in its answer.
LOOKUPS = "/v1/layer-sets/"  # Path prefix of single lookups. They are cached and exempt from the rate limit.
JSON = ("application/json",)
LINES = ("application/jsonl", "application/x-ndjson", "application/octet-stream", "multipart/form-data")
JSON_PATHS = (
    *("/v1/jobs", "/v1/layer-sets:lookup", "/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/tokenize", "/detokenize", "/v1/tuning:pause", "/v1/tuning:resume", "/v1/tuning:pin"),
)
BODIES = {"/v1/streams": LINES, **dict.fromkeys(JSON_PATHS, JSON)}  # Route -> accepted content types.

access = logging.getLogger("swiftopt.access")


def sse(content: Mapping[str, Any], event: str | None = None, number: int | None = None) -> ServerSentEvent:
    """Return a server-sent event with a JSON object."""
    return ServerSentEvent(json.dumps(content), event=event, id=None if number is None else str(number))


# --- limits and state


class RateLimit:
    """A limit of `per_min` items for each caller in any minute; 0: no limit.

    With `counted` it keeps two counters per caller instead of a time per item, for large amounts such as tokens.
    """

    def __init__(self, per_min: int, counted: bool = False) -> None:
        kind: type[RateLimiter] = SlidingWindowCounterRateLimiter if counted else MovingWindowRateLimiter
        self._per_min, self._limit = per_min, RateLimitItemPerMinute(per_min) if per_min else None
        self._spent_per_caller = kind(MemoryStorage())

    def wait_s(self, caller: str) -> int:
        """Return the seconds until the caller may spend again; 0: it may now."""
        if self._limit is None or self._spent_per_caller.test(self._limit, caller):
            return 0
        return max(1, math.ceil(self._spent_per_caller.get_window_stats(self._limit, caller).reset_time - time.time()))

    def check(self, caller: str, limit_name: str) -> None:
        """Raise Refused (429) if the caller's limit is used up; `limit_name` names the limited quantity."""
        if wait_s := self.wait_s(caller):
            detail = f"more than {self._per_min} {limit_name} a minute: wait {wait_s} s, then continue"
            raise Refused(
                429, f"too-many-{limit_name}", detail, {"Retry-After": str(wait_s)}, code="rate_limit_exceeded"
            )

    def spend(self, caller: str, n: int = 1) -> None:
        """Count an amount against the caller's limit; amounts beyond the limit are not counted."""
        if self._limit is not None:
            n_remaining = self._spent_per_caller.get_window_stats(self._limit, caller).remaining
            self._spent_per_caller.hit(self._limit, caller, cost=min(n, n_remaining))


@dataclass(frozen=True, slots=True)
class State:
    """What the routes of an app share; `queue` is None without Redis. A process can hold several apps."""

    store: Store
    board: JobBoard
    queue: RedisQueue | None
    settings: ServerSettings
    engines: Engines
    tokens: RateLimit  # Tokens per minute of each caller.
    storage: StorageCheck
    tries: dict[str, Any] = field(default_factory=dict)  # Playground runs of `dashboard.playground`, the oldest first.
    usage: UsageTable = field(default_factory=UsageTable)
    traces: TracerProvider | None = None
    answers: Counter = field(
        default_factory=lambda: Counter(
            "swiftopt_http_requests", "Requests by the status of the answer.", ["status"], registry=None
        )
    )
    # Log-ins from each address.
    logins: RateLimit = field(default_factory=lambda: RateLimit(LOGINS_PER_MIN))


async def state_of(request: Request) -> State:
    """Return the state of the app that serves the request."""
    return cast(State, request.app.state.swiftopt)


Shared = Annotated[State, Depends(state_of)]


# --- checks before a route


class AccessMiddleware:
    """Access checks and access log. It is plain ASGI middleware, because lookups must stay fast."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, answers: Counter) -> None:
        self._app, self._settings, self._answers = app, settings, answers
        self._rate = RateLimit(settings.requests_per_min)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        with logs.about_request(logs.valid_request_id(headers.get(REQUEST_ID, ""))):
            await self._answer(scope, headers, receive, send)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        started_s, status, request_id = time.perf_counter(), 500, logs.request_id.get()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        caller = scope["client"][0] if scope.get("client") else "local"
        try:
            key_owner = self._key_owner(headers)
            caller = key_owner or caller
            scope.setdefault("state", {}).update(key_owner=key_owner, caller=caller)
            if scope["path"].startswith(GUARDED):
                self._check(scope, headers, key_owner, caller)
            # Answer HEAD like GET: TransportMiddleware drops the body.
            await self._app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, sending)
        except Refused as refused:
            # It comes from `_check`: the app answers its own refusals.
            await refused.response(scope["path"])(scope, receive, sending)
        finally:
            self._answers.labels(str(status)).inc()
            # The raw path is ASCII without line breaks, and has no query string.
            path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
            millis = (time.perf_counter() - started_s) * 1000
            if path not in POLLS or self._settings.log_polls:
                parts = scope["method"], path[:500], status, millis, caller
                values = dict(zip(("method", "path", "status", "ms", "caller"), parts, strict=True))
                access.info("%s %s %d %.1f ms %s", *parts, extra={"values": {**values, "ms": round(millis, 1)}})

    def _key_owner(self, headers: Headers) -> str | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not self._settings.keys.required or scheme.lower() != "bearer":
            return None
        return self._settings.keys.owner(key.strip())

    def _check(self, scope: Scope, headers: Headers, key_owner: str | None, caller: str) -> None:
        """Raise Refused for a missing key, an exceeded limit, or headers of a body that cannot be accepted."""
        path, method = scope["path"], scope["method"]
        if self._settings.keys.required and key_owner is None:
            raise _unauthorised("authorization" in headers)
        if method not in ("GET", "HEAD") or not path.startswith(LOOKUPS):
            self._rate.check(caller, "requests")
            self._rate.spend(caller)
        if method != "POST":
            return
        if is_foreign(headers) and not {"*", headers["origin"]} & set(self._settings.origins):
            detail = "a page of another site may not send this: call the API from a program"
            raise Refused(403, "foreign-origin", detail)
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if path in BODIES and media_type not in BODIES[path]:
            problem = f"the body is {media_type[:100]!r}" if media_type else "the body has no Content-Type"
            detail = f"{problem}: send it as {' or '.join(BODIES[path])}"
            accepted = {"Accept-Post": ", ".join(BODIES[path])}
            raise Refused(415, "unsupported-media-type", detail, accepted, code="unsupported_content_type")
        if (encoding := headers.get("content-encoding", IDENTITY).strip().lower()) != IDENTITY:
            detail = f"the body is encoded as {encoding[:100]!r}: send it uncompressed, without Content-Encoding"
            raise Refused(415, "unsupported-encoding", detail, {"Accept-Encoding": IDENTITY})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise too_large(self._settings.max_body_bytes)


class OriginsMiddleware(CORSMiddleware):
    """CORS headers for routes that need a key, but not for others such as the dashboard's forms."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(GUARDED)
        await (super().__call__ if is_api else self.app)(scope, receive, send)


def is_foreign(headers: Headers) -> bool:
    """Return whether another site's page sent the request. Browsers allow such posts, even to localhost."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def _unauthorised(has_key: bool) -> Refused:
    problem = "Incorrect API key provided" if has_key else "this server requires an API key"
    scheme = 'Bearer realm="swiftopt"' + (', error="invalid_token"' if has_key else "")
    detail = f"{problem}: send one of this server's as `Authorization: Bearer KEY`"
    return Refused(401, "unauthorised", detail, {"WWW-Authenticate": scheme}, code="invalid_api_key")
