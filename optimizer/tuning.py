"""Tuning while serving: decode a stream, search between the rounds, and judge the result on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.events import Event, PhaseChanged, Progress, PromptFinished, PromptStarted, TaskFinished
from ..core.settings import SwiftSettings
from ..core.types import Completion, CostProfile, LayerSetRecord, Prompt, Sampling, Timings, Verdict
from ..decoding.context import Context
from ..decoding.drafters import Drafter, NoDrafter, SkipDrafter
from ..decoding.loop import Round, Watch
from ..decoding.session import Session
from ..models.runtime import Runtime
from .search import Search
from .verdict import faster, hold_out, is_open, judge, speed, timed

TellEvent = Callable[[Event], None]


@dataclass(slots=True)
class _Task:
    """One task of the stream: its search, its completions so far, and its phase."""

    name: str
    search: Search
    held_out: list[tuple[int, Prompt]]  # with their places in the stream
    phase: Any = ""
    prompt_id: str = ""
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    timings: Timings = field(default_factory=Timings)
    n_prompts: int = 0
    n_tokens: int = 0


class Tuner:
    """Tunes every task of a stream on one model.

    Args: model: the name the caller used, for the record. costs: the measured profile that scores are made of.
          tell: takes every event; what it raises ends the run.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: SwiftSettings,
        sampling: Sampling,
        max_new_tokens: int,
        costs: CostProfile,
        tell: TellEvent,
        model: str,
    ) -> None:
        self.runtime, self.settings, self.costs, self.model = runtime, settings, costs, model
        self.session = Session(runtime, sampling, max_new_tokens)
        self.tell = tell
        self._running: dict[str, _Task] = {}

    def run(self, prompts: Sequence[Prompt]) -> Iterator[TaskFinished]:
        """Decode the stream in its order; held-out prompts come last. One result per task, in order of appearance.

        Each result is yielded before the next task is judged, so that a run cut short there has lost nothing.
        """
        self._running = tasks = self._tasks(prompts)
        held = {index for task in tasks.values() for index, _ in task.held_out}
        try:
            for index, prompt in enumerate(prompts):
                if index not in held:
                    self._serve(tasks[prompt.task], prompt, index, len(prompts))
        finally:
            for task in tasks.values():
                task.search.finish("the stream ended")
        for task in list(tasks.values()):
            result = self._conclude(task, len(prompts))
            del self._running[task.name]
            yield result

    def unfinished(self) -> list[LayerSetRecord]:
        """The sets in use of tasks that were cut short after their search had tried something, without a verdict."""
        tried = [task for task in self._running.values() if task.search.trials]
        return [self._record(task, [], Verdict("unmeasured", reason="the run was cut short")) for task in tried]

    def _tasks(self, prompts: Sequence[Prompt]) -> dict[str, _Task]:
        by_task: dict[str, list[tuple[int, Prompt]]] = {}
        for index, prompt in enumerate(prompts):
            by_task.setdefault(prompt.task, []).append((index, prompt))
        tasks: dict[str, _Task] = {}
        ratio = self.settings.start_skip_ratio(self.runtime.info.n_parameters)
        for name, own in by_task.items():
            search = Search(
                name,
                self.runtime.n_layers,
                self.settings,
                ratio,
                self.costs,
                self.tell,
                lambda name=name: tasks[name].prompt_id,  # type: ignore[misc]
            )
            tasks[name] = _Task(name, search, hold_out(own)[1])
        return tasks

    def _serve(self, task: _Task, prompt: Prompt, index: int, n_prompts: int) -> None:
        """Decode one prompt with the set in use, searching before each round while the search goes on."""
        task.prompt_id = prompt.id
        self.tell(PromptStarted(task.name, prompt.id, index, n_prompts))
        watch = Watch(
            before_round=task.search.before_round if task.search.optimising else None,
            after_round=lambda context, round_: self._after_round(task, context, round_),
            scratch_rows=task.search.scratch_rows,
        )
        for turn, completion in self.session.run(prompt, task.search.drafter, watch):
            task.timings += completion.timings
            task.n_prompts += 1
            task.n_tokens += completion.n_tokens
            self.tell(PromptFinished(turn, index, completion))

    def _after_round(self, task: _Task, context: Context, round_: Round) -> None:
        search = task.search
        search.after_round(context, round_)
        task.tokens += round_.n_emitted
        task.drafted += round_.n_steps
        task.accepted += round_.n_accepted
        task.rounds += 1
        task.seconds += round_.optimise_s + round_.draft_s + round_.verify_s
        waiting = search.matchness is None or len(context.generated) < self.settings.context_window
        phase = "accelerate" if not search.optimising else "accumulate" if waiting else "optimise"
        if phase != task.phase:
            task.phase = phase
            self.tell(PhaseChanged(task.name, phase, search.stopped_because))  # type: ignore[arg-type]
        self.tell(self._progress(task))

    def _progress(self, task: _Task) -> Progress:
        trials = task.search.trials
        return Progress(
            task=task.name,
            phase=task.phase,
            tokens=task.tokens,
            tok_s=task.tokens / max(1e-9, task.seconds),
            matchness=trials[-1].matchness if trials else None,
            best_matchness=task.search.matchness,
            n_trials=len(trials),
            acceptance_rate=task.accepted / task.drafted if task.drafted else None,
            mean_generated_length=task.tokens / task.rounds if task.rounds else None,
            skip_ratio=task.search.skip_ratio,
        )

    def _conclude(self, task: _Task, n_prompts: int) -> TaskFinished:
        """Run the held-out prompts plain and tuned, interleaved, and put the task's result together."""
        if task.held_out:
            self.tell(PhaseChanged(task.name, "verdict", f"{len(task.held_out)} held-out prompts, plain and tuned"))
        plain, tuned = self._side_by_side(task, n_prompts, is_first=True)
        slow, fast = timed(plain), timed(tuned)
        expected = self.costs.expected_of(task.search.layer_set, tuned)
        verdict = judge(fast, slow, expected)
        if is_open(verdict):
            # One slow moment of the machine in four prompts is enough to hide a gain: look again, keep the faster runs.
            again = self._side_by_side(task, n_prompts, is_first=False)
            slow, fast = (faster(runs, timed(more)) for runs, more in zip((slow, fast), again, strict=True))
            verdict = judge(fast, slow, expected)
        return TaskFinished(
            task=task.name,
            record=self._record(task, tuned, verdict),
            verdict=verdict,
            stopped_because=task.search.stopped_because,
            trials=tuple(task.search.trials),
            timings=task.timings,
            n_prompts=task.n_prompts,
            n_tokens=task.n_tokens,
            draft_cost=self.costs.draft_cost(task.search.layer_set),
            plain_tok_s=speed(slow) if slow else None,
            tuned_tok_s=speed(fast) if fast else None,
        )

    def _side_by_side(self, task: _Task, n_prompts: int, is_first: bool) -> tuple[list[Completion], list[Completion]]:
        """All held-out prompts under plain and tuned decoding, the order of the two changing from one to the next."""
        plain: list[Completion] = []
        tuned: list[Completion] = []
        for number, (index, prompt) in enumerate(task.held_out):
            self.tell(PromptStarted(task.name, prompt.id, index, n_prompts))
            tell = self.tell if is_first else _silent
            plain_done, tuned_done = self._both(task, prompt, index, (number % 2 == 1) == is_first, tell)
            plain += plain_done
            tuned += tuned_done
        return plain, tuned

    def _both(
        self, task: _Task, prompt: Prompt, index: int, tuned_first: bool, tell: TellEvent
    ) -> tuple[list[Completion], list[Completion]]:
        """A prompt's turns under plain and tuned decoding; those of plain decoding are its output."""
        drafters: list[Drafter] = [NoDrafter(), SkipDrafter(task.search.layer_set, self.settings)]
        done: dict[str, list[Completion]] = {drafter.name: [] for drafter in drafters}
        for drafter in reversed(drafters) if tuned_first else drafters:
            for turn, completion in self.session.run(prompt, drafter):
                done[drafter.name].append(completion)
                if drafter.layer_set is None:
                    tell(PromptFinished(turn, index, completion, held_out=True))
        plain, tuned = (done[drafter.name] for drafter in drafters)
        return plain, tuned

    def _record(self, task: _Task, tuned: Sequence[Completion], verdict: Verdict) -> LayerSetRecord:
        drafted, passes = sum(done.drafted for done in tuned), sum(done.target_passes for done in tuned)
        if not tuned:
            drafted, accepted, passes, tokens = task.drafted, task.accepted, task.rounds, task.tokens
        else:
            accepted = sum(done.accepted for done in tuned)
            tokens = sum(done.n_tokens - done.first_tokens for done in tuned)
        return LayerSetRecord(
            model=self.model,
            task=task.name,
            layer_set=task.search.layer_set,
            fingerprint=self.runtime.info.fingerprint,
            matchness=_rounded(task.search.matchness),
            acceptance_rate=_rounded(accepted / drafted if drafted else None),
            mean_generated_length=_rounded(tokens / passes if passes else None),
            expected_speedup=_rounded(verdict.expected),
            measured_speedup=_rounded(verdict.ratio),
            measured_interval=None
            if verdict.interval is None
            else (round(verdict.interval[0], 4), round(verdict.interval[1], 4)),
            verdict=verdict.word,
            device=self.costs.device,
            dtype=self.costs.dtype,
            settings=self.settings.to_json(),
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _silent(event: Event) -> None:
    """Takes the completions of a repeated run, which are those of the first."""
