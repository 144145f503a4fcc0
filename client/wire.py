"""Requests that are sent again when that may help, answers as values or errors, and a job's events as they come."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx2
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential_jitter

from ..core.errors import (
    Conflict,
    InvalidInput,
    LayerSetNotFound,
    NotFound,
    ServiceUnreachable,
    SettingsError,
    StreamError,
    SwiftoptError,
    safe_url,
)

ATTEMPTS = 4  # of a request that may be sent twice
WAIT_S, MAX_WAIT_S = 0.2, 5.0  # before the second attempt, doubled each time
SILENCE_S = 60.0  # without even a keep-alive comment the connection counts as broken
AWAY_S = 120.0  # how long nothing may answer, once something has
FIRST_S = 3.0  # the same before the first answer
LIVED_S = 1.0  # a connection that stood so long was an answer, although no event came
RETRY_S, MAX_RETRY_S = 0.2, 5.0  # between two tries, doubled each time
OPENED = ""  # in place of an event: the connection stands
PASSING = (429, 502, 503, 504)  # statuses that may go by themselves
ERRORS: dict[int, type[SwiftoptError]] = {
    400: InvalidInput,
    404: NotFound,
    405: InvalidInput,
    409: Conflict,
    413: InvalidInput,
    415: InvalidInput,
    422: InvalidInput,
}
NAMED = {"layer-set-not-found": LayerSetNotFound, "stream-error": StreamError, "settings-error": SettingsError}


class RefusedAnswer(Exception):
    """An answer with a status that may pass; kept to ourselves, for the loop that tries again."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response


def check_url(url: str) -> str:
    """The server's address without a slash at its end.

    Raises: SettingsError: it is no http or https URL with a host.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise SettingsError(f"the server {safe_url(url)!r} is no URL: use one such as http://127.0.0.1:8000")
    return url.rstrip("/")


def check_key(key: str | None) -> dict[str, str]:
    """The headers that show the key; none without one.

    Raises: SettingsError: no key looks like that; it is not shown.
    """
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise SettingsError("the API key holds characters that no key has: copy it to SWIFTOPT_API_KEY again")
    return {"Authorization": f"Bearer {key}"}


def sent(
    send: Callable[[], httpx2.Response], url: str, *, again: bool, accept: tuple[int, ...] = ()
) -> httpx2.Response:
    """The answer; `again`: the request may be sent twice, as long as nothing answers or the server is not ready.

    `accept` are statuses of failure that the caller takes for an answer.

    Raises: SwiftoptError: as `complain`. ServiceUnreachable: nothing answers at `url`.
    """

    def attempt() -> httpx2.Response:
        response = send()
        if response.status_code in PASSING and again:
            raise RefusedAnswer(response)
        return response

    kinds = (httpx2.TransportError, RefusedAnswer) if again else (httpx2.ConnectError, httpx2.ConnectTimeout)
    retrying = Retrying(
        retry=retry_if_exception_type(kinds), stop=stop_after_attempt(ATTEMPTS), wait=_pause, reraise=True
    )
    try:
        response = retrying(attempt)
    except RefusedAnswer as refused:
        response = refused.response
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise unreachable(url, error) from error
    if not response.is_success and response.status_code not in accept:
        complain(response, url)
    return response


def unreachable(url: str, error: Exception) -> ServiceUnreachable:
    """The error for a server that does not answer."""
    reason = "in time" if isinstance(error, httpx2.TimeoutException) else "properly"
    if isinstance(error, httpx2.ConnectError):
        reason = f"({error})" if str(error) else "at all"
    return ServiceUnreachable(
        f"the server {safe_url(url)} does not answer {reason}: check the URL, and that `swiftopt serve` runs there"
    )


def complain(response: httpx2.Response, url: str) -> NoReturn:
    """Raise what an answer's status and its problem object say.

    Raises: InvalidInput, NotFound, Conflict, SwiftoptError: by status. ServiceUnreachable: the key is refused, the
        server is not ready or too busy, or no server of ours answers there.
    """
    status, place = response.status_code, safe_url(url)
    if status in (401, 403):
        raise ServiceUnreachable(
            f"the server {place} wants another API key: set SWIFTOPT_API_KEY to one that it accepts"
            if "authorization" in response.request.headers
            else f"the server {place} wants an API key: set SWIFTOPT_API_KEY"
        )
    problem = _problem(response)
    if problem is None:
        raise ServiceUnreachable(
            f"what answers at {place} is no swiftopt server (status {status}): check the URL and proxies in between"
        )
    if status == 429:
        raise ServiceUnreachable(f"the server {place} gets too many requests: {_sentence(problem)}")
    if status in PASSING:
        raise ServiceUnreachable(f"the server {place} is not ready: {_sentence(problem)}")
    raise error_of(problem)


def error_of(problem: Mapping[str, Any]) -> SwiftoptError:
    """The error that a problem object stands for: by its type where a class of ours is meant, else by its status."""
    kind = NAMED.get(str(problem.get("type")).rpartition(":")[2])
    return (kind or ERRORS.get(int(problem.get("status") or 0), SwiftoptError))(_sentence(problem))


def parsed(response: httpx2.Response, url: str) -> Any:
    """The JSON of an answer that should have one.

    Raises: ServiceUnreachable: it has none, so no server of ours sent it.
    """
    try:
        return response.json()
    except ValueError as error:
        raise ServiceUnreachable(
            f"what answers at {safe_url(url)} is no swiftopt server (it sends no JSON): check the URL"
        ) from error


def _problem(response: httpx2.Response) -> Mapping[str, Any] | None:
    """The problem object of an answer, made of an error in OpenAI's form as well; None if it holds neither."""
    try:
        found = json.loads(response.content)
    except ValueError:
        return None
    if not isinstance(found, Mapping):
        return None
    if "problem+json" in response.headers.get("content-type", ""):
        return found
    return openai_problem(found, response.status_code)


def openai_problem(found: Mapping[str, Any], status: int) -> Mapping[str, Any] | None:
    """The problem object for an answer, or a part of a stream, in which OpenAI's form reports an error; else None.

    `status` stands in where the error has no number of its own.
    """
    error = found.get("error")
    if not isinstance(error, Mapping):
        return None
    code = error.get("code")
    return {"status": code if isinstance(code, int) else status, "detail": error.get("message")}


def _sentence(problem: Mapping[str, Any]) -> str:
    return str(problem.get("detail") or problem.get("title") or f"status {problem.get('status')}")


_backoff = wait_exponential_jitter(multiplier=WAIT_S, max=MAX_WAIT_S, jitter=WAIT_S)


def _pause(state: RetryCallState) -> float:
    """Seconds until the next attempt: what the server asks for, if it does so within reason."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, RefusedAnswer):
        wanted = error.response.headers.get("retry-after", "")
        if wanted.isdigit():
            return min(MAX_WAIT_S, float(wanted))
    return _backoff(state)


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
