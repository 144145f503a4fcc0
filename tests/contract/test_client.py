"""`swiftopt.Client` against the real API: it is the job board that the database is, and its errors are ours."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from serving import serving

import swiftopt
from swiftopt.client import http
from swiftopt.core.errors import (
    Conflict,
    InvalidInput,
    LayerSetNotFound,
    NotFound,
    ServiceUnreachable,
    SettingsError,
)
from swiftopt.core.events import PhaseChanged, Progress, PromptFinished
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord, ModelInfo
from swiftopt.core.requests import Job, JobBoard, JobEvent, JobSpec, Lease, TuneRequest
from swiftopt.core.streams import stream_sha256
from swiftopt.core.types import Completion, Prompt, Sampling
from swiftopt.server.app import create_app
from swiftopt.store import Store
from swiftopt.worker.queue import JobService

PROMPTS = [Prompt("a", "notes", text="w1 w2"), Prompt("b", "chat", turns=("w3", "w4"), max_new_tokens=5)]
REQUEST = TuneRequest("smollm2-135m", "notes.jsonl", sampling=Sampling(top_p=0.9), max_new_tokens=64)
COMPLETION = Completion((1, 2), "w1 w2", "length", "swift", target_passes=2, drafted=3, accepted=1)


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as store:
        yield store


@pytest.fixture
def client(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[swiftopt.Client]:
    monkeypatch.delenv("SWIFTOPT_API_KEY", raising=False)
    with serving(create_app(store, JobService(store, None))) as url, swiftopt.Client(url) as client:
        yield client


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_address_of_a_server_may_end_like_that_of_openais_clients(end: str) -> None:
    with swiftopt.Client(f"http://127.0.0.1:8000{end}") as client:
        assert client.url == "http://127.0.0.1:8000"


def record(model: str = "smollm2-135m", task: str = "notes") -> LayerSetRecord:
    layer_set = LayerSet(30, frozenset({3}), frozenset({4, 5}))
    return LayerSetRecord(model, task, layer_set, device="cpu", dtype="float32", verdict="use", settings={"seed": 3})


def started(store: Store, job: str) -> Lease:
    claim = store.jobs.claim(Lease(job, 1), "w1")
    assert claim is not None
    return claim.lease


def test_client_has_every_method_of_a_job_board() -> None:
    for name, method in inspect.getmembers(JobBoard, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(swiftopt.Client, name)) == inspect.signature(method), name


def test_job_comes_back_as_it_was_submitted(client: swiftopt.Client, store: Store) -> None:
    job, is_new = client.submit(REQUEST, PROMPTS, "gpu")
    assert is_new and store.jobs.get(job.id) == job == client.get(job.id)
    assert (job.queue, job.n_prompts, job.stream) == ("gpu", 2, stream_sha256(PROMPTS))
    kept = TuneRequest.from_json(job.request)
    assert (kept.model, kept.sampling, kept.settings) == (REQUEST.model, REQUEST.sampling, REQUEST.settings)


def test_identical_unfinished_job_is_the_same_job(client: swiftopt.Client, store: Store) -> None:
    job, _ = client.submit(REQUEST, PROMPTS)
    assert client.submit(REQUEST, PROMPTS) == (job, False)
    assert JobService(store, None).submit(REQUEST, PROMPTS)[0].id == job.id


def test_lists_verbs_events_and_outputs_are_the_databases(client: swiftopt.Client, store: Store) -> None:
    job, _ = client.submit(REQUEST, PROMPTS)
    assert client.act(job.id, "pause").state == "paused"
    assert client.latest("paused") == store.jobs.latest("paused") and client.latest("failed") == []
    client.act(job.id, "resume")
    claim = store.jobs.claim(Lease(job.id, store.jobs.get(job.id).attempt), "w1")
    assert claim is not None
    done = PromptFinished(PROMPTS[0], 0, COMPLETION)
    store.jobs.renew(claim.lease, [PhaseChanged("notes", "accumulate")])
    checkpoint(store, claim.lease, done)
    assert client.events(job.id) == store.jobs.events(job.id)
    assert client.events(job.id, after=2, limit=1) == store.jobs.events(job.id, 2, 1)
    assert [event.completion for event in client.outputs(job.id)] == [COMPLETION]
    assert [event.prompt.id for event in client.outputs(job.id)] == ["a"]


def test_outputs_may_hold_what_ends_a_line_elsewhere_than_in_json(client: swiftopt.Client, store: Store) -> None:
    job, _ = client.submit(REQUEST, PROMPTS)
    done = dataclasses.replace(COMPLETION, text="a\u2028b\x85c\x1cd\r\ne\0f")
    checkpoint(store, started(store, job.id), PromptFinished(PROMPTS[0], 0, done))
    assert [event.completion for event in client.outputs(job.id)] == [done]


@pytest.mark.parametrize("status", ["none", [404], {}, 404.5, None, 2**70])
def test_problem_with_a_status_of_another_form_is_told_all_the_same(status: Any) -> None:
    """As proxies and other servers send it."""
    error = http.error_of({"status": status, "detail": "the answer"})
    assert type(error) is swiftopt.SwiftoptError and str(error) == "the answer"
    assert type(http.error_of({"status": "404"})) is type(http.error_of({"status": 404})) is NotFound


def checkpoint(store: Store, lease: Lease, done: PromptFinished) -> None:
    store.jobs.checkpoint(lease, 1, [done], {})


def test_layer_sets_and_models_are_the_databases(client: swiftopt.Client, store: Store) -> None:
    store.remember_model(ModelInfo("f" * 64, "llama", 30, 135_000_000, ("smollm2-135m", "org/smol lm")))
    stored = store.add_layer_set(record())
    found = client.layer_set("org/smol lm", "notes", device="cpu", dtype="float32")
    expected = store.lookup("org/smol lm", "notes", "cpu", "float32")
    assert (found.version, found.alias, found.fallback) == (expected.version, "best", None)
    assert (found.plan.method, found.plan.verdict) == (expected.plan.method, expected.plan.verdict)
    assert found.plan.layer_set is not None and found.plan.layer_set.layer_set == stored.layer_set
    assert [listed.version for listed in client.layer_sets(task="notes")] == [1]
    assert client.layer_sets("other") == [] and client.models() == store.models()


def test_lookup_of_many_answers_each(client: swiftopt.Client, store: Store) -> None:
    store.add_layer_set(record())
    one, other = client.lookup([{"model": "smollm2-135m", "task": "notes"}, {"model": "gone", "task": "notes"}])
    assert not isinstance(one, swiftopt.SwiftoptError) and one.version == 1
    assert isinstance(other, LayerSetNotFound) and "gone" in str(other)


def test_server_that_decodes_nothing_has_no_tuning(client: swiftopt.Client) -> None:
    with pytest.raises(NotFound, match="swiftopt serve --model"):
        client.tuning()


def test_uploaded_stream_has_the_hash_of_its_prompts(client: swiftopt.Client) -> None:
    assert client.upload(PROMPTS) == stream_sha256(PROMPTS)


def test_follow_brings_every_event_once_and_ends_with_the_job(client: swiftopt.Client, store: Store) -> None:
    job, _ = client.submit(REQUEST, PROMPTS)
    updates = client.follow(job.id)
    assert isinstance(first := next(updates), JobEvent) and first.type == "state_changed"
    lease = started(store, job.id)
    store.jobs.renew(lease, progress={"type": "progress", "task": "notes", "tokens": 7})
    store.jobs.end(lease, "succeeded")
    rest = list(updates)
    assert [event.id for event in [first, *rest] if isinstance(event, JobEvent) and event.id] == [
        event.id for event in store.jobs.events(job.id)
    ]
    assert any(isinstance(event, JobEvent) and event.type == "progress" and event.id == 0 for event in rest)
    assert rest[-1] == store.jobs.get(job.id)


class Cut:
    """Lets the app answer, but cuts every event stream after a number of messages, and every other connection first."""

    def __init__(self, app: Any, after: int) -> None:
        self.app, self.after, self.n_streams = app, after, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope.get("path", "").endswith("/events"):
            await self.app(scope, receive, send)
            return
        self.n_streams += 1
        n_sent = 0

        async def counted(message: Any) -> None:
            nonlocal n_sent
            n_sent += 1
            if n_sent > self.after:
                raise ConnectionResetError("cut")
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except BaseException:  # a task group of the stream wraps it
            return


def test_follow_takes_a_broken_stream_up_where_it_broke(store: Store) -> None:
    job, _ = JobService(store, None).submit(REQUEST, PROMPTS)
    lease = started(store, job.id)
    for number in range(6):
        store.jobs.renew(lease, [PhaseChanged("notes", "accumulate", f"step {number}")])
    store.jobs.end(lease, "succeeded")
    app = Cut(create_app(store, JobService(store, None)), after=4)  # the head and three events
    with serving(app) as url, swiftopt.Client(url) as client:
        found = list(client.follow(job.id))
    numbers = [event.id for event in found if isinstance(event, JobEvent) and event.id]
    assert numbers == [event.id for event in store.jobs.events(job.id)] and app.n_streams > 1
    assert isinstance(found[-1], Job) and found[-1].state == "succeeded"


class Quiet:
    """Lets an event stream stand for some seconds and breaks it off; refuses the next one, as while it starts again."""

    def __init__(self, app: Any, seconds: float, at_end: Callable[[], Any]) -> None:
        self.app, self.seconds, self.at_end, self.n_streams = app, seconds, at_end, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope.get("path", "").endswith("/events"):
            await self.app(scope, receive, send)
            return
        self.n_streams += 1
        if self.n_streams == 1:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.app(scope, receive, send), self.seconds)
            self.at_end()
        elif self.n_streams == 2:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, send)


def test_follow_of_a_quiet_job_outlives_a_restart_of_the_server(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for an hour reports nothing: what counts is how long nobody answers."""
    monkeypatch.setattr(http, "AWAY_S", 1.5)
    job, _ = JobService(store, None).submit(REQUEST, PROMPTS)
    app = Quiet(create_app(store, JobService(store, None)), 2.5, lambda: store.jobs.act(job.id, "cancel"))
    with serving(app) as url, swiftopt.Client(url) as client:
        found = list(client.follow(job.id))
    assert app.n_streams == 3 and isinstance(found[-1], Job) and found[-1].state == "cancelled"


async def empty(scope: Any, receive: Any, send: Any) -> None:
    """A proxy that ends every stream of events at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b""})


def test_follow_gives_up_where_every_stream_ends_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_S", 0.5)
    with serving(empty) as url, swiftopt.Client(url) as client, pytest.raises(ServiceUnreachable):
        next(client.follow("0123456789ab"))


class Busy:
    """Refuses the first requests as a proxy does whose server is just starting."""

    def __init__(self, app: Any, n_refused: int) -> None:
        self.app, self.n_refused = app, n_refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self.n_refused > 0:
            self.n_refused -= 1
            headers = [(b"content-type", b"text/html")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b"<h1>busy</h1>"})
            return
        await self.app(scope, receive, send)


def test_request_is_sent_again_while_the_server_starts(store: Store) -> None:
    app = Busy(create_app(store, JobService(store, None)), 2)
    with serving(app) as url, swiftopt.Client(url) as client:
        job, is_new = client.submit(REQUEST, PROMPTS)
    assert is_new and [found.id for found in store.jobs.latest()] == [job.id]


def test_retry_is_not_sent_twice(store: Store) -> None:
    job, _ = JobService(store, None).submit(REQUEST, PROMPTS)
    store.jobs.act(job.id, "cancel")
    app = Busy(create_app(store, JobService(store, None)), 1)
    with serving(app) as url, swiftopt.Client(url) as client, pytest.raises(ServiceUnreachable):
        client.act(job.id, "retry")
    assert store.jobs.get(job.id).state == "cancelled"


def test_errors_are_those_of_the_database(client: swiftopt.Client, store: Store) -> None:
    job, _ = client.submit(REQUEST, PROMPTS, idempotency_key="k")
    with pytest.raises(NotFound, match="no job 'nothing'"):
        client.get("nothing")
    with pytest.raises(NotFound):
        next(client.follow("nothing"))
    with pytest.raises(Conflict, match="cannot be retried"):
        client.act(job.id, "retry")
    with pytest.raises(Conflict, match="idempotency key"):
        client.submit(REQUEST, PROMPTS[:1], idempotency_key="k")
    with pytest.raises(LayerSetNotFound, match="tune"):
        client.layer_set("smollm2-135m", "nothing")
    with pytest.raises(InvalidInput):
        client.submit(REQUEST, PROMPTS, queue="no queue!")


def test_server_that_is_away_is_one_sentence_without_the_password() -> None:
    with swiftopt.Client("http://me:hidden@127.0.0.1:9", timeout=2) as client:
        with pytest.raises(ServiceUnreachable, match="does not answer") as caught:
            client.latest()
        assert "hidden" not in f"{caught.value}{client!r}" and "swiftopt serve" in str(caught.value)


def test_another_server_is_told_from_ours(tmp_path: Path) -> None:
    async def stranger(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status = 404 if "jobs" in scope["path"] else 200
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/html")]})
            await send({"type": "http.response.body", "body": b"<h1>hello</h1>"})

    with serving(stranger) as url, swiftopt.Client(url) as client:
        with pytest.raises(ServiceUnreachable, match="not a swiftopt server"):
            client.latest()
        with pytest.raises(ServiceUnreachable, match="not a swiftopt server"):
            client.models()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://ho st", "http://host:port"])
def test_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="not a URL"):
        swiftopt.Client(url)


def test_client_without_a_url_takes_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_SERVER_URL", "http://127.0.0.1:9/")
    with swiftopt.Client() as client:
        assert client.url == "http://127.0.0.1:9"
    monkeypatch.delenv("SWIFTOPT_SERVER_URL")
    with pytest.raises(SettingsError, match="SWIFTOPT_SERVER_URL"):
        swiftopt.Client()


def test_key_is_sent_and_never_shown(store: Store) -> None:
    heard: list[bytes] = []

    async def door(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            heard.append(dict(scope["headers"]).get(b"authorization", b""))
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with serving(door) as url:
        for key, words in (("secret-key", "rejects the API key"), (None, "needs an API key")):
            with swiftopt.Client(url, key) as client, pytest.raises(ServiceUnreachable, match=words) as caught:
                client.latest()
            assert "secret-key" not in str(caught.value) and url in str(caught.value)
    assert heard == [b"Bearer secret-key", b""]
    with pytest.raises(SettingsError, match="API key") as refused:
        swiftopt.Client(url, "sécret\nkey")
    assert "cret" not in str(refused.value)


def test_progress_of_a_followed_job_is_an_event_again(client: swiftopt.Client, store: Store) -> None:

    figures = Progress("notes", "optimise", 9, 3.5, 0.5, 0.6, 4, None, None, 0.45)
    job, _ = client.submit(REQUEST, PROMPTS)
    lease = started(store, job.id)
    store.jobs.renew(lease, progress={"type": "progress", **figures.to_json()})
    store.jobs.end(lease, "succeeded")
    shown = [event for event in client.follow(job.id) if isinstance(event, JobEvent) and event.type == "progress"]
    assert [event.event for event in shown] == [figures]


def test_noop_job_without_a_model_can_be_read(client: swiftopt.Client, store: Store) -> None:
    job, _ = store.jobs.submit(JobSpec("noop", "default", {"seconds": 0.0}))
    assert client.get(job.id) == job
