"""Client of a swiftopt server: the jobs and layer sets of its database, over HTTP.

`ServerConnection` is the base of this client and of the chat client: it retries requests where that may help, and turns
answers into values or errors.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, ClassVar, NoReturn, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential_jitter

from ..core import errors
from ..core.errors import (
    ServiceUnreachable,
    SettingsError,
    StoreError,
    SwiftoptError,
    connection_problem,
    safe_url,
)
from ..core.events import JobState, PromptFinished, Tuning, TuningVerb, Way
from ..core.records import FoundPlan, LayerSetList, LayerSetRecord, ModelInfo, ModelList
from ..core.requests import DEFAULT_QUEUE, LINES_FROM, EventPage, Job, JobEvent, JobList, TuneRequest, Verb
from ..core.serialization import Record
from ..core.streams import stream_lines
from ..core.types import Completion, Prompt
from ..core.usage import Usage

ATTEMPTS = 4  # Attempts of a request that is safe to repeat, the first included.
# Seconds before the second attempt, doubled for each further one, and their maximum.
WAIT_S, MAX_WAIT_S = 0.2, 5.0
# Seconds without data, even a keep-alive comment, after which an event stream counts as broken.
SILENCE_S = 60.0
# Seconds without an answer after which `follow` gives up, if the server has answered before.
AWAY_S = 120.0
# Seconds without an answer after which `follow` gives up, if the server has never answered.
FIRST_S = 3.0
# Seconds after which an open connection counts as an answer, even without an event.
LIVED_S = 1.0
RETRY_S, MAX_RETRY_S = 0.2, 5.0  # Seconds before `follow` reconnects, doubled each time, and their maximum.
RETRY_STATUSES = (429, 502, 503, 504)  # HTTP statuses of temporary failures.
ERRORS: dict[int, type[SwiftoptError]] = {
    **dict.fromkeys((400, 405, 413, 415, 422), errors.InvalidInput),
    404: errors.NotFound,
    409: errors.Conflict,
}
ERRORS_BY_TYPE: dict[str, type[SwiftoptError]] = {
    "layer-set-not-found": errors.LayerSetNotFound,
    "stream-error": errors.StreamError,
    "settings-error": errors.SettingsError,
}

Answer = TypeVar("Answer", bound=Record)


class RefusedAnswer(Exception):
    """An answer with a temporary status; internal, for the loops that retry."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response


class ServerConnection:
    """A server at `url`; `api_key` None takes `SWIFTOPT_API_KEY`. Threads may share it.

    Raises: SettingsError: the URL or the key is invalid. In every method that sends a request: InvalidInput, NotFound,
        Conflict: as the server answers. ServiceUnreachable: it does not answer, is not ready, is too busy, or refuses
        the key. StoreError: its answer has an unexpected form.
    """

    ADVICE: ClassVar[str]  # Advice in the error for a response of unexpected form.

    def __init__(self, url: str, api_key: str | None, timeout: httpx2.Timeout, headers: Mapping[str, str]) -> None:
        self.url = _check_url(url)
        key = _key_header(api_key or os.environ.get("SWIFTOPT_API_KEY"))
        self._http = httpx2.Client(headers={**key, **headers}, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({safe_url(self.url)!r})"

    def close(self) -> None:
        self._http.close()

    def _send(
        self, method: str, path: str, *, again: bool, accept: Sequence[int] = (), stream: bool = False, **request: Any
    ) -> httpx2.Response:
        """Return the answer to a request; `stream`: its body has not been read yet.

        With `again` the request may be repeated while nothing answers or the server is not ready; `accept` are error
        statuses that the caller handles as answers.
        """

        def attempt() -> httpx2.Response:
            built_request = self._http.build_request(method, self.url + path, **request)
            response = self._http.send(built_request, stream=stream)
            if not response.is_success:
                response.read()
            if response.status_code in RETRY_STATUSES and again:
                raise RefusedAnswer(response)
            return response

        kinds = (httpx2.TransportError, RefusedAnswer) if again else (httpx2.ConnectError, httpx2.ConnectTimeout)
        attempts = Retrying(
            retry=retry_if_exception_type(kinds), stop=stop_after_attempt(ATTEMPTS), wait=_pause, reraise=True
        )
        try:
            response = attempts(attempt)
        except RefusedAnswer as refused:
            response = refused.response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error
        if not response.is_success and response.status_code not in accept:
            self._complain(response)
        return response

    def _json(self, method: str, path: str, *, again: bool, **request: Any) -> Any:
        return self._parse(self._send(method, path, again=again, **request))

    def _parse(self, response: httpx2.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise ServiceUnreachable(
                f"{safe_url(self.url)} is not a swiftopt server (its answer is not JSON): check the URL"
            ) from error

    def _events(self, response: httpx2.Response) -> Iterator[httpx2.ServerSentEvent]:
        try:
            yield from httpx2.EventSource(response, max_event_size=None)
        except httpx2.SSEError as error:
            raise ServiceUnreachable(f"{safe_url(self.url)} does not send events ({error}): check the URL") from error

    @contextmanager
    def _reading(self, *kinds: type[Exception]) -> Iterator[None]:
        """Turn errors of these kinds into one about an unexpected form of the answer."""
        try:
            yield
        except kinds as error:
            raise StoreError(f"the answer of {safe_url(self.url)} cannot be read ({error}): {self.ADVICE}") from error

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        """Return the error for a server that does not answer."""
        reason = "in time" if isinstance(error, httpx2.TimeoutException) else "properly"
        if isinstance(error, httpx2.ConnectError):
            reason = f"({connection_problem(error)})"
        address = safe_url(self.url)
        return ServiceUnreachable(
            f"the server {address} does not answer {reason}: check the URL, and that `swiftopt serve` runs there"
        )

    def _complain(self, response: httpx2.Response) -> NoReturn:
        """Raise the error described by the answer's status and its problem object."""
        status, address = response.status_code, safe_url(self.url)
        if status in (401, 403):
            raise ServiceUnreachable(
                f"the server {address} rejects the API key: set SWIFTOPT_API_KEY to a valid one"
                if "authorization" in response.request.headers
                else f"the server {address} needs an API key: set SWIFTOPT_API_KEY"
            )
        problem = _problem(response)
        if problem is None:
            raise ServiceUnreachable(
                f"{address} is not a swiftopt server (status {status}): check the URL and proxies in between"
            )
        if status == 429:
            raise ServiceUnreachable(f"the server {address} is overloaded: {_sentence(problem)}")
        if status in RETRY_STATUSES:
            raise ServiceUnreachable(f"the server {address} is not ready: {_sentence(problem)}")
        raise error_of(problem)


class Client(ServerConnection):
    """Jobs (see `JobBoard`) and layer sets of the server at `url` (None: `SWIFTOPT_SERVER_URL`).

    `api_key` None takes `SWIFTOPT_API_KEY`; `timeout` is in seconds, for one request. Repeatable requests are retried a
    few times while nothing answers; threads may share a client.

    Raises: SettingsError: no URL, or an invalid one. In every method: as in `ServerConnection`.
    """

    ADVICE = "its swiftopt is of another version"

    def __init__(self, url: str | None = None, api_key: str | None = None, timeout: float = 30.0) -> None:
        url = url or os.environ.get("SWIFTOPT_SERVER_URL")
        if not url:
            raise SettingsError("no server is configured: pass its url, or set SWIFTOPT_SERVER_URL")
        super().__init__(url, api_key, httpx2.Timeout(timeout), {"Accept": "application/json"})

    # --- layer sets ---

    def layer_set(
        self,
        model: str,
        task: str,
        device: str | None = None,
        dtype: str | None = None,
        alias: str = "best",
        engine: str | None = None,
    ) -> FoundPlan:
        """Return the plan for a model and task, like `Store.lookup`; `engine`: the best one for another engine.

        Raises: LayerSetNotFound: nothing is stored for them.
        """
        path = f"/v1/layer-sets/{quote(model, safe='')}/{quote(task, safe='')}"
        return self._read(FoundPlan, self._get(path, device=device, dtype=dtype, alias=alias, engine=engine))

    def lookup(self, queries: Sequence[Mapping[str, str]]) -> list[FoundPlan | SwiftoptError]:
        """Return plans for many queries, each with the arguments of `layer_set`; or an error."""
        body = {"queries": [dict(query) for query in queries]}
        answers = self._json("POST", "/v1/layer-sets:lookup", again=True, json=body)
        with self._reading(KeyError, TypeError):
            answer_list = list(answers["answers"])
            return [error_of(answer) if "status" in answer else self._read(FoundPlan, answer) for answer in answer_list]

    def layer_sets(self, model: str | None = None, task: str | None = None) -> list[LayerSetRecord]:
        """Return the stored versions of a model, a task, both or all, newest first."""
        return list(self._read(LayerSetList, self._get("/v1/layer-sets", model=model, task=task)).layer_sets)

    def models(self) -> list[ModelInfo]:
        """Return every model that was loaded before."""
        return list(self._read(ModelList, self._get("/v1/models")).models)

    # --- jobs ---

    def upload(self, prompts: Sequence[Prompt]) -> str:
        """Store a stream; returns the SHA-256 by which jobs name it."""
        headers = {"Content-Type": "application/jsonl"}
        body = stream_lines(prompts).encode()
        return str(self._json("POST", "/v1/streams", again=True, content=body, headers=headers)["sha256"])

    def submit(
        self,
        request: TuneRequest,
        prompts: Sequence[Prompt],
        queue: str = DEFAULT_QUEUE,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Return the job for the request on these prompts, and whether it is new; safe to repeat with the same key."""
        fields_sent = {key: value for key, value in request.to_json().items() if key not in LINES_FROM}
        lines = [json.loads(line) for line in stream_lines(prompts).splitlines()]  # JSON objects, each with its task.
        body = {**fields_sent, "stream": {"prompts": lines}, "queue": queue}
        # Without the caller's key, send a random one, so that the request is safe to repeat.
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        response = self._send("POST", "/v1/jobs", again=True, json=body, headers=headers)
        return self._read(Job, self._parse(response)), response.status_code == 202

    def get(self, job: str) -> Job:
        return self._read(Job, self._get(_path(job)))

    def latest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        answer = self._get("/v1/jobs", state=state, limit=limit)
        return list(self._read(JobList, answer).jobs)

    def act(self, job: str, verb: Verb) -> Job:
        # Do not repeat `retry`: the first request queues the job, so a second one would be refused.
        return self._read(Job, self._json("POST", _path(job, verb), again=verb != "retry"))

    def obstacle(self, job: Job) -> str | None:
        return self.get(job.id).obstacle if job.state == "queued" else None

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        answer = self._get(_path(job, "events"), after=after, limit=limit, format="json")
        return list(self._read(EventPage, answer).events)

    def outputs(self, job: str) -> list[PromptFinished]:
        """Return the finished completions in the order of the stream; only the events say which were held out."""
        # Split at b"\n" only: texts may contain other Unicode line separators.
        lines = self._send("GET", _path(job, "outputs"), again=True).content.split(b"\n")
        with self._reading(ValueError, KeyError, TypeError):
            completions = [json.loads(line) for line in lines if line]
            return [
                PromptFinished(Prompt(values["id"], values["task"]), index, Completion.from_json(values))
                for index, values in enumerate(completions)
            ]

    def follow(self, job: str, after: int = 0) -> Iterator[JobEvent | Job]:
        """Yield the job's events after number `after` as they arrive, and finally the finished job.

        Events of the type "progress", with the current figures, have the number 0. A broken connection is resumed where
        it broke.

        Raises: ServiceUnreachable: nothing has answered for two minutes.
        """
        answered_s, wait_s, patience_s = time.monotonic(), RETRY_S, FIRST_S
        while True:
            opened_s, connection_error = math.inf, Exception("the stream ended too early")
            try:
                with self._open_events(job, after) as response:
                    opened_s = time.monotonic()
                    for event in self._events(response):
                        answered_s, wait_s, patience_s = time.monotonic(), RETRY_S, AWAY_S
                        payload = json.loads(event.data)
                        if event.event == "end":
                            yield self._read(Job, payload)
                            return
                        number = int(event.id or 0) if event.event != "progress" and (event.id or "").isdigit() else 0
                        after = max(after, number)
                        yield JobEvent(number, event.event, payload, "")
            # JSONDecodeError: the connection broke within an event.
            except (httpx2.TransportError, RefusedAnswer, json.JSONDecodeError) as error:
                connection_error = error
            if time.monotonic() - opened_s >= LIVED_S:
                answered_s, wait_s, patience_s = time.monotonic(), RETRY_S, AWAY_S
            elif time.monotonic() - answered_s > patience_s:
                raise self._unreachable(connection_error) from connection_error
            time.sleep(wait_s)
            wait_s = min(MAX_RETRY_S, 2 * wait_s)

    def ready(self) -> dict[str, Any]:
        """Return the readiness report of the server and its services, also if it is not ready."""
        return dict(self._json("GET", "/readyz", again=False, accept=(503,)))

    # --- tuning of served models ---

    def tuning(self) -> Tuning:
        """Return for each served model what its tasks use and try, and what that costs and gains."""
        return self._read(Tuning, self._get("/v1/tuning"))

    def usage(self, key: str | None = None, since: date | None = None) -> Usage:
        """Return requests, tokens and saved seconds by API key and model; see `GET /v1/usage`.

        Args: key: name of one key; None: this client's own key, or for an admin all keys. since: from this day (UTC)
              on, for all servers that share the database; None: for this server since its start.
        """
        day = None if since is None else since.isoformat()
        return self._read(Usage, self._get("/v1/usage", key=key, since=day))

    def steer_tuning(
        self, verb: TuningVerb, model: str | None = None, task: str | None = None, way: Way | None = None
    ) -> Tuning:
        """Pause or resume learning, or pin a task to a way (None: unpin it); return the new tuning status.

        Args: model: the model; None: all served models. task, way: the task that `pin` pins, and to what.
        """
        body = {name: value for name, value in (("model", model), ("task", task), ("way", way)) if value is not None}
        return self._read(Tuning, self._json("POST", f"/v1/tuning:{verb}", again=True, json=body))

    @contextmanager
    def _open_events(self, job: str, after: int) -> Iterator[httpx2.Response]:
        """Open the stream of a job's events.

        Raises: RefusedAnswer: the server cannot provide it now.
        """
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx2.Timeout(self._http.timeout.connect, read=SILENCE_S)
        with self._http.stream("GET", self.url + _path(job, "events"), headers=headers, timeout=timeout) as response:
            if response.status_code in RETRY_STATUSES:
                raise RefusedAnswer(response)
            if not response.is_success:
                response.read()
                self._complain(response)
            yield response

    def _get(self, path: str, **params: Any) -> Any:
        query = {name: value for name, value in params.items() if value is not None}
        return self._json("GET", path, again=True, params=query)

    def _read(self, kind: type[Answer], values: Any) -> Answer:
        with self._reading(SwiftoptError):
            return kind.from_json(values)


def _path(job: str, *further_parts: str) -> str:
    return "/".join(["/v1/jobs", quote(job, safe=""), *further_parts])


def _check_url(url: str) -> str:
    """Return the server's address without a final slash or `/v1`, which is part of the URL for OpenAI's clients.

    Raises: SettingsError: it is not an http or https URL with a host.
    """
    try:
        url_parts = urlsplit(url)
        is_usable = url_parts.scheme in ("http", "https") and bool(url_parts.hostname) and url_parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isprintable() or " " in url:
        raise SettingsError(f"the server {safe_url(url)!r} is not a URL: use for example http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _key_header(key: str | None) -> dict[str, str]:
    """Return the header with the key; empty without a key.

    Raises: SettingsError: the key is malformed; the message does not show it.
    """
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise SettingsError("the API key contains invalid characters: copy it to SWIFTOPT_API_KEY again")
    return {"Authorization": f"Bearer {key}"}


_backoff = wait_exponential_jitter(multiplier=WAIT_S, max=MAX_WAIT_S, jitter=WAIT_S)


def _pause(state: RetryCallState) -> float:
    """Return the seconds until the next attempt: as the server requests, at most `MAX_WAIT_S`."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, RefusedAnswer):
        retry_after = error.response.headers.get("retry-after", "")
        if retry_after.isdigit():
            return min(MAX_WAIT_S, float(retry_after))
    return _backoff(state)


def error_of(problem: Mapping[str, Any]) -> SwiftoptError:
    """Return the error for a problem object: by its type if that names one of our classes, otherwise by its status."""
    kind, status = ERRORS_BY_TYPE.get(str(problem.get("type")).rpartition(":")[2]), str(problem.get("status"))
    return (kind or ERRORS.get(int(status) if status.isdecimal() else 0, SwiftoptError))(_sentence(problem))


def openai_problem(answer: Mapping[str, Any], status: int) -> Mapping[str, Any] | None:
    """Return the problem object for an answer, or a part of a stream, with an error in OpenAI's form; None without one.

    `status` is used if the error has no number.
    """
    error = answer.get("error")
    if not isinstance(error, Mapping):
        return None
    code = error.get("code")
    return {"status": code if isinstance(code, int) else status, "detail": error.get("message")}


def _problem(response: httpx2.Response) -> Mapping[str, Any] | None:
    """Return the problem object of an answer, also from an error in OpenAI's form; None if there is neither."""
    try:
        problem = json.loads(response.content)
    except ValueError:
        return None
    if not isinstance(problem, Mapping):
        return None
    if "problem+json" in response.headers.get("content-type", ""):
        return problem
    return openai_problem(problem, response.status_code)


def _sentence(problem: Mapping[str, Any]) -> str:
    return str(problem.get("detail") or problem.get("title") or f"status {problem.get('status')}")
