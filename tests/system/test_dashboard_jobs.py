"""The pages of jobs: lists, actions, submission, and hostile input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api import client_of, filled, token
from job_table import edit, finished, noop, running, taken, trials_done, tune
from rq.worker import Worker as RqWorker
from servers import Valkey
from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from swiftopt.core.events import PhaseChanged, Progress, event_type
from swiftopt.core.requests import JobSpec, Lease, TuneRequest
from swiftopt.core.types import now
from swiftopt.server.dashboard.jobs import EVENTS_SHOWN, OUTPUTS_SHOWN, PER_PAGE
from swiftopt.server.settings import KeyRing, ServerSettings, new_key
from swiftopt.store import Store
from swiftopt.store.tables import EventRow, JobRow, OutputRow
from swiftopt.worker.queue import RedisQueue

NASTY = ("<img src=x onerror=alert(1)>", "a'b\"c&amp;", "\u05e9\u05dc\u05d5\u05dd \u202eabc", "x" * 10_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with filled(str(tmp_path / "a.db")) as store:
        yield store


@pytest.fixture
def client(store: Store) -> TestClient:
    return client_of(store)


def ids(html: str) -> list[str]:
    """Return the jobs of a list in its order."""
    return re.findall(r'<th scope="row" class="id"><a href="/jobs/([^"]+)"', html)


def verbs(html: str, job: str) -> set[str]:
    """Return the actions of a job's page."""
    return set(re.findall(rf'action="/jobs/{job}/(\w+)"', html))


def post(client: TestClient, address: str, **values: Any) -> Any:
    """Send a form with this session's token."""
    data = {"token": token(client.get("/jobs/new").text), **values.pop("data", {})}
    return client.post(address, data=data, follow_redirects=False, **values)


def crowd(store: Store, n_jobs: int, n_events: int) -> str:
    """Fill the store as after long use; return the job with all events."""
    first = store.jobs.submit(noop())[0].id
    jobs = [f"{n:012d}" for n in range(n_jobs - 1)] + [first]
    kinds = [trials_done(*range(8)), finished(3, NASTY[0]), PhaseChanged("t", "optimise", NASTY[1])]
    rows = [(event_type(event), event.to_json()) for event in kinds]
    with Session(store.engine) as session:
        kept = session.get_one(JobRow, first)
        values = {column.name: getattr(kept, column.name) for column in JobRow.__table__.columns}
        copies = [{**values, "id": job, "fingerprint": job, "created_at": now()} for job in jobs[:-1]]
        session.execute(insert(JobRow), copies)
        events = [rows[n % len(rows)] for n in range(n_events)]
        made = [{"job_id": first, "type": kind, "data": data, "created_at": now()} for kind, data in events]
        session.execute(insert(EventRow), made)
        last = session.scalars(select(EventRow.id).where(EventRow.type == "prompt_finished")).all()
        session.add_all(OutputRow(job_id=jobs[-1], place=n, prompt_id=str(n), event_id=at) for n, at in enumerate(last))
        session.commit()
    return jobs[-1]


def test_jobs_of_an_empty_database(client: TestClient) -> None:
    html = client.get("/jobs").text
    assert "There is no job yet" in html and "No Redis is configured" in html
    assert "No job is failed" in client.get("/jobs?state=failed").text
    assert client.get("/jobs?state=lost").status_code == 422
    assert "There is no such page" in client.get("/jobs?page=7").text


def test_jobs_are_listed_newest_first_by_page_and_state(client: TestClient, store: Store) -> None:
    made = [store.jobs.submit(noop(n))[0].id for n in range(PER_PAGE + 3)]
    store.jobs.act(made[5], "cancel")
    first, second = client.get("/jobs").text, client.get("/jobs?page=2").text
    shown = ids(first) + ids(second)
    assert len(ids(first)) == PER_PAGE and sorted(shown) == sorted(made)
    newest = [store.jobs.get(job).created_at for job in shown]
    assert newest == sorted(newest, reverse=True)
    assert 'rel="next"' in first and 'rel="next"' not in second and 'rel="prev"' in second
    assert ids(client.get("/jobs?state=cancelled").text) == [made[5]]


def test_thousand_jobs_and_ten_thousand_events_are_shown_by_the_page(client: TestClient, store: Store) -> None:
    job = crowd(store, 1000, 10_000)
    for address in ("/jobs", "/jobs?page=20", "/jobs?state=queued"):
        assert len(ids(client.get(address).text)) == PER_PAGE
    assert client.get("/jobs/new").status_code == 200
    html = client.get(f"/jobs/{job}").text
    assert html.count('<tr id="event-') == EVENTS_SHOWN and html.count("<pre>") == OUTPUTS_SHOWN
    assert "<img" not in html and "&lt;img src=x onerror=alert(1)&gt;" in html


def test_job_shows_its_attempts_lease_and_figures(client: TestClient, store: Store) -> None:
    lease = running(store.jobs, tune(), "host-7-engine")
    figures = Progress("notes", "optimise", 96, 31.5, 0.5, 0.75, 12, 0.6, 3.2, 0.45)
    store.jobs.checkpoint(lease, 1, [finished()], None, figures.to_json())
    html = client.get(f"/jobs/{lease.job}").text
    assert "host-7-engine" in html and "lease for" in html and "31.5" in html and "0.75" in html
    assert "1 of 1" in html and "six" in html, "the completion"
    assert client.get(f"/searches/{lease.job}").status_code == 200 and f'"/searches/{lease.job}"' in html
    assert "host-7-engine" in client.get("/jobs").text and "engine of a served model" in client.get("/jobs").text
    store.jobs.attempt_failed(lease, "out of <b>memory</b>")
    html = client.get(f"/jobs/{lease.job}").text
    assert "out of &lt;b&gt;memory&lt;/b&gt;" in html and "next attempt in" in html and "<b>" not in html


def test_long_word_in_a_reason_is_shortened(client: TestClient, store: Store) -> None:
    lease = running(store.jobs, noop())
    store.jobs.end(lease, "failed", f"no {'x' * 2500} here")
    html = client.get(f"/jobs/{lease.job}").text
    assert "x" * 1900 in html and html.count(f"no {'x' * 280}") == 3, "the error, the attempt, the event"


def test_actions_depend_on_the_state_and_need_a_token(client: TestClient, store: Store) -> None:
    job = store.jobs.submit(tune("org/m", lines='{"prompt": "w1"}\n'))[0].id
    page = f"/jobs/{job}"
    assert verbs(client.get(page).text, job) == {"pause", "cancel"}
    for verb in ("pause", "resume", "stop", "cancel", "retry"):
        assert client.post(f"{page}/{verb}").status_code == 403
        assert client.post(f"{page}/{verb}", data={"token": "forged"}).status_code == 403
    assert store.jobs.get(job).state == "queued"
    for verb, state, left in (
        ("pause", "paused", {"resume", "cancel"}),
        ("resume", "queued", {"pause", "cancel"}),
        ("cancel", "cancelled", {"retry"}),
        ("retry", "queued", {"pause", "cancel"}),
    ):
        done = post(client, f"{page}/{verb}")
        assert (done.status_code, done.headers["location"]) == (303, page)
        assert store.jobs.get(job).state == state and verbs(client.get(page).text, job) == left
    lease = taken(store.jobs, Lease(job, store.jobs.get(job).attempt))
    assert verbs(client.get(page).text, job) == {"pause", "stop", "cancel"}
    post(client, f"{page}/pause")
    html = client.get(page).text
    assert "to pause at its next step" in html and verbs(html, job) == {"resume", "stop", "cancel"}
    post(client, f"{page}/stop")
    html = client.get(page).text
    assert "to stop at its next step" in html and verbs(html, job) == {"pause", "cancel"}
    store.jobs.end(lease, "succeeded")
    assert verbs(client.get(page).text, job) == set()
    refused = post(client, f"{page}/cancel")
    assert refused.status_code == 409 and "it has already ended" in refused.text


def test_cancel_asks_for_confirmation(client: TestClient, store: Store) -> None:
    job = store.jobs.submit(tune())[0].id
    asked = client.get(f"/jobs/{job}/cancel?")
    assert asked.status_code == 200 and "ends without a result" in asked.text
    assert store.jobs.get(job).state == "queued"
    post(client, f"/jobs/{job}/cancel")
    assert "has already ended" in client.get(f"/jobs/{job}/cancel").text


@pytest.mark.parametrize("address", ["/jobs/{}", "/jobs/{}/cancel", "/jobs/{}/outputs"])
def test_unknown_job_is_reported(client: TestClient, address: str) -> None:
    found = client.get(address.format("0" * 12))
    assert found.status_code == 404 and "no job" in found.text and "<main" in found.text
    assert client.get(address.format("%3Cscript%3E")).status_code == 422


def test_outputs_can_be_downloaded_in_the_session(store: Store, tmp_path: Path) -> None:
    key, entry = new_key("ann")
    (tmp_path / "keys").write_text(entry)
    client = client_of(store, ServerSettings(keys=KeyRing(file=tmp_path / "keys"), requests_per_min=0))
    lease = running(store.jobs, tune())
    store.jobs.checkpoint(lease, 1, [finished()], None)
    assert client.get(f"/jobs/{lease.job}/outputs", follow_redirects=False).status_code == 303
    client.post("/login", data={"key": key})
    found = client.get(f"/jobs/{lease.job}/outputs")
    assert "attachment" in found.headers["content-disposition"] and json.loads(found.text)["text"] == "six"


def test_job_is_submitted_from_a_file(client: TestClient, store: Store) -> None:
    file = {"file": ("code.jsonl", b'{"prompt": "w1"}\n{"prompt": "w2", "task": "notes"}\n')}
    asked = {
        "model": "org/m",
        "limit": "2",
        "settings.strategy": "swift",
        "settings.early_stop": "no",
        "sampling.seed": "7",
    }
    done = post(client, "/jobs/new", data=asked, files=file)
    assert done.status_code == 303, done.text
    job = store.jobs.get(done.headers["location"].removeprefix("/jobs/"))
    request = TuneRequest.from_json(job.request)
    assert (job.n_prompts, request.model, request.limit, request.sampling.seed) == (2, "org/m", 2, 7)
    assert (request.settings.strategy, request.settings.early_stop) == ("swift", False)
    assert store.jobs.stream(str(job.stream)).count("code") == 1, "the task of the line that names none"
    html = client.get(f"/jobs/{job.id}").text
    assert "Search strategy" in html and "Seed of sampling" in html and "values at their defaults" in html
    again = post(client, "/jobs/new", data=asked, files=file)
    assert again.headers["location"] == f"/jobs/{job.id}?known=1"
    assert "it is shown here" in client.get(again.headers["location"]).text


def test_job_is_submitted_from_a_stream_folder(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "streams"
    folder.mkdir()
    (folder / "notes.jsonl").write_text('{"prompt": "w1"}\n')
    client = client_of(store, ServerSettings(stream_folders=(folder,), requests_per_min=0))
    assert 'value="notes.jsonl"' in client.get("/jobs/new").text
    done = post(client, "/jobs/new", data={"model": "org/m", "stream": "notes.jsonl"})
    assert store.jobs.get(done.headers["location"].removeprefix("/jobs/")).request["task"] == "notes"
    wrong = post(client, "/jobs/new", data={"model": "m", "stream": "note.jsonl"})
    assert wrong.status_code == 422 and "did you mean &#39;notes.jsonl&#39;?" in wrong.text
    assert "is not a plain relative path" in post(client, "/jobs/new", data={"model": "m", "stream": "../a"}).text


@pytest.mark.parametrize(
    "values, lines, words",
    [
        ({"model": ""}, b'{"prompt": "w"}', "Model is"),
        ({"model": "no-model"}, b'{"prompt": "w"}', "there is no model &#39;no-model&#39;"),
        ({"max_new_tokens": "4"}, b'{"prompt": "w"}', "max_new_tokens 4 leaves nothing to decode"),
        ({"limit": "many"}, b'{"prompt": "w"}', "Use only the first prompts is &#39;many&#39;"),
        ({"max_new_tokens": "0"}, b'{"prompt": "w"}', "Tokens per completion is 0"),
        ({"settings.skip_ratio": "7"}, b'{"prompt": "w"}', "skip_ratio"),
        ({"sampling.temperature": "-1"}, b'{"prompt": "w"}', "temperature"),
        ({"device": "abacus"}, b'{"prompt": "w"}', "Device is &#39;abacus&#39;"),
        ({"settings.max_steps": "nan"}, b'{"prompt": "w"}', "Maximum number of candidates is &#39;nan&#39;"),
        ({"task": "a/b"}, b'{"prompt": "w"}', "Task is &#39;a/b&#39;"),
        ({}, b'{"prompt": 7}', "line 1"),
        ({}, b"", "holds no prompt"),
        ({}, b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_form_names_the_error_and_keeps_its_values(
    client: TestClient, store: Store, values: dict[str, str], lines: bytes, words: str
) -> None:
    asked = {"model": NASTY[1], "settings.strategy": "swift", **values}
    found = post(client, "/jobs/new", data=asked, files={"file": ("a.jsonl", lines)})
    assert found.status_code == 422 and words in found.text, re.findall(r"<li>.*", found.text)
    assert 'role="alert"' in found.text and 'aria-invalid="true"' in found.text and "Traceback" not in found.text
    assert "<option selected>swift</option>" in found.text
    assert store.jobs.latest() == []


def test_submission_needs_a_token_and_a_stream(client: TestClient, store: Store) -> None:
    assert client.post("/jobs/new", data={"model": "m"}).status_code == 403
    assert post(client, "/jobs/new", data={"model": "m"}).status_code == 422
    file = {"file": ("a.jsonl", b'{"prompt": "w"}')}
    assert client.post("/jobs/new", data={"model": "m", "token": "forged"}, files=file).status_code == 403
    assert store.jobs.latest() == []


@pytest.mark.parametrize("name", NASTY)
def test_hostile_names_of_jobs_are_shown_as_text(client: TestClient, store: Store, name: str) -> None:
    lease = running(store.jobs, JobSpec("tune", name[:60], {"model": name, "task": name, "settings": name}), name)
    figures = Progress(name, "load", 0, 0, None, None, 0, None, None, 0)
    store.jobs.checkpoint(lease, 1, [finished(0, name)], None, figures.to_json())
    for address in ("/jobs", f"/jobs/{lease.job}", f"/jobs/{lease.job}/cancel"):
        found = client.get(address)
        assert found.status_code == 200 and "<img" not in found.text and "onerror=alert(1)>" not in found.text
    assert len(client.get("/jobs").text) < 20_000, "a list shows the beginning of a long name"


def test_job_that_was_edited_by_hand_is_shown(client: TestClient, store: Store) -> None:
    lease = running(store.jobs, tune())
    store.jobs.checkpoint(lease, 1, [finished()], None)
    for table, values in (
        ("events", "data = '{\"a\": 1}'"),
        ("events", "type = 'dream'"),
        ("jobs", "request = '[]'"),
        ("jobs", "created_at = 'once', started_at = 'then'"),
    ):
        edit(store.engine, table, values)
        assert client.get(f"/jobs/{lease.job}").status_code == 200
        assert client.get("/jobs").status_code == 200
    assert "changed by hand" in client.get(f"/jobs/{lease.job}").text


def test_unreachable_database_is_reported(client: TestClient, store: Store) -> None:
    job = store.jobs.submit(noop())[0].id
    session = token(client.get("/jobs/new").text)
    edit(store.engine, "jobs", "state = state")
    with store.engine.begin() as connection:
        connection.execute(text("ALTER TABLE swiftopt_jobs RENAME TO gone"))
    for address in ("/jobs", f"/jobs/{job}", f"/jobs/{job}/cancel"):
        found = client.get(address)
        assert found.status_code in (500, 503) and 'role="alert"' in found.text and "Traceback" not in found.text
    file = {"file": ("a.jsonl", b'{"prompt": "w"}')}
    found = client.post("/jobs/new", data={"model": "m", "token": session}, files=file)
    assert found.status_code in (422, 500, 503) and 'role="alert"' in found.text


def test_workers_are_listed_from_redis(store: Store, valkey_server: Valkey) -> None:
    queue = RedisQueue(valkey_server.url)
    client = client_of(store, queue=queue)
    assert "There is no worker" in client.get("/jobs").text
    worker = RqWorker(["gpu"], connection=queue.connection, name="<img/src=x>", serializer="json")
    worker.register_birth()
    try:
        html = client.get("/jobs").text
        assert "&lt;img/src=x&gt;" in html and "<img" not in html
        assert "gpu" in html and re.search(r"\d m?s ago", html)
    finally:
        worker.register_death()
        queue.close()


def test_unreachable_redis_is_reported(store: Store) -> None:
    client = client_of(store, queue=RedisQueue("redis://:secret@127.0.0.1:9/0"))
    html = client.get("/jobs").text
    assert "Redis is unavailable" in html and "secret" not in html
    job = store.jobs.submit(noop())[0].id
    html = client.get(f"/jobs/{job}").text
    assert "the job waits in the database: Redis at" in html and "secret" not in html
