"""A swiftopt server as an object: the same jobs and layer sets as its database holds, over HTTP."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx2

from ..core.errors import SettingsError, StoreError, SwiftoptError, safe_url
from ..core.events import JobState, PromptFinished
from ..core.jobs import DEFAULT_QUEUE, EventPage, Job, JobEvent, JobList, Verb
from ..core.requests import TuneRequest
from ..core.serialization import Record
from ..core.streams import stream_lines
from ..core.types import Completion, FoundPlan, LayerSetList, LayerSetRecord, ModelInfo, ModelList, Prompt
from .wire import check_key, check_url, error_of, follow, parsed, sent

Answer = TypeVar("Answer", bound=Record)

JSON = {"Accept": "application/json"}


class Client:
    """Jobs and layer sets of the server at `url` (None: `SWIFTOPT_SERVER_URL`); implements `core.jobs.JobBoard`.

    `api_key` None takes `SWIFTOPT_API_KEY`; `timeout` is in seconds, for one request. Requests that may be repeated
    are, a few times, while nothing answers; threads may share a client.

    Raises: SettingsError: no URL, or one that cannot be used. In every method: NotFound, Conflict, InvalidInput: the
        server says so. ServiceUnreachable: it does not answer, is not ready, or refuses the key.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, timeout: float = 30.0) -> None:
        url = url or os.environ.get("SWIFTOPT_SERVER_URL")
        if not url:
            raise SettingsError("no server is named: pass its url, or set SWIFTOPT_SERVER_URL")
        self.url = check_url(url)
        headers = check_key(api_key or os.environ.get("SWIFTOPT_API_KEY"))
        self._http = httpx2.Client(headers=headers, timeout=httpx2.Timeout(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({safe_url(self.url)!r})"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # --- layer sets ---

    def layer_set(
        self, model: str, task: str, device: str | None = None, dtype: str | None = None, alias: str = "best"
    ) -> FoundPlan:
        """The plan for a model and task, as `Store.lookup`.

        Raises: LayerSetNotFound: nothing is stored for them.
        """
        params = {"device": device, "dtype": dtype, "alias": alias}
        path = f"/v1/layer-sets/{quote(model, safe='')}/{quote(task, safe='')}"
        return self._read(FoundPlan, self._get(path, params))

    def lookup(self, queries: Sequence[Mapping[str, str]]) -> list[FoundPlan | SwiftoptError]:
        """Plans for many queries in one request, each with the arguments of `layer_set`; an error stands for itself."""
        body = {"queries": [dict(query) for query in queries]}
        answers = self._json("POST", "/v1/layer-sets:lookup", again=True, json=body)
        try:
            listed = list(answers["answers"])
            return [error_of(one) if "status" in one else self._read(FoundPlan, one) for one in listed]
        except (KeyError, TypeError) as error:
            raise self._unreadable(error) from error

    def layer_sets(self, model: str | None = None, task: str | None = None) -> list[LayerSetRecord]:
        """The stored versions of a model, a task, both or all, newest first."""
        found = self._get("/v1/layer-sets", {"model": model, "task": task})
        return list(self._read(LayerSetList, found).layer_sets)

    def models(self) -> list[ModelInfo]:
        """Every model that a worker has loaded once."""
        return list(self._read(ModelList, self._get("/v1/models")).models)

    # --- jobs ---

    def upload(self, prompts: Sequence[Prompt]) -> str:
        """Store a stream; the SHA-256 by which jobs name it."""
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
        """The job for the request on these prompts, and whether it is new; safe to repeat with the same key."""
        own = {key: value for key, value in request.to_json().items() if key not in ("task", "out", "limit")}
        lines = [json.loads(line) for line in stream_lines(prompts).splitlines()]  # each with its task
        body = {**own, "stream": {"prompts": lines}, "queue": queue}
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}  # ours, so that it may be sent again
        response = self._send("POST", "/v1/jobs", again=True, json=body, headers=headers)
        return self._job(parsed(response, self.url)), response.status_code == 202

    def get(self, job: str) -> Job:
        """One job as it is now."""
        return self._job(self._get(f"/v1/jobs/{quote(job, safe='')}"))

    def latest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs first."""
        found = self._get("/v1/jobs", {"state": state, "limit": limit})
        return [_with_sets(job) for job in self._read(JobList, found).jobs]

    def act(self, job: str, verb: Verb) -> Job:
        """Pause, resume, stop, cancel or retry; the job as it is then."""
        # a repeated `retry` would meet the job that the first one queued, and be refused
        return self._job(self._json("POST", f"/v1/jobs/{quote(job, safe='')}/{verb}", again=verb != "retry"))

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """What the job reported behind event number `after`, oldest first."""
        params = {"after": after, "limit": limit, "format": "json"}
        found = self._get(f"/v1/jobs/{quote(job, safe='')}/events", params)
        return list(self._read(EventPage, found).events)

    def outputs(self, job: str) -> list[PromptFinished]:
        """The finished completions in the order of the stream; which of them were held out, only the events tell."""
        lines = self._send("GET", f"/v1/jobs/{quote(job, safe='')}/outputs", again=True).iter_lines()
        try:
            found = [json.loads(line) for line in lines if line]
            return [
                PromptFinished(Prompt(values["id"], values["task"]), place, Completion.from_json(values))
                for place, values in enumerate(found)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error

    def follow(self, job: str, after: int = 0) -> Iterator[JobEvent | Job]:
        """What the job reports, from event number `after` on, as it comes; the last value is the job at its end.

        An event of the type "progress" has the number 0: the figures of the moment. Broken connections are taken up
        again where they broke.

        Raises: ServiceUnreachable: nothing has answered for two minutes.
        """
        path = f"{self.url}/v1/jobs/{quote(job, safe='')}/events"
        for name, number, data in follow(self._http, path, self.url, after):
            yield self._job(data) if name == "end" else JobEvent(number, name, data, "")

    def ready(self) -> dict[str, Any]:
        """What the server says of itself and of what it needs; also when it is not ready."""
        response = sent(lambda: self._http.get(f"{self.url}/readyz"), self.url, again=False, accept=(503,))
        return dict(parsed(response, self.url))

    # --- requests ---

    def _send(self, method: str, path: str, *, again: bool, **request: Any) -> httpx2.Response:
        headers = {**JSON, **request.pop("headers", {})}
        return sent(
            lambda: self._http.request(method, self.url + path, headers=headers, **request), self.url, again=again
        )

    def _json(self, method: str, path: str, *, again: bool, **request: Any) -> Any:
        return parsed(self._send(method, path, again=again, **request), self.url)

    def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        given = {name: value for name, value in (params or {}).items() if value is not None}
        return self._json("GET", path, again=True, params=given)

    # --- answers ---

    def _unreadable(self, error: Exception) -> StoreError:
        return StoreError(
            f"the answer of {safe_url(self.url)} cannot be read ({error}): its swiftopt is of another version"
        )

    def _read(self, kind: type[Answer], values: Any) -> Answer:
        try:
            return kind.from_json(values)
        except SwiftoptError as error:
            raise self._unreadable(error) from error

    def _job(self, values: Any) -> Job:
        return _with_sets(self._read(Job, values))


def _with_sets(job: Job) -> Job:
    """Return the job with its id in its layer sets: the exchanged object does not say which job found it."""
    return replace(job, layer_sets=tuple(replace(record, job=job.id) for record in job.layer_sets))
