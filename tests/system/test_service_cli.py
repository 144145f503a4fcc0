"""The queue from the command line: submit, work, follow, detach.

Workers and who follows them are processes of their own; what other commands print, those that the script calls do here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_files import save

from swiftopt.cli.main import run
from swiftopt.core.requests import JobSpec
from swiftopt.store import Store
from swiftopt.worker.queue import JobService, RedisQueue

SCRIPT = shutil.which("swiftopt", path=str(Path(sys.executable).parent)) or "swiftopt"
SHORT = ("--max-new-tokens", "24", "--context-window", "8", "--max-steps", "6", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def home(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a database and a stream, and an environment that names database and Redis."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.setenv("SWIFTOPT_REDIS_URL", redis_url)
    lines = [json.dumps({"id": f"p{i}", "prompt": f"w{i} w{i + 1} w{i + 2}"}) for i in range(4)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    Store.open(str(tmp_path / "home.db")).close()
    return tmp_path


def swiftopt(*args: str, timeout: float = 120, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=timeout, **more)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints that runs in this process."""

    def call(*args: str) -> str:
        capsys.readouterr()
        code = run(args)
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


@pytest.fixture
def worker(home: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([SCRIPT, "worker", "--name", "w1"], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.mark.slow
def test_tuning_through_a_worker_gives_the_results_of_a_local_run(
    home: Path, tiny: str, worker: subprocess.Popen[str], told: Callable[..., str]
) -> None:
    args = ("tune", "--model", tiny, "--stream", "notes.jsonl", *SHORT, "--json", "--out")
    queued = swiftopt(*args, "queued.jsonl")
    assert queued.returncode == 0, queued.stderr
    found, expected = json.loads(queued.stdout), json.loads(told(*args, "local.jsonl", "--local"))
    assert found["schema"] == expected["schema"] == "swiftopt.tune/1"
    assert found.keys() == expected.keys() and found["tasks"][0].keys() == expected["tasks"][0].keys()
    assert found["tasks"][0]["n_trials"] > 0 and found["job"] != expected["job"]
    texts = [
        {line["id"]: line["text"] for line in map(json.loads, Path(name).read_text().splitlines())}
        for name in ("queued.jsonl", "local.jsonl")
    ]
    assert texts[0] == texts[1] and set(texts[0]) == {"p0", "p1", "p2", "p3"}
    assert "running on w1" in queued.stderr and "notes: finished" in queued.stderr

    watched = json.loads(told("jobs", "watch", found["job"], "--json"))
    assert watched["tasks"][0].pop("plan") == expected["tasks"][0]["plan"]  # that of the later run is in use
    assert found["tasks"][0].pop("plan")["version"] == 1 and watched == {**found, "out": None}
    listed = json.loads(told("jobs", "list", "--json"))["jobs"]
    assert {job["id"] for job in listed} == {found["job"], expected["job"]}
    assert all(job["layer_sets"][0]["schema"] == "swiftopt.layer-set/1" for job in listed)
    assert told("jobs", "outputs", found["job"]) == Path("queued.jsonl").read_text()


@pytest.mark.slow
def test_burst_worker_runs_a_detached_job_and_ends(home: Path, tiny: str, told: Callable[..., str]) -> None:
    args = ("tune", "--model", tiny, "--stream", "notes.jsonl", *SHORT, "--detach", "--json")
    submitted = json.loads(told(*args))
    assert (submitted["schema"], submitted["state"], submitted["new"]) == ("swiftopt.submitted/1", "queued", True)
    same = json.loads(told(*args))
    assert (same["job"], same["new"]) == (submitted["job"], False)
    done = swiftopt("worker", "--burst", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["schema"] == "swiftopt.worker/1", done.stderr
    shown = json.loads(told("jobs", "show", submitted["job"], "--json"))
    assert (shown["state"], shown["n_outputs"]) == ("succeeded", 4)


def test_interrupt_detaches_without_ending_the_job(home: Path, tiny: str) -> None:
    args = ["tune", "--model", tiny, "--stream", "notes.jsonl", *SHORT]
    with subprocess.Popen([SCRIPT, *args], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        heard = ""
        while "no worker listens" not in heard:
            line = process.stderr.readline()
            assert line, heard
            heard += line
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "jobs watch" in rest and "jobs cancel" in rest
    with Store.open(str(home / "home.db")) as store:
        (job,) = store.jobs.latest()
    assert job.state == "queued" and job.id in rest


def test_follower_reports_how_a_cancelled_job_ended(home: Path) -> None:
    with Store.open(str(home / "home.db")) as store:
        queue = RedisQueue(os.environ["SWIFTOPT_REDIS_URL"])
        job, _ = JobService(store, queue).submit_spec(JobSpec("noop", "default", {"seconds": 0.0}))
        with subprocess.Popen([SCRIPT, "jobs", "watch", job.id], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "queued\n"
            store.jobs.act(job.id, "cancel")
            _, rest = process.communicate(timeout=60)
        queue.close()
    assert process.returncode == 5
    assert rest.splitlines() == ["cancelled on request", f"error: job {job.id} was cancelled"]


def test_worker_check_tells_whether_one_listens_here(home: Path) -> None:
    missing = swiftopt("worker", "--check", "--json")
    assert missing.returncode == 1 and "no worker of this machine" in json.loads(missing.stdout)["problems"][0]
    with subprocess.Popen([SCRIPT, "worker", "--name", "w2"], stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 60
            while swiftopt("worker", "--check").returncode:
                assert time.monotonic() < until, "the worker does not register"
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
