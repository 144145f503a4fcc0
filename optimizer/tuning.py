"""Tuning while serving: decode a stream, search between the rounds, and judge the result on held-out prompts."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from ..core.costs import CostProfile, expected_of
from ..core.errors import ContextOverflow
from ..core.events import (
    Adopted,
    Event,
    PhaseChanged,
    PromptFinished,
    PromptStarted,
    StreamShifted,
    TaskFinished,
    TrialsDone,
)
from ..core.layer_sets import LayerSet
from ..core.observed_costs import ObservedCosts
from ..core.records import KnownSet
from ..core.settings import SwiftSettings
from ..core.types import Prompt, Trial, Verdict, n_turns
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import side_by_side
from ..decoding.events import Prefilled, Round, Turn, WorkEvent
from ..decoding.session import Session
from ..decoding.work import Work
from ..models.costs import slot_copies
from .drafting import N_PROMPTS, drafting_with, time_methods, unbeaten_methods
from .task_state import VERSION, PromptInProgress, TaskState, check, refuse_unreadable_state
from .verdict import Look, TimedTurn, by_looks, hold_out, in_pairs, looks_of

PROGRESS_INTERVAL_S = 0.5  # Minimum seconds between two progress events while held-out prompts are timed.
# Events at which no checkpoint may be taken: their trials or completions follow.
EVENTS_WITHIN_STEP = (Adopted, StreamShifted)


class Tuner:
    """Tunes every task of a stream on one model.

    Args: session: how prompts are decoded. costs: measured, for the scores. model: the name that the caller used, for
          the record. known: sets of this model from elsewhere; after a shift those of similar text are tried first.
          concurrency: prompts that are decoded side by side, as far as `memory` goes, see `Engine`.
    """

    def __init__(
        self,
        session: Session,
        settings: SwiftSettings,
        costs: CostProfile,
        model: str,
        known: Sequence[KnownSet] = (),
        concurrency: int = 1,
        memory: int | None = None,
    ) -> None:
        self.session, self.runtime, self.settings, self.costs = session, session.runtime, settings, costs
        self.model, self.concurrency, self.memory = model, concurrency, memory
        formats = self.runtime.whole.filled(settings.draft_format).formats
        self.known = tuple(known_set for known_set in known if known_set.layer_set.formats == formats)
        self._running_tasks: dict[str, TaskState] = {}
        self._concluded_tasks: list[str] = []
        self._prompts: Sequence[Prompt] = ()
        self._next_index = 0  # Position in the stream of the next prompt to start.
        self._in_progress: dict[int, PromptInProgress] = {}  # Prompts being decoded, by position in the stream.
        self._next_report = 0.0
        self._observed = ObservedCosts(
            costs, (), slot_copies(self.runtime)
        )  # Costs refined by the passes of all verdicts.

    @property
    def refined_costs(self) -> list[CostProfile]:
        """Costs refined by the verdicts' passes, for later runs; this run keeps its own to stay reproducible."""
        return self._observed.refined()

    def run(
        self,
        prompts: Sequence[Prompt],
        start: Mapping[str, Any] | None = None,
        trials: Mapping[str, Sequence[Trial]] = {},
    ) -> Generator[Event, None, None]:
        """Decode the stream in its order; held-out prompts come last. Yields all events, a `TaskFinished` per task.

        A chat whose later turn does not fit the model's context ends before that turn, and an event says so.
        Each is yielded before the next task is judged. A caller that closes the generator may then ask for what is
        `unfinished`.

        Args:   start: a `snapshot` of the same run, to continue from. trials: by task, all that the run had made by
                then, in their order.
        Raises: SettingsError: `start` is of another version, model or stream, or was changed.
        """
        with self._begin_tasks(prompts, holds_out=True):
            held_out_indices = {index for task in self._running_tasks.values() for index, _ in task.judged}
            if start is not None:
                self._restore(start, trials)
            yield from self._serve_all(held_out_indices)
            for task in list(self._running_tasks.values()):
                result = yield from self._conclude(task)
                self._mark_concluded(task)
                yield result

    def serve(
        self, prompts: Sequence[Prompt], is_budgeted: bool = True
    ) -> Generator[Event, None, dict[str, tuple[LayerSet, SwiftSettings]]]:
        """Decode the stream as `run` does, with nothing held out and no verdict; return what each task drafts with.

        Args: is_budgeted: limit searches to a share of the stream's time, as `run` does; else they may last to its end.
        """
        with self._begin_tasks(prompts, holds_out=False, is_budgeted=is_budgeted):
            yield from self._serve_all()
        return {name: (task.search.layer_set, task.search.settings) for name, task in self._running_tasks.items()}

    def snapshot(self) -> dict[str, Any]:
        """Return the position as JSON values without the trials; `run` continues from it in another process.

        Valid at any event but those of `EVENTS_WITHIN_STEP`. Prompts decoded side by side all continue where they were,
        but not in step: their tokens stay the same, while the search may try other sets than without the interruption.
        """
        return {
            "version": VERSION,
            "n_layers": self.runtime.n_layers,
            "n_prompts": len(self._prompts),
            # Stored because it may have been chosen automatically at the start.
            "draft_format": self.settings.draft_format,
            "costs": self.costs.to_json(),  # Stored because the cost store may have been refined since.
            "next": self._next_index,
            "flights": {
                str(index): current.to_json(task.shift.chart)
                for index, current in self._in_progress.items()
                if (task := self._running_tasks.get(self._prompts[index].task)) is not None
            },
            "tasks": {name: task.to_json() for name, task in self._running_tasks.items()},
            "concluded": list(self._concluded_tasks),
        }

    def unfinished(self, reason: str = "the run was cut short") -> Iterator[TaskFinished]:
        """Yield results without a verdict for tasks that were interrupted after their search had scored candidates.

        A task counts as concluded when it is yielded, in snapshots as well.
        """
        verdict = Verdict("unmeasured", reason=reason)
        for task in [task for task in self._running_tasks.values() if task.search.trials]:
            self._mark_concluded(task)
            yield task.result(self.model, self.runtime, self.costs, verdict)

    def _mark_concluded(self, task: TaskState) -> None:
        del self._running_tasks[task.name]
        self._concluded_tasks.append(task.name)

    def _restore(self, start: Mapping[str, Any], trials: Mapping[str, Sequence[Trial]]) -> None:
        with refuse_unreadable_state():
            check(start, self.runtime.n_layers, len(self._prompts), self._running_tasks)
            self._next_index, self._concluded_tasks = int(start["next"]), list(start["concluded"])
            for name in self._concluded_tasks:
                del self._running_tasks[name]
            for name, task in self._running_tasks.items():
                task.restore(start["tasks"][name], trials.get(name, ()), self._prompts)
            for index, progress in start["flights"].items():
                prompt = self._prompts[int(index)]
                chart = self._running_tasks[prompt.task].shift.chart
                self._in_progress[int(index)] = PromptInProgress.from_json(progress, prompt, chart)

    @contextmanager
    def _begin_tasks(self, prompts: Sequence[Prompt], holds_out: bool, is_budgeted: bool = True) -> Iterator[None]:
        """Begin the searches of all tasks, and close them at the end."""
        prompts_by_task: dict[
            str, list[tuple[int, Prompt]]
        ] = {}  # Prompts with their positions in the stream, by task.
        for index, prompt in enumerate(prompts):
            prompts_by_task.setdefault(prompt.task, []).append((index, prompt))
        self._prompts, self._running_tasks = prompts, {}
        for name, task_prompts in prompts_by_task.items():
            tuning_prompts, held_out = hold_out(task_prompts) if holds_out else (task_prompts, [])
            n_tokens = (
                sum(n_turns(task_prompt) * self.session.room(task_prompt) for _, task_prompt in tuning_prompts)
                if is_budgeted
                else None
            )
            task = TaskState.begin(name, self.runtime, self.settings, self.costs, self.known, n_tokens=n_tokens)
            task.hold_out(held_out)
            self._running_tasks[name] = task
        try:
            yield
        finally:
            for task in self._running_tasks.values():
                task.search.close()

    def _serve_all(self, held_out_indices: Collection[int] = ()) -> Iterator[Event]:
        """Decode all prompts but those held out, from the current position, and end the searches."""
        open_indices = [*self._in_progress, *range(self._next_index, len(self._prompts))]
        indices_to_serve = [
            index
            for index in open_indices
            if index not in held_out_indices and self._prompts[index].task in self._running_tasks
        ]
        # by_time=False: what is drafted, and hence what the search tries, must not depend on the clock.
        works = map(self._serve, indices_to_serve)
        for event in side_by_side(works, self.concurrency, self.memory, by_time=False):
            if isinstance(event, Event):
                yield event
        for task in self._running_tasks.values():
            task.search.finish("the stream ended")
            yield from task.search.choose_drafting()
            yield from self._adopt_fastest(task)

    def _serve(self, index: int) -> Work[None]:
        """Decode the prompt at this position of the stream with the set in use, and search meanwhile."""
        prompt = self._prompts[index]
        task = self._running_tasks[prompt.task]
        search = task.search
        if index not in self._in_progress:
            yield from search.choose_drafting()
        progress = self._in_progress.setdefault(index, PromptInProgress())
        self._next_index = max(self._next_index, index + 1)
        yield PromptStarted(task.name, prompt.id, index, len(self._prompts))

        def follow(event: WorkEvent) -> Work[None]:
            match event:
                case Prefilled():
                    progress.context = event.context
                    progress.read = task.add_prompt(event, goes_on=bool(progress.answers)) or progress.read
                case Round():
                    yield from self._after_round(task, event)
                case Turn():
                    yield from self._after_turn(task, index, progress, event)
                case TrialsDone():
                    task.seconds += sum(trial.seconds for trial in event.trials)

        try:
            yield from search.request(
                self.session, prompt, progress.answers, progress.resume_from, follow, with_state=True
            )
        except ContextOverflow as error:
            if not progress.answers:
                raise
            del self._in_progress[index]
            yield PhaseChanged(task.name, task.phase or "accumulate", f"a chat ends early: {error}")

    def _after_turn(self, task: TaskState, index: int, progress: PromptInProgress, turn: Turn) -> Iterator[Event]:
        """Record a completion, and restart the search if it signals a shift."""
        task.count_completion(turn.completion)
        shift_event = task.shifted_by(turn.completion, progress.read)
        progress.answered(turn.completion.text)
        if len(progress.answers) == n_turns(self._prompts[index]):
            del self._in_progress[index]
        if shift_event is not None:
            yield shift_event
        yield PromptFinished(turn.prompt, index, turn.completion)

    def _after_round(self, task: TaskState, round_: Round) -> Iterator[Event]:
        search = task.search
        task.count(round_)
        open_contexts = [
            in_progress.context
            for index, in_progress in self._in_progress.items()
            if self._prompts[index].task == task.name
        ]
        max_generated = max((len(context.generated) for context in open_contexts if context is not None), default=0)
        is_waiting = search.matchness is None or max_generated < self.settings.context_window
        phase = "accelerate" if not search.optimising else "accumulate" if is_waiting else "optimise"
        if phase != task.phase:
            task.phase = phase
            yield PhaseChanged(task.name, phase, search.stopped_because)  # type: ignore[arg-type]
        yield task.progress()

    def _conclude(self, task: TaskState) -> Generator[Event, None, TaskFinished]:
        """Time prompts that the search did not score, plain and tuned, until the verdict is sure; return the result."""
        task.phase = "verdict"
        if len(task.judged) == task.n_held_out:
            held_out_indices = {index for index, _ in task.judged}
            # Skip the first prompts: they were used to choose the draft's format.
            task_indices = [
                prompt_index
                for prompt_index, prompt in enumerate(self._prompts)
                if prompt.task == task.name and prompt_index >= N_PROMPTS
            ]
            task.add_unscored(
                [
                    (prompt_index, self._prompts[prompt_index])
                    for prompt_index in task_indices
                    if prompt_index not in held_out_indices
                ]
            )
        looks = looks_of(task.n_held_out, len(task.judged) - task.n_held_out)
        judgement = yield from by_looks(looks, lambda look: self._time_look(task, look))
        n_prompts = judgement.verdict.n_prompts
        tuned_completions = [pair.tuned for pairs in task.timed[:n_prompts] for pair in pairs]
        verdict = replace(judgement.verdict, expected=expected_of(self.costs, tuned_completions))
        return task.result(self.model, self.runtime, self.costs, verdict, tuned_completions, judgement.turns)

    def _adopt_fastest(self, task: TaskState) -> Iterator[Event]:
        """Time the set in use and the search's first set on served prompts, and use the faster one."""
        search, held_out_indices = task.search, {index for index, _ in task.judged}
        contender_sets = [] if task.timed else search.contenders
        methods = [drafting_with(SkippedTarget(contender), search.settings, self.costs) for contender in contender_sets]
        served_prompts = [
            contender
            for prompt_index, contender in enumerate(self._prompts)
            if contender.task == task.name and prompt_index not in held_out_indices
        ]
        phase = PhaseChanged(task.name, "profile", "timing the set in use and the first one")
        runs = yield from time_methods(self.session, served_prompts[::-1], methods, phase)
        if runs:
            search.take(contender_sets[unbeaten_methods(runs)[0]])

    def _time_look(self, task: TaskState, look: Look) -> Generator[Event, None, list[tuple[int, list[TimedTurn]]]]:
        """Time a look's prompts, each plain and tuned, except those already in the checkpoint."""
        runs_to_time = [
            (run * len(task.judged) + prompt_index, prompt_index, run)
            for run in look.runs
            for prompt_index in look.prompts
        ]
        if runs_to_time[-1][0] >= len(task.timed):
            yield PhaseChanged(task.name, "verdict", _look_words(look))
        timed_turns = []
        for timed_index, prompt_index, run in runs_to_time:
            yield from self._time_prompt(task, prompt_index, run, timed_index)
            timed_turns.append((prompt_index, [TimedTurn.of(pair) for pair in task.timed[timed_index]]))
        return timed_turns

    def _time_prompt(self, task: TaskState, prompt_index: int, run: int, timed_index: int) -> Iterator[Event]:
        """Decode a prompt of the verdict plain and tuned; which of the two comes first alternates.

        Plain decoding's first run of a held-out prompt is the output; others equal it, or what was served, and are not
        yielded. A chat that outgrows the context either way is judged up to there.
        """
        index, prompt = task.judged[prompt_index]
        if timed_index == len(task.timed):
            task.timed.append([])
        pairs = task.timed[timed_index]
        if len(pairs) == n_turns(prompt):
            return
        yield PromptStarted(task.name, prompt.id, index, len(self._prompts))
        # Create a new drafter for each run, so that all runs learn the same.
        method = drafting_with(SkippedTarget(task.search.layer_set), task.search.settings, self.costs)
        if (prompt_index or pairs) and task.learnt is not None:
            method.drafter.restore(task.learnt)
        is_output = prompt_index < task.n_held_out and not run
        try:
            for event in in_pairs(self.session, prompt, method, (prompt_index + run) % 2 == 1, pairs[:]):
                if isinstance(event, Round):
                    paused_at = perf_counter()
                    self._observed.learn(event.context.load.take_timings())
                    yield from self._report_progress(task)
                    # Exclude the caller's time from the run's time.
                    event.context.tally.started += perf_counter() - paused_at
                    continue
                turn, pair = event
                pairs.append(pair)
                task.learnt = method.drafter.state()
                # A run that is not output still yields progress, so that the timed pair can be saved in a checkpoint.
                yield PromptFinished(turn, index, pair.plain, held_out=True) if is_output else task.progress()
        except ContextOverflow as error:
            if not pairs or run:
                raise
            task.judged[prompt_index] = index, replace(prompt, turns=prompt.turns[: len(pairs)])
            yield PhaseChanged(task.name, "verdict", f"a chat ends early: {error}")

    def _report_progress(self, task: TaskState) -> Iterator[Event]:
        """Yield progress, at which the run can be stopped.

        At most once per `PROGRESS_INTERVAL_S`, as the rounds in between are timed.
        """
        now = perf_counter()
        if now >= self._next_report:
            self._next_report = now + PROGRESS_INTERVAL_S
            yield task.progress()


def _look_words(look: Look) -> str:
    n_prompts = len(look.prompts)
    if look.runs.start:
        return f"not sure yet: all {n_prompts} prompts again"
    if look.prompts.start:
        return f"not sure yet: {n_prompts} more that no candidate was scored on"
    return f"{n_prompts} held-out prompts, plain and tuned"
