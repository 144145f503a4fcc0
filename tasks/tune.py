"""Tune a stream, here or as an attempt of a queued job: store events and checkpoints, and obey the job's verbs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, TypeVar

from ..core.costs import CostProfile
from ..core.errors import JobCancelled, JobFailed, LeaseLost, SettingsError, SwiftoptError
from ..core.events import Event, PhaseChanged, Progress, PromptFinished, TaskFinished, TrialsDone
from ..core.requests import Promotion, TuneRequest, Wanted
from ..core.settings import AUTO, SwiftSettings
from ..core.streams import LineWriter, default_output, read_stream
from ..core.types import Prompt
from ..decoding.session import Session
from ..decoding.work import exhaust
from ..models.costs import machine_name, memory_for_texts
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import OnStep
from ..optimizer.drafting import prepare_draft_format
from ..optimizer.task_state import refuse_unreadable_state
from ..optimizer.tuning import EVENTS_WITHIN_STEP, Tuner
from ..store import Claim, Store
from .admission import check_tuning
from .job import PATIENCE_S, HandedBack, LeaseKeeper, ModelTurn, Paused, tune_spec, with_retries
from .recipes import stamp, stored_costs

SHOW_S = 1.0  # Seconds between two writes of the job's progress figures.
CHECKPOINT_S = 5.0  # Seconds between two checkpoints, besides those after each pass of candidates and each prompt.
SHORT_PATIENCE_S = 5.0  # Longest wait for the database while the model is shared with an engine.

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TuneResult:
    """Outcome of a tuning run: the job's id, one result per task, and the file of completions."""

    job: str
    tasks: tuple[TaskFinished, ...]
    out: Path


def run_tuning(
    request: TuneRequest,
    store: Store,
    on_event: Callable[[Event], None],
    prompts: Sequence[Prompt] | None = None,
) -> TuneResult:
    """Tune as requested, in this process; every trial and completion is on disk before the next event.

    Args:   prompts: in place of those that the request's stream holds.
    Raises: SwiftoptError: as the parts raise it; JobCancelled: the job was cancelled; JobFailed: its lease ran
        out; KeyboardInterrupt after the best sets so far were stored.
    """
    if prompts is None:
        prompts = read_stream(request.stream, request.task, request.limit, request.form)
    prompts = prompts[: request.limit]
    check_tuning(request, prompts)
    spec = tune_spec(request, prompts, None)
    # End the runs of killed processes: without a service, no reconciler does so.
    store.jobs.expire()
    with LineWriter(Path(request.out) if request.out else default_output(request.stream)) as writer:
        claim = store.jobs.begin_here(spec, f"{socket.gethostname()}-{os.getpid()}")
        with LeaseKeeper(store.jobs, claim.lease, fatal=False) as keeper:
            tasks = _tune(TuningRun(request, prompts, store, claim, keeper, on_event, writer))
        with_retries(lambda: store.jobs.end(claim.lease, "succeeded"))
        return TuneResult(claim.job.id, tuple(tasks), writer.path)


def load_model(request: TuneRequest, on_step: OnStep) -> Runtime:
    return load(request.model, request.dtype, request.device, on_step, request.speed)


class TuningRun:
    """Tune under a lease; `on_event` gets every event after it was written.

    `ending` returns whether the process is to end: the run then raises HandedBack at its next checkpoint. `load` loads
    the request's model. If other threads use the model too, the run computes within `turn`, which it holds from one
    event to the next, but never while it waits for the database.

    Raises: LeaseLost: in `tune`, when the attempt was replaced or its job cancelled.
    """

    def __init__(
        self,
        request: TuneRequest,
        prompts: Sequence[Prompt],
        store: Store,
        claim: Claim,
        keeper: LeaseKeeper,
        on_event: Callable[[Event], None],
        writer: LineWriter | None = None,
        ending: Callable[[], bool] = lambda: False,
        load: Callable[[TuneRequest, OnStep], Runtime] = load_model,
        turn: ModelTurn | None = None,
    ) -> None:
        self.request, self.prompts, self.store, self.claim = request, prompts, store, claim
        self.tuner: Tuner | None = None
        self._jobs, self._lease = store.jobs, claim.lease
        self._keeper, self._on_event, self._writer, self._ending = keeper, on_event, writer, ending
        self._load, self._turn, self._held_turn = load, turn, ExitStack()
        self._pending: list[Event] = []  # Events that are not in the database yet.
        self._n_checkpoints = claim.n_checkpoints
        self._snapshot = claim.snapshot  # Tuner state of the last checkpoint.
        self._written_s = self._shown_s = self._checkpoint_s = monotonic()
        self._wanted: Wanted | None = claim.job.wanted

    def tune(self) -> list[TaskFinished]:
        """Run from the last attempt's checkpoint to the end; return the results of this attempt's tasks."""
        request = self.request
        self.handle(PhaseChanged("", "load", request.model))
        runtime = self._load(request, lambda step: self.handle(PhaseChanged("", "load", step)))
        with_retries(lambda: self.store.remember_model(runtime.info))
        session = Session(runtime, request.sampling, request.max_new_tokens)
        n_positions = int(median(session.check(prompt) for prompt in self.prompts))
        settings, costs = self._drafts(session, n_positions)
        known_sets = with_retries(lambda: self.store.known_sets(runtime.info.fingerprint))
        memory = memory_for_texts(runtime) if request.concurrency > 1 else None
        self.tuner = Tuner(session, settings, costs, request.model, known_sets, request.concurrency, memory)
        finished_tasks: list[TaskFinished] = []
        with closing(self.tuner.run(self.prompts, self.claim.snapshot, self.claim.trials)) as events:
            for event in self._in_turns(events):
                if isinstance(event, TaskFinished):
                    finished_tasks.append(self._finish(event, "always"))
                else:
                    self.handle(event)
                if self._is_stopped and not isinstance(event, EVENTS_WITHIN_STEP):
                    break
        if self._is_stopped:
            finished_tasks += [self._finish(task, "if none") for task in self.tuner.unfinished("stopped on request")]
        for refined_profile in self.tuner.refined_costs:
            with_retries(partial(self.store.save_cost_profile, refined_profile))
        self._write()
        return finished_tasks

    def _drafts(self, session: Session, n_positions: int) -> tuple[SwiftSettings, CostProfile]:
        """Choose the drafts' weight format and convert the weights; return settings and costs for this format."""
        settings, snapshot = self.request.settings, self.claim.snapshot or {}
        if settings.draft_format == AUTO and (chosen_format := snapshot.get("draft_format")):
            settings = replace(settings, draft_format=chosen_format)
        with refuse_unreadable_state():
            saved_costs = CostProfile.from_json(snapshot["costs"]) if "costs" in snapshot else None
        if saved_costs is not None and saved_costs.fingerprint != session.runtime.info.fingerprint:
            problem = f"the weights of {self.request.model} are others than when this run began: start the run anew"
            raise SettingsError(problem)

        def on_step(step: str) -> None:
            self._held_turn.close()  # Let other threads use the model while the step is reported.
            self.handle(PhaseChanged("", "profile", step))
            self._take_turn()

        def measure_or_load(*formats: str) -> CostProfile:
            if saved_costs is not None and saved_costs.device == machine_name(session.runtime):
                return saved_costs
            patience_s = PATIENCE_S if self._turn is None else SHORT_PATIENCE_S
            return stored_costs(session.runtime, self.store, n_positions, on_step, formats, patience_s)

        return exhaust(
            self._in_turns(prepare_draft_format(session, self.prompts, settings, measure_or_load)), self.handle
        )

    def _in_turns(self, events: Generator[E, None, T]) -> Generator[E, None, T]:
        """Yield a generator's events, computing each while holding the model."""
        while True:
            self._take_turn()
            with self._held_turn:
                try:
                    event = next(events)
                except StopIteration as stop:
                    returned: T = stop.value
                    return returned
            yield event

    def _take_turn(self) -> None:
        if self._turn is not None:
            self._held_turn.enter_context(self._turn())

    def keep_unfinished(self) -> None:
        """Store the best sets so far of a run that was cut short, without making them plans.

        A retry continues from the last checkpoint and drops everything after it, including unwritten events.
        """
        self._pending.clear()
        for task in self.tuner.unfinished() if self.tuner is not None else ():
            self._finish(task, "never")

    def handle(self, event: Event) -> None:
        """Write the event if it must not be lost, pass it on, then obey the job's verb."""
        if isinstance(event, Progress):
            self._show(event)
        else:
            self._pending.append(event)
            if isinstance(event, TrialsDone | PromptFinished):
                self._checkpoint()
            elif self.tuner is None or monotonic() - self._written_s >= SHOW_S / 2:
                self._write()
        if isinstance(event, PromptFinished) and self._writer is not None:
            self._writer.write_completion(event.prompt, event.completion)
        self._on_event(event)
        self._obey(can_save=isinstance(event, TrialsDone | PromptFinished | Progress))

    def _obey(self, can_save: bool) -> None:
        verb_now = self._keeper.wanted or self._wanted
        if self._keeper.lost:
            raise LeaseLost(f"attempt {self._lease.attempt} of job {self._lease.job} was replaced: leave it")
        interruption = HandedBack if self._ending() else Paused if verb_now == "pause" else None
        if interruption is not None and (can_save or self.tuner is None):
            if self.tuner is not None:
                self._checkpoint()
            raise interruption

    @property
    def _is_stopped(self) -> bool:
        """Whether the job was asked to stop and keep what it found so far."""
        return "stop" in (self._keeper.wanted, self._wanted)

    def _show(self, progress: Progress) -> None:
        now_s = monotonic()
        if now_s - self._checkpoint_s >= CHECKPOINT_S and self._has_moved():
            self._checkpoint(progress)
        elif self._pending:
            self._write()
        elif now_s - self._shown_s >= SHOW_S:
            self._write(progress)
            self._shown_s = now_s

    def _has_moved(self) -> bool:
        """Whether a checkpoint would differ from the last: an equal one would count as progress of a crashing job."""
        assert self.tuner is not None
        self._checkpoint_s = monotonic()
        return self.tuner.snapshot() != self._snapshot

    def _write(self, progress: Progress | None = None) -> None:
        """Write the pending events, and the figures of `progress`."""
        events, figures = tuple(self._pending), _figures(progress)
        if events or figures:
            self._wanted = with_retries(lambda: self._jobs.renew(self._lease, events, figures))
            self._pending.clear()
            self._written_s = monotonic()

    def _checkpoint(self, progress: Progress | None = None) -> None:
        assert self.tuner is not None
        events, snapshot, number = tuple(self._pending), self.tuner.snapshot(), self._n_checkpoints + 1
        figures = _figures(progress)
        self._wanted = with_retries(lambda: self._jobs.checkpoint(self._lease, number, events, snapshot, figures))
        self._n_checkpoints, self._snapshot = number, snapshot
        self._pending.clear()
        self._written_s = self._checkpoint_s = monotonic()

    def _finish(self, task: TaskFinished, promotion: Promotion) -> TaskFinished:
        """Store a task's layer set, the event, and the snapshot in which the task is finished, if it is."""
        assert self.tuner is not None
        self._write()
        stamped_task = replace(
            task, record=stamp(task.record, stream_sha256=self.claim.job.stream, job=self._lease.job)
        )
        method = self.request.settings.method if task.verdict.word == "use" else "plain"
        snapshot = self._snapshot if promotion == "never" else self.tuner.snapshot()
        number = self._n_checkpoints + 1
        stored_task = with_retries(
            lambda: self._jobs.finish_task(self._lease, number, stamped_task, method, promotion, snapshot)
        )
        self._n_checkpoints, self._snapshot = number, snapshot
        self._on_event(stored_task)
        return stored_task


def _figures(progress: Progress | None) -> Mapping[str, Any] | None:
    return None if progress is None else {"type": "progress", **progress.to_json()}


def _tune(run: TuningRun) -> list[TaskFinished]:
    jobs, lease = run.store.jobs, run.claim.lease
    try:
        return run.tune()
    except LeaseLost as error:
        # The job was cancelled, or its lease ran out, for example while the machine was suspended.
        job = jobs.get(lease.job)
        if job.state == "failed":
            problem = f"job {job.id} was ended from outside ({job.error}); its completions so far are kept"
            raise JobFailed(problem) from error
        raise JobCancelled(f"job {job.id} was cancelled; its completions so far are kept") from error
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        with suppress(SwiftoptError):
            # Ignore errors here: the original error is the one to report.
            run.keep_unfinished()
            jobs.end(lease, "cancelled" if interrupted else "failed", str(error) or type(error).__name__)
        raise
