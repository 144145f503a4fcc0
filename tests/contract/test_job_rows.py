"""Job rows that somebody changed by hand: one sentence, and the other jobs go on."""

from __future__ import annotations

import re

import pytest
from job_table import edit, finished, noop, running, taken, trials_done, tune
from sqlalchemy import Engine, create_engine

from swiftopt.core.errors import SettingsError, StoreError
from swiftopt.core.events import event_from_json
from swiftopt.core.requests import Lease, TuneRequest
from swiftopt.store import Jobs, Store

UNREADABLE = {
    "state = 'sleeping'": "its kind is 'tune' and its state 'sleeping'",
    "kind = 'dance'": "its kind is 'dance' and its state 'queued'",
    "request = '[1, 2]'": "its request is no object",
    "request = 'null'": "its request is no object",
    "request = '\"tune\"'": "its request is no object",
}


def unreadable(table: str, key: str | int) -> str:
    return f"row {key} of the table swiftopt_{table} cannot be read"


@pytest.mark.parametrize("values", UNREADABLE)
def test_job_that_cannot_be_read_shows_as_failed_and_the_others_as_they_are(
    jobs: Jobs, engine: Engine, values: str
) -> None:
    broken, _ = jobs.submit(tune())
    edit(engine, "jobs", values)
    whole, _ = jobs.submit(noop())
    job = jobs.get(broken.id)
    assert job.state == "failed" and job.request == {}
    assert job.error is not None and job.error.startswith(unreadable("jobs", broken.id) + f" ({UNREADABLE[values]})")
    assert {found.id: found for found in jobs.latest()} == {job.id: job, whole.id: whole}


@pytest.mark.parametrize("values", [values for values in UNREADABLE if "state" not in values])
def test_job_that_cannot_be_read_fails_when_it_is_claimed(jobs: Jobs, engine: Engine, values: str) -> None:
    job, _ = jobs.submit(tune())
    edit(engine, "jobs", values)
    assert jobs.claim(Lease(job.id, 1), "w1") is None
    assert jobs.states() == {"failed": 1} and jobs.due() == []
    assert "cannot be read" in jobs.events(job.id)[-1].data["detail"]


@pytest.mark.parametrize("values", UNREADABLE)
def test_job_that_cannot_be_read_can_be_cancelled(jobs: Jobs, engine: Engine, values: str) -> None:
    job, _ = jobs.submit(tune())
    edit(engine, "jobs", values)
    jobs.act(job.id, "cancel")
    assert jobs.states() == {"cancelled": 1}


@pytest.mark.parametrize("values", ["request = '[]'", "request = 'null'"])
def test_attempt_goes_on_to_its_end_when_the_request_is_changed_under_it(
    jobs: Jobs, engine: Engine, values: str
) -> None:
    lease = running(jobs, tune())
    edit(engine, "jobs", values)
    jobs.checkpoint(lease, 1, [trials_done(0), finished()], {})
    assert jobs.attempt_failed(lease, "why")
    assert jobs.states() == {"queued": 1}


@pytest.mark.parametrize("values", ["request = '[]'", "request = 'null'"])
def test_local_run_whose_request_was_changed_can_be_retried_and_then_fails(
    jobs: Jobs, engine: Engine, values: str
) -> None:
    lease = jobs.begin_here(noop(queue=None), "here").lease
    jobs.end(lease, "failed", "why")
    edit(engine, "jobs", values)
    job = jobs.act(lease.job, "retry")
    assert jobs.claim(Lease(job.id, job.attempt), "w1") is None
    assert jobs.states() == {"failed": 1}


def test_request_with_unknown_keys_is_shown_and_refused_as_input(jobs: Jobs, engine: Engine) -> None:
    job, _ = jobs.submit(tune())
    edit(engine, "jobs", """request = '{"model": "m", "stream": "s", "haste": 3}'""")
    claim = jobs.claim(Lease(job.id, 1), "w1")
    assert claim is not None
    with pytest.raises(SettingsError, match="a tuning job: it has no 'haste'"):
        TuneRequest.from_json(claim.job.request)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": "m"},
        {"model": 3, "stream": "s"},
        {"model": "m", "stream": "s", "max_new_tokens": True},
        {"model": "m", "stream": "s", "limit": 0},
        {"model": "m", "stream": "s", "sampling": [1]},
        {"model": "m", "stream": "s", "sampling": None},
        {"model": "m", "stream": "s", "sampling": {"heat": 1}},
        {"model": "m", "stream": "s", "sampling": {"temperature": "hot"}},
        {"model": "m", "stream": "s", "sampling": {"top_k": None}},
        {"model": "m", "stream": "s", "sampling": {"seed": "x"}},
        {"model": "m", "stream": "s", "settings": "fast"},
        {"model": "m", "stream": "s", "settings": {"seed": "x"}},
        {"model": "m", "stream": "s", "settings": {"no such": 1}},
    ],
    ids=str,
)
def test_hostile_request_is_refused_as_input(values: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        TuneRequest.from_json(values)


@pytest.mark.parametrize("values", ["skip_attn = '[77]'", "skip_mlp = '3'", "skip_attn = '[\"a\"]'"])
def test_job_whose_trials_were_changed_fails_when_it_is_claimed(jobs: Jobs, engine: Engine, values: str) -> None:
    lease = running(jobs)
    jobs.checkpoint(lease, 1, [trials_done(0)], {})
    jobs.hand_back(lease, "its worker is shutting down")
    edit(engine, "trials", values)
    assert jobs.claim(Lease(lease.job, 2), "w1") is None
    job = jobs.get(lease.job)
    assert job.state == "failed" and re.search(unreadable("trials", r"\d+"), job.error or "")


def test_progress_that_was_changed_is_not_shown(jobs: Jobs, engine: Engine) -> None:
    job, _ = jobs.submit(noop())
    edit(engine, "jobs", "progress = '[3]'")
    assert jobs.get(job.id).progress is None


@pytest.mark.parametrize(
    "values",
    ["data = '[]'", "data = 'null'", "data = '{}'", "data = '3'", "type = 'sneezed'", "type = 'progress'"],
)
def test_events_that_were_changed_are_refused_in_one_sentence(jobs: Jobs, engine: Engine, values: str) -> None:
    lease = running(jobs)
    jobs.checkpoint(lease, 1, [finished()], {})
    edit(engine, "events", f"{values} WHERE type = 'prompt_finished'")
    event = jobs.events(lease.job)[-1]
    with pytest.raises(StoreError, match=f"{unreadable('events', event.id)} .*changed by hand"):
        jobs.outputs(lease.job)
    with pytest.raises(StoreError, match="the event"):
        event_from_json(event.type, event.data)
    assert event.event is None


def test_text_that_is_no_json_hides_no_job_and_stops_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("store") / "a.db"  # PostgreSQL takes no such text
    with Store.open(str(path)) as store:
        lease = running(store.jobs)
        engine = create_engine(store.url)
        edit(engine, "jobs", "request = '{\"model\": ', progress = '{'")
        engine.dispose()
        whole, _ = store.jobs.submit(noop(1))
        job = store.jobs.get(lease.job)
        assert job.progress is None and f"{unreadable('jobs', job.id)} (its request is no object)" in (job.error or "")
        assert {found.id for found in store.jobs.latest()} == {job.id, whole.id}
        store.jobs.act(job.id, "cancel")
        assert store.jobs.states() == {"cancelled": 1, "queued": 1}


@pytest.mark.parametrize("error", ["a\x00b", "half a pair: \udc80", "ß" * 10_000])
def test_any_text_can_be_the_reason_of_an_end(jobs: Jobs, error: str) -> None:
    lease = running(jobs)
    assert jobs.attempt_failed(lease, error)
    assert jobs.end(taken(jobs, Lease(lease.job, 2)), "failed", error)
    assert jobs.get(lease.job).error
    assert jobs.events(lease.job)[-1].data["detail"]
