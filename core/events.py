"""Events of a tuning run, for the store and the terminal, and the tuning status of served models."""

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
    """Estimate for drafts with all weights in one format, if the run chooses the format itself.

    `expected` is the ratio to plain decoding by measured costs, `agreement` the share of tokens on which draft and
    model agree. Both are None if such drafts do not run; `problem` then gives the reason. `tok_s` is the measured speed
    of decoding, if the format was timed together with another one.
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
    """The state of a task after a round. The matchness values are those of the latest trial and of the set in use."""

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
    """A task's layer set with its figures, and the data for a summary of the run.

    `timings` and `paces` (tokens per second of each prompt) cover the prompts decoded during tuning (SWIFT Figure 6),
    not the runs of the verdict. `stopped_because` describes what ended the search. `record.version` is set
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
    """A job entered a state; `detail` gives the reason if it is not obvious."""

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

    Raises: StoreError: the event is unknown, or its values are invalid.
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
            return f"drafts in {event.format}: {tok_s:.1f} tokens per second, alternating with other formats"
        case FormatTried(problem=""):
            return (
                f"drafts in {event.format}: {_figure(event.expected)}x expected,"
                f" {_figure(event.agreement)} of the tokens agree"
            )
        case FormatTried():
            return f"drafts in {event.format} do not run here: {event.problem}"
        case Adopted():
            skipped_words = (
                f"{len(event.layer_set.skip_attn)} attentions and {len(event.layer_set.skip_mlp)} MLPs skipped"
            )
            return f"{task}set of trial {event.step} in use: {skipped_words}, matchness {_figure(event.matchness)}"
        case SkipRatioLowered():
            ratio_words = f"skip ratio lowered to {_figure(event.skip_ratio)}"
            return f"{task}{ratio_words}, because α was {_figure(event.acceptance_rate)}"
        case DraftingChosen():
            widest = event.branching[0][1]
            return (
                f"{task}drafts of at most {event.max_draft_length} tokens, down to confidence"
                f" {_figure(event.stop_threshold)}, {widest} candidates at most: {_figure(event.expected)}x expected,"
                f" {_figure(event.before)}x before"
            )
        case StreamShifted():
            known_words = f", with {event.n_known} known sets first" if event.n_known else ""
            return f"{task}the text has changed, because {event.reason}: searching again{known_words}"
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
    """Return a step of loading or measuring without its counter, because logs have one line per phase."""
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
    """Cost of a search, matchness of the set in use (once it was scored), and why the search ended.

    `share` is its `seconds` / the seconds of the task's rounds; `latest` is the last candidate tried.
    """

    trials: int
    seconds: float
    share: float = 0.0
    matchness: float | None = None
    ended: str | None = None
    latest: Trial | None = None


@dataclass(frozen=True, slots=True)
class ShiftStatus(Record):
    """Number of changes of a task's kind of text, the reason of the latest, and the request at which it was noticed."""

    n: int = 0
    latest: str | None = None
    at_request: int | None = None


@dataclass(frozen=True, slots=True)
class TaskTuning(Record):
    """One task of a served model: the way in use, the verdict on its drafts, its requests and its search.

    `since` is the time of the last change of way, in seconds since 1970; `version` is that of the stored plan in use.

    `ratio`, its `interval`, `plain_tok_s` and `drafted_tok_s` come from one look at the latest `pairs` of timings; the
    ratio is the quotient of the two speeds, and `timed` says what was timed. Before the first look all are None, and
    `pairs` is the number of pairs so far.

    `requests` and their `tokens` count requests that ended since the engine's start. `seconds` is the time of their
    rounds, including `compared_s` in the way that is not in use. `drafted_s`, α and M cover rounds with the drafts in
    use, since these or the text changed. `saved_s` is the extra time of plain decoding: drafted_s · (ratio - 1).
    `saved_before_s` is its sum over earlier drafts.
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
        """Seconds saved by the drafts in use, if they have a verdict, and by earlier ones."""
        return (self.saved_s or 0.0) + self.saved_before_s


@dataclass(frozen=True, slots=True)
class CostStatus(Record):
    """Status of the costs by which drafts are weighed: `quality`, its reason in `remark`, and the time of a pass.

    `pass_s` is the time of a one-row pass of the model, in a context of up to `context_bucket` tokens.
    """

    quality: Quality
    remark: str
    context_bucket: int
    pass_s: float


@dataclass(frozen=True, slots=True)
class KeptTexts(Record):
    """Size of what an engine keeps of served texts.

    Keys and values of `prefix_tokens` tokens take `prefix_bytes` of memory and, if also stored on disk, `disk_bytes`;
    `disk_tokens` were read back from disk since the start. Finished answers, for drafts, are `corpus_tokens` tokens in
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
    """The tasks of one model, its costs and kept texts; `unavailable`: the reason if its engine does not answer."""

    paused: bool = False
    tasks: tuple[TaskTuning, ...] = ()
    unavailable: str | None = None
    costs: CostStatus | None = None
    kept: KeptTexts | None = None


@dataclass(frozen=True, slots=True)
class Tuning(Record):
    """By model: what is in use, what is being tried, what that costs, and what it has gained."""

    SCHEMA: ClassVar = "swiftopt.tuning/1"
    ERROR: ClassVar = StoreError

    models: Mapping[str, ModelTuning]
