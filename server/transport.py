"""HTTP handling for all routes: limits on the size of bodies, readable early answers, and HEAD."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refused
from .settings import MIB

BODY_WAIT_S = 30.0  # Maximum pause between two parts of a request's body.
# Bodies up to this size are read to their end before an early answer, so that the connection can be reused.
SMALL_BODY = 1 << 16
# Limits on reading the rest of a body after an early answer: bytes, seconds, seconds without data.
LINGER_BYTES, LINGER_S, LINGER_WAIT_S = 1 << 30, 30.0, 5.0
EMPTY: Message = {"type": "http.response.body", "body": b"", "more_body": False}

T = TypeVar("T")


class TransportMiddleware:
    """Limits the size of bodies, lets clients read early answers, and keeps answers to HEAD empty.

    Most clients send the whole body before they read the answer. If the server closed the connection earlier, the
    kernel would reset it, and the client would never see the answer. So after an early answer the rest of the body is
    read and dropped, up to LINGER_BYTES and LINGER_S, before the connection is closed.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = RequestBody(Headers(scope=scope), receive, self._max_bytes)
        is_head, is_ended = scope["method"] == "HEAD", False

        async def sending(message: Message) -> None:
            nonlocal is_ended
            # A stream may go on after the answer to a HEAD request has ended.
            if is_ended:
                return
            if message["type"] == "http.response.start":
                if not body.is_over and not await body.drop_small():
                    MutableHeaders(scope=message)["connection"] = "close"
                await send(message)
                return
            if is_head:
                message, is_ended = EMPTY, True
            if not body.is_over and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await body.drop()
                message = EMPTY
            await send(message)

        await self._app(scope, body.receive, sending)


class RequestBody:
    """A request's body while it arrives. Its bytes are counted, because Content-Length may be wrong or missing."""

    def __init__(self, headers: Headers, receive: Receive, max_bytes: int) -> None:
        self._receive, self._max_bytes, self._n_received = receive, max_bytes, 0
        length = headers.get("content-length", "0")
        is_chunked = "transfer-encoding" in headers
        self._is_small = not is_chunked and length.isdigit() and int(length) <= SMALL_BODY
        self.is_over = length == "0" and not is_chunked

    async def receive(self) -> Message:
        """Return the next message, like ASGI's `receive`.

        Raises: Refused: the body is too large, or nothing arrived for BODY_WAIT_S.
        """
        if self.is_over:
            return await self._receive()  # Only the message of a disconnect can follow the body.
        try:
            message = await self._next(BODY_WAIT_S)
        except TimeoutError:
            raise Refused(408, "too-slow", "the rest of the body did not arrive in time: send it again") from None
        if self._n_received > self._max_bytes:
            raise too_large(self._max_bytes)
        return message

    async def drop_small(self) -> bool:
        """Read the rest of a small body; return whether the body has ended."""
        if self._is_small:
            await self.drop()
        return self.is_over

    async def drop(self) -> None:
        """Read and drop the rest of the body, up to LINGER_BYTES and LINGER_S."""
        max_received = self._n_received + LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.is_over and self._n_received < max_received:
                    await self._next(LINGER_WAIT_S)

    async def _next(self, within_s: float) -> Message:
        message = await asyncio.wait_for(self._receive(), within_s)
        self._n_received += len(message.get("body", b""))
        self.is_over = not message.get("more_body", False)
        return message


def too_large(max_bytes: int) -> Refused:
    """Return the error for a body that is too large."""
    detail = f"the body is larger than {max_bytes / MIB:g} MiB: send less, or ask the operator for a higher limit"
    return Refused(413, "too-large", detail)


async def await_unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of the work. If the client disconnects first, cancel the work and return None."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        work_task.cancel()
        disconnect_task.cancel()


async def prepend(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Yield `first`, then `rest`, and close `rest` at the end."""
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event
