"""One row that nobody can read costs one job: its claim ends it, and the reconciler and the lists go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from swiftopt.cli.backend import Backend
from swiftopt.core.errors import ModelNotFound
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.requests import JobSpec, Lease, TuneRequest
from swiftopt.store import Store
from swiftopt.tasks.tune import run_tuning


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as store:  # PostgreSQL takes no text that is no JSON
        yield store


@pytest.fixture
def engine(store: Store) -> Iterator[Engine]:
    engine = create_engine(store.url)
    yield engine
    engine.dispose()


def edit(engine: Engine, table: str, values: str, job: str) -> None:
    column = "job_id" if table == "layer_sets" else "id"
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE swiftopt_{table} SET {values} WHERE {column} = :job"), {"job": job})


def reason(engine: Engine, job: str) -> str:
    """Of the job's last change, whose row the store cannot read."""
    with engine.connect() as connection:
        query = "SELECT data FROM swiftopt_events WHERE job_id = :job ORDER BY id DESC"
        return str(connection.execute(text(query), {"job": job}).scalar())


def noop(store: Store, n: int = 0) -> str:
    return store.jobs.submit(JobSpec("noop", "default", {"n": n}))[0].id


@pytest.mark.parametrize("column", ["request", "snapshot"])
def test_job_whose_row_is_no_json_fails_at_its_claim_and_is_not_due_again(
    store: Store, engine: Engine, column: str
) -> None:
    job = noop(store)
    edit(engine, "jobs", f"{column} = '{{bad'", job)
    assert store.jobs.claim(Lease(job, 1), "w1") is None
    assert store.jobs.states() == {"failed": 1} and store.jobs.due() == []
    assert f"row {job} of the table swiftopt_jobs cannot be read (its {column} is no object)" in reason(engine, job)


def test_row_that_is_no_json_keeps_no_other_job_from_being_taken_from_a_lost_worker(
    store: Store, engine: Engine
) -> None:
    broken, whole = noop(store, 1), noop(store, 2)
    for job in (broken, whole):
        store.jobs.claim(Lease(job, 1), "w1")
        edit(engine, "jobs", "lease_until = 0", job)
    edit(engine, "jobs", "request = '{bad', snapshot = '{bad'", broken)
    assert {lost.lease.job for lost in store.jobs.expire()} == {broken, whole}
    assert store.jobs.states() == {"queued": 2}


@pytest.mark.parametrize("values", ["skip_attn = '[0, 99]'", "skip_mlp = '3'", "skip_attn = '[\"a\"]'"])
def test_layer_set_that_was_changed_hides_no_job_and_stops_none(store: Store, engine: Engine, values: str) -> None:
    job, other = noop(store, 1), noop(store, 2)
    store.add_layer_set(LayerSetRecord("m", "t", LayerSet(8, frozenset({3}), frozenset()), job=job))
    edit(engine, "layer_sets", values, job)
    assert store.jobs.get(job).layer_sets == ()
    assert {found.id for found in store.jobs.latest()} == {job, other}
    assert store.jobs.claim(Lease(job, 1), "w1") is not None


@pytest.mark.parametrize("values", ["skip_attn = '[0, 99]'", "skip_mlp = '3'", "prompt_state = 'abc'"])
def test_layer_set_that_cannot_be_read_is_no_known_set(
    store: Store, engine: Engine, caplog: pytest.LogCaptureFixture, values: str
) -> None:
    job, whole = noop(store), LayerSet(8, frozenset({4}), frozenset())
    for own, of_job in ((LayerSet(8, frozenset({3}), frozenset()), job), (whole, None)):
        store.add_layer_set(LayerSetRecord("m", "t", own, fingerprint="f" * 16, job=of_job, prompt_state=(1.0, 0.0)))
    edit(engine, "layer_sets", values, job)
    assert [known.layer_set for known in store.known_sets("f" * 16)] == [whole]
    assert "version=1 task=t" in caplog.text


def killed_here(store: Store, engine: Engine) -> str:
    """A local run whose process is gone."""
    job = store.jobs.begin_here(JobSpec("tune", None), "here").job.id
    edit(engine, "jobs", "lease_until = 0", job)
    return job


def test_local_run_that_was_killed_is_ended_by_the_next_one(store: Store, engine: Engine, tmp_path: Path) -> None:
    job = killed_here(store, engine)
    stream = tmp_path / "s.jsonl"
    stream.write_text('{"prompt": "a b"}\n')
    with pytest.raises(ModelNotFound):
        run_tuning(TuneRequest("org/not-here", str(stream), out=str(tmp_path / "out")), store, lambda event: None)
    assert store.jobs.get(job).state == "failed"


def test_local_run_that_was_killed_is_not_listed_as_running(store: Store, engine: Engine) -> None:
    job = killed_here(store, engine)
    with Backend(db=store.url).open() as client:
        assert [(found.id, found.state) for found in client.jobs.latest()] == [(job, "failed")]
