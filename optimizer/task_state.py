"""A tuned task, of a stream or of served traffic, and the state of a run's tasks and prompts in flight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

from ..core.costs import CostProfile, CostSource
from ..core.errors import SettingsError
from ..core.events import Progress, StreamShifted, TaskFinished
from ..core.layer_sets import LayerSet, SubLayer, searchable
from ..core.records import KnownSet, LayerSetRecord
from ..core.serialization import adapter
from ..core.settings import SwiftSettings
from ..core.types import Completion, Prompt, Timings, Trial, Verdict, n_turns
from ..decoding.context import Context, ResumePoint
from ..decoding.events import Prefilled, Round
from ..models.costs import machine_name
from ..models.restacked import check_restackable
from ..models.runtime import Runtime
from .search import Search
from .shift import AcceptanceChart, ReadPrompt, ShiftWatch
from .verdict import Pair, Timed, TimedTurn, speed

VERSION = 5
COUNTERS = ("tokens", "seconds", "drafted", "accepted", "rounds", "n_prompts", "n_tokens", "paces")


def sub_layers_of(runtime: Runtime) -> tuple[SubLayer, ...]:
    """Return the sub-layers that a draft may leave out, of those that the model has: some layers have one alone.

    Attention whose keys and values other layers read is never left out.
    """
    givers = {("attn", layer) for layer in runtime.givers}
    inner = (one for one in searchable(runtime.n_layers) if one not in givers)
    return tuple((kind, layer) for kind, layer in inner if kind in runtime.blocks[layer].kinds)


@dataclass(slots=True)
class TunedTask:
    """One task: its search, and the detection of shifts of its text."""

    name: str
    search: Search
    shift: ShiftWatch = field(default_factory=ShiftWatch)

    @classmethod
    def begin(
        cls,
        name: str,
        runtime: Runtime,
        settings: SwiftSettings,
        costs: CostSource,
        known: Sequence[KnownSet],
        start: LayerSet | None = None,
        n_tokens: int | None = None,
    ) -> Self:
        """Begin a search; arguments as for `Search` and `ShiftWatch`.

        Raises: UnsupportedModel: `settings.exportable`, and no set of this model is a checkpoint.
        """
        skip_ratio = settings.start_skip_ratio(runtime.info.n_parameters)
        if settings.exportable:
            check_restackable(runtime.hf_model.config)
        search = Search(
            *(name, runtime.whole, sub_layers_of(runtime), settings, skip_ratio, costs, start, n_tokens),
            parallel=runtime.parallel,
            # Of drafts of Qwen3.5 without any attention 4 % are accepted, and twelve times that with whole layers left
            # out. Source: arXiv:2605.01106.
            whole_layers=runtime.mixes_in_turns and not runtime.family.alone,
        )
        return cls(name, search, ShiftWatch(known))

    def add_prompt(self, prefilled: Prefilled, goes_on: bool = False) -> ReadPrompt | None:
        """Record the hidden state of a prompt that was read, if known; see `ShiftWatch.add_prompt`."""
        if prefilled.state is None:
            return None
        return self.shift.add_prompt(prefilled.state.tolist(), settled=not self.search.optimising, goes_on=goes_on)

    def shifted_by(self, completion: Completion, prompt: ReadPrompt | None = None) -> StreamShifted | None:
        """Record a prompt's completion; if it signals a shift, restart the search and return the event."""
        reason = self.shift.add(completion, prompt)
        if not reason:
            return None
        nearest_sets = self.shift.restart(self.search.layer_set)
        return StreamShifted(self.name, reason, len(nearest_sets)) if self.search.reopen(nearest_sets) else None

    def record(
        self, model: str, runtime: Runtime, verdict: Verdict, pairs: Sequence[tuple[Timed, Timed]]
    ) -> LayerSetRecord:
        """Describe the set in use, with the verdict on it.

        Args: model: the name that the caller used. pairs: plain and drafted runs of a text, which the verdict is of.
        """
        interval = verdict.interval
        return LayerSetRecord(
            model=model,
            task=self.name,
            layer_set=self.search.layer_set,
            fingerprint=runtime.info.fingerprint,
            matchness=_round(self.search.matchness),
            expected_speedup=_round(verdict.expected),
            measured_speedup=_round(verdict.ratio),
            measured_interval=None if interval is None else (round(interval[0], 4), round(interval[1], 4)),
            verdict=verdict.word,
            device=machine_name(runtime),
            dtype=runtime.dtype_name,
            settings=self.search.settings.to_json(),
            evidence=tuple((plain.tokens, plain.seconds, drafted.tokens, drafted.seconds) for plain, drafted in pairs),
            prompt_state=self.shift.state,
        )


@dataclass(slots=True)
class TaskState(TunedTask):
    """One task of a run: the sums over its completions, its phase, and its verdict's pairs so far.

    `judged` are the prompts of the verdict with their places in the stream, chats as far as they fit the context: the
    first `n_held_out` were never served, the others joined them when the verdict began. `timed` are the pairs of each
    run of a prompt, in their order; `learnt` is the state of the verdict's drafter after its latest pair.
    """

    judged: list[tuple[int, Prompt]] = field(default_factory=list)
    n_held_out: int = 0
    phase: Any = ""
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    timings: Timings = field(default_factory=Timings)
    n_prompts: int = 0
    n_tokens: int = 0
    paces: Sequence[float] = ()  # Tokens per second of each prompt.
    timed: list[list[Pair]] = field(default_factory=list)
    learnt: dict[str, Any] | None = None

    def hold_out(self, prompts: Sequence[tuple[int, Prompt]]) -> None:
        """Set prompts aside for the verdict, with their positions in the stream."""
        self.judged, self.n_held_out = list(prompts), len(prompts)

    def add_unscored(self, served: Sequence[tuple[int, Prompt]]) -> None:
        """Let the latest of the `served` prompts that the search has scored nothing on join those held out.

        They are as many as were held out, at most.
        """
        scored = {trial.prompt_id for trial in self.search.trials}
        unscored = [(index, prompt) for index, prompt in served if prompt.id not in scored]
        self.judged += unscored[max(0, len(unscored) - self.n_held_out) :]

    def count(self, round_: Round) -> None:
        """Add a round to the sums."""
        self.tokens += len(round_.token_ids)
        self.drafted += round_.n_steps
        self.accepted += round_.n_accepted
        self.rounds += 1
        self.seconds += round_.draft_s + round_.verify_s

    def count_completion(self, completion: Completion) -> None:
        """Add a completion decoded while tuning to the sums."""
        self.timings += completion.timings
        self.n_prompts += 1
        self.n_tokens += completion.n_tokens
        self.paces = *self.paces, round(completion.tok_s or 0.0, 3)

    def progress(self) -> Progress:
        """Return the task's progress after a round."""
        trials = self.search.trials
        return Progress(
            task=self.name,
            phase=self.phase,
            tokens=self.tokens,
            tok_s=self.tokens / max(1e-9, self.seconds),
            matchness=trials[-1].matchness if trials else None,
            best_matchness=self.search.matchness,
            n_trials=len(trials),
            acceptance_rate=self.accepted / self.drafted if self.drafted else None,
            mean_generated_length=self.tokens / self.rounds if self.rounds else None,
            skip_ratio=self.search.skip_ratio,
        )

    def result(
        self,
        model: str,
        runtime: Runtime,
        costs: CostProfile,
        verdict: Verdict,
        tuned: Sequence[Completion] = (),
        turns: Sequence[TimedTurn] = (),
    ) -> TaskFinished:
        """Return the task's result: figures of the `tuned` completions, else of the prompts served so far.

        Args: turns: what the verdict was made of.
        """
        n_drafted, n_accepted, n_passes, n_tokens = self.drafted, self.accepted, self.rounds, self.tokens
        if tuned:
            n_drafted, n_accepted = (
                sum(completion.drafted for completion in tuned),
                sum(completion.accepted for completion in tuned),
            )
            n_passes = sum(completion.target_passes for completion in tuned)
            n_tokens = sum(completion.n_decoded for completion in tuned)
        record = replace(
            self.record(model, runtime, verdict, turns),
            acceptance_rate=_round(n_accepted / n_drafted if n_drafted else None),
            mean_generated_length=_round(n_tokens / n_passes if n_passes else None),
        )
        return TaskFinished(
            task=self.name,
            record=record,
            verdict=verdict,
            stopped_because=self.search.stopped_because or verdict.reason,
            trials=tuple(self.search.trials),
            timings=self.timings,
            n_prompts=self.n_prompts,
            n_tokens=self.n_tokens,
            draft_cost=costs.draft_cost(self.search.layer_set),
            plain_tok_s=speed([turn.plain for turn in turns]) if turns else None,
            tuned_tok_s=speed([turn.tuned for turn in turns]) if turns else None,
            paces=tuple(self.paces),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `restore`; texts only of the latest prompt's turns, which its next turn will see."""
        timed = [[[pair.plain.to_json(), pair.tuned.to_json()] for pair in pairs] for pairs in self.timed]
        for pair in chain.from_iterable(timed[:-1]):
            for run in pair:
                run["text"] = ""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "timings": self.timings.to_json(),
            "search": self.search.state(),
            "shift": self.shift.to_json(),
            "learnt": self.learnt,
            "timed": timed,
            "judged": [[index, n_turns(prompt)] for index, prompt in self.judged],
        }

    def restore(self, values: Mapping[str, Any], trials: Sequence[Trial], prompts: Sequence[Prompt]) -> None:
        """Continue from `to_json` of the same task of the stream of `prompts`, and its trials in their order."""
        for name in COUNTERS:
            setattr(self, name, values[name])
        self.timings = Timings.from_json(values["timings"])
        self.timed = [[Pair(*map(Completion.from_json, pair)) for pair in pairs] for pairs in values["timed"]]
        self.learnt = values["learnt"]
        judged_prompts = [
            (int(index), prompts[int(index)], int(n_turns_judged)) for index, n_turns_judged in values["judged"]
        ]
        if [index for index, _ in self.judged] != [index for index, _, _ in judged_prompts[: self.n_held_out]]:
            raise ValueError("other prompts were held out")
        self.judged = [
            (index, replace(prompt, turns=prompt.turns[:n_turns_judged]))
            for index, prompt, n_turns_judged in judged_prompts
        ]
        self.search.restore(values["search"], trials)
        self.shift = replace(ShiftWatch.from_json(values["shift"]), known=self.shift.known)


@dataclass(slots=True)
class PromptInProgress:
    """A prompt that is being decoded: the answers of its finished turns, and the position in the next turn.

    `resume_from` is where an earlier process left that turn, `context` the turn in progress, `read` what was known when
    its prompt was read.
    """

    answers: list[str] = field(default_factory=list)
    resume_from: ResumePoint | None = None
    context: Context | None = None
    read: ReadPrompt | None = None

    def answered(self, text: str) -> None:
        """Count a finished turn."""
        self.answers.append(text)
        self.resume_from = self.context = None

    def to_json(self, chart: AcceptanceChart) -> dict[str, Any]:
        """Return plain values for `from_json`; `chart` is the present one of its task, as there."""
        read_state = None if self.read is None else [self.read.chart is chart, self.read.is_far]
        resume_point = self.resume_from if self.context is None else self.context.resume_point()
        resume_values = adapter(ResumePoint | None).dump_python(
            resume_point, mode="json", exclude={"tally": {"started"}}
        )
        return {"answers": self.answers[:], "begun": resume_values, "read": read_state}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], prompt: Prompt, chart: AcceptanceChart) -> PromptInProgress:
        """Restore the state in which an earlier process of this run left `prompt`."""
        answers, resume_point = list(values["answers"]), adapter(ResumePoint | None).validate_python(values["begun"])
        if len(answers) >= n_turns(prompt):
            raise ValueError("the prompt in flight has no turn left")
        if resume_point is not None and not resume_point.token_ids:
            raise ValueError("a prompt that was begun has no tokens")
        counts_for_chart, is_far = values["read"] or (False, False)
        return cls(answers, resume_point, read=ReadPrompt(chart if counts_for_chart else None, is_far))


@contextmanager
def refuse_unreadable_state() -> Iterator[None]:
    """Convert any error from reading a checkpoint to a SettingsError."""
    try:
        yield
    except SettingsError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        words = " ".join(repr(error).split())
        raise SettingsError(f"the checkpoint of this run cannot be read ({words}): start the run anew") from error


def check(start: Mapping[str, Any], n_layers: int, n_prompts: int, tasks: Collection[str]) -> None:
    """Raises: SettingsError: the checkpoint belongs to another format version, model or stream."""
    problem = ""
    if start["version"] != VERSION:
        problem = f"has version {start['version']!r}, and this swiftopt reads version {VERSION}: start the run anew"
    elif start["n_layers"] != n_layers:
        problem = (
            f"is of a model with {start['n_layers']} layers, but this one has {n_layers}: give the run's own model"
        )
    elif (names := sorted([*start["concluded"], *start["tasks"]])) != sorted(tasks) or start["n_prompts"] != n_prompts:
        problem = f"is of a stream of {start['n_prompts']} prompts in the tasks {names},"
        problem += f" but this one has {n_prompts} in {sorted(tasks)}: give the run's own stream"
    if problem:
        raise SettingsError(f"the checkpoint of this run {problem}")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
