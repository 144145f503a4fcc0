"""Server-sent events of a job, over as many connections as it takes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx2

from ..core.errors import ServiceUnreachable
from ..core.urls import safe_url
from .wire import PASSING, complain, unreachable

SILENCE_S = 60.0  # without even a keep-alive comment the connection counts as broken
AWAY_S = 120.0  # how long nothing may answer, once something has
FIRST_S = 3.0  # the same before the first answer
LIVED_S = 1.0  # a connection that stood so long was an answer, although no event came
RETRY_S, MAX_RETRY_S = 0.2, 5.0  # between two tries, doubled each time
OPENED = ""  # in place of an event: the connection stands


def follow(http: httpx2.Client, path: str, url: str, after: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(type, number, data) of every event behind number `after`, until the one called `end`; number 0 if it has none.

    Raises: SwiftoptError: as `complain`. ServiceUnreachable: nothing has answered for `AWAY_S`.
    """
    answered, wait, patience = time.monotonic(), RETRY_S, FIRST_S
    while True:
        opened, broken = math.inf, Exception("the stream ended too early")
        try:
            for name, number, data in _one_connection(http, path, url, after):
                if name == OPENED:
                    opened = time.monotonic()
                    continue
                answered, wait, patience = time.monotonic(), RETRY_S, AWAY_S
                after = max(after, number)
                yield name, number, data
                if name == "end":
                    return
        except (httpx2.TransportError, _NotReady, ValueError) as error:  # ValueError: the last event is cut in two
            broken = error
        if time.monotonic() - opened >= LIVED_S:
            answered, wait, patience = time.monotonic(), RETRY_S, AWAY_S
        elif time.monotonic() - answered > patience:
            raise unreachable(url, broken) from broken
        time.sleep(wait)
        wait = min(MAX_RETRY_S, 2 * wait)


class _NotReady(Exception):
    """The server answers that it cannot just now."""


def _one_connection(http: httpx2.Client, path: str, url: str, after: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
    timeout = httpx2.Timeout(http.timeout.connect, read=SILENCE_S)
    with http.stream("GET", path, headers=headers, timeout=timeout) as response:
        if response.status_code in PASSING:
            raise _NotReady(response.status_code)
        if not response.is_success:
            response.read()
            complain(response, url)
        yield OPENED, 0, {}
        try:
            for event in httpx2.EventSource(response, max_event_size=None):
                number = int(event.id) if event.event != "end" and (event.id or "").isdigit() else 0
                yield event.event, 0 if event.event == "progress" else number, json.loads(event.data)
        except httpx2.SSEError as error:
            raise ServiceUnreachable(
                f"what answers at {safe_url(url)} sends no events ({error}): check the URL"
            ) from error
