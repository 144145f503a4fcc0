"""Tune a stream, here or as an attempt of a queued job: store events and checkpoints, and obey pause and stop."""

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
CHECKPOINT_S = 5.0  # Maximum seconds between two checkpoints; further ones follow each scoring pass and each prompt.
SHORT_PATIENCE_S = 5.0  # Longest wait for the database while the model is shared with an engine.

E = TypeVar("E")  # Events of a generator.
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

    Args:   prompts: used instead of the request's stream.
    Raises: JobCancelled: the job was cancelled. JobFailed: its lease ran out. KeyboardInterrupt: after the best sets so
            far were stored. SwiftoptError: the model, the stream or the database cannot be used.
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
    """One attempt of a tuning job, under a lease.

    Args: claim: the job with its last checkpoint. on_event: called with every event after it was written. writer: for
          completions. ending: returns whether the process should end; the run then raises HandedBack at its next
          checkpoint. load: loads the request's model. turn: if other threads use the model too, the context in which
          the run computes; it is held from one event to the next, but never while the run waits for the database.
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
        # Times of the last write of events, of progress figures, and of the last check whether a checkpoint is due.
        self._written_s = self._shown_s = self._checkpoint_s = monotonic()
        self._wanted: Wanted | None = claim.job.wanted  # The verb that a user sent to the job.

    def tune(self) -> list[TaskFinished]:
        """Run from the job's last checkpoint to the end; return the results of the tasks that this attempt finished.

        Raises: LeaseLost: the attempt was replaced, or its job was cancelled. HandedBack, Paused: it was interrupted.
        """
        request = self.request
        self.handle(PhaseChanged("", "load", request.model))
        runtime = self._load(request, lambda step: self.handle(PhaseChanged("", "load", step)))
        with_retries(lambda: self.store.remember_model(runtime.info))
        session = Session(runtime, request.sampling, request.max_new_tokens)
        n_positions = int(median(session.check(prompt) for prompt in self.prompts))
        settings, costs = self._prepare_drafts(session, n_positions)
        known_sets = with_retries(lambda: self.store.known_sets(runtime.info.fingerprint))
        memory = memory_for_texts(runtime) if request.concurrency > 1 else None
        self.tuner = Tuner(session, settings, costs, request.model, known_sets, request.concurrency, memory)
        finished_tasks: list[TaskFinished] = []
        with closing(self.tuner.run(self.prompts, self.claim.snapshot, self.claim.trials)) as events:
            for event in self._in_turns(events):
                if isinstance(event, TaskFinished):
                    finished_tasks.append(self._store_result(event, "always"))
                else:
                    self.handle(event)
                if self._is_stopped and not isinstance(event, EVENTS_WITHIN_STEP):
                    break
        if self._is_stopped:
            unfinished_tasks = self.tuner.unfinished("stopped on request")
            finished_tasks += [self._store_result(task, "if none") for task in unfinished_tasks]
        for refined_profile in self.tuner.refined_costs:
            with_retries(partial(self.store.save_cost_profile, refined_profile))
        self._write()
        return finished_tasks

    def _prepare_drafts(self, session: Session, n_positions: int) -> tuple[SwiftSettings, CostProfile]:
        """Choose the drafts' weight format and convert the weights; return the settings and costs with this format.

        A checkpoint determines both, so that a resumed run drafts as before.
        """
        settings, snapshot = self.request.settings, self.claim.snapshot or {}
        if settings.draft_format == AUTO and (chosen_format := snapshot.get("draft_format")):
            settings = replace(settings, draft_format=chosen_format)
        with refuse_unreadable_state():
            saved_costs = CostProfile.from_json(snapshot["costs"]) if "costs" in snapshot else None
        if saved_costs is not None and saved_costs.fingerprint != session.runtime.info.fingerprint:
            problem = f"the weights of {self.request.model} have changed since this run began: start the run anew"
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
        """Yield a generator's events; hold the model while it computes each of them."""
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

        Unwritten events are dropped: a retry continues from the last checkpoint and repeats them.
        """
        self._pending.clear()
        for task in self.tuner.unfinished() if self.tuner is not None else ():
            self._store_result(task, "never")

    def handle(self, event: Event) -> None:
        """Write an event if it must not be lost, pass it on, then obey the verb that was sent to the job."""
        if isinstance(event, Progress):
            self._write_progress(event)
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
        """Raise LeaseLost, HandedBack or Paused if the run has to end; the last two need a checkpoint (`can_save`)."""
        verb = self._keeper.wanted or self._wanted
        if self._keeper.lost:
            raise LeaseLost(f"attempt {self._lease.attempt} of job {self._lease.job} was replaced: leave it")
        interruption = HandedBack if self._ending() else Paused if verb == "pause" else None
        if interruption is not None and (can_save or self.tuner is None):
            if self.tuner is not None:
                self._checkpoint()
            raise interruption

    @property
    def _is_stopped(self) -> bool:
        """Whether the job was asked to stop and keep its results so far."""
        return "stop" in (self._keeper.wanted, self._wanted)

    def _write_progress(self, progress: Progress) -> None:
        """Write a checkpoint, the pending events, or the figures of `progress`, if that is due."""
        now_s = monotonic()
        if now_s - self._checkpoint_s >= CHECKPOINT_S and self._differs_from_checkpoint():
            self._checkpoint(progress)
        elif self._pending:
            self._write()
        elif now_s - self._shown_s >= SHOW_S:
            self._write(progress)
            self._shown_s = now_s

    def _differs_from_checkpoint(self) -> bool:
        """Tell whether the state differs from the last checkpoint's.

        An equal checkpoint must not be written: it would count as progress of a job that crashes again and again.
        """
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
        """Write the tuner's state with the pending events, and the figures of `progress`."""
        assert self.tuner is not None
        events, snapshot, number = tuple(self._pending), self.tuner.snapshot(), self._n_checkpoints + 1
        figures = _figures(progress)
        self._wanted = with_retries(lambda: self._jobs.checkpoint(self._lease, number, events, snapshot, figures))
        self._n_checkpoints, self._snapshot = number, snapshot
        self._pending.clear()
        self._written_s = self._checkpoint_s = monotonic()

    def _store_result(self, task: TaskFinished, promotion: Promotion) -> TaskFinished:
        """Store a task's layer set, the event, and the tuner's state; return the event as stored.

        Args: promotion: when the set becomes the task's `best` plan. With "never" the last checkpoint stays valid, so
              that a retry can continue the task.
        """
        assert self.tuner is not None
        self._write()
        record = stamp(task.record, stream_sha256=self.claim.job.stream, job=self._lease.job)
        stamped_task = replace(task, record=record)
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
    """Run `run.tune` in this process; if it fails, store the sets so far and end the job."""
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
            # An error here is suppressed, because the original one has to be reported.
            run.keep_unfinished()
            jobs.end(lease, "cancelled" if interrupted else "failed", str(error) or type(error).__name__)
        raise
