"""Workers as real processes with real servers: kills, signals, outages and restarts."""

from __future__ import annotations

import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
import yaml
from api import Served, serving, until_ready
from job_table import edit
from servers import Postgres, Valkey, flush, server_folder
from sqlalchemy import create_engine
from tiny_files import save
from workers import Site, WorkerProcess, gone, site, until

import swiftopt
from swiftopt.core.requests import JobSpec, TuneRequest
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt
from swiftopt.store import as_url

LEASE_S = 4.0
CLI = [sys.executable, "-m", "swiftopt", "worker"]
on_each_database = pytest.mark.parametrize(
    "database_url", ["postgresql", pytest.param("sqlite", marks=pytest.mark.families)], indirect=True
)


@pytest.fixture
def here(tmp_path: Path, redis_url: str) -> Iterator[Site]:
    """Return a site on SQLite."""
    with site(str(tmp_path / "jobs.db"), redis_url, tmp_path, LEASE_S, is_quick=True) as found:
        yield found


@pytest.fixture
def anywhere(tmp_path: Path, redis_url: str, database_url: str) -> Iterator[Site]:
    """Return a site on each kind of database."""
    with site(database_url, redis_url, tmp_path, LEASE_S, is_quick=True) as found:
        yield found


@pytest.fixture
def own_valkey() -> Iterator[Valkey]:
    """Start a Valkey that the test may stop."""
    with server_folder() as folder, Valkey(folder) as server:
        yield server


def n_runs(found: Site, job: str) -> int:
    return [state for state, _ in found.states(job)].count("running")


@on_each_database
def test_burst_ends_when_the_queue_is_empty_and_the_parent_never_imports_torch(anywhere: Site) -> None:
    jobs = [anywhere.noop(0, n) for n in range(5)]
    assert anywhere.start(burst=True).process.wait(30) == 0, anywhere.logs()
    assert [anywhere.states(job) for job in jobs] == [[("queued", 1), ("running", 1), ("succeeded", 1)]] * 5
    assert anywhere.queue.depth() == 0
    with redis.Redis.from_url(anywhere.redis) as client:
        assert not client.keys("rq:job:*"), "rq keeps no record of attempts that are over"


def test_workers_are_scaled_by_waiting_and_running_jobs(here: Site) -> None:
    """KEDA counts the entries of a list and a sorted set, whose keys its triggers name."""
    scaled = yaml.safe_load((Path(swiftopt.__file__).parent / "deploy/kubernetes/scaled/worker.yaml").read_text())
    keys = {trigger["name"]: trigger["metadata"]["listName"] for trigger in scaled["spec"]["triggers"]}
    jobs = [here.noop(60, n) for n in range(3)]
    worker = here.start()
    here.running(jobs[0])
    with redis.Redis.from_url(here.redis) as client:
        assert (client.llen(keys["waiting"]), client.zcard(keys["running"])) == (2, 1)
        assert worker.end() == 0
        assert (client.llen(keys["waiting"]), client.zcard(keys["running"])) == (3, 0)


def states_logged(worker: WorkerProcess, job: str) -> list[tuple[str, str, str]]:
    """Return attempt, state and class of the error from each line of the job in the worker's log."""
    lines = re.findall(rf"job={job} attempt=(\d+) state=(\w+)(.*)", worker.text())
    errors = (re.search(r"error=(\w+) reason=.+", more) for _, _, more in lines)
    return [(attempt, state, e[1] if e else "") for (attempt, state, _), e in zip(lines, errors, strict=True)]


def test_log_has_state_and_reason_of_every_attempt(here: Site) -> None:
    worker = here.start()
    done = here.noop(0.01)
    here.ended(done)
    wrong = here.service.submit_spec(JobSpec("noop", "default", {"seconds": "long"}))[0].id
    here.ended(wrong)
    paused, cancelled, killed = (here.noop(60, n) for n in range(3))
    here.running(paused)
    here.service.act(paused, "pause")
    here.running(cancelled)
    here.service.act(cancelled, "cancel")
    here.running(killed)
    worker.child().kill()
    until(lambda: here.job(killed).attempt == 2, 20)
    begun = ("1", "running", "")
    wanted = {
        done: [begun, ("1", "succeeded", "")],
        wrong: [begun, ("1", "failed", "SettingsError")],
        paused: [begun, ("1", "paused", "")],
        cancelled: [begun, ("1", "cancelled", "")],
        killed: [begun, ("1", "queued", "ChildDied")],
    }
    until(lambda: all(states_logged(worker, job)[: len(lines)] == lines for job, lines in wanted.items()), 10)
    assert 'reason="seconds of a no-op job is ' in worker.text()


@pytest.mark.slow
@on_each_database
def test_child_of_a_killed_worker_ends_and_its_job_runs_elsewhere(anywhere: Site) -> None:
    anywhere.reconcile()
    job = anywhere.noop(60)
    first = anywhere.start()
    anywhere.running(job)
    child = first.child()
    other = anywhere.start()
    first.kill()
    until(lambda: gone(child), 2)
    again = anywhere.running(job, attempt=2)
    assert again.worker is not None and str(other.pid) in again.worker
    assert "is overdue" in anywhere.reasons(job)


@on_each_database
def test_sigterm_returns_the_job_and_ends_the_worker(anywhere: Site) -> None:
    job = anywhere.noop(60)
    worker = anywhere.start()
    anywhere.running(job)
    child = worker.child()
    assert worker.end(within_s=6) == 0, anywhere.logs()
    assert gone(child)
    assert (anywhere.job(job).state, anywhere.job(job).attempt, anywhere.job(job).worker) == ("queued", 2, None)
    assert anywhere.queue.waiting("default") == {f"{job}-a2"}, "the next worker need not wait for the reconciler"


def test_second_sigterm_ends_a_worker_whose_child_does_not_answer(here: Site) -> None:
    job = here.noop(60)
    worker = here.start()
    here.running(job)
    child = worker.child()
    child.suspend()
    worker.signal(signal.SIGTERM)
    time.sleep(1.2)  # a signal that comes sooner is taken for the same one
    assert worker.process.poll() is None
    assert worker.end(within_s=5) == 0, here.logs()
    assert gone(child)


def test_idle_worker_ends_on_sigterm_even_without_redis(tmp_path: Path, own_valkey: Valkey) -> None:
    with site(str(tmp_path / "jobs.db"), own_valkey.url, tmp_path, is_quick=True) as found:
        workers = [found.start(), found.start()]
        found.ended(found.noop(0))
        found.until(lambda: len(found.queue.workers()) == 2, 20)
        assert workers[0].end() == 0, found.logs()
        own_valkey.stop()
        time.sleep(1.5)
        assert workers[1].end() == 0, found.logs()


@pytest.mark.slow
@on_each_database
def test_child_with_an_expired_lease_is_replaced_and_writes_nothing(anywhere: Site) -> None:
    anywhere.reconcile()
    job = anywhere.noop(3)  # its time is over when it wakes: it would report its success
    first = anywhere.start()
    anywhere.running(job)
    child = first.child()
    child.suspend()
    anywhere.start()
    anywhere.running(job, attempt=2)
    child.resume()
    until(lambda: gone(child), 5)
    assert anywhere.ended(job).state == "succeeded"
    assert anywhere.states(job) == [("queued", 1), ("running", 1), ("queued", 2), ("running", 2), ("succeeded", 2)]


@pytest.mark.slow
@on_each_database
def test_job_whose_child_is_killed_runs_again_and_fails_after_three_times_without_progress(anywhere: Site) -> None:
    anywhere.reconcile()
    job = anywhere.noop(60)
    worker = anywhere.start()
    for attempt in (1, 2, 3):
        anywhere.running(job, attempt)
        worker.child().kill()
    ended = anywhere.ended(job)
    assert ended.state == "failed" and ended.error is not None
    assert "killed by signal 9 (SIGKILL), probably out of memory" in ended.error
    assert "3 attempts in a row made no progress" in ended.error
    assert anywhere.reasons(job).count("probably out of memory") == 3
    assert anywhere.ended(anywhere.noop(0, 1)).state == "succeeded", "the worker itself is well"


def tuning(found: Site, model: Path, n_prompts: int, max_new_tokens: int = 8) -> str:
    """Return a tuning job; jobs with the same number of prompts are equal."""
    settings = SwiftSettings(optimise=False)
    prompts = [Prompt(f"p{n}", "notes", text=f"w{n} w3 w5") for n in range(n_prompts)]
    request = TuneRequest(str(model), "notes.jsonl", settings=settings, max_new_tokens=max_new_tokens)
    return found.service.submit(request, prompts)[0].id


def processes_of(worker: WorkerProcess, jobs: list[str]) -> list[str]:
    """Return the process that started each job's last attempt, from the worker's log."""
    lines = [line.split() for line in worker.text().splitlines() if "state=running" in line]
    return [next(words[2] for words in reversed(lines) if f"job={job}" in words) for job in jobs]


@pytest.mark.slow
def test_jobs_of_one_model_share_a_child(here: Site, tmp_path: Path) -> None:
    """The next job of another model gets another child."""
    here.reconcile()
    one, other = save(tmp_path / "one"), save(tmp_path / "other")
    jobs = [tuning(here, one, 1), tuning(here, one, 2), tuning(here, other, 1)]
    worker = here.start()
    assert [here.ended(job, 60).state for job in jobs] == ["succeeded"] * 3
    first, second, third = processes_of(worker, jobs)
    assert first == second != third
    loads = [sum(event.data.get("phase") == "load" for event in here.store.jobs.events(job)) for job in jobs]
    assert loads[1] < loads[0]


@pytest.mark.slow
def test_child_killed_in_its_second_job_loses_only_that_job(here: Site, tmp_path: Path) -> None:
    here.reconcile()
    model = save(tmp_path / "one")
    jobs = [tuning(here, model, 1), tuning(here, model, 40, 200)]
    worker = here.start()
    here.running(jobs[1], within_s=60)
    worker.child().kill()
    here.running(jobs[1], attempt=2, within_s=60)
    assert "probably out of memory" in here.reasons(jobs[1])
    assert here.job(jobs[0]).state == "succeeded" and n_runs(here, jobs[0]) == 1


@contextmanager
def engine(here: Site, model: Path) -> Iterator[Served]:
    """Start a server of the model on the site's database, without Redis."""
    options = ("--model", f"tiny={model}", "--threads", "1")
    with serving(here.database, here.folder / "server.log", *options) as served:
        until_ready(served)
        yield served


@pytest.mark.slow
def test_jobs_of_a_served_model_run_in_its_engine(here: Site, tmp_path: Path) -> None:
    """Requests are still answered; jobs of other models go to the worker."""
    here.reconcile()
    one, other = save(tmp_path / "one"), save(tmp_path / "other")
    body = {"model": "tiny", "prompt": "w3 w5 w7", "max_tokens": 24, "temperature": 0}
    with engine(here, one) as served:
        before = served.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        worker = here.start()
        jobs = [tuning(here, one, 16, 60), tuning(here, other, 1)]
        here.running(jobs[0])
        meanwhile = [served.client.post("/v1/completions", json=body).json() for _ in range(2)]
        assert not here.job(jobs[0]).is_finished
        meanwhile += [served.client.post("/v1/completions", json=body).json() for _ in range(6)]
        assert [done["choices"][0]["text"] for done in meanwhile] == [before] * 8
        assert [here.ended(job, 60).state for job in jobs] == ["succeeded"] * 2
        assert "-engine" in here.reasons(jobs[0]) and "-engine" not in here.reasons(jobs[1])
        assert f"job={jobs[0]} attempt=1 state=running" not in worker.text()
        assert here.job(jobs[0]).n_outputs == 16 and here.job(jobs[0]).attempt == 1
        assert worker.end() == 0, here.logs()


@pytest.mark.slow
def test_job_of_a_served_model_outlives_its_engines(here: Site, tmp_path: Path) -> None:
    """After a kill it continues in the next engine; then a worker of that machine takes it."""
    here.reconcile()
    one = save(tmp_path / "one")
    with engine(here, one) as served:
        job = tuning(here, one, 40, 100)
        first = here.running(job)
        here.until(lambda: here.job(job).n_outputs > 1, 60)
        children = psutil.Process(served.process.pid).children()
        next(child for child in children if "swiftopt.worker.serving" in child.cmdline()).kill()
        rows = create_engine(as_url(here.database))
        edit(rows, "jobs", "lease_until = 1 WHERE state = 'running'")  # as time would
        edit(rows, "locks", "until = 1 WHERE owner = :owner", owner=first.worker)
        second = here.running(job, attempt=2, within_s=90)
        assert "-engine" in str(first.worker) and "-engine" in str(second.worker) and first.worker != second.worker
        here.until(lambda: here.job(job).n_outputs > second.n_outputs, 60)
    left = here.job(job)
    assert left.state == "queued" and second.n_outputs < left.n_outputs < 40, "the server's end hands it back"
    here.start()
    last = here.running(job, attempt=3)
    assert last.worker is not None and "-engine" not in last.worker
    assert here.ended(job, 120).state == "succeeded" and here.job(job).n_outputs == 40


def test_flushed_redis_loses_no_job(here: Site) -> None:
    jobs = [here.noop(1, n) for n in range(2)]
    here.start()
    here.running(jobs[0])
    flush(here.redis)
    assert [here.ended(job).state for job in jobs] == ["succeeded"] * 2
    assert [n_runs(here, job) for job in jobs] == [1, 1]


def test_child_killed_after_a_flush_is_still_reported(here: Site) -> None:
    job = here.noop(60)
    worker = here.start()
    here.running(job)
    flush(here.redis)
    worker.child().kill()
    here.until(lambda: "killed by signal 9" in here.reasons(job), 3)


def test_redis_restarted_empty_loses_no_job(tmp_path: Path, own_valkey: Valkey) -> None:
    with site(str(tmp_path / "jobs.db"), own_valkey.url, tmp_path, is_quick=True) as found:
        jobs = [found.noop(2.5, 0), found.noop(0, 1)]
        found.start()
        found.running(jobs[0])
        own_valkey.kill()
        shutil.rmtree(own_valkey.folder / "appendonlydir")
        jobs.append(found.noop(0, 2))  # no error: it waits in the database
        time.sleep(1)
        own_valkey.start()
        assert [found.ended(job).state for job in jobs] == ["succeeded"] * 3
        assert [n_runs(found, job) for job in jobs] == [1, 1, 1]


def test_worker_continues_after_a_restart_of_a_persistent_redis(tmp_path: Path, own_valkey: Valkey) -> None:
    with site(str(tmp_path / "jobs.db"), own_valkey.url, tmp_path, is_quick=True) as found:
        found.start()
        found.ended(found.noop(0, 0))
        own_valkey.stop()
        time.sleep(3)
        own_valkey.start()
        assert found.ended(found.noop(0, 1)).state == "succeeded"


def test_attempts_that_redis_evicted_are_delivered_again(here: Site) -> None:
    jobs = [here.noop(0, n) for n in range(3)]
    with redis.Redis.from_url(here.redis) as client:
        assert client.delete(*client.keys("rq:job:*")) == 3
    here.start()
    assert [here.ended(job).state for job in jobs] == ["succeeded"] * 3


def test_attempt_that_died_between_queue_and_claim_is_delivered_again(here: Site) -> None:
    job = here.noop(0)
    with redis.Redis.from_url(here.redis) as client:
        assert client.lpop("rq:queue:default") == f"{job}-a1".encode()  # a worker takes it and is killed
    here.start()
    assert here.ended(job, within_s=30).state == "succeeded"
    assert here.job(job).attempt == 2


def test_job_succeeds_after_an_outage_of_the_database(
    tmp_path: Path, redis_url: str, postgres_url: str, postgres_server: Postgres
) -> None:
    with site(postgres_url, redis_url, tmp_path, is_quick=True) as found:
        jobs = [found.noop(2, 0), found.noop(0, 1)]
        found.start()
        found.running(jobs[0])
        postgres_server.stop()
        time.sleep(3)
        postgres_server.start()
        assert [found.ended(job).state for job in jobs] == ["succeeded"] * 2, found.logs()
        assert found.states(jobs[0]) == [("queued", 1), ("running", 1), ("succeeded", 1)]


@on_each_database
def test_cancel_ends_the_job_at_once_and_its_child_soon(anywhere: Site) -> None:
    queued, running, next_one = anywhere.noop(60, 0), anywhere.noop(60, 1), anywhere.noop(0, 2)
    assert anywhere.service.act(queued, "cancel").state == "cancelled"
    worker = anywhere.start()
    anywhere.running(running)
    child = worker.child()
    assert anywhere.service.act(running, "cancel").state == "cancelled"
    until(lambda: gone(child), 2)
    assert anywhere.ended(next_one).state == "succeeded"
    assert (n_runs(anywhere, queued), anywhere.job(running).state) == (0, "cancelled")


@on_each_database
def test_job_is_paused_resumed_and_stopped(anywhere: Site) -> None:
    job = anywhere.noop(60)
    anywhere.start()
    anywhere.running(job)
    anywhere.service.act(job, "pause")
    anywhere.until(lambda: anywhere.job(job).state == "paused", 5)
    anywhere.service.act(job, "resume")
    anywhere.running(job, attempt=2)
    anywhere.service.act(job, "stop")
    assert anywhere.ended(job, within_s=5).state == "succeeded"


class Bomb:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_junk_in_redis_is_ignored_and_no_pickle_is_loaded(here: Site, tmp_path: Path) -> None:
    first, last = here.noop(0, 0), here.noop(0, 1)
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    with redis.Redis.from_url(here.redis) as client:
        client.hset("rq:job:junk-a1", mapping={"data": bomb, "created_at": "2026-01-01T00:00:00.000000Z"})
        client.hset(f"rq:job:{first}-a1", mapping={"data": bomb})
        client.lpush("rq:queue:default", b"\xff\xfe", "unknown", f"{first}-a7", "junk-a1", f"{first}-a1", "-a", "a1-ax")
        client.set("rq:job:string-a1", "no hash")
        client.lpush("rq:queue:default", "string-a1")
    here.start()
    assert [here.ended(job).state for job in (first, last)] == ["succeeded"] * 2
    assert [n_runs(here, job) for job in (first, last)] == [1, 1]
    assert not (tmp_path / "exploded").exists()


def test_noop_job_with_a_bad_request_fails_with_the_reason_at_once(here: Site) -> None:
    job, _ = here.service.submit_spec(JobSpec("noop", "default", {"seconds": "long"}))
    here.start(burst=True).process.wait(30)
    assert here.job(job.id).state == "failed" and "'long'" in str(here.job(job.id).error)


def test_check_reports_whether_a_worker_of_this_machine_is_alive(here: Site) -> None:
    servers = ["--redis", here.redis, "--db", here.database, "--name", "w"]
    before = here.run([*CLI, "--check", *servers])
    assert before.process.wait(30) == 1 and "start one with `swiftopt worker`" in before.text()
    first = here.run([*CLI, *servers])
    here.until(here.queue.workers, 20)
    first.kill()
    here.run([*CLI, *servers])  # its name is still taken in Redis, by a worker that died
    assert here.ended(here.noop(0)).state == "succeeded"
    assert here.run([*CLI, "--check", *servers]).process.wait(30) == 0, here.logs()
