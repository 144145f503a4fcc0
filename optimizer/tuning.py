"""Tuning of a stream: decode it, search between the rounds, and judge the result on held-out prompts."""

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
from .task_state import VERSION, PromptInProgress, TaskState, check_start, refuse_unreadable_state
from .verdict import InterimTest, TimedTurn, hold_out, in_pairs, plan_interim_tests, run_interim_tests

PROGRESS_INTERVAL_S = 0.5  # Minimum seconds between two progress events while held-out prompts are timed.
# Events after which no checkpoint may be taken, because the trials or the completion that they belong to follow.
EVENTS_WITHIN_STEP = (Adopted, StreamShifted)


class Tuner:
    """Tunes every task of a stream on one model.

    Args: session: how prompts are decoded. costs: measured costs of passes, for the scores. model: the name that the
          caller used, for the record. known: stored sets of this model; after a shift, those of similar text are tried
          first. concurrency: prompts that are decoded together, if `memory` allows it; see `Engine`.
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
        self._next_report_s = 0.0
        # Costs refined by the passes of the verdicts.
        self._observed_costs = ObservedCosts(costs, (), slot_copies(self.runtime))

    @property
    def refined_costs(self) -> list[CostProfile]:
        """Costs refined by the verdicts' passes, for later runs. This run does not use them, to stay reproducible."""
        return self._observed_costs.refined()

    def run(
        self,
        prompts: Sequence[Prompt],
        start: Mapping[str, Any] | None = None,
        trials: Mapping[str, Sequence[Trial]] = {},
    ) -> Generator[Event, None, None]:
        """Decode the stream in order, then the held-out prompts of each task; yield all events.

        A task ends with `TaskFinished`, before the next task is judged. A chat ends before a turn that does not fit the
        model's context; an event reports it. A caller that closes the generator early gets the remaining results from
        `unfinished`.

        Args:   start: a `snapshot` of the same run, to continue from. trials: by task, the trials up to that snapshot
                in order.
        Raises: SettingsError: `start` belongs to another version, model or stream, or cannot be read.
        """
        with self._begin_tasks(prompts, holds_out=True):
            held_out_indices = {index for task in self._running_tasks.values() for index, _ in task.verdict_prompts}
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
        """Decode the stream as `run` does, but without held-out prompts and verdicts; return each task's drafts.

        Args:    is_budgeted: limit searches to a share of the stream's time, as `run` does.
        Returns: by task, the layer set in use at the end and its settings.
        """
        with self._begin_tasks(prompts, holds_out=False, is_budgeted=is_budgeted):
            yield from self._serve_all()
        return {name: (task.search.layer_set, task.search.settings) for name, task in self._running_tasks.items()}

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the run as JSON values, without the trials; `run` continues from it in another process.

        Valid after any event that is not in `EVENTS_WITHIN_STEP`. Each prompt in progress continues where it was, with
        the same tokens. If several were decoded together, their rounds alternate in another order afterwards, so that
        the search may try other sets.
        """
        return {
            "version": VERSION,
            "n_layers": self.runtime.n_layers,
            "n_prompts": len(self._prompts),
            # Stored because it may have been chosen automatically at the start.
            "draft_format": self.settings.draft_format,
            "costs": self.costs.to_json(),  # Stored because the database's costs may be refined meanwhile.
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
        """Yield results without a verdict for the interrupted tasks whose search has scored candidates.

        A yielded task counts as concluded, also in snapshots.
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
            check_start(start, self.runtime.n_layers, len(self._prompts), self._running_tasks)
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
        prompts_by_task: dict[str, list[tuple[int, Prompt]]] = {}  # Prompts with their positions in the stream.
        for index, prompt in enumerate(prompts):
            prompts_by_task.setdefault(prompt.task, []).append((index, prompt))
        self._prompts, self._running_tasks = prompts, {}
        for name, task_prompts in prompts_by_task.items():
            tuning_prompts, held_out = hold_out(task_prompts) if holds_out else (task_prompts, [])
            n_tokens = sum(n_turns(prompt) * self.session.room(prompt) for _, prompt in tuning_prompts)
            limit = n_tokens if is_budgeted else None
            task = TaskState.begin(name, self.runtime, self.settings, self.costs, self.known, n_tokens=limit)
            task.hold_out(held_out)
            self._running_tasks[name] = task
        try:
            yield
        finally:
            for task in self._running_tasks.values():
                task.search.close()

    def _serve_all(self, held_out_indices: Collection[int] = ()) -> Iterator[Event]:
        """Decode the remaining prompts except the held-out ones, then end the searches."""
        remaining_indices = [
            index
            for index in (*self._in_progress, *range(self._next_index, len(self._prompts)))
            if index not in held_out_indices and self._prompts[index].task in self._running_tasks
        ]
        # by_time=False: the drafts, and with them the candidates, must not depend on measured times.
        works = map(self._serve, remaining_indices)
        for event in side_by_side(works, self.concurrency, self.memory, by_time=False):
            if isinstance(event, Event):
                yield event
        for task in self._running_tasks.values():
            task.search.finish("the stream ended")
            yield from task.search.choose_drafting()
            yield from self._adopt_fastest(task)

    def _serve(self, index: int) -> Work[None]:
        """Decode the prompt at this position of the stream with its task's set in use, while searching."""
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
                    progress.read = task.add_prompt(event, is_later_turn=bool(progress.answers)) or progress.read
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
        shift_event = task.add_completion(turn.completion, progress.read)
        progress.finish_turn(turn.completion.text)
        if len(progress.answers) == n_turns(self._prompts[index]):
            del self._in_progress[index]
        if shift_event is not None:
            yield shift_event
        yield PromptFinished(turn.prompt, index, turn.completion)

    def _after_round(self, task: TaskState, round_: Round) -> Iterator[Event]:
        """Count a round; report the task's phase if it changed, and its progress."""
        search = task.search
        task.count_round(round_)
        contexts = [
            progress.context for index, progress in self._in_progress.items() if self._prompts[index].task == task.name
        ]
        max_generated = max((len(context.generated) for context in contexts if context is not None), default=0)
        fills_window = search.matchness is None or max_generated < self.settings.context_window
        phase = "accelerate" if not search.optimising else "accumulate" if fills_window else "optimise"
        if phase != task.phase:
            task.phase = phase
            yield PhaseChanged(task.name, phase, search.stopped_because)  # type: ignore[arg-type]
        yield task.progress()

    def _conclude(self, task: TaskState) -> Generator[Event, None, TaskFinished]:
        """Time prompts that the search did not score, plain and tuned, until the verdict is sure; return the result."""
        task.phase = "verdict"
        if len(task.verdict_prompts) == task.n_held_out:
            # Leave out the stream's first prompts: the draft's format was chosen on them.
            task.add_unscored([(index, prompt) for index, prompt in self._served_prompts(task) if index >= N_PROMPTS])
        tests = plan_interim_tests(task.n_held_out, len(task.verdict_prompts) - task.n_held_out)
        judgement = yield from run_interim_tests(tests, lambda test: self._run_interim_test(task, test))
        n_prompts = judgement.verdict.n_prompts
        tuned_completions = [pair.tuned for pairs in task.timed_pairs[:n_prompts] for pair in pairs]
        verdict = replace(judgement.verdict, expected=expected_of(self.costs, tuned_completions))
        return task.result(self.model, self.runtime, self.costs, verdict, tuned_completions, judgement.turns)

    def _served_prompts(self, task: TaskState) -> list[tuple[int, Prompt]]:
        """Return the task's prompts that are not held out, with their positions in the stream."""
        held_out_indices = {index for index, _ in task.verdict_prompts}
        return [
            (index, prompt)
            for index, prompt in enumerate(self._prompts)
            if prompt.task == task.name and index not in held_out_indices
        ]

    def _adopt_fastest(self, task: TaskState) -> Iterator[Event]:
        """Time the set in use and the search's first set on served prompts, the latest first; adopt the faster one."""
        search = task.search
        layer_sets = [] if task.timed_pairs else search.sets_to_time
        methods = [drafting_with(SkippedTarget(layer_set), search.settings, self.costs) for layer_set in layer_sets]
        prompts = [prompt for _, prompt in reversed(self._served_prompts(task))]
        phase = PhaseChanged(task.name, "profile", "timing the set in use and the first one")
        runs = yield from time_methods(self.session, prompts, methods, phase)
        if runs:
            search.adopt(layer_sets[unbeaten_methods(runs)[0]])

    def _run_interim_test(
        self, task: TaskState, test: InterimTest
    ) -> Generator[Event, None, list[tuple[int, list[TimedTurn]]]]:
        """Time a test's prompts plain and tuned, except those that the checkpoint has; see `MeasureRuns`."""
        runs_to_time = [
            (run * len(task.verdict_prompts) + prompt_index, prompt_index, run)
            for run in test.runs
            for prompt_index in test.prompts
        ]
        if runs_to_time[-1][0] >= len(task.timed_pairs):
            yield PhaseChanged(task.name, "verdict", _describe_test(test))
        timed_turns = []
        for run_index, prompt_index, run in runs_to_time:
            yield from self._time_prompt(task, prompt_index, run, run_index)
            timed_turns.append((prompt_index, [TimedTurn.of(pair) for pair in task.timed_pairs[run_index]]))
        return timed_turns

    def _time_prompt(self, task: TaskState, prompt_index: int, run: int, run_index: int) -> Iterator[Event]:
        """Decode a prompt of the verdict plain and tuned; the order of the two alternates.

        The first plain run of a held-out prompt is the prompt's output. Other runs give the same text or text that was
        served already, so they are not yielded as completions. A chat that outgrows the context is judged up to there.

        Args: run: 0-based number of the prompt's run. run_index: position of the run in `task.timed_pairs`.
        """
        index, prompt = task.verdict_prompts[prompt_index]
        if run_index == len(task.timed_pairs):
            task.timed_pairs.append([])
        pairs = task.timed_pairs[run_index]
        if len(pairs) == n_turns(prompt):
            return
        yield PromptStarted(task.name, prompt.id, index, len(self._prompts))
        # Each run over the prompts starts with a drafter that has learnt nothing, so that all runs are alike. Within a
        # run, the drafter's state passes from pair to pair.
        method = drafting_with(SkippedTarget(task.search.layer_set), task.search.settings, self.costs)
        if (prompt_index or pairs) and task.drafter_state is not None:
            method.drafter.restore(task.drafter_state)
        is_output = prompt_index < task.n_held_out and not run
        try:
            for event in in_pairs(self.session, prompt, method, (prompt_index + run) % 2 == 1, pairs[:]):
                if isinstance(event, Round):
                    paused_at_s = perf_counter()
                    self._observed_costs.learn(event.context.load.take_timings())
                    yield from self._report_progress(task)
                    # The run's time must not include the time that the caller takes.
                    event.context.tally.started += perf_counter() - paused_at_s
                    continue
                turn, pair = event
                pairs.append(pair)
                task.drafter_state = method.drafter.state()
                # Yield progress after the other runs, so that a checkpoint can save the timed pair.
                yield PromptFinished(turn, index, pair.plain, held_out=True) if is_output else task.progress()
        except ContextOverflow as error:
            if not pairs or run:
                raise
            task.verdict_prompts[prompt_index] = index, replace(prompt, turns=prompt.turns[: len(pairs)])
            yield PhaseChanged(task.name, "verdict", f"a chat ends early: {error}")

    def _report_progress(self, task: TaskState) -> Iterator[Event]:
        """Yield progress, at which the caller can stop the run.

        At most once per `PROGRESS_INTERVAL_S`, because reports disturb the rounds that are being timed.
        """
        now_s = perf_counter()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + PROGRESS_INTERVAL_S
            yield task.progress()


def _describe_test(test: InterimTest) -> str:
    n_prompts = len(test.prompts)
    if test.runs.start:
        return f"undecided: all {n_prompts} prompts again"
    if test.prompts.start:
        return f"undecided: {n_prompts} more prompts on which no candidate was scored"
    return f"{n_prompts} held-out prompts, plain and tuned"
