"""The laws of the job table: lost workers, fruitless attempts, and what a job reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from job_table import column, edit, finished, noop, running, taken, trials_done, tune
from sqlalchemy import Engine

from swiftopt.core.events import PhaseChanged
from swiftopt.core.requests import JobSpec, Lease
from swiftopt.store import Jobs

SHORT_S = 0.2  # a lease to let run out


def run_out(engine: Engine) -> None:
    """Let every lease end now, as time would."""
    edit(engine, "jobs", "lease_until = 1 WHERE state = 'running'")


def waits(engine: Engine, job: str) -> float:
    """Seconds from now until the job is due; our clock is the database's here."""
    return float(column(engine, "due_at", job)) - time.time()


# --- lost workers, and attempts that come to nothing ------------------------------------------------------------------


def test_only_leases_that_ran_out_expire_and_only_once(jobs: Jobs) -> None:
    kept, lost, renewed = running(jobs), running(jobs, noop(1.0), "w2"), running(jobs, noop(2.0))
    assert jobs.expire() == []
    jobs.lease_s = SHORT_S
    for lease in (lost, renewed):
        jobs.renew(lease)
    time.sleep(SHORT_S + 0.1)
    jobs.lease_s = 30.0
    jobs.renew(renewed)  # late, but nobody has taken the job
    assert jobs.expire() == [(lost, "queued", "the heartbeat of worker w2 is overdue")]
    assert jobs.expire() == []
    job = jobs.get(lost.job)
    assert (job.state, job.attempt, job.worker) == ("queued", 2, None)
    told = jobs.events(lost.job)[-1].data
    assert (told["state"], told["attempt"], told["detail"]) == ("queued", 2, "the heartbeat of worker w2 is overdue")
    assert [jobs.get(lease.job).state for lease in (kept, renewed)] == ["running", "running"]
    assert {(c.name, c.label): c.value for c in jobs.counts()}["reconciled", "expired"] == 1


def test_lease_that_ran_out_expires_once_when_many_look(jobs: Jobs, engine: Engine) -> None:
    leases = [running(jobs, noop(float(n))) for n in range(4)]
    run_out(engine)
    with ThreadPoolExecutor(4) as pool:
        found = [lost.lease for some in pool.map(lambda _: jobs.expire(), range(4)) for lost in some]
    assert sorted(found, key=str) == sorted(leases, key=str)
    assert {jobs.get(lease.job).attempt for lease in leases} == {2}


def test_job_waits_longer_after_each_fruitless_attempt_and_fails_with_the_third(jobs: Jobs, engine: Engine) -> None:
    lease = running(jobs)
    for attempt in (1, 2):
        before = time.time()
        assert jobs.attempt_failed(lease, "RuntimeError: no")
        assert jobs.get(lease.job).state == "queued" and jobs.due() == []
        assert column(engine, "due_at", lease.job) - before > attempt - 0.01  # s: more than 1, then more than 2
        assert waits(engine, lease.job) <= 2 * attempt
        lease = taken(jobs, Lease(lease.job, attempt + 1))
    assert jobs.attempt_failed(lease, "RuntimeError: no")
    job = jobs.get(lease.job)
    assert (job.state, job.error) == ("failed", "RuntimeError: no (3 attempts in a row made no progress)")
    assert job.finished_at is not None and jobs.events(job.id)[-1].data["detail"] == job.error


def test_lost_workers_count_like_failed_attempts(jobs: Jobs, engine: Engine) -> None:
    lease = running(jobs)
    for attempt in (2, 3):
        run_out(engine)
        jobs.expire()
        taken(jobs, Lease(lease.job, attempt), f"w{attempt}")
    run_out(engine)
    assert [(lost.lease, lost.state) for lost in jobs.expire()] == [(Lease(lease.job, 3), "failed")]
    assert jobs.get(lease.job).error == "the heartbeat of worker w3 is overdue (3 attempts in a row made no progress)"


@pytest.mark.parametrize("ended", ["failed", "handed back", "lost"])
def test_attempt_with_a_checkpoint_begins_the_count_anew_however_it_ended(
    jobs: Jobs, engine: Engine, ended: str
) -> None:
    lease = running(jobs)
    for attempt in range(2, 8):  # two fruitless ones, one with a checkpoint, and again
        if attempt % 3 == 1:
            jobs.checkpoint(lease, attempt, [trials_done(attempt)], {})
            if ended == "handed back":
                jobs.hand_back(lease, "its worker is shutting down")
            elif ended == "lost":
                run_out(engine)
                jobs.expire()
            else:
                jobs.attempt_failed(lease, "no")
            assert waits(engine, lease.job) <= 2
        else:
            jobs.attempt_failed(lease, "no")
        lease = taken(jobs, Lease(lease.job, attempt))


def test_hand_backs_do_not_count_and_are_due_at_once(jobs: Jobs, engine: Engine) -> None:
    lease = running(jobs)
    for attempt in range(2, 7):
        assert jobs.hand_back(lease, "its worker is shutting down")
        assert [delivery.attempt for delivery in jobs.due()] == [attempt]
        lease = taken(jobs, Lease(lease.job, attempt))
    assert column(engine, "n_fruitless", lease.job) == 0


LOSSES: dict[str, Callable[[Jobs, Engine, Lease], object]] = {
    "lease ran out": lambda jobs, engine, lease: (run_out(engine), jobs.expire()),
    "failed": lambda jobs, engine, lease: jobs.attempt_failed(lease, "why"),
    "handed back": lambda jobs, engine, lease: jobs.hand_back(lease, "why"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_job_that_is_to_pause_rests_when_it_loses_its_worker(jobs: Jobs, engine: Engine, loss: str) -> None:
    lease = running(jobs)
    jobs.act(lease.job, "pause")
    LOSSES[loss](jobs, engine, lease)
    job = jobs.get(lease.job)
    assert (job.state, job.wanted, job.worker, job.finished_at) == ("paused", None, None, None)
    assert jobs.due() == []
    assert jobs.act(lease.job, "resume").wanted is None


@pytest.mark.parametrize("loss", LOSSES)
def test_job_that_is_to_stop_still_is_when_it_loses_its_worker(jobs: Jobs, engine: Engine, loss: str) -> None:
    lease = running(jobs)
    jobs.act(lease.job, "stop")
    LOSSES[loss](jobs, engine, lease)
    taken(jobs, Lease(lease.job, 2))
    assert jobs.renew(Lease(lease.job, 2)) == "stop"


@pytest.mark.parametrize("loss", LOSSES)
def test_local_run_is_never_due_and_fails_when_its_process_is_lost(jobs: Jobs, engine: Engine, loss: str) -> None:
    lease = jobs.begin_here(JobSpec("tune", None, {"model": "m"}), "here").lease
    assert jobs.due() == [] and jobs.get(lease.job).state == "running"
    jobs.checkpoint(lease, 1, [trials_done(0)], {})
    LOSSES[loss](jobs, engine, lease)
    job = jobs.get(lease.job)
    assert job.state == "failed" and job.error and jobs.due() == []


def test_local_runs_neither_hold_each_other_back_nor_a_submission(jobs: Jobs) -> None:
    spec = tune()
    claims = [jobs.begin_here(replace(spec, queue=None), "here") for _ in range(2)]
    assert claims[0].job.id != claims[1].job.id and claims[0].job.worker == "here"
    assert jobs.submit(spec)[1]


# --- what a job reports -----------------------------------------------------------------------------------------------


def test_events_are_complete_in_order_and_begin_behind_the_number_asked_for(jobs: Jobs) -> None:
    lease, other = running(jobs), running(jobs, noop(1.0))
    jobs.renew(lease, [PhaseChanged("t", "load"), PhaseChanged("t", "accumulate")])
    jobs.checkpoint(other, 1, [trials_done(0)], {})
    jobs.checkpoint(lease, 1, [trials_done(0), finished()], {})
    jobs.end(lease, "succeeded")
    found = jobs.events(lease.job)
    named = [event.type for event in found]
    phases = ["phase_changed"] * 2
    assert named == ["state_changed"] * 2 + phases + ["trials_done", "prompt_finished", "state_changed"]
    assert [event.data["state"] for event in found if event.type == "state_changed"] == [
        "queued",
        "running",
        "succeeded",
    ]
    assert [event.id for event in found] == sorted({event.id for event in found})
    assert jobs.events(lease.job, after=found[2].id) == found[3:]
    assert jobs.events(lease.job, after=found[2].id, limit=2) == found[3:5]
    assert jobs.events(lease.job, after=found[-1].id) == []


def test_outputs_come_in_the_order_of_the_stream(jobs: Jobs) -> None:
    lease = running(jobs)
    given = [finished(2, "c"), finished(0, "a", held_out=True), finished(1, "b"), finished(1, "b#2")]
    jobs.checkpoint(lease, 1, given[:2], {})
    jobs.checkpoint(lease, 2, given[2:], {})
    assert jobs.outputs(lease.job) == [given[1], given[2], given[3], given[0]]
    assert jobs.get(lease.job).n_outputs == 4


def test_counters_lose_nothing_when_two_jobs_write_at_once(jobs: Jobs) -> None:
    specs = [JobSpec("noop", "default", {"model": "m", "n": n}) for n in range(2)]
    leases = [running(jobs, spec) for spec in specs]

    def write(lease: Lease) -> None:
        for n in range(20):  # in either order, as jobs report them
            events = [trials_done(n), finished(n)] if n % 2 else [finished(n), trials_done(n)]
            jobs.checkpoint(lease, n + 1, events, {})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, leases))
    counted = {(c.name, c.model, c.task, c.label): c.value for c in jobs.counts()}
    assert counted.pop(("attempts", "", "", "started")) == 2
    assert counted == {
        ("trials", "m", "t", ""): 40,
        ("trial_seconds", "m", "t", ""): 20,
        ("drafts", "m", "t", ""): 120,
        ("draft_tokens", "m", "t", ""): 200,
        ("accepted_tokens", "m", "t", ""): 120,
        ("accepted_per_position", "m", "t", "0"): 80,
        ("accepted_per_position", "m", "t", "1"): 40,
    }


def test_ends_of_attempts_are_counted_by_kind(jobs: Jobs) -> None:
    lease = running(jobs)
    jobs.hand_back(lease, "why")
    jobs.attempt_failed(taken(jobs, Lease(lease.job, 2)), "why")
    jobs.end(taken(jobs, Lease(lease.job, 3)), "succeeded")
    jobs.act(running(jobs, noop(1.0)).job, "cancel")
    counted = {c.label: c.value for c in jobs.counts() if c.name == "attempts"}
    assert counted == {"started": 4, "handed_back": 1, "failed": 1, "succeeded": 1, "cancelled": 1}
