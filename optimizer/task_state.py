"""A tuned task, of a stream or of served traffic, and the state of a run's tasks and prompts in progress."""

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

VERSION = 5  # Version of the checkpoint format.
COUNTERS = ("tokens", "seconds", "drafted", "accepted", "rounds", "n_prompts", "n_tokens", "paces")


def sub_layers_of(runtime: Runtime) -> tuple[SubLayer, ...]:
    """Return the sub-layers of the model that a draft may skip.

    They exclude the first and the last layer, sub-layers that a layer does not have, and attention whose keys and
    values other layers read.
    """
    shared_attention = {("attn", layer) for layer in runtime.givers}
    return tuple(
        (kind, layer)
        for kind, layer in searchable(runtime.n_layers)
        if (kind, layer) not in shared_attention and kind in runtime.blocks[layer].kinds
    )


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
        """Begin a task's search; arguments as for `Search` and `ShiftWatch`.

        Raises: UnsupportedModel: `settings.exportable` is set, and this model cannot be exported with skipped layers.
        """
        skip_ratio = settings.start_skip_ratio(runtime.info.n_parameters)
        if settings.exportable:
            check_restackable(runtime.hf_model.config)
        # Models that mix attention with recurrent layers skip whole layers. For Qwen3.5, 4 % of the drafted tokens are
        # accepted if all attention is skipped, and twelve times as many with whole layers (arXiv:2605.01106).
        whole_layers = runtime.mixes_in_turns and not runtime.family.alone
        search = Search(
            name,
            runtime.whole,
            sub_layers_of(runtime),
            settings,
            skip_ratio,
            costs,
            start,
            n_tokens,
            parallel=runtime.parallel,
            whole_layers=whole_layers,
        )
        return cls(name, search, ShiftWatch(known))

    def add_prompt(self, prefilled: Prefilled, is_later_turn: bool = False) -> ReadPrompt | None:
        """Record a prompt's hidden state if the prefill computed it; see `ShiftWatch.add_prompt`."""
        if prefilled.state is None:
            return None
        is_settled = not self.search.optimising
        return self.shift.add_prompt(prefilled.state.tolist(), is_settled, is_later_turn)

    def add_completion(self, completion: Completion, prompt: ReadPrompt | None = None) -> StreamShifted | None:
        """Record a prompt's completion; if it signals a shift, restart the search and return the event."""
        reason = self.shift.add(completion, prompt)
        if not reason:
            return None
        nearest_sets = self.shift.restart(self.search.layer_set)
        return StreamShifted(self.name, reason, len(nearest_sets)) if self.search.reopen(nearest_sets) else None

    def record(
        self, model: str, runtime: Runtime, verdict: Verdict, pairs: Sequence[tuple[Timed, Timed]]
    ) -> LayerSetRecord:
        """Return the record of the set in use with its verdict.

        Args: model: the name that the caller used. pairs: the (plain, drafted) runs that the verdict is based on.
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
    """One task of a tuning run: sums over its rounds and completions, its phase, and the runs of its verdict so far.

    `tokens`, `seconds`, `drafted`, `accepted` and `rounds` are sums over rounds, `n_prompts` and `n_tokens` over
    completions.
    """

    # Prompts of the verdict with their positions in the stream; chats are cut to the turns that fit the context. The
    # first `n_held_out` were never served.
    verdict_prompts: list[tuple[int, Prompt]] = field(default_factory=list)
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
    timed_pairs: list[list[Pair]] = field(default_factory=list)  # For each run of a verdict's prompt, its turns.
    drafter_state: dict[str, Any] | None = None  # State of the verdict's drafter after the latest pair.

    def hold_out(self, prompts: Sequence[tuple[int, Prompt]]) -> None:
        """Set prompts aside for the verdict, with their positions in the stream."""
        self.verdict_prompts, self.n_held_out = list(prompts), len(prompts)

    def add_unscored(self, served: Sequence[tuple[int, Prompt]]) -> None:
        """Add to the verdict the latest served prompts on which no candidate was scored, at most `n_held_out`."""
        scored_ids = {trial.prompt_id for trial in self.search.trials}
        unscored = [(index, prompt) for index, prompt in served if prompt.id not in scored_ids]
        self.verdict_prompts += unscored[max(0, len(unscored) - self.n_held_out) :]

    def count_round(self, round_: Round) -> None:
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
        """Return the task's result.

        Args: tuned: completions that α and M are computed from; if empty, they are computed from the rounds so far.
              turns: the timed turns that the verdict is based on.
        """
        n_drafted, n_accepted, n_passes, n_tokens = self.drafted, self.accepted, self.rounds, self.tokens
        if tuned:
            n_drafted = sum(completion.drafted for completion in tuned)
            n_accepted = sum(completion.accepted for completion in tuned)
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
        """Return JSON values for `restore`.

        Only the latest prompt's pairs keep their texts: its next turn needs them.
        """
        timed = [[[pair.plain.to_json(), pair.tuned.to_json()] for pair in pairs] for pairs in self.timed_pairs]
        for completion in chain.from_iterable(chain.from_iterable(timed[:-1])):
            completion["text"] = ""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "timings": self.timings.to_json(),
            "search": self.search.state(),
            "shift": self.shift.to_json(),
            "learnt": self.drafter_state,
            "timed": timed,
            "judged": [[index, n_turns(prompt)] for index, prompt in self.verdict_prompts],
        }

    def restore(self, values: Mapping[str, Any], trials: Sequence[Trial], prompts: Sequence[Prompt]) -> None:
        """Continue from `to_json` of the same task.

        Args: trials: the task's trials up to then, in order. prompts: the whole stream.
        """
        for name in COUNTERS:
            setattr(self, name, values[name])
        self.timings = Timings.from_json(values["timings"])
        self.timed_pairs = [[Pair(*map(Completion.from_json, pair)) for pair in pairs] for pairs in values["timed"]]
        self.drafter_state = values["learnt"]
        turns_by_index = [(int(index), int(n_judged_turns)) for index, n_judged_turns in values["judged"]]
        if [index for index, _ in self.verdict_prompts] != [index for index, _ in turns_by_index[: self.n_held_out]]:
            raise ValueError("other prompts were held out")
        self.verdict_prompts = [
            (index, replace(prompts[index], turns=prompts[index].turns[:n_judged_turns]))
            for index, n_judged_turns in turns_by_index
        ]
        self.search.restore(values["search"], trials)
        self.shift = replace(ShiftWatch.from_json(values["shift"]), known=self.shift.known)


@dataclass(slots=True)
class PromptInProgress:
    """A prompt that is being decoded: the answers of its finished turns, and the turn in progress."""

    answers: list[str] = field(default_factory=list)
    resume_from: ResumePoint | None = None  # Where an earlier process left the turn in progress.
    context: Context | None = None  # Of the turn in progress, after its prefill.
    read: ReadPrompt | None = None  # State of the task's shift detection when the prompt was read.

    def finish_turn(self, answer: str) -> None:
        """Record the answer of the turn in progress."""
        self.answers.append(answer)
        self.resume_from = self.context = None

    def to_json(self, chart: AcceptanceChart) -> dict[str, Any]:
        """Return JSON values for `from_json`; `chart` is the current acceptance chart of the prompt's task."""
        read_state = None if self.read is None else [self.read.chart is chart, self.read.is_far]
        resume_point = self.resume_from if self.context is None else self.context.resume_point()
        resume_values = adapter(ResumePoint | None).dump_python(
            resume_point, mode="json", exclude={"tally": {"started"}}
        )
        return {"answers": self.answers[:], "begun": resume_values, "read": read_state}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], prompt: Prompt, chart: AcceptanceChart) -> PromptInProgress:
        """Return the state in which an earlier process of this run left `prompt`."""
        answers, resume_point = list(values["answers"]), adapter(ResumePoint | None).validate_python(values["begun"])
        if len(answers) >= n_turns(prompt):
            raise ValueError("the prompt in progress has no turn left")
        if resume_point is not None and not resume_point.token_ids:
            raise ValueError("a prompt in progress has no tokens")
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
        detail = " ".join(repr(error).split())
        raise SettingsError(f"the checkpoint of this run cannot be read ({detail}): start the run anew") from error


def check_start(start: Mapping[str, Any], n_layers: int, n_prompts: int, tasks: Collection[str]) -> None:
    """Check that a snapshot belongs to this run.

    Raises: SettingsError: it belongs to another format version, model or stream.
    """
    problem = ""
    if start["version"] != VERSION:
        problem = f"has version {start['version']!r}, but this swiftopt reads version {VERSION}: start the run anew"
    elif start["n_layers"] != n_layers:
        problem = (
            f"belongs to a model with {start['n_layers']} layers, but this model has {n_layers}: use the run's model"
        )
    elif (names := sorted([*start["concluded"], *start["tasks"]])) != sorted(tasks) or start["n_prompts"] != n_prompts:
        problem = f"belongs to a stream of {start['n_prompts']} prompts in the tasks {names},"
        problem += f" but this stream has {n_prompts} in {sorted(tasks)}: use the run's stream"
    if problem:
        raise SettingsError(f"the checkpoint of this run {problem}")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
