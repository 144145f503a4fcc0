"""What an operator of the service gets wrong: one sentence at the start, no traceback in a log, no job spoilt."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisAway
from rq import Queue
from rq.worker import Worker as RqWorker
from sqlalchemy import create_engine, text

from swiftopt.cli.main import run, warn_misspelt
from swiftopt.cli.services import OneLineErrors
from swiftopt.core.errors import ModelNotFound
from swiftopt.core.requests import Job, JobSpec, TuneRequest
from swiftopt.core.streams import stream_lines, stream_sha256
from swiftopt.core.types import Prompt
from swiftopt.store import Store
from swiftopt.worker.queue import JobService, RedisQueue

PROMPTS = [Prompt("a", "notes", text="w1 w2")]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, redis_url: str, unconfigured: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own; the environment names an empty database and an empty Redis."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.setenv("SWIFTOPT_REDIS_URL", redis_url)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def job(home: Path, redis_url: str) -> Job:
    """One that waits for a worker."""
    request, lines = TuneRequest("/no/such/model", "notes.jsonl"), stream_lines(PROMPTS)
    spec = JobSpec("tune", "default", request.to_json(), stream_sha256(PROMPTS), lines, n_prompts=1)
    queue = RedisQueue(redis_url)
    with Store.open() as store:
        submitted, _ = JobService(store, queue).submit_spec(spec)
    queue.close()
    return submitted


def edit(change: str) -> None:
    """Change the database by hand."""
    engine = create_engine(f"sqlite:///{os.environ['SWIFTOPT_DATABASE_URL']}")
    with engine.begin() as connection:
        connection.execute(text(change))
    engine.dispose()


def refused(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """The one sentence on stderr."""
    assert run(args) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(("device", "why"), [("cuda:4095", "cannot run on this machine"), ("gpu", "is unknown: use")])
def test_worker_without_its_device_takes_no_job(
    job: Job, capsys: pytest.CaptureFixture[str], device: str, why: str
) -> None:
    assert why in refused(capsys, 2, "worker", "--device", device, "--burst")
    with Store.open() as store:
        assert store.jobs.get(job.id) == job


@pytest.mark.parametrize(
    ("variable", "value", "code", "why"),
    [
        ("SWIFTOPT_REDIS_URL", "redis://127.0.0.1:1", 6, "127.0.0.1:1 cannot be used (connection refused): start"),
        (
            "SWIFTOPT_REDIS_URL",
            "unix:///no/where",
            6,
            "no/where cannot be used (no such file or directory): start",
        ),
        ("SWIFTOPT_REDIS_URL", "http://127.0.0.1:1", 2, "http://127.0.0.1:1 is not a Redis URL"),
        ("SWIFTOPT_DATABASE_URL", "/proc/none/home.db", 1, "the folder /proc/none of the database"),
    ],
)
def test_worker_says_that_it_listens_only_when_it_can(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, code: int, why: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert why in refused(capsys, code, "worker", "--burst")


def register(url: str, pid: int, hostname: str | None = None) -> RedisQueue:
    """Let Redis hold a worker called w1, as another process would have."""
    queue = RedisQueue(url)
    other = RqWorker([Queue("default", connection=queue.connection)], name="w1", connection=queue.connection)
    other.pid, other.hostname = pid, hostname or other.hostname
    other.register_birth()
    return queue


def test_worker_with_the_name_of_another_one_here_does_not_start(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register(redis_url, os.getppid()).close()
    assert f"process {os.getppid()}" in refused(capsys, 2, "worker", "--name", "w1", "--burst")


def test_worker_takes_the_name_of_one_that_died(redis_url: str) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    queue = register(redis_url, dead.pid)
    done = subprocess.run(worker("--name", "w1"), capture_output=True, text=True, timeout=60)
    queue.close()
    assert done.returncode == 0 and "w1 listens" in done.stderr


def test_worker_with_the_name_of_one_elsewhere_says_so(redis_url: str) -> None:
    queue = register(redis_url, 1, hostname="elsewhere")
    done = subprocess.run(worker("--name", "w1"), capture_output=True, text=True, timeout=60)
    queue.close()
    assert done.returncode == 0 and "note: a worker named w1 is registered on elsewhere" in done.stderr


def worker(*options: str) -> list[str]:
    return [sys.executable, "-m", "swiftopt", "worker", "--burst", *options]


def test_job_fails_at_once_and_costs_the_log_one_line_when_its_model_is_not_there(job: Job) -> None:
    done = subprocess.run(worker(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "alembic" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "/no/such/model" in line]
    assert f"job={job.id} attempt=1 state=failed error=ModelNotFound reason='there is no folder" in line
    with Store.open() as store:
        failed = store.jobs.get(job.id)
    assert (failed.state, failed.attempt) == ("failed", 1) and "there is no folder" in str(failed.error)


def record_of(logger: str, error: Exception) -> logging.LogRecord:
    """What the worker's log makes of an error."""
    trace = (type(error), error, None)
    found = logging.LogRecord(logger, logging.ERROR, __file__, 1, "attempt=%s", ("failed",), trace)
    assert OneLineErrors().filter(found)
    return found


def test_log_tells_foreseen_errors_in_a_line_and_keeps_the_trace_of_others() -> None:
    known = record_of("swiftopt.worker.attempt", ModelNotFound("no model\nof that name"))
    assert known.exc_info is None and known.getMessage() == "attempt=failed reason='no model'"
    away = record_of("rq.worker", RedisAway("refused"))
    assert (away.levelname, away.exc_info, away.getMessage()) == ("WARNING", None, "redis=away reason='refused'")
    ours = record_of("swiftopt.worker.attempt", ZeroDivisionError("division by zero"))
    assert ours.exc_info is not None and ours.getMessage() == "attempt=failed"


def test_check_of_a_worker_does_not_advise_to_upgrade_a_newer_database(capsys: pytest.CaptureFixture[str]) -> None:
    Store.open().close()
    edit("UPDATE swiftopt_alembic_version SET version_num = '9999_newer'")
    assert run(["worker", "--check", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert "by a newer swiftopt (its schema is 9999_newer" in problems[0] and "db upgrade" not in problems[0]


def test_job_with_a_time_that_is_none_can_be_shown(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    edit("UPDATE swiftopt_jobs SET started_at = 'noon', finished_at = 'tea'")
    assert run(["jobs", "show", job.id]) == 0
    assert "noon" in capsys.readouterr().out


def test_variable_that_is_nearly_one_of_ours_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTOPT_REDISURL", "redis://127.0.0.1:1")
    assert run(["jobs", "list"]) == 0
    assert "SWIFTOPT_REDISURL is unknown and ignored: did you mean SWIFTOPT_REDIS_URL?" in capsys.readouterr().err


def test_variables_of_ours_and_of_others_are_not_misspelt() -> None:
    ours = ("DATABASE_URL", "DB", "REDIS_URL", "API_KEY", "API_KEYS_FILE", "CACHE_DIR", "STREAM_FOLDERS", "TOP_P")
    ours += ("MODEL_FOLDERS",)
    others = ("KEYS_DIR", "STREAMS_DIR", "SECRETS_DIR", "PORT", "VERSION", "VALKEY_MEMORY", "TEST_REDIS_URL")
    assert not list(warn_misspelt([f"SWIFTOPT_{name}" for name in (*ours, *others)] + ["HOME", "SWIFTOPT"]))
