"""Checks before a route sees a request: its key, the limits of rate and body; and a line in the log after it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from urllib.parse import urlsplit

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter, RateLimiter, SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Refused
from .settings import MIB, ServerSettings

BODY_WAIT_S = 30.0  # of silence while a body is being sent
GUARDED = ("/v1/", "/tokenize", "/detokenize")  # what begins so needs a key, where keys are set
LOOKUPS = "/v1/layer-sets/"  # single look-ups, cached, do not count against the rate
JSON = ("application/json",)
LINES = ("application/jsonl", "application/x-ndjson", "application/octet-stream", "multipart/form-data")
TAKE_JSON = (
    *("/v1/jobs", "/v1/layer-sets:lookup", "/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/tokenize", "/detokenize", "/v1/tuning:pause", "/v1/tuning:resume", "/v1/tuning:pin"),
)
BODIES = {"/v1/streams": LINES, **dict.fromkeys(TAKE_JSON, JSON)}  # what may be sent where

access = logging.getLogger("swiftopt.access")


class RateLimit:
    """At most `per_min` of something for each caller in any minute; 0: no limit.

    What is `counted` is added up over the minute and the one before, where it may be too many to remember one by one.
    """

    def __init__(self, per_min: int, counted: bool = False) -> None:
        kind: type[RateLimiter] = SlidingWindowCounterRateLimiter if counted else MovingWindowRateLimiter
        self._limit = RateLimitItemPerMinute(per_min) if per_min else None
        self._spent = kind(MemoryStorage())

    def wait_s(self, caller: str) -> int:
        """Return 0 if the caller may go on, else after how many seconds it may."""
        if self._limit is None or self._spent.test(self._limit, caller):
            return 0
        return max(1, math.ceil(self._spent.get_window_stats(self._limit, caller).reset_time - time.time()))

    def spend(self, caller: str, n: int = 1) -> None:
        """Count what a caller has had; what is beyond the limit is given."""
        if self._limit is not None:
            left = self._spent.get_window_stats(self._limit, caller).remaining
            self._spent.hit(self._limit, caller, cost=min(n, left))


class Gate:
    """Pure ASGI, so that a look-up pays little for it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
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
            refused = self._refused(scope, headers, key_owner, caller) if scope["path"].startswith(GUARDED) else None
            if refused is not None:
                await refused.response(scope["path"])(scope, receive, sending)
            else:
                await self._app(scope, _limited(receive, self._settings.max_body_bytes), sending)
        finally:
            # raw_path is ASCII without line breaks, and has no query
            path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
            millis = (time.perf_counter() - began) * 1000
            access.info("%s %s %d %.1f ms %s", scope["method"], path[:500], status, millis, caller)

    def _key_owner(self, headers: Headers) -> str | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not self._settings.keys.required or scheme.lower() != "bearer":
            return None
        return self._settings.keys.owner(key.strip())

    def _refused(self, scope: Scope, headers: Headers, key_owner: str | None, caller: str) -> Refused | None:
        """Return why the request is turned away before its body comes, if it is."""
        path, method = scope["path"], scope["method"]
        if self._settings.keys.required and key_owner is None:
            return _unauthorised("authorization" in headers)
        if method != "GET" or not path.startswith(LOOKUPS):
            if wait_s := self._rate.wait_s(caller):
                return too_many(f"{self._settings.requests_per_min} requests", wait_s)
            self._rate.spend(caller)
        return self._bad_post(path, headers) if method == "POST" else None

    def _bad_post(self, path: str, headers: Headers) -> Refused | None:
        """Return what can be said of a body before it comes, and of the page that sends it."""
        if is_foreign(headers):
            words = "a page of another site may not do that: call the API from a program"
            return Refused(403, "foreign-origin", words)
        given = headers.get("content-type", "").partition(";")[0].strip().lower()
        if path in BODIES and given not in BODIES[path]:
            words = f"the body is {given[:100]!r}" if given else "the body has no Content-Type"
            detail = f"{words}: send it as {' or '.join(BODIES[path])}"
            return Refused(415, "unsupported-media-type", detail, {"Accept-Post": ", ".join(BODIES[path])})
        length = headers.get("content-length", "0")
        too_large = length.isdigit() and int(length) > self._settings.max_body_bytes
        return _too_large(self._settings.max_body_bytes) if too_large else None


def is_foreign(headers: Headers) -> bool:
    """Tell whether a page of another site sends it: browsers let it post to a server on the user's own machine."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Count what really comes, whatever was announced."""
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


def too_many(what: str, wait_s: int) -> Refused:
    """Return how a caller is turned away that has had its share of a minute."""
    detail = f"more than {what} a minute: wait {wait_s} s, then go on"
    return Refused(429, "too-many-requests", detail, {"Retry-After": str(wait_s)})


def _too_large(max_bytes: int) -> Refused:
    detail = f"the body is larger than {max_bytes / MIB:g} MiB: send less, or ask the operator for more"
    return Refused(413, "too-large", detail, {"Connection": "close"})


def _unauthorised(given: bool) -> Refused:
    why = "the key is not one of this server's" if given else "this server wants a key"
    how = 'Bearer realm="swiftopt"' + (', error="invalid_token"' if given else "")
    return Refused(401, "unauthorised", f"{why}: send it as `Authorization: Bearer KEY`", {"WWW-Authenticate": how})
