"""One attempt of a tuning job: what counts as progress, and what an outage of the database costs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import worded_runtime
from safetensors.torch import load_file, save_file
from tiny_files import save

from swiftopt.core.costs import CostProfile
from swiftopt.core.errors import JobCancelled, JobFailed, StoreUnavailable, StreamError
from swiftopt.core.events import Event, Progress, PromptFinished, TrialsDone
from swiftopt.core.requests import Delivery, Job, JobSpec, Lease, TuneRequest
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt
from swiftopt.store import Store
from swiftopt.tasks import tune
from swiftopt.tasks.job import LeaseKeeper
from swiftopt.tasks.recipes import stored_costs
from swiftopt.tasks.tune import TuningRun, run_tuning
from swiftopt.worker.attempt import Attempts, WorkerContext

BEAT = Progress("t", "verdict", 0, 0.0, None, None, 0, None, None, 0.45)


class StillTuner:
    """Stands where it stands, as in the middle of a long held-out prompt."""

    def __init__(self, place: int) -> None:
        self.place = place

    def snapshot(self) -> dict[str, Any]:
        return {"next": self.place, "tasks": {"t": {"tokens": 3}}}


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as store:
        yield store


def attempt(store: Store, lease: Lease) -> TuningRun:
    claim = store.jobs.claim(lease, "w1")
    assert claim is not None
    keeper = LeaseKeeper(store.jobs, lease, fatal=False)
    return TuningRun(TuneRequest("m", "s"), [Prompt("a", "t", text="x")], store, claim, keeper, lambda event: None)


def test_heartbeats_do_not_count_as_progress(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of the verdict that always kills its worker, after more seconds than lie between two checkpoints."""
    monkeypatch.setattr(tune, "CHECKPOINT_S", 0.0)
    job, _ = store.jobs.submit(JobSpec("tune", "default", {"model": "m"}))
    for number in range(1, 5):
        run = attempt(store, Lease(job.id, number))
        run.tuner = StillTuner(place=7)  # type: ignore[assignment]
        for _ in range(3):
            run.handle(BEAT)
        assert store.jobs.attempt_failed(Lease(job.id, number), "killed")
    assert store.jobs.get(job.id).state == "failed"  # the first has come to place 7, three came no further


def test_progress_of_an_attempt_is_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "CHECKPOINT_S", 0.0)
    job, _ = store.jobs.submit(JobSpec("tune", "default", {"model": "m"}))
    run = attempt(store, Lease(job.id, 1))
    for place in range(3):
        run.tuner = StillTuner(place)  # type: ignore[assignment]
        run.handle(BEAT)
    store.jobs.hand_back(Lease(job.id, 1), "over")
    claim = store.jobs.claim(Lease(job.id, 2), "w2")
    assert claim is not None and claim.n_checkpoints == 3 and claim.snapshot == StillTuner(2).snapshot()


@pytest.mark.parametrize(("state", "error"), [("cancelled", JobCancelled), ("failed", JobFailed)])
def test_local_run_reports_whether_it_was_cancelled_or_presumed_dead(
    store: Store, tmp_path: Path, state: str, error: type[Exception]
) -> None:
    stream = tmp_path / "s.jsonl"
    stream.write_text('{"prompt": "w3 w4 w5"}\n' * 3)
    settings = SwiftSettings(context_window=8, strategy="random", max_steps=4)
    model, out = str(save(tmp_path / "model")), str(tmp_path / "out")
    request = TuneRequest(model, str(stream), out=out, settings=settings, max_new_tokens=12)

    def end(event: Event) -> None:
        job = store.jobs.latest()[0]
        if state == "cancelled" and job.state == "running":
            store.jobs.act(job.id, "cancel")
        store.jobs.lease_s = -1.0  # as of a machine that sleeps: every renewal is too late
        store.jobs.expire()

    with pytest.raises(error, match="its completions so far are kept"):
        run_tuning(request, store, end)
    assert store.jobs.latest()[0].state == state


def interrupted(store: Store, tmp_path: Path) -> tuple[Job, list[Event]]:
    """A local run of eight prompts that got Ctrl-C behind its second, and what it told."""
    stream = tmp_path / "s.jsonl"
    stream.write_text("".join(f'{{"prompt": "w{i} w4 w5"}}\n' for i in range(2, 10)))
    settings = SwiftSettings(context_window=8, strategy="random", max_steps=100, deterministic=True)
    model, out = str(save(tmp_path / "model")), str(tmp_path / "out")
    request = TuneRequest(model, str(stream), out=out, settings=settings, max_new_tokens=16)
    told: list[Event] = []

    def interrupt(event: Event) -> None:
        told.append(event)
        if isinstance(event, PromptFinished) and event.index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tuning(request, store, interrupt)
    return store.jobs.latest()[0], told


def retried(store: Store, before: Job) -> Job:
    """The job after a worker has gone on with it."""
    job = store.jobs.act(before.id, "retry")
    worker = Attempts(WorkerContext("w", store.url, "", "default"), store, threading.Event())
    worker.run(Delivery(job.id, job.attempt, "default"))
    return store.jobs.get(job.id)


def test_interrupted_local_run_continues_when_retried(store: Store, tmp_path: Path) -> None:
    """Ctrl-C keeps the set in use as a version; that must not end its task for whoever goes on with the job."""
    before, told = interrupted(store, tmp_path)
    assert (before.state, before.n_outputs) == ("cancelled", 2)
    assert [own.verdict for own in before.layer_sets] == ["unmeasured"]
    ended = retried(store, before)
    assert (ended.state, ended.n_outputs) == ("succeeded", 8), ended.error
    assert [own.measured_speedup is not None for own in ended.layer_sets] == [False, True]
    n_told = sum(len(event.trials) for event in told if isinstance(event, TrialsDone))
    assert len(store.trials(ended.id, "s")) > n_told > 0


def test_local_run_on_a_relative_path_continues_in_another_folder(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, _ = interrupted(store, Path())
    monkeypatch.chdir("/")
    ended = retried(store, before)
    assert ended.state == "succeeded", ended.error


def test_run_does_not_continue_with_other_weights(store: Store, tmp_path: Path) -> None:
    """Half of its trials and texts would be another model's."""
    before, _ = interrupted(store, tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    ended = retried(store, before)
    assert ended.state == "failed" and ended.n_outputs == 2
    assert ended.error is not None and "have changed since this run began: start the run anew" in ended.error


def test_run_without_a_prompt_is_refused_in_a_sentence(store: Store) -> None:
    with pytest.raises(StreamError, match="there is no prompt to tune on: give at least one"):
        run_tuning(TuneRequest("m", "s"), store, lambda event: None, [])


class Away(Store):
    """A database that is away at every first call."""

    calls: list[str]

    def cost_profile(self, *key: Any) -> CostProfile | None:
        self._miss("find")
        return super().cost_profile(*key)

    def save_cost_profile(self, profile: CostProfile) -> None:
        self._miss("save")
        super().save_cost_profile(profile)

    def _miss(self, what: str) -> None:
        self.calls.append(what)
        if self.calls.count(what) == 1:
            raise StoreUnavailable("the database is away")


def test_costs_are_measured_once_despite_database_outages(store: Store, tmp_path: Path) -> None:
    with Away.open(store.url) as away:
        assert isinstance(away, Away)
        away.calls = []
        measured = stored_costs(worded_runtime(), away, 16)
        assert away.calls == ["find", "find", "save", "save"]
    kept = stored_costs(worded_runtime(), store, 16)
    assert dataclasses.asdict(kept) == dataclasses.asdict(measured)
