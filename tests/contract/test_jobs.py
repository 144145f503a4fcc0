"""The laws of the job table: who gets a job, and what an attempt may write."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, TypeVar

import pytest
from job_table import column, dump, finished, noop, running, taken, task_finished, trials_done, tune
from sqlalchemy import Engine, event

from swiftopt.core.errors import Conflict, LeaseLost, NotFound, StoreError
from swiftopt.core.events import JobState, PhaseChanged, TaskFinished
from swiftopt.core.requests import Delivery, Job, JobSpec, Lease
from swiftopt.store import Jobs, Store

T = TypeVar("T")


def at_once(n: int, work: Callable[[int], T]) -> list[T]:
    """The work of `n` threads that begin together."""
    together = Barrier(n)

    def begin(i: int) -> T:
        together.wait(30)
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(begin, range(n)))


# --- submission -------------------------------------------------------------------------------------------------------


def test_submitted_job_is_queued_with_its_request_and_stream(jobs: Jobs) -> None:
    job, is_new = jobs.submit(tune(lines='{"id": "ä"}\n'))
    assert is_new and jobs.get(job.id) == job
    assert (job.state, job.attempt, job.queue, job.kind, job.model) == ("queued", 1, "default", "tune", "m")
    assert (job.request, job.stream, job.n_prompts) == ({"model": "m", "stream": "s.jsonl"}, "5" * 64, 1)
    assert (job.wanted, job.worker, job.error, job.started_at, job.finished_at) == (None,) * 5
    assert jobs.stream("5" * 64) == '{"id": "ä"}\n'
    claim = jobs.claim(Lease(job.id, 1), "w1")
    assert claim is not None and (claim.lines, claim.n_checkpoints, claim.snapshot) == ('{"id": "ä"}\n', 0, None)
    assert claim.job == jobs.get(job.id) and claim.job.worker == "w1" and claim.job.started_at is not None


def test_equal_submission_is_the_same_job_in_each_unfinished_state(jobs: Jobs) -> None:
    job, _ = jobs.submit(noop())
    assert jobs.submit(noop()) == (job, False)
    for change in (lambda: jobs.claim(Lease(job.id, 1), "w1"), lambda: jobs.end(Lease(job.id, 1), "paused")):
        change()
        assert jobs.submit(noop()) == (jobs.get(job.id), False)
    assert jobs.get(job.id).state == "paused" and len(jobs.latest()) == 1


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_equal_submission_is_a_new_job_when_the_first_has_ended(jobs: Jobs, state: str) -> None:
    lease = running(jobs)
    assert jobs.end(lease, state)  # type: ignore[arg-type]
    job, is_new = jobs.submit(noop())
    assert is_new and job.id != lease.job


def test_job_of_another_request_queue_kind_or_stream_is_another_job(jobs: Jobs) -> None:
    specs = [noop(), noop(1.0), noop(queue="other"), tune(), tune(stream="6" * 64), tune("other")]
    assert len({jobs.submit(spec)[0].id for spec in specs}) == 6


def test_name_of_the_file_and_its_output_do_not_make_another_job(jobs: Jobs) -> None:
    same = [JobSpec("tune", "default", {"model": "m", "stream": path, "out": path}, "5" * 64) for path in "ab"]
    assert len({jobs.submit(spec)[0].id for spec in same}) == 1


def test_hundred_equal_submissions_at_once_are_one_job(jobs: Jobs) -> None:
    found = at_once(16, lambda _: [jobs.submit(tune()) for _ in range(7)])
    answers = [answer for some in found for answer in some]
    assert len(answers) >= 100 and len({job.id for job, _ in answers}) == 1
    assert [is_new for _, is_new in answers].count(True) == 1
    assert len(jobs.latest()) == 1


def test_hundred_equal_submissions_from_several_processes_are_one_job(jobs: Jobs, database_url: str) -> None:
    script = """
import sys
from concurrent.futures import ThreadPoolExecutor
from swiftopt.core.requests import JobSpec
from swiftopt.store import Store
with Store.open(sys.argv[1]) as store, ThreadPoolExecutor(5) as pool:
    print("ready", flush=True)
    input()  # until all processes are
    submit = lambda _: store.jobs.submit(JobSpec("noop", "default", {"seconds": 1.0}))[0].id
    print(*pool.map(submit, range(34)))
"""
    start = partial(subprocess.Popen, [sys.executable, "-c", script, database_url], text=True)
    processes = [start(stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    ids = [job for some in told for job in some]
    assert len(ids) == 102 and set(ids) == {jobs.latest()[0].id} and len(jobs.latest()) == 1


def test_idempotency_key_names_one_job_even_after_its_end(jobs: Jobs) -> None:
    job, _ = jobs.submit(noop(key="k"))
    assert jobs.submit(noop(key="k")) == (job, False)
    jobs.act(job.id, "cancel")
    assert jobs.submit(noop(key="k")) == (jobs.get(job.id), False)
    assert jobs.submit(noop())[1]


def test_idempotency_key_is_refused_for_other_values(jobs: Jobs) -> None:
    job, _ = jobs.submit(noop(key="k"))
    with pytest.raises(Conflict, match=f"key 'k' belongs to job {job.id} with another request: use a new key"):
        jobs.submit(noop(1.0, key="k"))
    assert len(jobs.latest()) == 1


def test_idempotency_key_makes_one_job_when_used_by_many_at_once(jobs: Jobs) -> None:
    found = at_once(8, lambda _: jobs.submit(noop(key="k"))[0].id)
    assert len(set(found)) == len(jobs.latest()) == 1


def test_unknown_job_is_not_found_and_the_nearest_is_named(jobs: Jobs) -> None:
    with pytest.raises(NotFound, match="no job 'abc' is stored: `swiftopt jobs list` shows them"):
        jobs.get("abc")
    job, _ = jobs.submit(noop())
    near = job.id[:-1] + ("0" if job.id[-1] != "0" else "1")
    for call in (jobs.get, jobs.events, jobs.outputs, lambda name: jobs.act(name, "cancel")):
        with pytest.raises(NotFound, match=rf"\(the nearest is {job.id}\)"):
            call(near)
        for odd in ("\x00", "\udcff", "ä"):
            with pytest.raises(NotFound):
                call(odd)


def test_latest_is_newest_first_of_a_state_and_no_more_than_asked(jobs: Jobs, engine: Engine) -> None:
    ids = [jobs.submit(noop(float(n)))[0].id for n in range(3)]
    for n, job in enumerate(ids):
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"UPDATE swiftopt_jobs SET created_at = '2026-11-21T00:00:0{n}Z' WHERE id = '{job}'"
            )
    jobs.act(ids[1], "cancel")
    assert [job.id for job in jobs.latest()] == ids[::-1]
    assert [job.id for job in jobs.latest(limit=1)] == ids[2:]
    assert [job.id for job in jobs.latest("queued")] == [ids[2], ids[0]]
    assert jobs.states() == {"queued": 2, "cancelled": 1}


# --- who gets a job ---------------------------------------------------------------------------------------------------


def test_one_of_twenty_claims_at_once_gets_the_job(jobs: Jobs) -> None:
    job, _ = jobs.submit(noop())
    claims = at_once(20, lambda i: jobs.claim(Lease(job.id, 1), f"w{i}"))
    (mine,) = [claim for claim in claims if claim is not None]
    assert jobs.get(job.id) == mine.job
    assert [event.data["state"] for event in jobs.events(job.id)] == ["queued", "running"]


def test_claim_of_an_attempt_that_is_not_queued_gets_nothing(jobs: Jobs) -> None:
    job, _ = jobs.submit(noop())
    assert jobs.claim(Lease(job.id, 2), "w1") is None
    assert jobs.claim(Lease("abc", 1), "w1") is None
    jobs.act(job.id, "pause")
    assert jobs.claim(Lease(job.id, 1), "w1") is None
    assert jobs.get(job.id).state == "paused"


def test_claim_brings_what_earlier_attempts_left(jobs: Jobs) -> None:
    lease = running(jobs)
    jobs.checkpoint(lease, 1, [trials_done(1, 0), trials_done(0, task="u"), finished()], {"at": 1})
    jobs.hand_back(lease, "its worker is shutting down")
    claim = jobs.claim(Lease(lease.job, 2), "w2")
    assert claim is not None and (claim.n_checkpoints, claim.snapshot) == (1, {"at": 1})
    found = {task: tuple(trials) for task, trials in claim.trials.items()}
    assert found == {"t": trials_done(0, 1).trials, "u": trials_done(0).trials}
    assert claim.job.n_outputs == 1 and claim.job.attempt == 2


def test_poll_sees_the_tuning_attempts_of_a_queue_that_have_become_due_since(jobs: Jobs) -> None:
    first, other = (jobs.submit(tune(model, stream=model * 64))[0] for model in "ab")
    jobs.submit(noop())
    jobs.submit(tune("c", stream="c" * 64, queue="large"))
    seen = jobs.due_tunings("default", 0.0)
    assert [(each.delivery.job, each.request["model"]) for each in seen] == [(first.id, "a"), (other.id, "b")]
    assert [each.delivery.job for each in jobs.due_tunings("default", seen[1].due_at)] == [other.id]
    assert jobs.due("large", 1) and [each.job for each in jobs.due("default", 1)] == [first.id]


def test_due_lists_queued_attempts_by_the_time_that_they_are_due(jobs: Jobs, engine: Engine) -> None:
    ids = [jobs.submit(noop(float(n)))[0].id for n in range(4)]
    claimed = taken(jobs, Lease(ids[0], 1))
    with engine.begin() as connection:
        for job, due_at in zip(ids[1:], (20, 10, 1e12), strict=True):  # the last one in the distant future
            connection.exec_driver_sql(f"UPDATE swiftopt_jobs SET due_at = {due_at} WHERE id = '{job}'")
    assert jobs.due() == [Delivery(ids[2], 1, "default"), Delivery(ids[1], 1, "default")]
    jobs.hand_back(claimed, "its worker is shutting down")
    assert jobs.due()[-1] == Delivery(ids[0], 2, "default")


def test_redelivery_replaces_a_queued_attempt_once_and_never_a_running_one(jobs: Jobs) -> None:
    job, _ = jobs.submit(noop())
    (lost,) = jobs.due()
    new = Delivery(job.id, 2, "default")
    assert at_once(4, lambda _: jobs.redeliver(lost)).count(new) == 1
    assert jobs.due() == [new]
    assert jobs.claim(Lease(job.id, 1), "w1") is None
    taken(jobs, Lease(job.id, 2))
    assert jobs.redeliver(new) is None
    assert {(c.name, c.label): c.value for c in jobs.counts()}["reconciled", "redelivered"] == 1


def test_lock_has_one_owner_and_ends_by_time(jobs: Jobs) -> None:
    owners = at_once(8, lambda i: jobs.lock("reconciler", f"o{i}", 30.0))
    assert owners.count(True) == 1
    mine = f"o{owners.index(True)}"
    assert jobs.lock("another", "o9", 0.2)
    assert not jobs.lock("reconciler", "o9", 30.0)
    assert jobs.lock("reconciler", mine, 0.2)  # its owner keeps it, for as long as it says now
    assert not jobs.lock("another", mine, 0.2)
    time.sleep(0.3)
    assert jobs.lock("reconciler", "o9", 30.0)
    assert not jobs.lock("reconciler", mine, 30.0)


# --- what an attempt writes -------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Jobs, Lease], object]] = {
    "renew": lambda jobs, lease: jobs.renew(lease),
    "peek": lambda jobs, lease: jobs.peek(lease),
    "renew with progress": lambda jobs, lease: jobs.renew(lease, progress={"type": "progress", "tokens": 3}),
    "renew with events": lambda jobs, lease: jobs.renew(lease, [PhaseChanged("t", "load")]),
    "checkpoint": lambda jobs, lease: jobs.checkpoint(lease, 9, [trials_done(7), finished(7)], {"at": 9}, {"n": 1}),
    "checkpoint that was written": lambda jobs, lease: jobs.checkpoint(lease, 1, [trials_done(7)], {"at": 9}),
    "finish_task": lambda jobs, lease: jobs.finish_task(
        lease, 10, task_finished(lease.job), "swift", "always", {"at": 9}
    ),
}
ENDS: dict[str, Callable[[Jobs, Lease], JobState | None]] = {
    "end": lambda jobs, lease: jobs.end(lease, "succeeded"),
    "end failed": lambda jobs, lease: jobs.end(lease, "failed", "why"),
    "hand_back": lambda jobs, lease: jobs.hand_back(lease, "why"),
    "attempt_failed": lambda jobs, lease: jobs.attempt_failed(lease, "why"),
}
LOSSES: dict[str, Callable[[Jobs, Lease], object]] = {
    "handed back": lambda jobs, lease: jobs.hand_back(lease, "why"),
    "replaced": lambda jobs, lease: jobs.hand_back(lease, "why") and taken(jobs, Lease(lease.job, 2), "w2"),
    "cancelled": lambda jobs, lease: jobs.act(lease.job, "cancel"),
    "paused": lambda jobs, lease: jobs.end(lease, "paused"),
    "succeeded": lambda jobs, lease: jobs.end(lease, "succeeded"),
    "failed, then retried": lambda jobs, lease: jobs.end(lease, "failed", "why") and jobs.act(lease.job, "retry"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_stale_attempt_cannot_write(jobs: Jobs, engine: Engine, loss: str) -> None:
    lease = running(jobs)
    jobs.checkpoint(lease, 1, [trials_done(0), finished()], {"at": 1})
    LOSSES[loss](jobs, lease)
    before = dump(engine)
    for write in WRITES.values():
        with pytest.raises(LeaseLost, match=f"attempt 1 of job {lease.job} was replaced, or the job has ended"):
            write(jobs, lease)
    assert [end(jobs, lease) for end in ENDS.values()] == [None] * len(ENDS)
    assert dump(engine) == before


def test_latest_attempt_can_write_what_a_stale_one_cannot(jobs: Jobs) -> None:
    lease = running(jobs)
    for write in WRITES.values():
        write(jobs, lease)
    for n, end in enumerate(ENDS.values()):
        assert end(jobs, running(jobs, noop(n + 1.0)))


def test_renewal_tells_what_the_job_is_asked_to_do(jobs: Jobs, engine: Engine) -> None:
    lease = running(jobs)
    assert jobs.peek(lease) is None
    jobs.act(lease.job, "stop")
    before = dump(engine)
    assert jobs.peek(lease) == "stop"
    assert dump(engine) == before
    for write in list(WRITES.values())[:5]:
        assert write(jobs, lease) == "stop"


def test_a_look_each_second_reads_no_checkpoint(jobs: Jobs) -> None:
    """One may hold a megabyte, which the process that decodes would parse each time."""
    lease, statements = running(jobs), list[str]()
    event.listen(jobs.engine, "before_cursor_execute", lambda *values: statements.append(values[2]))
    assert jobs.peek(lease) is None and jobs.renew(lease) is None
    assert len(statements) >= 2 and not any("snapshot" in statement for statement in statements)


READS: dict[str, Callable[[Jobs, str], object]] = {  # by the index that finds a few among many
    "sqlite_autoindex_swiftopt_jobs_1": lambda jobs, job: jobs.get(job),
    "ix_swiftopt_jobs_created_at": lambda jobs, _: jobs.latest(None, 50, 100),
    "ix_swiftopt_jobs_state": lambda jobs, _: jobs.latest("running", 50),
    "ix_swiftopt_events_type": lambda jobs, job: (jobs.newest_events(job, 5, "state_changed"), jobs.evidence(job, "t")),
    "uq_swiftopt_jobs_fingerprint": lambda jobs, _: jobs.submit(noop()),
    "ix_swiftopt_jobs_due": lambda jobs, _: (jobs.due("default", 1), jobs.due_tunings("default", 1.8e9)),
}


@pytest.mark.parametrize("index", READS)
def test_jobs_and_events_are_found_by_an_index_and_without_the_checkpoint(sqlite_url: str, index: str) -> None:
    with Store.open(sqlite_url) as store:  # PostgreSQL scans what is small
        lease, asked = running(store.jobs), list[Any]()
        event.listen(store.engine, "before_cursor_execute", lambda *values: asked.append(values[2:4]))
        READS[index](store.jobs, lease.job)
        queries = [(words, values) for words, values in asked if re.search("FROM swiftopt_(jobs|events)", words)]
        with store.engine.connect() as connection:
            for words, values in queries:
                steps = [step[3] for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {words}", values)]
                assert "snapshot" not in words and index in steps[0] and "ORDER BY" not in steps[-1], steps
    assert queries


def test_every_write_renews_the_lease(jobs: Jobs, engine: Engine) -> None:
    lease = running(jobs)
    writes = [write for name, write in WRITES.items() if name not in ("peek", "checkpoint that was written")]
    for n, write in enumerate(writes):
        before = column(engine, "lease_until", lease.job)
        time.sleep(0.01)
        write(jobs, lease)
        assert column(engine, "lease_until", lease.job) > before, n


def test_progress_is_shown_and_is_no_event(jobs: Jobs) -> None:
    lease = running(jobs)
    n_events = len(jobs.events(lease.job))
    jobs.renew(lease, progress={"tokens": 3})
    assert jobs.get(lease.job).progress == {"tokens": 3}
    jobs.checkpoint(lease, 1, [], None, {"tokens": 5})
    assert jobs.get(lease.job).progress == {"tokens": 5}
    jobs.checkpoint(lease, 2, [], None)
    assert jobs.get(lease.job).progress == {"tokens": 5}
    assert len(jobs.events(lease.job)) == n_events


@pytest.mark.parametrize("again", [finished(3, "p"), trials_done(0)])
def test_checkpoint_is_all_or_nothing_and_no_completion_comes_twice(jobs: Jobs, engine: Engine, again: object) -> None:
    lease = running(jobs)
    jobs.checkpoint(lease, 1, [trials_done(0), finished(3, "p")], {"at": 1})
    before = dump(engine)
    with pytest.raises(StoreError):
        jobs.checkpoint(lease, 2, [trials_done(1), finished(4, "q"), again], {"at": 2}, {"n": 2})  # type: ignore[list-item]
    assert dump(engine) == before
    jobs.checkpoint(lease, 2, [trials_done(1), finished(3, "p#2")], {"at": 2})  # the prompt's second turn
    assert [event.prompt.id for event in jobs.outputs(lease.job)] == ["p", "p#2"]


def test_checkpoint_of_a_number_is_written_once(jobs: Jobs, engine: Engine) -> None:
    lease = running(jobs)
    jobs.checkpoint(lease, 1, [trials_done(0), finished()], {"at": 1}, {"n": 1})
    before = dump(engine)
    jobs.checkpoint(lease, 1, [trials_done(0), finished()], {"at": 1}, {"n": 1})
    assert dump(engine) == before
    jobs.checkpoint(lease, 2, [trials_done(1)], {"at": 2})
    assert jobs.get(lease.job).n_outputs == 1 and column(engine, "n_checkpoints", lease.job) == 2


def test_finished_task_is_stored_once_with_its_alias_event_and_job(store: Store, jobs: Jobs, engine: Engine) -> None:
    lease = running(jobs)
    stored = jobs.finish_task(lease, 1, task_finished(lease.job), "swift", "always", {"at": 1})
    before = dump(engine)
    assert jobs.finish_task(lease, 1, task_finished(lease.job), "swift", "always", {"at": 1}) == stored
    assert dump(engine) == before
    assert isinstance(stored, TaskFinished) and stored.record.version == 1 and stored.record.job == lease.job
    assert jobs.get(lease.job).layer_sets == (stored.record,)
    assert store.lookup("m", "t").plan.layer_set == stored.record
    assert jobs.events(lease.job)[-1].type == "task_finished"


def test_task_that_is_not_promoted_is_found_only_where_nothing_was(store: Store, jobs: Jobs) -> None:
    lease = running(jobs)
    for number in (1, 2):
        jobs.finish_task(lease, number, task_finished(lease.job), "swift", "if none", {})
    assert store.lookup("m", "t").version == 1
    assert [record.version for record in jobs.get(lease.job).layer_sets] == [1, 2]
    jobs.finish_task(lease, 3, task_finished(lease.job), "swift", "always", {})
    assert store.lookup("m", "t").version == 3


def test_jobs_are_listed_with_their_own_sets_and_outputs(jobs: Jobs) -> None:
    first, second = running(jobs), running(jobs, noop(1.0))
    jobs.finish_task(first, 1, task_finished(first.job), "swift", "always", {})
    jobs.checkpoint(second, 1, [finished()], None)
    found: dict[str, Job] = {job.id: job for job in jobs.latest()}
    assert [(len(found[lease.job].layer_sets), found[lease.job].n_outputs) for lease in (first, second)] == [
        (1, 0),
        (0, 1),
    ]


def test_evidence_of_a_task_is_its_end_and_the_held_out_prompts_before_it(jobs: Jobs) -> None:
    lease = running(jobs)
    assert jobs.evidence(lease.job, "t") == (None, [])
    held_out = [finished(place, f"p{place}", held_out=True) for place in (3, 4)]
    jobs.checkpoint(lease, 1, [finished(0, held_out=True), finished(1), *held_out], None)
    stored = jobs.finish_task(lease, 2, task_finished(lease.job), "swift", "always", {})
    found, prompts = jobs.evidence(lease.job, "t")
    assert found is not None and (found.verdict, found.record) == (stored.verdict, stored.record)
    assert [event.prompt.id for event in prompts] == ["p3", "p4"], "not those of an earlier verdict"
    assert jobs.evidence(lease.job, "other") == (None, [])
