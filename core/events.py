"""What tuning reports: a run's events, kept in the store and drawn by the terminal, and what a served model learns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from .costs import Quality
from .errors import StoreError, SwiftoptError
from .layer_sets import LayerSet
from .records import LayerSetRecord
from .serialization import Figure, Form, Record, kinds_by_name
from .settings import Branching
from .types import Completion, Prompt, Timings, Trial, Verdict, VerdictWord

JobState = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
Phase = Literal["load", "profile", "accumulate", "optimise", "accelerate", "verdict"]


class Reported(Record):
    """Base of all events."""

    __slots__ = ()
    ERROR: ClassVar[type[SwiftoptError]] = StoreError


WITH_JOB = Form(lambda record: {**record.to_json(), "job": record.job}, dict[str, Any])
ID_AND_TASK = Form(lambda prompt: {"id": prompt.id, "task": prompt.task}, dict[str, str])
# Omits the trials from the JSON of `TaskFinished`: earlier `TrialsDone` events contain them already.
NOT_AGAIN = Form(lambda trials: None, None, lambda _: ())


@dataclass(frozen=True, slots=True)
class PhaseChanged(Reported):
    """A task entered a phase; `detail` is a few words for a person."""

    task: str
    phase: Phase
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FormatTried(Reported):
    """What drafts with all weights in a format promise, where the format is the run's own choice.

    `expected` is a ratio to plain decoding by measured costs, `agreement` the share of tokens on which draft and model
    agree; both are None where such drafts do not run, and `problem` says why. `tok_s` is of decoding with them, where
    they were timed together with drafts in another format.
    """

    format: str
    expected: float | None
    agreement: float | None
    problem: str = ""
    task: str = ""
    tok_s: float | None = None


@dataclass(frozen=True, slots=True)
class PromptStarted(Reported):
    """Prompt `index` (0-based) of `n_prompts` is being decoded."""

    task: str
    prompt_id: str
    index: int
    n_prompts: int


@dataclass(frozen=True, slots=True)
class Progress(Reported):
    """The state of a task after a round. Matchness is of the latest trial and of the set in use."""

    task: str
    phase: Phase
    tokens: int
    tok_s: Figure
    matchness: float | None
    best_matchness: float | None
    n_trials: int
    acceptance_rate: float | None
    mean_generated_length: float | None
    skip_ratio: Figure


@dataclass(frozen=True, slots=True)
class TrialsDone(Reported):
    """Candidates that one pass scored."""

    task: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class Adopted(Reported):
    """The draft uses this layer set from now on."""

    task: str
    layer_set: LayerSet
    matchness: float | None
    step: int


@dataclass(frozen=True, slots=True)
class SkipRatioLowered(Reported):
    """The skip ratio was lowered because acceptance rate α stayed below its minimum (SWIFT C.2)."""

    task: str
    skip_ratio: Figure
    acceptance_rate: Figure


@dataclass(frozen=True, slots=True)
class DraftingChosen(Reported):
    """New stop threshold, length and branching of SWIFT's drafts, with the expected speedup now and before."""

    task: str
    stop_threshold: Figure
    max_draft_length: int
    branching: Branching
    expected: Figure
    before: Figure


@dataclass(frozen=True, slots=True)
class StreamShifted(Reported):
    """The kind of text has changed, and the search restarts with `n_known` layer sets found on similar text.

    `reason` describes how the acceptance rate changed.
    """

    task: str
    reason: str
    n_known: int


@dataclass(frozen=True, slots=True)
class PromptFinished(Reported):
    """A completion is final; `held_out` ones were decoded for the verdict."""

    prompt: Annotated[Prompt, ID_AND_TASK]
    index: int
    completion: Completion
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class TaskFinished(Reported):
    """A task's layer set with its figures, and what a summary of the run needs.

    `timings` and `paces`, tokens per second of each, cover the prompts that were decoded while tuning (SWIFT
    Figure 6), not the verdict's runs; `stopped_because` says in words what ended the search; `record.version` is set
    once the runner has stored it.
    """

    task: str
    record: Annotated[LayerSetRecord, WITH_JOB]
    verdict: Verdict
    stopped_because: str
    trials: Annotated[tuple[Trial, ...], NOT_AGAIN]
    timings: Timings
    n_prompts: int
    n_tokens: int
    draft_cost: Figure
    plain_tok_s: float | None
    tuned_tok_s: float | None
    paces: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StateChanged(Reported):
    """A job entered a state; `detail` says in words why, where that is not plain."""

    state: JobState
    attempt: int
    detail: str = ""
    task: str = ""


Event = (
    StateChanged
    | PhaseChanged
    | FormatTried
    | PromptStarted
    | Progress
    | TrialsDone
    | Adopted
    | SkipRatioLowered
    | DraftingChosen
    | StreamShifted
    | PromptFinished
    | TaskFinished
)

TYPES: dict[str, type[Any]] = kinds_by_name(get_args(Event), "_")
_NAMES = {kind: name for name, kind in TYPES.items()}


def event_type(event: Event | type[Event]) -> str:
    """Return the name of an event, or of a kind of events: prompt_finished, trials_done ..."""
    return _NAMES[event if isinstance(event, type) else type(event)]


def event_from_json(name: str, values: Mapping[str, Any]) -> Event:
    """Return the event of that name from its `to_json`.

    Raises: StoreError: there is no such event, or its values are not those of one.
    """
    if name not in TYPES:
        raise StoreError(f"the event {name!r} is unknown: known are {', '.join(TYPES)}")
    event: Event = TYPES[name].from_json(values, f"the event {name!r}")
    return event


# --- events as text, for the terminal and the dashboard

PHASES: Mapping[str, str] = {
    "load": "loading",
    "profile": "preparing",
    "accumulate": "collecting text",
    "optimise": "searching",
    "accelerate": "search ended",
    "verdict": "verdict",
}


def event_task(event: Event) -> str:
    """Return the task that an event belongs to; empty before the first one."""
    return event.prompt.task if isinstance(event, PromptFinished) else event.task


def state_words(event: StateChanged) -> str:
    """Return a job's new state as text, without the reason of a failure: the job's error gives it."""
    if event.state == "queued" and event.detail:
        return f"queued again: {event.detail}"
    detail = event.detail if event.state in ("running", "paused", "cancelled") else ""
    attempt_words = f"(attempt {event.attempt})" if event.state == "running" and event.attempt > 1 else ""
    return " ".join(filter(None, (event.state, detail, attempt_words)))


def event_line(event: Event, n_prompts: int = 0) -> str | None:
    """Return the event as a log line; None for events too frequent to log. `n_prompts` 0: unknown."""
    task = f"{event_task(event)}: " if event_task(event) else ""
    match event:
        case StateChanged():
            return state_words(event)
        case PhaseChanged():
            return f"{task}{PHASES[event.phase]}" + (f": {event.detail}" if event.detail else "")
        case FormatTried(problem="", tok_s=float() as tok_s):
            return f"drafts in {event.format}: {tok_s:.1f} tokens per second, by turns with other formats"
        case FormatTried(problem=""):
            return (
                f"drafts in {event.format}: {_figure(event.expected)}x expected,"
                f" {_figure(event.agreement)} of the tokens agree"
            )
        case FormatTried():
            return f"drafts in {event.format} do not run here: {event.problem}"
        case Adopted():
            skipped_words = (
                f"{len(event.layer_set.skip_attn)} attentions and {len(event.layer_set.skip_mlp)} MLPs left out"
            )
            return f"{task}set of trial {event.step} in use: {skipped_words}, matchness {_figure(event.matchness)}"
        case SkipRatioLowered():
            ratio_words = f"skip ratio lowered to {_figure(event.skip_ratio)}"
            return f"{task}{ratio_words}, for α was {_figure(event.acceptance_rate)}"
        case DraftingChosen():
            widest = event.branching[0][1]
            return (
                f"{task}drafts of at most {event.max_draft_length} tokens, to confidence"
                f" {_figure(event.stop_threshold)}, {widest} candidates at most: {_figure(event.expected)}x expected,"
                f" {_figure(event.before)}x before"
            )
        case StreamShifted():
            known_words = f", {event.n_known} known sets first" if event.n_known else ""
            return f"{task}other text, for {event.reason}: searching again{known_words}"
        case PromptFinished():
            completion = event.completion
            held_out = ", held out" if event.held_out else ""
            figures = f"α {_figure(completion.acceptance_rate)}, M {_figure(completion.mean_generated_length)}"
            position = f"prompt {event.index + 1}" + (f" of {n_prompts}" if n_prompts else "")
            decoded_words = f"{completion.n_tokens} tokens, {_figure(completion.tok_s, 1)} tok/s, {figures}"
            return f"{task}{position} ({event.prompt.id}{held_out}): {decoded_words}"
        case TaskFinished():
            return f"{task}finished, {event.verdict.word}"
        case _:
            return None


_COUNTER = re.compile(r", (round \d+|.*\d+ of \d+.*|\d+ % .*)$")


def phase_of(step: str) -> str:
    """Return a step of loading or measuring without its counter, for logs, where a line per phase is enough."""
    return _COUNTER.sub("", step)


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


# --- tuning status of served models: the response of `GET /v1/tuning`

# What a task can be pinned to: its best stored plan, or plain decoding.
Way = Literal["best", "plain"]
# What was timed with and without drafts: single rounds of a served request, or whole requests.
PairKind = Literal["rounds", "requests"]
TuningVerb = Literal["pause", "resume", "pin"]


@dataclass(frozen=True, slots=True)
class SearchStatus(Record):
    """What a search has cost, how well the set in use drafts (matchness, once it was scored), and why it has ended.

    `share` is its `seconds` / the seconds of the task's rounds; `latest` the candidate that was tried last.
    """

    trials: int
    seconds: float
    share: float = 0.0
    matchness: float | None = None
    ended: str | None = None
    latest: Trial | None = None


@dataclass(frozen=True, slots=True)
class ShiftStatus(Record):
    """How often a task's text has become another kind, the latest time's reason, and the request it was noticed at."""

    n: int = 0
    latest: str | None = None
    at_request: int | None = None


@dataclass(frozen=True, slots=True)
class TaskTuning(Record):
    """One task of a served model: the way in use, the verdict on its drafts, its requests and its search.

    `since` is when the way in use became that, in seconds since 1970; `version` is of the stored plan in use.

    `ratio`, its `interval`, `plain_tok_s` and `drafted_tok_s` are of one look at the latest `pairs` of timings, and the
    ratio is the quotient of the two speeds; `timed` says what was timed. Before the first look all are None, and
    `pairs` counts those there are so far.

    `requests` and their `tokens` have ended since the engine's start. Its `seconds` went into their rounds, of which
    `compared_s` into rounds of the way that is not in use. `drafted_s`, α and M are of rounds with the drafts in use,
    since these or the text changed; `saved_s` is what plain decoding would have taken longer: drafted_s · (ratio - 1).
    `saved_before_s` is the sum of that over earlier drafts.
    """

    task: str
    in_use: Literal["drafts", "plain"]
    since: float
    verdict: VerdictWord
    version: int | None
    pinned: Way | None
    layer_set: LayerSet
    pairs: int
    timed: PairKind | None
    ratio: float | None
    interval: tuple[float, float] | None
    shifts: ShiftStatus
    requests: int
    tokens: int
    seconds: float
    compared_s: float
    drafted_s: float
    saved_s: float | None
    saved_before_s: float
    plain_tok_s: float | None
    drafted_tok_s: float | None
    acceptance_rate: float | None
    mean_generated_length: float | None
    search: SearchStatus

    @property
    def all_saved_s(self) -> float:
        """Seconds saved by the drafts in use, as far as they are judged, and by earlier ones."""
        return (self.saved_s or 0.0) + self.saved_before_s


@dataclass(frozen=True, slots=True)
class CostStatus(Record):
    """The costs that drafts are weighed by: their `quality`, with the reason in `remark`, and a pass's seconds.

    `pass_s` is that of a pass of the model over one row, in a context of up to `context_bucket` tokens.
    """

    quality: Quality
    remark: str
    context_bucket: int
    pass_s: float


@dataclass(frozen=True, slots=True)
class KeptTexts(Record):
    """What an engine keeps of the texts that it served.

    Keys and values of `prefix_tokens` take `prefix_bytes` of memory and, where they are stored, too, `disk_bytes`;
    `disk_tokens` were read back from there since the start. Finished answers, for drafts, are `corpus_tokens` in
    `corpus_bytes` of memory.
    """

    prefix_tokens: int = 0
    prefix_bytes: int = 0
    disk_bytes: int = 0
    disk_tokens: int = 0
    corpus_tokens: int = 0
    corpus_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelTuning(Record):
    """The tasks of one model, its costs and what it keeps; `unavailable` says why its engine cannot tell."""

    paused: bool = False
    tasks: tuple[TaskTuning, ...] = ()
    unavailable: str | None = None
    costs: CostStatus | None = None
    kept: KeptTexts | None = None


@dataclass(frozen=True, slots=True)
class Tuning(Record):
    """By model: what is in use, what is being tried, what that costs, and what it has brought."""

    SCHEMA: ClassVar = "swiftopt.tuning/1"
    ERROR: ClassVar = StoreError

    models: Mapping[str, ModelTuning]
