"""Jobs on the command line: what is shown, how verbs answer, how following ends, and what the doctor sees."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType
from serving import serving

from swiftopt.cli import backend
from swiftopt.cli.backend import Backend, JobClient, QueueClient, RunState, TuneProgress, finished_tasks, follow
from swiftopt.cli.jobs import duration, job_view, jobs_table
from swiftopt.cli.main import run
from swiftopt.core.errors import JobCancelled, JobFailed, StoreUnavailable, safe_url
from swiftopt.core.events import (
    PhaseChanged,
    Progress,
    PromptFinished,
    StateChanged,
    TaskFinished,
    TrialsDone,
    state_words,
)
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord, Plan
from swiftopt.core.requests import Job, Lease, TuneRequest
from swiftopt.core.types import Completion, Prompt, Timings, Trial, Verdict
from swiftopt.store import Store
from swiftopt.worker.queue import JobService, RedisQueue

FIGURES = {"type": "progress", **Progress("notes", "optimise", 9, 3.2, 0.5, 0.6, 4, 0.9, 2.1, 0.45).to_json()}
PROMPTS = [Prompt("a", "notes", text="w1 w2"), Prompt("b", "notes", text="w3")]
LAYERS = LayerSet(30, frozenset({3, 4}), frozenset({5}))
TRIALS = tuple(Trial(step, LAYERS, "random", 0.5, 0.1 * step) for step in range(3))
TASK = TaskFinished(
    task="notes",
    record=LayerSetRecord("smollm2-135m", "notes", LAYERS, measured_speedup=1.2, verdict="use", device="cpu"),
    verdict=Verdict("use", 1.2, (1.1, 1.3), 1.3, 2),
    stopped_because="3 candidates were scored",
    trials=TRIALS,
    timings=Timings(1.0, 1.0, 1.0, 1.0),
    n_prompts=2,
    n_tokens=60,
    draft_cost=0.6,
    plain_tok_s=10.0,
    tuned_tok_s=12.0,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, database_url: str, unconfigured: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a stream; the environment names an empty database of each kind."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", database_url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.jsonl").write_text('{"id": "a", "prompt": "w1 w2"}\n{"id": "b", "prompt": "w3"}\n')
    return tmp_path


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as store:
        yield store


@pytest.fixture
def job(store: Store) -> Job:
    """A queued tuning job."""
    return JobService(store, None).submit(TuneRequest("smollm2-135m", "notes.jsonl"), PROMPTS)[0]


def work(
    store: Store,
    job: str,
    end: str = "succeeded",
    error: str | None = None,
    text: str = "w1",
    task: TaskFinished = TASK,
) -> None:
    """What a worker writes for a whole job."""
    attempt = store.jobs.get(job).attempt
    claim = store.jobs.claim(Lease(job, attempt), "w1")
    assert claim is not None
    store.jobs.renew(claim.lease, [PhaseChanged("notes", "accumulate")])
    done = [PromptFinished(prompt, i, Completion((1, 2), text, "length", "swift")) for i, prompt in enumerate(PROMPTS)]
    store.jobs.checkpoint(claim.lease, 1, [TrialsDone("notes", TRIALS), *done], {})
    if end == "succeeded":
        stamped = replace(task, record=replace(task.record, job=job))
        method = "swift" if task.verdict.word == "use" else "plain"
        store.jobs.finish_task(claim.lease, 2, stamped, method, "always", {})
    store.jobs.end(claim.lease, end, error)  # type: ignore[arg-type]


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(args)
    out, err = capsys.readouterr()
    return code, out, err


def drawn(renderable: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


def heard() -> tuple[TuneProgress, io.StringIO]:
    to = io.StringIO()
    return TuneProgress(Console(file=to, width=200, markup=False, highlight=False)), to


# --- lists and verbs


def test_list_and_show_carry_the_layer_sets_of_every_front_door(
    store: Store, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    work(store, job.id)
    _, out, _ = called(capsys, "jobs", "list", "--json")
    listed = json.loads(out)
    assert listed["schema"] == "swiftopt.jobs-list/1" and [entry["id"] for entry in listed["jobs"]] == [job.id]
    assert listed["jobs"][0]["layer_sets"] == [store.layer_set("smollm2-135m", "notes", 1).to_json()]
    _, shown, _ = called(capsys, "jobs", "show", job.id, "--json")
    assert json.loads(shown) == listed["jobs"][0]
    assert json.loads(called(capsys, "jobs", "list", "--state", "failed", "--json")[1])["jobs"] == []


def test_list_without_jobs_says_how_to_submit_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "jobs", "list")
    assert (code, out) == (0, "") and "swiftopt tune --redis" in err


def test_verbs_print_the_new_state(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, state in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled"), ("retry", "queued")):
        code, out, _ = called(capsys, "jobs", verb, job.id)
        assert (code, out) == (0, f"job {job.id} is {state}\n")
    assert json.loads(called(capsys, "jobs", "cancel", job.id, "--json")[1])["schema"] == "swiftopt.job/1"


def test_running_job_is_told_to_pause_at_its_next_step(
    store: Store, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.jobs.claim(Lease(job.id, 1), "w1") is not None
    assert called(capsys, "jobs", "pause", job.id)[1] == f"job {job.id} is running, and will pause at its next step\n"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["retry", "ID"], 7, "cannot be retried"),
        (["stop", "ID"], 7, "cancel it instead"),
        (["show", "nothing"], 3, "no job 'nothing'"),
        (["watch", "nothing"], 3, "no job 'nothing'"),
        (["outputs", "ID", "--json"], 2, "use --out FILE"),
        (["list", "--state", "gone"], 2, "'gone' is not one of"),
        (["list", "--server", "http://127.0.0.1:9", "--db", "x.db"], 2, "remove --db"),
        (["list", "--server", "nowhere"], 2, "is not a URL"),
    ],
)
def test_slip_gets_its_code_and_one_sentence(
    args: list[str], code: int, words: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = called(capsys, "jobs", *[job.id if arg == "ID" else arg for arg in args])
    assert (found, out) == (code, "") and words in err and err.count("\n") == 1


def test_outputs_are_written_whole_and_anew(
    store: Store, job: Job, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work(store, job.id)
    for _ in range(2):
        code, out, _ = called(capsys, "jobs", "outputs", job.id, "--out", "done.jsonl", "--json")
        assert code == 0 and json.loads(out)["n_outputs"] == 2
    lines = (home / "done.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]
    assert called(capsys, "jobs", "outputs", job.id)[1].splitlines() == lines


def test_outputs_on_stdout_are_those_of_the_file_whatever_the_terminal_shows(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(store, job.id, text="größer")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", errors="replace"))
    assert run(["jobs", "outputs", job.id]) == 0
    assert [json.loads(line)["text"] for line in shown.getvalue().splitlines()] == ["größer"] * 2


OPEN = replace(
    TASK,
    record=replace(TASK.record, measured_speedup=1.29, measured_interval=(0.66, 2.52), verdict="plain"),
    verdict=Verdict("plain", 1.29, (0.66, 2.52), 1.3, 4, "4 held-out prompts are too few to tell: give more"),
)
PLAINLY = "notes: decode plainly (drafts measured 1.29x, 95 % 0.66 to 2.52: not enough to be sure)"


def test_every_place_names_plain_decoding_after_a_verdict_that_is_not_sure(
    store: Store, job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import client_of

    monkeypatch.setenv("COLUMNS", "200")
    work(store, job.id, task=OPEN)
    listed = called(capsys, "jobs", "list")[1]
    assert "notes plain" in listed and "1.29" not in listed
    shown, watched = (called(capsys, "jobs", verb, job.id)[1] for verb in ("show", "watch"))
    page = unescape(client_of(store).get(f"/jobs/{job.id}").text)
    for text in (shown, watched, page):
        assert PLAINLY in text and text.count("1.29") == 1
    assert "use it" not in watched and OPEN.verdict.reason in watched
    plan = json.loads(called(capsys, "jobs", "show", job.id, "--json")[1])["plans"][0]
    assert (
        plan["sentence"]
        == PLAINLY
        == json.loads(called(capsys, "jobs", "watch", job.id, "--json")[1])["tasks"][0]["plan"]["sentence"]
    )


def test_every_place_names_the_plan_that_a_look_up_finds_now(
    store: Store, job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    work(store, job.id, task=OPEN)
    store.add_plan("smollm2-135m", "notes", Plan("prompt-lookup", verdict="use", measured_speedup=1.6, device="cpu"))
    now = "notes: decode with prompt-lookup drafts of version 2 (measured 1.60x)"
    assert "notes v2 1.60x" in called(capsys, "jobs", "list")[1]
    assert now in called(capsys, "jobs", "show", job.id)[1]
    watched = called(capsys, "jobs", "watch", job.id)[1]
    assert now in watched and "1.29" not in watched and "version 1, which this run stored, is not in use" in watched


@pytest.mark.parametrize("width", [80, 120])
def test_job_tables_fit(width: int, store: Store, job: Job) -> None:
    work(store, job.id)
    found = store.jobs.get(job.id)
    long = replace(
        found, request={"model": "/models/" + "deep/" * 12 + "tiny"}, worker="gpu-host-17-4242-ab12", error="e " * 90
    )
    running = replace(found, state="running", wanted="pause", layer_sets=(), progress=FIGURES)
    for renderable in (jobs_table([found, long, running], width), job_view(long), job_view(running)):
        assert max(map(cell_len, drawn(renderable, width))) <= width
    assert "notes, searching: 3.2 tok/s" in "\n".join(drawn(job_view(running), width))
    text = "\n".join(drawn(jobs_table([found, running], width), width))
    assert found.id in text and "notes v1 1.20x" in text and "pausing" in text and "2/2" in text


def test_duration_is_said_as_people_say_it() -> None:
    start = "2026-11-21T00:00:00Z"
    ends = ("2026-11-21T00:00:41Z", "2026-11-21T00:03:20Z", "2026-11-21T02:05:59Z")
    assert [duration(start, end) for end in ends] == ["41 s", "3 min 20 s", "2 h 5 min"]
    assert duration(None, None) == ""


# --- following


def test_ended_job_shows_its_summary_at_once(store: Store, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    work(store, job.id)
    code, out, _ = called(capsys, "jobs", "watch", job.id)
    assert code == 0 and "smollm2-135m/notes version 1" in out and "matchness of 3 trials" in out
    found = json.loads(called(capsys, "jobs", "watch", job.id, "--json")[1])
    assert (found["schema"], found["job"], found["tasks"][0]["n_trials"]) == ("swiftopt.tune/1", job.id, 3)


@pytest.mark.parametrize(
    ("end", "code", "words"), [("failed", 4, "failed: no memory"), ("cancelled", 5, "was cancelled")]
)
def test_job_without_a_result_ends_with_its_code(
    end: str, code: int, words: str, store: Store, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    work(store, job.id, end, "no memory" if end == "failed" else None)
    found, out, err = called(capsys, "jobs", "watch", job.id, "--json")
    assert (found, out) == (code, "") and words in err
    assert f"2 completions are kept: fetch them with `swiftopt jobs outputs {job.id} --out FILE`" in err


def test_follower_tells_every_state_and_ends_with_the_trials(store: Store, job: Job) -> None:
    progress, to = heard()
    worker = threading.Thread(target=lambda: (time.sleep(0.3), work(store, job.id)))
    worker.start()
    ended = follow(QueueClient(store, None), job, progress)
    worker.join()
    lines = to.getvalue().splitlines()
    assert lines[:3] == ["queued", "running on w1", "notes: collecting text"] and lines[-1] == "succeeded"
    assert ended.job.state == "succeeded" and ended.tasks[0].trials == TRIALS


def test_follower_over_http_tells_the_same(store: Store, job: Job) -> None:
    from swiftopt.server.app import create_app

    progress, to = heard()
    with serving(create_app(store, JobService(store, None))) as url, Backend(server=url).open() as client:
        worker = threading.Thread(target=lambda: (time.sleep(0.3), work(store, job.id)))
        worker.start()
        ended = follow(client, job, progress)
        worker.join()
    local, to_local = heard()
    work_again = follow(QueueClient(store, None), job, local)
    assert (ended, to.getvalue()) == (work_again, to_local.getvalue())


def test_state_is_said_in_words() -> None:
    said = [
        (StateChanged("queued", 1), "queued"),
        (
            StateChanged("queued", 2, "the heartbeat of worker w1 is overdue"),
            "queued again: the heartbeat of worker w1 is overdue",
        ),
        (StateChanged("running", 1, "on w1"), "running on w1"),
        (StateChanged("running", 2, "on w2"), "running on w2 (attempt 2)"),
        (StateChanged("paused", 1, "before a worker took it"), "paused before a worker took it"),
        (StateChanged("cancelled", 1, "on request"), "cancelled on request"),
        (StateChanged("failed", 1, "no memory"), "failed"),
    ]
    assert [state_words(event) for event, _ in said] == [words for _, words in said]


def test_new_attempt_starts_the_display_over_but_keeps_the_curve() -> None:
    state = RunState().after(TrialsDone("notes", TRIALS)).after(StateChanged("running", 2, "on w2"))
    assert (state.phase, state.progress, state.matchness) == ("running on w2 (attempt 2)", None, (0.5, 0.5, 0.5))


class Away(JobService):
    """The real jobs, behind a database that is away for the first looks."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, None)
        self.n_away = 2
        self.get = self.get_later

    def get_later(self, job: str) -> Job:
        if self.n_away:
            self.n_away -= 1
            raise StoreUnavailable("the database is away")
        return self.store.jobs.get(job)


def test_follower_waits_for_a_database_that_is_away(store: Store, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "RETRY_S", 0.01)
    work(store, job.id)
    progress, to = heard()
    assert follow(JobClient(Away(store), "db"), job, progress).tasks
    assert to.getvalue().count("the database is away; still trying") == 1
    monkeypatch.setattr(backend, "AWAY_S", 0.0)
    with pytest.raises(StoreUnavailable):
        follow(JobClient(Away(store), "db"), job, heard()[0])


def test_waiting_job_says_once_that_no_worker_listens(
    store: Store, job: Job, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "PATIENCE_S", 0.05)
    queue = RedisQueue(redis_url)
    progress, to = heard()
    timer = threading.Timer(2.5, lambda: store.jobs.act(job.id, "cancel"))
    timer.start()
    with pytest.raises(JobCancelled):
        follow(QueueClient(store, queue), job, progress)
    queue.close()
    assert to.getvalue().count("no worker listens on queue 'default': start one with `swiftopt worker`") == 1


def test_retried_job_is_looked_back_at_with_one_result_per_task(store: Store, job: Job) -> None:
    work(store, job.id, "failed", "no memory")
    with pytest.raises(JobFailed):
        follow(QueueClient(store, None), store.jobs.get(job.id), heard()[0])
    events = (TASK, replace(TASK, n_tokens=7), TrialsDone("notes", TRIALS[1:]), TrialsDone("notes", TRIALS[:1]))
    (task,) = finished_tasks(events)
    assert task.n_tokens == 7 and task.trials == TRIALS


# --- submitting


TUNE = ("tune", "--model", "smollm2-135m", "--stream", "notes.jsonl")


def test_submission_waits_in_the_database_while_redis_is_away(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    url = "redis://:geheim@127.0.0.1:9"
    code, out, err = called(capsys, *TUNE, "--redis", url, "--detach", "--json")
    assert code == 0 and json.loads(out)["state"] == "queued" and "waits in the database" in err
    assert [found.id for found in store.jobs.latest("queued")] == [json.loads(out)["job"]]
    code, out, err = called(capsys, *TUNE, "--redis", url, "--detach")
    assert "already does the same" in out and "redis://:***@127.0.0.1:9" in out and "geheim" not in out + err


def test_submission_over_http_is_the_same_job(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from swiftopt.server.app import create_app

    with serving(create_app(store, JobService(store, None))) as url:
        monkeypatch.setenv("SWIFTOPT_SERVER_URL", url)
        first = json.loads(called(capsys, *TUNE, "--detach", "--json")[1])
        assert json.loads(called(capsys, *TUNE, "--detach", "--json")[1]) == {**first, "new": False}
        over_http = json.loads(called(capsys, "jobs", "list", "--json")[1])
        work(store, first["job"])
        code, out, _ = called(capsys, "jobs", "watch", first["job"])
        assert code == 0 and "matchness of 3 trials" in out and f"curl {url}/v1/layer-sets/smollm2-135m/notes" in out
        assert called(capsys, "jobs", "outputs", first["job"])[1].count("\n") == 2
    monkeypatch.delenv("SWIFTOPT_SERVER_URL")
    assert [entry["id"] for entry in over_http["jobs"]] == [first["job"]]
    assert json.loads(called(capsys, "jobs", "list", "--json")[1])["jobs"][0]["n_outputs"] == 2


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--detach"], 2, "--detach needs workers"),
        (["--detach", "--local", "--redis", "redis://127.0.0.1:9"], 2, "--detach needs workers"),
        (["--detach", "--redis", "redis://127.0.0.1:9", "--out", "x.jsonl"], 2, "--detach writes no file"),
        (["--redis", "redis://127.0.0.1:9", "--queue", "a b"], 2, "is not a queue name"),
        (["--redis", "http://127.0.0.1"], 2, "is not a Redis URL"),
        (["--redis", "redis://127.0.0.1:9", "--model", "smolm2-135m"], 3, "smollm2-135m"),
        (["--redis", "redis://127.0.0.1:9", "--stream", "gone.jsonl"], 3, "no stream gone.jsonl"),
        (["--redis", "redis://127.0.0.1:9", "--out", "/dev/null/x"], 1, "cannot write completions"),
        (["--server", "http://127.0.0.1:9", "--detach"], 6, "does not answer"),
    ],
)
def test_slip_while_submitting_leaves_no_job(
    args: list[str], code: int, words: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = called(capsys, *TUNE, *args)
    assert (found, out) == (code, "") and words in err and err.count("\n") == 1
    assert store.jobs.latest() == []


def test_command_line_wins_over_a_server_in_the_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWIFTOPT_SERVER_URL", "http://127.0.0.1:9")
    assert called(capsys, *TUNE, "--redis", "redis://127.0.0.1:9", "--detach")[0] == 0
    assert len(store.jobs.latest()) == 1
    assert called(capsys, "jobs", "list")[0] == 6


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@host/0", "redis://:***@host/0"),
        ("postgresql://me:p@w@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@host/db?password=pw&x=1", "postgresql://me@host/db?password=***&x=1"),
        ("sqlite:////home/a:b@c.db", "sqlite:////home/a:b@c.db"),
        ("http://[broken@host", "(unreadable URL)"),
    ],
)
def test_password_in_a_url_is_never_shown(url: str, shown: str) -> None:
    assert safe_url(url) == shown
