"""What a tuning run reports while it goes on: written to the store by the runner, drawn by the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .jobs import JobState
from .settings import Branching
from .types import Completion, LayerSet, LayerSetRecord, Prompt, Timings, Trial, Verdict

Phase = Literal["load", "profile", "accumulate", "optimise", "accelerate", "verdict"]


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """A task entered a phase; `detail` is a few words for a person."""

    task: str
    phase: Phase
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FormatTried:
    """What drafts with all weights in a format promise, where the format is the run's own choice.

    `expected` is a ratio to plain decoding by measured costs, `agreement` the share of tokens on which draft and model
    agree; both are None where such drafts do not run, and `problem` says why.
    """

    format: str
    expected: float | None
    agreement: float | None
    problem: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True)
class PromptStarted:
    """Prompt `index` (0-based) of `n_prompts` is being decoded."""

    task: str
    prompt_id: str
    index: int
    n_prompts: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a task after a round. Matchness is of the latest trial and of the set in use."""

    task: str
    phase: Phase
    tokens: int
    tok_s: float
    matchness: float | None
    best_matchness: float | None
    n_trials: int
    acceptance_rate: float | None
    mean_generated_length: float | None
    skip_ratio: float


@dataclass(frozen=True, slots=True)
class TrialsDone:
    """Candidates that one pass scored."""

    task: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """The draft uses this layer set from now on."""

    task: str
    layer_set: LayerSet
    matchness: float | None
    step: int


@dataclass(frozen=True, slots=True)
class SkipRatioLowered:
    """α stayed too low for too long (SWIFT C.2)."""

    task: str
    skip_ratio: float
    acceptance_rate: float


@dataclass(frozen=True, slots=True)
class DraftingChosen:
    """How SWIFT's drafts of a task are ended and branched from now on, and what that and what was before promise."""

    task: str
    stop_threshold: float
    max_draft_length: int
    branching: Branching
    expected: float
    before: float


@dataclass(frozen=True, slots=True)
class StreamShifted:
    """The text has become another kind, and the search begins anew with `n_known` sets of similar text.

    `reason` says in words how acceptance changed.
    """

    task: str
    reason: str
    n_known: int


@dataclass(frozen=True, slots=True)
class PromptFinished:
    """A completion is final; `held_out` ones were decoded for the verdict."""

    prompt: Prompt
    index: int
    completion: Completion
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A task's layer set with its figures, and what a summary of the run needs.

    `timings` covers the prompts that were decoded while tuning (SWIFT Figure 6), not the verdict's runs;
    `stopped_because` says in words what ended the search; `record.version` is set once the runner has stored it.
    """

    task: str
    record: LayerSetRecord
    verdict: Verdict
    stopped_because: str
    trials: tuple[Trial, ...]
    timings: Timings
    n_prompts: int
    n_tokens: int
    draft_cost: float
    plain_tok_s: float | None
    tuned_tok_s: float | None


@dataclass(frozen=True, slots=True)
class StateChanged:
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
