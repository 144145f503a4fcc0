"""The one runner of tuning: loads, measures, tunes, and writes what the optimizer reports, for every front door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from .. import __version__
from ..core.errors import SettingsError, SwiftoptError
from ..core.events import Event, PhaseChanged, PromptFinished, TaskFinished, TrialsDone
from ..core.requests import TuneRequest
from ..core.streams import read_stream, stream_sha256
from ..core.types import CostProfile, LayerSetRecord, Prompt
from ..decoding.session import Session
from ..models.costs import context_bucket, device_name, measure_costs
from ..models.loading import load
from ..models.runtime import Runtime
from ..optimizer.tuning import Tuner
from ..store import Store
from .outputs import CompletionWriter, default_output


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a tuning run left behind: the job's id, one result per task, and the file of completions."""

    job: str
    tasks: tuple[TaskFinished, ...]
    out: Path


def run_tuning(request: TuneRequest, store: Store, on_event: Callable[[Event], None]) -> TuneResult:
    """Tune as asked; every trial and completion is on disk before the next event.

    Raises: SwiftoptError: as the parts raise it; KeyboardInterrupt after the best sets so far were stored.
    """
    prompts = read_stream(request.stream, request.task, request.limit)
    _check_room(request, prompts)
    with CompletionWriter(Path(request.out) if request.out else default_output(request.stream)) as writer:
        job = store.create_job(request.to_json())
        run = _Run(request, store, on_event, job, writer, stream_sha256(prompts))
        try:
            tasks = run.tune(prompts)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            # Where the store is what failed, too, the first error is the one to report.
            with suppress(SwiftoptError):
                run.keep_unfinished()
                store.finish_job(job, "cancelled" if interrupted else "failed", str(error) or type(error).__name__)
            raise
        store.finish_job(job, "succeeded")
        return TuneResult(job, tuple(tasks), writer.path)


def stored_costs(
    runtime: Runtime, store: Store, n_positions: int, on_step: Callable[[str], None] | None = None
) -> CostProfile:
    """The cost profile of this model here, measured once and kept."""
    bucket = min(context_bucket(n_positions), runtime.max_positions)
    dtype = runtime.dtype_name
    found = store.cost_profile(runtime.info.fingerprint, device_name(runtime.device), dtype, bucket)
    if found is None:
        found = replace(measure_costs(runtime, bucket, on_step), context_bucket=bucket)
        store.save_cost_profile(found)
    return found


class _Run:
    """One tuning run with its places to write to."""

    def __init__(
        self,
        request: TuneRequest,
        store: Store,
        on_event: Callable[[Event], None],
        job: str,
        writer: CompletionWriter,
        sha256: str,
    ) -> None:
        self.request, self.store, self.on_event = request, store, on_event
        self.job, self.writer, self.sha256 = job, writer, sha256
        self.tuner: Tuner | None = None

    def tune(self, prompts: Sequence[Prompt]) -> list[TaskFinished]:
        request = self.request
        self.on_event(PhaseChanged("", "load", request.model))
        runtime = load(
            request.model, request.dtype, request.device, lambda step: self.on_event(PhaseChanged("", "load", step))
        )
        self.store.remember_model(runtime.info)
        session = Session(runtime, request.sampling, request.max_new_tokens)
        n_positions = int(median(session.check(prompt) for prompt in prompts))
        costs = stored_costs(
            runtime, self.store, n_positions, lambda step: self.on_event(PhaseChanged("", "profile", step))
        )
        self.tuner = Tuner(
            runtime, request.settings, request.sampling, request.max_new_tokens, costs, self.handle, request.model
        )
        finished: list[TaskFinished] = []
        for task in self.tuner.run(prompts):
            finished.append(self.keep(task))
            self.on_event(finished[-1])
        return finished

    def handle(self, event: Event) -> None:
        """Write what must not be lost, then pass the event on."""
        if isinstance(event, TrialsDone):
            self.store.add_trials(self.job, event.task, event.trials)
        elif isinstance(event, PromptFinished):
            self.writer.write(event.prompt, event.completion)
        self.on_event(event)

    def keep(self, task: TaskFinished) -> TaskFinished:
        """Store a task's layer set and make it the one that look-ups find."""
        method = "swift" if task.verdict.word == "use" else "plain"
        return replace(task, record=self.store.add_layer_set(self._stamped(task.record), plan_method=method))

    def keep_unfinished(self) -> None:
        """Store the best sets so far of a run that was cut short, without making them anyone's plan."""
        for record in self.tuner.unfinished() if self.tuner is not None else ():
            self.store.add_layer_set(self._stamped(record), promote=False)

    def _stamped(self, record: LayerSetRecord) -> LayerSetRecord:
        return replace(
            record,
            stream_sha256=self.sha256,
            swiftopt_version=__version__,
            created_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            job=self.job,
        )


def _check_room(request: TuneRequest, prompts: Sequence[Prompt]) -> None:
    window = request.settings.context_window
    longest = max(prompt.max_new_tokens or request.max_new_tokens for prompt in prompts)
    if request.settings.optimise and longest <= window:
        raise SettingsError(
            f"max_new_tokens {longest} leaves nothing to decode after the context window of {window}"
            " tokens: raise --max-new-tokens or lower --context-window"
        )
