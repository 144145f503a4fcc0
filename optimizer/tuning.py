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
from ..core.observed_costs import ObservedCosts
from ..core.records import KnownSet
from ..core.settings import SwiftSettings
from ..core.types import LayerSet, Prompt, Trial, Verdict, n_turns
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import side_by_side
from ..decoding.events import Prefilled, Round, Turn, WorkEvent
from ..decoding.session import Session
from ..decoding.work import Work
from .drafting import N_PROMPTS, drafting_with, timed_by_turns, unbeaten
from .task_state import VERSION, PromptInProgress, TaskState, check, reading
from .verdict import Look, TimedTurn, by_looks, hold_out, in_pairs, looks_of

BEAT_S = 0.5  # Minimum seconds between two progress events while held-out prompts are timed.
MID_STEP = (Adopted, StreamShifted)  # Events at which no checkpoint may be taken: their trials or completions follow.


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
        formats = LayerSet(self.runtime.n_layers).filled(settings.draft_format).formats
        self.known = tuple(known_set for known_set in known if known_set.layer_set.formats == formats)
        self._running: dict[str, TaskState] = {}
        self._concluded: list[str] = []
        self._prompts: Sequence[Prompt] = ()
        self._next = 0  # Position in the stream of the next prompt to start.
        self._in_progress: dict[int, PromptInProgress] = {}  # Prompts being decoded, by position in the stream.
        self._next_beat = 0.0
        self._observed = ObservedCosts(costs)  # Costs refined by the passes of all verdicts.

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
        with self._tasks_of(prompts, judged=True):
            held = {index for task in self._running.values() for index, _ in task.judged}
            if start is not None:
                self._restore(start, trials)
            yield from self._serve_all(held)
            for task in list(self._running.values()):
                result = yield from self._conclude(task)
                self._mark_concluded(task)
                yield result

    def serve(
        self, prompts: Sequence[Prompt], sparing: bool = True
    ) -> Generator[Event, None, dict[str, tuple[LayerSet, SwiftSettings]]]:
        """Decode the stream as `run` does, with nothing held out and no verdict; return what each task drafts with.

        Args: sparing: limit searches to a share of the stream's time, as `run` does; else they may last to its end.
        """
        with self._tasks_of(prompts, judged=False, sparing=sparing):
            yield from self._serve_all()
        return {name: (task.search.layer_set, task.search.settings) for name, task in self._running.items()}

    def snapshot(self) -> dict[str, Any]:
        """Return the position as JSON values without the trials; `run` continues from it in another process.

        Valid at any event but those of `MID_STEP`. Prompts decoded side by side all continue where they were, but not
        in step: their tokens stay the same, while the search may then try other sets than it would have.
        """
        return {
            "version": VERSION,
            "n_layers": self.runtime.n_layers,
            "n_prompts": len(self._prompts),
            # Stored because it may have been chosen automatically at the start.
            "draft_format": self.settings.draft_format,
            "costs": self.costs.to_json(),  # Stored because the cost store may have been refined since.
            "next": self._next,
            "flights": {
                str(index): current.to_json(task.shift.chart)
                for index, current in self._in_progress.items()
                if (task := self._running.get(self._prompts[index].task)) is not None
            },
            "tasks": {name: task.to_json() for name, task in self._running.items()},
            "concluded": list(self._concluded),
        }

    def unfinished(self, reason: str = "the run was cut short") -> Iterator[TaskFinished]:
        """Yield results without a verdict for tasks that were interrupted after their search had scored candidates.

        A task counts as concluded when it is yielded, in snapshots as well.
        """
        verdict = Verdict("unmeasured", reason=reason)
        for task in [task for task in self._running.values() if task.search.trials]:
            self._mark_concluded(task)
            yield task.result(self.model, self.runtime, self.costs, verdict)

    def _mark_concluded(self, task: TaskState) -> None:
        del self._running[task.name]
        self._concluded.append(task.name)

    def _restore(self, start: Mapping[str, Any], trials: Mapping[str, Sequence[Trial]]) -> None:
        with reading():
            check(start, self.runtime.n_layers, len(self._prompts), self._running)
            self._next, self._concluded = int(start["next"]), list(start["concluded"])
            for name in self._concluded:
                del self._running[name]
            for name, task in self._running.items():
                task.restore(start["tasks"][name], trials.get(name, ()), self._prompts)
            for place, current in start["flights"].items():
                prompt = self._prompts[int(place)]
                chart = self._running[prompt.task].shift.chart
                self._in_progress[int(place)] = PromptInProgress.from_json(current, prompt, chart)

    @contextmanager
    def _tasks_of(self, prompts: Sequence[Prompt], judged: bool, sparing: bool = True) -> Iterator[None]:
        """Begin the searches of all tasks, and close them at the end."""
        by_task: dict[str, list[tuple[int, Prompt]]] = {}  # Prompts with their positions in the stream, by task.
        for index, prompt in enumerate(prompts):
            by_task.setdefault(prompt.task, []).append((index, prompt))
        self._prompts, self._running = prompts, {}
        for name, task_prompts in by_task.items():
            tuned_on, held_out = hold_out(task_prompts) if judged else (task_prompts, [])
            n_tokens = (
                sum(n_turns(task_prompt) * self.session.room(task_prompt) for _, task_prompt in tuned_on)
                if sparing
                else None
            )
            task = TaskState.begin(name, self.runtime, self.settings, self.costs, self.known, n_tokens=n_tokens)
            task.hold_out(held_out)
            self._running[name] = task
        try:
            yield
        finally:
            for task in self._running.values():
                task.search.close()

    def _serve_all(self, held: Collection[int] = ()) -> Iterator[Event]:
        """Decode all prompts but those held out, from the current position, and end the searches."""
        places = [*self._in_progress, *range(self._next, len(self._prompts))]
        places_to_serve = [at for at in places if at not in held and self._prompts[at].task in self._running]
        # by_time=False: what is drafted, and hence what the search tries, must not depend on the clock.
        works = map(self._serve, places_to_serve)
        for event in side_by_side(works, self.concurrency, self.memory, by_time=False):
            if isinstance(event, Event):
                yield event
        for task in self._running.values():
            task.search.finish("the stream ended")
            yield from task.search.choose_drafting()
            yield from self._take_fastest(task)

    def _serve(self, index: int) -> Work[None]:
        """Decode the prompt at this position of the stream with the set in use, and search meanwhile."""
        prompt = self._prompts[index]
        task = self._running[prompt.task]
        search = task.search
        if index not in self._in_progress:
            yield from search.choose_drafting()
        current = self._in_progress.setdefault(index, PromptInProgress())
        self._next = max(self._next, index + 1)
        yield PromptStarted(task.name, prompt.id, index, len(self._prompts))

        def follow(event: WorkEvent) -> Work[None]:
            match event:
                case Prefilled():
                    current.context = event.context
                    current.read = task.add_prompt(event, goes_on=bool(current.answers)) or current.read
                case Round():
                    yield from self._after_round(task, event)
                case Turn():
                    yield from self._after_turn(task, index, current, event)
                case TrialsDone():
                    task.seconds += sum(trial.seconds for trial in event.trials)

        try:
            yield from search.request(
                self.session, prompt, current.answers, current.resume_from, follow, with_state=True
            )
        except ContextOverflow as error:
            if not current.answers:
                raise
            del self._in_progress[index]
            yield PhaseChanged(task.name, task.phase or "accumulate", f"a chat ends early: {error}")

    def _after_turn(self, task: TaskState, index: int, current: PromptInProgress, turn: Turn) -> Iterator[Event]:
        """Record a completion, and restart the search if it signals a shift."""
        task.count_completion(turn.completion)
        shifted = task.shifted_by(turn.completion, current.read)
        current.answered(turn.completion.text)
        if len(current.answers) == n_turns(self._prompts[index]):
            del self._in_progress[index]
        if shifted is not None:
            yield shifted
        yield PromptFinished(turn.prompt, index, turn.completion)

    def _after_round(self, task: TaskState, round_: Round) -> Iterator[Event]:
        search = task.search
        task.count(round_)
        running = [
            in_progress.context for at, in_progress in self._in_progress.items() if self._prompts[at].task == task.name
        ]
        longest = max((len(context.generated) for context in running if context is not None), default=0)
        waiting = search.matchness is None or longest < self.settings.context_window
        phase = "accelerate" if not search.optimising else "accumulate" if waiting else "optimise"
        if phase != task.phase:
            task.phase = phase
            yield PhaseChanged(task.name, phase, search.stopped_because)  # type: ignore[arg-type]
        yield task.progress()

    def _conclude(self, task: TaskState) -> Generator[Event, None, TaskFinished]:
        """Time prompts that the search did not score, plain and tuned, until the verdict is sure; return the result."""
        task.phase = "verdict"
        if len(task.judged) == task.n_held_out:
            held = {index for index, _ in task.judged}
            # Skip the first prompts: they were used to choose the draft's format.
            places = [at for at, prompt in enumerate(self._prompts) if prompt.task == task.name and at >= N_PROMPTS]
            task.add_unscored([(at, self._prompts[at]) for at in places if at not in held])
        looks = looks_of(task.n_held_out, len(task.judged) - task.n_held_out)
        judged = yield from by_looks(looks, lambda look: self._measure(task, look))
        n_prompts = judged.verdict.n_prompts
        tuned = [pair.tuned for pairs in task.timed[:n_prompts] for pair in pairs]
        verdict = replace(judged.verdict, expected=expected_of(self.costs, tuned))
        return task.result(self.model, self.runtime, self.costs, verdict, tuned, judged.turns)

    def _take_fastest(self, task: TaskState) -> Iterator[Event]:
        """Time the set in use and the search's first set on served prompts, and use the faster one."""
        search, held = task.search, {index for index, _ in task.judged}
        sets = [] if task.timed else search.contenders
        methods = [drafting_with(SkippedTarget(contender), search.settings, self.costs) for contender in sets]
        served = [
            contender for at, contender in enumerate(self._prompts) if contender.task == task.name and at not in held
        ]
        phase = PhaseChanged(task.name, "profile", "timing the set in use and the first one")
        runs = yield from timed_by_turns(self.session, served[::-1], methods, phase)
        if runs:
            search.take(sets[unbeaten(runs)[0]])

    def _measure(self, task: TaskState, look: Look) -> Generator[Event, None, list[tuple[int, list[TimedTurn]]]]:
        """Time a look's prompts, each plain and tuned, except those already in the checkpoint."""
        places = [(run * len(task.judged) + number, number, run) for run in look.runs for number in look.prompts]
        if places[-1][0] >= len(task.timed):
            yield PhaseChanged(task.name, "verdict", _look_words(look))
        timed_turns = []
        for place, number, run in places:
            yield from self._time(task, number, run, place)
            timed_turns.append((number, [TimedTurn.of(pair) for pair in task.timed[place]]))
        return timed_turns

    def _time(self, task: TaskState, number: int, run: int, place: int) -> Iterator[Event]:
        """Decode a prompt of the verdict plain and tuned; which of the two comes first alternates.

        Plain decoding's first run of a held-out prompt is the output; others equal it, or what was served, and are not
        yielded. A chat that outgrows the context either way is judged up to there.
        """
        index, prompt = task.judged[number]
        if place == len(task.timed):
            task.timed.append([])
        pairs = task.timed[place]
        if len(pairs) == n_turns(prompt):
            return
        yield PromptStarted(task.name, prompt.id, index, len(self._prompts))
        # Create a new drafter for each run, so that all runs learn the same.
        method = drafting_with(SkippedTarget(task.search.layer_set), task.search.settings, self.costs)
        if (number or pairs) and task.learnt is not None:
            method.drafter.restore(task.learnt)
        is_output = number < task.n_held_out and not run
        try:
            for event in in_pairs(self.session, prompt, method, (number + run) % 2 == 1, pairs[:]):
                if isinstance(event, Round):
                    clock = perf_counter()
                    self._observed.learn(event.context.load.take_timings())
                    yield from self._beat(task)
                    # Exclude the caller's time from the run's time.
                    event.context.tally.started += perf_counter() - clock
                    continue
                turn, pair = event
                pairs.append(pair)
                task.learnt = method.drafter.state()
                # A run that is not output still yields progress, so that the timed pair can be saved in a checkpoint.
                yield PromptFinished(turn, index, pair.plain, held_out=True) if is_output else task.progress()
        except ContextOverflow as error:
            if not pairs or run:
                raise
            task.judged[number] = index, replace(prompt, turns=prompt.turns[: len(pairs)])
            yield PhaseChanged(task.name, "verdict", f"a chat ends early: {error}")

    def _beat(self, task: TaskState) -> Iterator[Event]:
        """Yield progress, at which the run can be stopped, at most every `BEAT_S` since these rounds are timed."""
        now = perf_counter()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            yield task.progress()


def _look_words(look: Look) -> str:
    n = len(look.prompts)
    if look.runs.start:
        return f"not sure yet: all {n} prompts again"
    if look.prompts.start:
        return f"not sure yet: {n} more that no candidate was scored on"
    return f"{n} held-out prompts, plain and tuned"
