"""The laws of the job table: what people ask of a job."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from job_table import dump, finished, noop, running, taken, trials_done, tune
from sqlalchemy import Engine

from swiftopt.core.errors import Conflict
from swiftopt.core.requests import VERBS, Job, JobSpec, Lease, Verb
from swiftopt.store import Jobs

# --- what people ask of a job -----------------------------------------------------------------------------------------


def conditions(jobs: Jobs) -> dict[str, str]:
    """A job in each condition that a verb may meet it in; "+" is one with a checkpoint."""

    def made(n: int, *ends: Callable[[Lease], object], checkpoint: bool = False) -> str:
        lease = running(jobs, noop(float(n)))
        if checkpoint:
            jobs.checkpoint(lease, 1, [trials_done(0)], {})
        for end in ends:
            end(lease)
        return lease.job

    return {
        "queued": jobs.submit(noop())[0].id,
        "queued+": made(1, lambda lease: jobs.hand_back(lease, "why"), checkpoint=True),
        "running": made(2),
        "paused": made(3, lambda lease: jobs.end(lease, "paused")),
        "paused+": made(4, lambda lease: jobs.end(lease, "paused"), checkpoint=True),
        "succeeded": made(5, lambda lease: jobs.end(lease, "succeeded")),
        "failed": made(6, lambda lease: jobs.end(lease, "failed", "why")),
        "cancelled": made(7, lambda lease: jobs.act(lease.job, "cancel")),
        "local": jobs.begin_here(JobSpec("tune", None, {"model": "m"}), "here").job.id,
    }


AGAIN, DONE, ENDED, NOTHING = "`retry` restarts it", "it is done", "it has already ended", "cancel it instead"
NOT_YET = "it has not ended yet"

# What a job becomes: (state, what it is asked to do, whether it is a new attempt), or the end of the refusal.
Outcome = tuple[str, str | None, bool] | str
CANCELLED: Outcome = ("cancelled", None, False)
MATRIX: dict[Verb, dict[str, Outcome]] = {
    "pause": {
        "queued": ("paused", None, False),
        "queued+": ("paused", None, False),
        "running": ("running", "pause", False),
        "paused": ("paused", None, False),
        "paused+": ("paused", None, False),
        "succeeded": DONE,
        "failed": AGAIN,
        "cancelled": AGAIN,
        "local": "stop or cancel it",
    },
    "resume": {
        "queued": ("queued", None, False),
        "queued+": ("queued", None, False),
        "running": ("running", None, False),
        "paused": ("queued", None, True),
        "paused+": ("queued", None, True),
        "succeeded": DONE,
        "failed": AGAIN,
        "cancelled": AGAIN,
        "local": ("running", None, False),
    },
    "stop": {
        "queued": NOTHING,
        "queued+": ("queued", "stop", False),
        "running": ("running", "stop", False),
        "paused": NOTHING,
        "paused+": ("queued", "stop", True),
        "succeeded": ENDED,
        "failed": ENDED,
        "cancelled": ENDED,
        "local": ("running", "stop", False),
    },
    "cancel": {
        "queued": CANCELLED,
        "queued+": CANCELLED,
        "running": CANCELLED,
        "paused": CANCELLED,
        "paused+": CANCELLED,
        "succeeded": ENDED,
        "failed": ENDED,
        "cancelled": CANCELLED,
        "local": CANCELLED,
    },
    "retry": {
        "queued": NOT_YET,
        "queued+": NOT_YET,
        "running": NOT_YET,
        "paused": NOT_YET,
        "paused+": NOT_YET,
        "succeeded": "submit it again to repeat the tuning",
        "failed": ("queued", None, True),
        "cancelled": ("queued", None, True),
        "local": NOT_YET,
    },
}
DONE_WORD = {"pause": "paused", "resume": "resumed", "stop": "stopped", "cancel": "cancelled", "retry": "retried"}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_does_or_refuses_what_the_matrix_says_and_twice_is_as_once(jobs: Jobs, engine: Engine, verb: Verb) -> None:
    found = conditions(jobs)
    assert found.keys() == MATRIX[verb].keys()
    for condition, job in found.items():
        before, outcome = jobs.get(job), MATRIX[verb][condition]
        if isinstance(outcome, str):
            refused(jobs, engine, before, verb, outcome)
            continue
        after = jobs.act(job, verb)
        assert (after.state, after.wanted, after.attempt - before.attempt) == outcome, condition
        assert jobs.get(job) == after
        rows = dump(engine)
        if verb == "retry":
            refused(jobs, engine, after, verb, NOT_YET)
        else:
            assert jobs.act(job, verb) == after
        assert dump(engine) == rows, condition


def refused(jobs: Jobs, engine: Engine, job: Job, verb: Verb, why: str) -> None:
    """The verb is refused in one sentence that names the job and its state, and changes nothing."""
    rows = dump(engine)
    with pytest.raises(Conflict) as caught:
        jobs.act(job.id, verb)
    told = str(caught.value)
    assert told.startswith(f"job {job.id} is {job.state} and cannot be {DONE_WORD[verb]}: ") and told.endswith(why)
    assert dump(engine) == rows


def test_job_can_be_taken_again_after_each_way_back_into_the_queue(jobs: Jobs) -> None:
    found = conditions(jobs)
    for verb, condition in (("resume", "paused"), ("stop", "paused+"), ("retry", "failed"), ("retry", "cancelled")):
        job = jobs.act(found[condition], verb)  # type: ignore[arg-type]
        assert (job.id, job.attempt) in {(delivery.job, delivery.attempt) for delivery in jobs.due()}
        assert (job.error, job.finished_at) == (None, None)
        taken(jobs, Lease(job.id, job.attempt))
        assert jobs.end(Lease(job.id, job.attempt), "succeeded")


def test_pause_is_taken_back_by_resume_before_the_worker_heard_of_it(jobs: Jobs) -> None:
    lease = running(jobs)
    jobs.act(lease.job, "pause")
    assert jobs.act(lease.job, "resume").wanted is None
    assert jobs.renew(lease) is None


def test_retry_gives_three_new_attempts_and_keeps_the_checkpoints(jobs: Jobs) -> None:
    lease = running(jobs)
    jobs.checkpoint(lease, 1, [trials_done(0), finished()], {"at": 1})
    for attempt in (2, 3, 4):
        jobs.attempt_failed(lease, "no")
        lease = taken(jobs, Lease(lease.job, attempt))
    jobs.attempt_failed(lease, "no")
    assert jobs.get(lease.job).state == "failed"
    job = jobs.act(lease.job, "retry")
    claim = jobs.claim(Lease(job.id, job.attempt), "w2")
    assert claim is not None and (claim.n_checkpoints, claim.snapshot, claim.job.n_outputs) == (1, {"at": 1}, 1)
    assert jobs.attempt_failed(claim.lease, "no") and jobs.get(job.id).state == "queued"


def test_retry_is_refused_while_an_equal_job_is_unfinished_and_names_it(jobs: Jobs, engine: Engine) -> None:
    first, _ = jobs.submit(noop())
    jobs.act(first.id, "cancel")
    second, _ = jobs.submit(noop())
    refused(jobs, engine, jobs.get(first.id), "retry", f"job {second.id} already does the same")
    jobs.act(second.id, "cancel")
    with ThreadPoolExecutor(2) as pool:
        tried = [pool.submit(jobs.act, job.id, "retry") for job in (first, second)]
    errors = [future.exception() for future in tried]
    assert [type(error) for error in errors if error is not None] == [Conflict]
    assert jobs.states() == {"queued": 1, "cancelled": 1}


def test_retried_local_run_is_a_job_like_the_submitted_ones(jobs: Jobs, engine: Engine) -> None:
    spec = tune()
    first, second = (jobs.begin_here(replace(spec, queue=None), "here").lease for _ in range(2))
    jobs.end(first, "failed", "why")
    job = jobs.act(first.job, "retry")  # the second run is nobody's business
    assert (job.state, job.queue) == ("queued", "default")
    assert jobs.submit(spec) == (job, False)
    jobs.end(second, "cancelled")
    refused(jobs, engine, jobs.get(second.job), "retry", f"job {first.job} already does the same")


def test_retry_is_refused_when_the_prompts_were_not_stored(jobs: Jobs, engine: Engine) -> None:
    lease = jobs.begin_here(JobSpec("tune", None, {"model": "m"}), "here").lease
    jobs.end(lease, "failed", "why")
    refused(jobs, engine, jobs.get(lease.job), "retry", "its prompts were not stored, run it again")
