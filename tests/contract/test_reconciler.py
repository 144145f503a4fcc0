"""The reconciler goes on whatever one row, Redis or the database does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from job_table import noop, running
from sqlalchemy import create_engine
from workers import until

from swiftopt.core.errors import StoreUnavailable
from swiftopt.core.requests import Lease, ServedModel
from swiftopt.store import Store
from swiftopt.worker import attempt
from swiftopt.worker.attempt import EngineJobs
from swiftopt.worker.queue import Reconciler, RedisQueue


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as store:
        yield store


@pytest.fixture
def queue(redis_url: str) -> Iterator[RedisQueue]:
    queue = RedisQueue(redis_url)
    yield queue
    queue.close()


def test_row_with_an_impossible_id_keeps_no_other_job_waiting(store: Store, queue: RedisQueue) -> None:
    spoilt, _ = store.jobs.submit(noop(1))
    engine = create_engine(store.url)
    with engine.begin() as connection:  # events point at the job by its id
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql(f"UPDATE swiftopt_jobs SET id = 'a b' WHERE id = '{spoilt.id}'")
    engine.dispose()
    fine, _ = store.jobs.submit(noop(2))
    Reconciler(store.jobs, queue, "r").step()
    assert queue.waiting("default") == {f"{fine.id}-a1"}


def test_only_one_reconciler_works_at_a_time(store: Store, queue: RedisQueue) -> None:
    store.jobs.submit(noop(1))
    assert store.jobs.lock("reconciler", "another", 60)
    Reconciler(store.jobs, queue, "r").step()
    assert queue.waiting("default") == set()


def test_redis_that_does_not_answer_is_logged_before_a_job_is_due(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    queue = RedisQueue("redis://127.0.0.1:1/0")
    Reconciler(store.jobs, queue, "r").try_step()
    assert "reconciler=waiting reason='Redis at redis://127.0.0.1:1/0" in caplog.text


def test_an_outage_is_logged_at_its_beginning_and_its_end(
    store: Store, queue: RedisQueue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    reconciler = Reconciler(store.jobs, queue, "r")
    reconciler.try_step()
    with monkeypatch.context() as outage:
        outage.setattr(reconciler, "_queue", RedisQueue("redis://127.0.0.1:1/0"))
        for _ in range(3):
            reconciler.try_step()
    reconciler.try_step()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("reconciler=")]
    assert [line.split()[0] for line in lines] == ["reconciler=waiting", "reconciler=working"]
    assert lines[1].endswith(" s")


def test_the_end_of_an_outage_is_not_logged_by_a_process_that_lost_the_lock(
    store: Store, queue: RedisQueue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    reconciler = Reconciler(store.jobs, queue, "r")
    with monkeypatch.context() as outage:
        outage.setattr(reconciler, "_queue", RedisQueue("redis://127.0.0.1:1/0"))
        reconciler.try_step()
    store.jobs.lock("reconciler", "r", 0.0)
    assert store.jobs.lock("reconciler", "another", 60)
    reconciler.try_step()
    store.jobs.lock("reconciler", "another", 0.0)
    reconciler.try_step()
    assert [message.split()[0] for message in caplog.messages] == ["reconciler=waiting"]


def test_engine_ends_lost_attempts_and_keeps_nobody_from_delivering(
    store: Store, queue: RedisQueue, tmp_path: Path
) -> None:
    """An engine knows no Redis: what waits for a delivery would wait for as long as the engine runs."""
    store.jobs.lease_s = -1.0
    lost = running(store.jobs, noop(1))
    engine = EngineJobs(ServedModel("m", str(tmp_path)), store, cast(Any, None), nullcontext)
    try:
        until(lambda: store.jobs.get(lost.job).state == "queued", 10)
        waits, _ = store.jobs.submit(noop(2))
        Reconciler(store.jobs, queue, "r").step()
        assert queue.waiting("default") == {f"{waits.id}-a1"}
    finally:
        engine.ending.set()
        engine.close()


def test_leases_are_spared_after_an_outage_of_the_database(
    store: Store, queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.jobs.lease_s = -1.0  # over before it began, as after an outage that was longer than a lease
    lease = running(store.jobs, noop(1))
    reconciler = Reconciler(store.jobs, queue, "r")
    with monkeypatch.context() as away:
        away.setattr(store.jobs, "due", _away)
        away.setattr(store.jobs, "expire", _away)
        reconciler.try_step()
    reconciler.try_step()
    assert store.jobs.get(lease.job).state == "running"
    Reconciler(store.jobs, queue, "r").try_step()  # one that saw no outage
    assert store.jobs.get(lease.job).state == "queued"


def test_engine_spares_leases_after_an_outage_of_the_database(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "HOLD_S", 0.03)
    monkeypatch.setattr(attempt, "LOOK_S", 0.01)
    store.jobs.lease_s = -1.0
    lease, lock, asked = running(store.jobs, noop(1)), store.jobs.lock, list[str]()

    def away_at_first(name: str, *values: Any) -> bool:
        asked.append(name)
        return _away() if len(asked) == 1 else lock(name, *values)

    monkeypatch.setattr(store.jobs, "lock", away_at_first)
    engine = EngineJobs(ServedModel("m", str(tmp_path)), store, cast(Any, None), nullcontext)
    try:
        until(lambda: len(asked) > 5, 10)
        assert store.jobs.get(lease.job).state == "running" and "reconciler" not in asked
    finally:
        engine.ending.set()
        engine.close()


def test_attempt_that_waits_is_delivered_once(store: Store, queue: RedisQueue) -> None:
    job, _ = store.jobs.submit(noop(1))
    reconciler = Reconciler(store.jobs, queue, "r")
    for _ in range(3):
        reconciler.step()
    assert queue.depth() == 1 and store.jobs.get(job.id).attempt == 1
    assert store.jobs.claim(Lease(job.id, 1), "w") is not None


def test_attempt_that_workers_leave_to_an_engine_is_not_lost_where_one_has_just_taken_it(
    store: Store, queue: RedisQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has its delivery once."""
    caplog.set_level("INFO", "swiftopt.worker.queue")
    monkeypatch.setattr("swiftopt.worker.queue.CLAIM_S", 0.1)
    job, _ = store.jobs.submit(noop(1))
    reconciler, known = Reconciler(store.jobs, queue, "r"), queue._queue("default")
    for _ in range(3):
        reconciler.step()
        assert queue.depth() == 1
        known.empty()  # a worker has taken and left it
        time.sleep(0.05)
    reconciler.step()
    assert sum("delivered job=" in message for message in caplog.messages) == 1
    queue.connection.delete(known.key)  # one has just taken it
    reconciler.step()
    assert store.jobs.get(job.id).attempt == 1
    time.sleep(0.15)  # and died
    reconciler.step()
    assert store.jobs.get(job.id).attempt == 2


def _away() -> Any:
    raise StoreUnavailable("the database is away")
