"""Laws of what is said of jobs that wait or have failed: it is derived from who can take them, and true."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from api import client_of, problem, token
from job_table import finished, running
from rq.worker import Worker as RqWorker
from starlette.testclient import TestClient
from tiny_files import save

from swiftopt.core.errors import Conflict
from swiftopt.core.events import PromptStarted
from swiftopt.core.requests import Job, Lease, ServedModel, TuneRequest
from swiftopt.core.settings import TuningSettings
from swiftopt.core.types import Prompt
from swiftopt.store import Store
from swiftopt.tasks.job import tune_spec
from swiftopt.worker.engine_locks import as_request, engine_lock
from swiftopt.worker.queue import JobService, RedisQueue

PROMPTS = [Prompt("1", "notes", "w3 w4 w5")]
NO_REDIS = "no Redis is configured to bring jobs to workers, and no served model takes this job"


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


@pytest.fixture
def job(store: Store, model: Path) -> Job:
    """One that waits in the default queue."""
    return JobService(store, None).submit(TuneRequest(str(model), "notes.jsonl"), PROMPTS)[0]


def local(store: Store, request: TuneRequest, why: str = "killed") -> Job:
    """A run of `tune` in its own process, which has failed."""
    claim = store.jobs.begin_here(tune_spec(request, PROMPTS, None), "here-1")
    store.jobs.end(claim.lease, "failed", why)
    return store.jobs.get(claim.job.id)


def notes(store: Store, client: TestClient, job: Job) -> tuple[str | None, bool]:
    """What the API says keeps a job from running, and whether the job's page says something of the kind."""
    said: str | None = client.get(f"/v1/jobs/{job.id}").json()["obstacle"]
    page = client.get(f"/jobs/{job.id}").text
    assert (said is None) or said.partition("'")[0] in page
    return said, "Redis" in page or "no worker" in page


def test_nothing_is_said_to_keep_a_job_when_the_engine_of_its_model_takes_it(store: Store, job: Job) -> None:
    client = client_of(store)
    said, on_page = notes(store, client, job)
    assert said is not None and said.startswith(NO_REDIS) and on_page
    lock = engine_lock(as_request(ServedModel("tiny", job.model)))
    assert store.jobs.lock(lock, "w-engine", 30.0)
    assert notes(store, client, job) == (None, False)
    assert "waits for a worker" in client.get(f"/jobs/{job.id}").text
    assert store.jobs.lock(lock, "w-engine", -1.0)  # the engine has ended
    assert notes(store, client, job)[0] == said


@pytest.mark.parametrize(
    ("served", "takes"),
    [({}, True), ({"device": "cuda:1"}, True), ({"dtype": "float32"}, False), ({"speed": "eager"}, False)],
)
def test_engine_is_said_to_take_a_job_when_it_runs_the_model_likewise(
    store: Store, job: Job, served: dict[str, str], takes: bool
) -> None:
    own = ServedModel("tiny", job.model, **served)  # type: ignore[arg-type]
    store.jobs.lock(engine_lock(as_request(own)), "w-engine", 30.0)
    assert (JobService(store, None).obstacle(job) is None) == takes
    store.jobs.lock(engine_lock(as_request(own)), "w-engine", -1.0)
    assert (JobService(store, None, [own]).obstacle(job) is None) == takes, "also while it loads"
    assert JobService(store, None, [replace(own, tune=False)]).obstacle(job) is not None


def test_engine_takes_no_job_of_another_device_or_queue(store: Store, model: Path) -> None:
    store.jobs.lock(engine_lock(as_request(ServedModel("tiny", str(model)))), "w-engine", 30.0)
    service = JobService(store, None)
    for change, queue in (({"device": "cpu"}, "default"), ({}, "large")):
        submitted, _ = service.submit(replace(TuneRequest(str(model), "s"), **change), PROMPTS, queue)  # type: ignore[arg-type]
        assert str(service.obstacle(submitted)).startswith(NO_REDIS)


def test_queue_without_a_worker_is_named_with_the_command_that_serves_it(
    store: Store, model: Path, redis_url: str
) -> None:
    with closing(RedisQueue(redis_url)) as queue:
        service = JobService(store, queue)
        job, _ = service.submit(TuneRequest(str(model), "s"), PROMPTS, "large")
        wanted = "no worker listens on queue 'large': start one with `swiftopt worker --queue large`"
        assert service.obstacle(job) == wanted
        worker = RqWorker(["large"], connection=queue.connection, name="w1", serializer="json")
        worker.register_birth()
        assert service.obstacle(job) is None
        worker.register_death()


def test_job_is_not_offered_again_when_another_attempt_would_fail_alike(store: Store, model: Path) -> None:
    settings = TuningSettings(context_window=200)
    job = local(store, TuneRequest(str(model), "s", settings=settings), "as it was submitted before this was checked")
    client = client_of(store)
    page = client.get(f"/jobs/{job.id}").text
    assert "leaves nothing to decode" in page and ">Retry<" not in page
    said = problem(client.post(f"/v1/jobs/{job.id}/retry"), 409, "conflict")
    assert said.startswith(f"job {job.id} cannot be retried: max_new_tokens 128 leaves nothing to decode")
    with pytest.raises(Conflict, match="cannot be retried"):
        JobService(store, None).act(job.id, "retry")
    assert store.jobs.get(job.id).state == "failed"


def test_local_job_is_offered_again_when_somebody_can_take_it(store: Store, model: Path) -> None:
    job, client = local(store, TuneRequest(str(model), "s")), client_of(store)
    page = client.get(f"/jobs/{job.id}").text
    assert ">Retry<" not in page and f"It cannot be retried: {NO_REDIS}" in page
    store.jobs.lock(engine_lock(as_request(ServedModel("tiny", str(model)))), "w-engine", 30.0)
    page = client.get(f"/jobs/{job.id}").text
    assert ">Retry<" in page
    client.post(f"/jobs/{job.id}/retry", data={"token": token(page)})
    assert store.jobs.get(job.id).state == "queued" and notes(store, client, job) == (None, False)


def test_events_have_one_line_a_prompt_and_the_beginning_of_those_that_run(store: Store) -> None:
    lease: Lease = running(store.jobs)
    begun = [PromptStarted("t", name, place, 32) for place, name in enumerate(("p", "q"))]
    store.jobs.checkpoint(lease, 1, [begun[0], finished(0), begun[1]], None)
    page = client_of(store).get(f"/jobs/{lease.job}").text
    assert page.count("prompt 1") == 1 and page.count("prompt 2 of 32 (q) begins") == 1
