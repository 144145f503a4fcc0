"""Tuning while serving: decode a stream, search between the rounds, and judge the result on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from ..core.costs import CostProfile
from ..core.events import PhaseChanged, PromptFinished, PromptStarted, StreamShifted, TaskFinished
from ..core.known_sets import KnownSet
from ..core.settings import SwiftSettings
from ..core.types import Completion, LayerSet, LayerSetRecord, Prompt, Sampling, Trial, Verdict
from ..decoding.context import Context
from ..decoding.loop import Round, Watch
from ..decoding.models import SkippedTarget
from ..decoding.session import Session, n_turns
from ..models.runtime import Runtime
from .drafting import drafting_with, expected_of, learn_again, learnt_by
from .reports import progress_of, record_of, result_of
from .search import Search, TellEvent
from .shift import ShiftWatch
from .snapshot import VERSION, Flight, TaskState, check, reading
from .verdict import Pair, faster, hold_out, is_open, judge, side_by_side, timed_pairs, turns_done

Place = tuple[int, Prompt]  # a prompt and where it is in the stream
Divide = Callable[[list[Place]], tuple[list[Place], list[Place]]]  # into those to tune on and those held out

BEAT_S = 0.5  # seconds between two signs of life while held-out prompts are timed


class _Stopped(Exception):
    """Ends the decoding of a prompt when the run was asked to stop."""


class Tuner:
    """Tunes every task of a stream on one model.

    Args: model: the name the caller used, for the record. costs: the measured profile that scores are made of.
          tell: takes every event; what it raises ends the run. known: sets of this model from elsewhere, those of
          similar text being tried first where a task's text becomes another kind.
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
        known: Sequence[KnownSet] = (),
    ) -> None:
        self.runtime, self.settings, self.costs, self.model = runtime, settings, costs, model
        self.session = Session(runtime, sampling, max_new_tokens)
        self.tell = tell
        formats = LayerSet(runtime.n_layers).filled(settings.draft_format).formats
        self.known = tuple(own for own in known if own.layer_set.formats == formats)
        self._running: dict[str, TaskState] = {}
        self._concluded: list[str] = []
        self._prompts: Sequence[Prompt] = ()
        self._next = 0  # place in the stream of the prompt in flight, or else of the first that was not begun
        self._flight: Flight | None = None
        self._stop_reason: str | None = None
        self._next_beat = 0.0

    def run(
        self,
        prompts: Sequence[Prompt],
        start: Mapping[str, Any] | None = None,
        trials: Mapping[str, Sequence[Trial]] = {},
    ) -> Iterator[TaskFinished]:
        """Decode the stream in its order; held-out prompts come last. One result per task, in order of appearance.

        Each result is yielded before the next task is judged, so that a run cut short there has lost nothing.

        Args:   start: a `snapshot` of the same run, from which this one goes on. trials: by task, all that the run had
                made by then, in their order.
        Raises: SettingsError: `start` is of another version, model or stream, or was changed.
        """
        self._running, self._prompts = self._tasks(prompts, hold_out), prompts
        held = {index for task in self._running.values() for index, _ in task.held_out}
        try:
            if start is not None:
                self._restore(start, trials)
            self._check_stop()
            self._serve_all(held)
            for task in list(self._running.values()):
                result = self._conclude(task)
                del self._running[task.name]
                self._concluded.append(task.name)
                yield result
                self._check_stop()
        except _Stopped:
            return
        finally:
            for task in self._running.values():
                task.search.close()

    def serve(self, prompts: Sequence[Prompt], sparing: bool = True) -> dict[str, tuple[LayerSet, SwiftSettings]]:
        """Decode the stream as `run` does, with nothing held out and no verdict; what each task drafts with at the end.

        Args: sparing: keep searches to a share of the stream's time, as `run` does; else they may go on to its end.
        """
        self._running, self._prompts = self._tasks(prompts, lambda own: (own, []), sparing), prompts
        try:
            self._serve_all()
        finally:
            for task in self._running.values():
                task.search.close()
        return {name: (task.search.layer_set, task.search.settings) for name, task in self._running.items()}

    def snapshot(self) -> dict[str, Any]:
        """Where the run stands, as JSON values without the trials; `run` goes on from it in another process.

        To be taken when a result was yielded, or in any `tell` but those of `Adopted`, whose trial is told right after,
        and `StreamShifted`, whose prompt is finished right after.
        """
        return {
            "version": VERSION,
            "n_layers": self.runtime.n_layers,
            "n_prompts": len(self._prompts),
            "draft_format": self.settings.draft_format,  # chosen once, where the request leaves it open
            "next": self._next,
            "flight": None if self._flight is None else self._flight.to_json(),
            "tasks": {name: task.to_json() for name, task in self._running.items()},
            "concluded": list(self._concluded),
        }

    def stop(self, reason: str) -> None:
        """End the run after the round in progress, without a verdict; may be called in `tell`, or by another thread.

        The prompt in flight is dropped; what was tried is in `unfinished`, and a later `snapshot` can be gone on from.
        """
        self._stop_reason = reason

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop_reason is not None

    def unfinished(self) -> Iterator[TaskFinished]:
        """Results, without a verdict, of tasks that were cut short after their search had tried something.

        A task counts as concluded when it is yielded, in snapshots as well.
        """
        reason = self._stop_reason or "the run was cut short"
        verdict = Verdict("unmeasured", reason=reason)
        for task in [task for task in self._running.values() if task.search.trials]:
            result = result_of(task, self._record(task, [], verdict), verdict, self.costs, [], [])
            del self._running[task.name]
            self._concluded.append(task.name)
            yield result

    def _restore(self, start: Mapping[str, Any], trials: Mapping[str, Sequence[Trial]]) -> None:
        with reading():
            check(start, self.runtime.n_layers, len(self._prompts), self._running)
            self._next, self._concluded = int(start["next"]), list(start["concluded"])
            if start["flight"] is not None:
                self._flight = Flight.from_json(start["flight"], self._prompts[self._next])
            for name in self._concluded:
                del self._running[name]
            for name, task in self._running.items():
                task.restore(start["tasks"][name], trials.get(name, ()))

    def _check_stop(self) -> None:
        if self.stopped:
            raise _Stopped

    def _tasks(self, prompts: Sequence[Prompt], divide: Divide, sparing: bool = True) -> dict[str, TaskState]:
        by_task: dict[str, list[Place]] = {}
        for index, prompt in enumerate(prompts):
            by_task.setdefault(prompt.task, []).append((index, prompt))
        tasks: dict[str, TaskState] = {}
        ratio = self.settings.start_skip_ratio(self.runtime.info.n_parameters)
        for name, own in by_task.items():

            def prompt_id(name: str = name) -> str:
                return tasks[name].prompt_id

            tuned_on, held_out = divide(own)
            n_tokens = sum(n_turns(each) * self.session.room(each) for _, each in tuned_on)
            search = Search(
                name,
                self.runtime.n_layers,
                self.settings,
                ratio,
                self.costs,
                self.tell,
                prompt_id,
                n_tokens=n_tokens if sparing else None,
            )
            tasks[name] = TaskState(name, search, held_out, ShiftWatch(self.known))
        return tasks

    def _serve_all(self, held: Collection[int] = ()) -> None:
        """Decode all prompts but those held out, from where the run stands; the searches are over then."""
        for index, prompt in enumerate(self._prompts):
            if index >= self._next and index not in held and prompt.task in self._running:
                self._serve(self._running[prompt.task], prompt, index)
        for task in self._running.values():
            task.search.finish("the stream ended")
            task.search.choose_drafting()

    def _serve(self, task: TaskState, prompt: Prompt, index: int) -> None:
        """Decode one prompt with the set in use, searching before each round while the search goes on."""
        if self._flight is None:
            task.search.choose_drafting()
        flight = self._flight or Flight()
        self._next, self._flight = index, flight
        task.prompt_id = prompt.id
        self.tell(PromptStarted(task.name, prompt.id, index, len(self._prompts)))
        self._check_stop()
        watch = self._watch(task, flight)
        for turn, completion in self.session.run(prompt, task.search.method, watch, flight.answers, flight.begun):
            task.count_completion(completion)
            self._look_for_shift(task, completion)
            flight.answered(completion.text)
            if len(flight.answers) == n_turns(prompt):
                self._next, self._flight = index + 1, None
            self.tell(PromptFinished(turn, index, completion))
            self._check_stop()

    def _look_for_shift(self, task: TaskState, completion: Completion) -> None:
        """Search anew where the text has become another kind."""
        if reason := task.shift.add(completion):
            first = task.shift.moved(task.search.layer_set)
            if task.search.reopen(first):
                self.tell(StreamShifted(task.name, reason, len(first)))

    def _watch(self, task: TaskState, flight: Flight) -> Watch:
        def before_round(context: Context) -> None:
            flight.context = context
            task.search.before_round(context)

        def after_round(context: Context, round_: Round) -> None:
            flight.context = context
            self._after_round(task, context, round_)

        def on_prompt(state: Tensor) -> None:
            task.shift.saw(state.tolist(), settled=not task.search.optimising, goes_on=bool(flight.answers))

        searching = before_round if task.search.optimising else None
        return Watch(None, searching, after_round, task.search.scratch_rows, on_prompt)

    def _after_round(self, task: TaskState, context: Context, round_: Round) -> None:
        search = task.search
        task.count(round_)
        search.after_round(context, round_)
        waiting = search.matchness is None or len(context.generated) < self.settings.context_window
        phase = "accelerate" if not search.optimising else "accumulate" if waiting else "optimise"
        if phase != task.phase:
            task.phase = phase
            self.tell(PhaseChanged(task.name, phase, search.stopped_because))  # type: ignore[arg-type]
        self.tell(progress_of(task))
        if context.finish is None:
            self._check_stop()

    def _conclude(self, task: TaskState) -> TaskFinished:
        """Run the held-out prompts plain and tuned, interleaved, and put the task's result together."""
        task.phase = "verdict"
        if task.held_out:
            self.tell(PhaseChanged(task.name, "verdict", f"{len(task.held_out)} held-out prompts, plain and tuned"))
        n_turns_held = sum(n_turns(prompt) for _, prompt in task.held_out)
        self._look(task, 0)
        first = task.pairs[:n_turns_held]
        slow, fast = timed_pairs(first)
        expected = expected_of(self.costs, [pair.tuned for pair in first])
        verdict = judge(fast, slow, expected)
        if is_open(verdict):
            # One slow moment of the machine in four prompts is enough to hide a gain: look again, keep the faster runs.
            self._look(task, n_turns_held)
            again = timed_pairs(task.pairs[n_turns_held:])
            slow, fast = (faster(runs, more) for runs, more in zip((slow, fast), again, strict=True))
            verdict = judge(fast, slow, expected)
        return result_of(task, self._record(task, first, verdict), verdict, self.costs, slow, fast)

    def _look(self, task: TaskState, n_before: int) -> None:
        """Make the pairs behind the first `n_before`: all held-out prompts, the order of plain and tuned changing.

        Plain decoding's completions are the output; those of a second look are the first's, and not told again.
        """
        is_first = not n_before
        n_done, n_turns_done = turns_done([prompt for _, prompt in task.held_out], len(task.pairs) - n_before)
        watch = Watch(after_round=lambda context, round_: self._beat(task))
        method = drafting_with(SkippedTarget(task.search.layer_set), task.search.settings, self.costs)
        if len(task.pairs) > n_before:
            learn_again(method, task.learnt)
        for number, (index, prompt) in list(enumerate(task.held_out))[n_done:]:
            self._check_stop()
            self.tell(PromptStarted(task.name, prompt.id, index, len(self._prompts)))
            self._check_stop()
            earlier = task.pairs[len(task.pairs) - n_turns_done :]
            n_turns_done = 0
            tuned_first = (number % 2 == 1) == is_first
            for turn, pair in side_by_side(self.session, prompt, method, tuned_first, earlier, watch):
                task.pairs.append(pair)
                task.learnt = learnt_by(method)
                if is_first:
                    self.tell(PromptFinished(turn, index, pair.plain, held_out=True))
                else:
                    self.tell(progress_of(task))  # so that what was timed can be kept
                self._check_stop()

    def _beat(self, task: TaskState) -> None:
        """A sign of life now and then, so that who listens can stop the run; seldom, for these rounds are timed."""
        self._check_stop()
        now = perf_counter()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self.tell(progress_of(task))

    def _record(self, task: TaskState, pairs: Sequence[Pair], verdict: Verdict) -> LayerSetRecord:
        return record_of(task, [pair.tuned for pair in pairs], verdict, self.model, self.runtime, self.costs)
