"""Notation and basic records of swiftopt.

| paper | code                    | meaning, unit, range                                                    |
|-------|-------------------------|-------------------------------------------------------------------------|
| z     | `LayerSet`              | sub-layers that the draft skips; 0-based; SWIFT keeps first and last    |
| r     | `skip_ratio`            | skipped / searchable (existing inner) sub-layers; [0, 1]                |
| γ     | `context_window`        | generated tokens that score a layer set; tokens                         |
| ε     | `stop_threshold`        | drafting stops after a token whose draft probability is below it        |
| N_D   | `max_draft_length`      | draft steps per round; tokens                                           |
| k     | `branching`             | candidates that a draft position offers, by confidence                  |
| S     | `max_steps`             | optimisation steps; one step scores one candidate                       |
| β     | `bayes_interval`        | every β-th step takes its candidate from the model of the scores        |
| –     | `matchness`             | share of window positions where the draft's argmax is the token         |
| α     | `acceptance_rate`       | accepted tokens (a hit side leaf is one) / draft steps; no bonus token  |
| M     | `mean_generated_length` | tokens per target pass, bonus token included                            |
| c     | `draft_cost`            | one draft pass / one plain target pass, measured                        |
| E(Spd.)| `expected_speedup`     | tokens per round / (draft steps · c + cost of verifying n rows)         |

Source: SWIFT (arXiv:2410.06916), sections 3-4, appendix B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from datetime import UTC, datetime
from operator import add
from typing import Annotated, Any, ClassVar, Literal

from .errors import InvalidInput, LayerSetError, SettingsError
from .layer_sets import LayerSet
from .serialization import BY_NUMBER, LARGEST, Figure, Form, Record, Settings, count, ranged, share

FinishReason = Literal["stop", "length", "stop_string"]
VerdictWord = Literal["use", "plain", "unmeasured"]

DEFAULT_TASK = "default"  # Task of prompts and layer sets without a task.
# Maximum length of a task or prompt id, in characters: a database index cannot hold names of kilobytes.
MAX_NAME_LENGTH = 512

NOT_WRITTEN: Any = {"exclude": True}  # Field metadata: leave the field out of JSON.
# Field metadata: leave the count out of JSON when it is 0.
WHERE_ANY: Any = {"exclude_if": lambda n: not n}


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second: 2026-11-21T00:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch_s(time: str | None) -> float | None:
    """Return a time from `now` as seconds since 1970; None if the text is empty or not a time."""
    try:
        return None if time is None else datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def _read_biases(values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError("use an object of numbers by token id")
    return tuple((int(key) if str(key).isdecimal() else key, bias) for key, bias in values.items())


BY_TOKEN = Form(lambda pairs: {str(token_id): bias for token_id, bias in pairs}, dict[str, float], _read_biases)
MAX_BIAS = 100.0  # Largest absolute value of a logit bias.
# A `top_p` below this keeps only the most probable token: its probability is larger, as no vocabulary has a million
# tokens.
MIN_PROBABILITY = 1e-6


@dataclass(frozen=True, slots=True)
class Prompt(Record):
    """One line of a stream: raw `text`, or chat `turns` of the user (or whole `messages`) for the chat template.

    `token_ids` replace all three if the prompt is already encoded. A completion ends before one of the `stop` strings,
    in addition to those of the session; `reference` is the reference for judging it (`core.templates`). Several samples
    of a prompt are numbered; the number is added to the seed of the sample's draws.
    """

    id: str
    task: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    turns: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    token_ids: tuple[int, ...] = field(default=(), metadata=NOT_WRITTEN)
    stop: tuple[str, ...] = field(default=(), metadata=NOT_WRITTEN)
    reference: Mapping[str, str] = field(default_factory=dict, hash=False, metadata=NOT_WRITTEN)
    sample: int = field(default=0, metadata=NOT_WRITTEN)


def n_turns(prompt: Prompt) -> int:
    return max(1, len(prompt.turns))


@dataclass(frozen=True, slots=True)
class Sampling(Settings):
    """How a token is taken from the target's distribution; temperature 0 is greedy, and so is `top_p` 0.

    `min_p` excludes tokens whose probability is below this share of the highest one. `repetition_penalty` None means
    the value of the model's own generation config. `presence_penalty` is subtracted from the logits of tokens that
    were generated so far, `frequency_penalty` once per occurrence; the prompt does not count. `logit_bias` are pairs of
    a token id and the number added to its logit.

    Raises: SettingsError: a value is out of its range.
    """

    NAME: ClassVar = "the sampling"

    temperature: float = ranged(0.0, ge=0)
    top_p: float = share(1.0)
    top_k: int = count(0, least=0)  # 0: no limit on the number of candidate tokens.
    min_p: float = share(0.0)  # 0: no minimum probability.
    repetition_penalty: float | None = ranged(None, gt=0)
    presence_penalty: float = ranged(0.0, ge=-2, le=2)
    frequency_penalty: float = ranged(0.0, ge=-2, le=2)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BY_TOKEN] = field(default_factory=tuple)
    seed: int = ranged(0, ge=-LARGEST - 1, le=LARGEST)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not abs(bias) <= MAX_BIAS:
                raise SettingsError(
                    f"logit_bias {bias} of token {token_id} is out of range: use token ids of 0 or more and numbers"
                    f" from {-MAX_BIAS:g} to {MAX_BIAS:g}",
                    "logit_bias",
                )
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(self.logit_bias).items())))

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is taken, with no draw."""
        return self.temperature == 0 or self.top_p < MIN_PROBABILITY


@dataclass(frozen=True, slots=True)
class TokenLogprob(Record):
    """A token's log probability (nats) by the model itself, before any processor; `top`: the likeliest tokens."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


TokenSource = Literal["target", "draft", "text", "corpus", "prediction", "grammar"]


@dataclass(frozen=True, slots=True)
class TracedToken:
    """A committed token: its source, and the tokens that were drafted in its place and rejected.

    The source "target" is the model itself; the others are drafters: the method's draft model, earlier text, finished
    answers of the task, the request's prediction, or a grammar that leaves only one choice.
    """

    token_id: int
    source: TokenSource = "target"
    rejected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings(Record):
    """Where the seconds of a completion went (SWIFT Figure 6); prefill counts as `other_s`."""

    optimise_s: Figure = 0.0
    draft_s: Figure = 0.0
    verify_s: Figure = 0.0
    other_s: Figure = 0.0

    @property
    def total_s(self) -> float:
        """Sum of the four parts; a part that was not finite when stored counts as 0."""
        return sum(seconds or 0.0 for seconds in astuple(self))

    @property
    def decode_s(self) -> float:
        """Seconds of rounds: drafting and verification, without prompt and search."""
        return (self.draft_s or 0.0) + (self.verify_s or 0.0)

    def __add__(self, other: Timings) -> Timings:
        return Timings(*map(add, astuple(self), astuple(other)))


def seconds_by_part(timings: Timings) -> dict[str, float]:
    """Return seconds by "optimise", "draft", "verify" and "other"."""
    return {name.removesuffix("_s"): seconds for name, seconds in asdict(timings).items()}


def _with_unit(values: Any) -> Any:
    return {f"{name}_s": seconds for name, seconds in values.items()} if isinstance(values, Mapping) else values


BY_PART = Form(seconds_by_part, dict[str, float], _with_unit)


@dataclass(frozen=True, slots=True)
class Completion(Record):
    """The completion of a prompt, with the counts that give α and M.

    `target_passes` counts passes of the full model after the prefill; `first_tokens` (0 or 1) come from the prefill
    itself. `drafted` counts draft steps, `accepted` those whose position was accepted (including hits of side leaves),
    `accepted_per_position[i]` the rounds in which draft step i was accepted, `refused` the rounds in which the target
    rejected a drafted token (later tokens of that draft are discarded unjudged). `verified_widths` counts the
    passes by their number of verified rows. `prefill_s` is part of `timings.other_s`. `estimated_cost` is the cost of
    the rounds by measured prices, in plain passes, if the drafter decides by prices. `n_cached` tokens of the prompt
    had been read by another request. `lossy`: the method does not guarantee the target's own output. `exact`: the
    output equals plain decoding bit by bit, because the method guarantees its tokens and the kernels compute a row in
    the same way whatever other rows the pass has. `accepted_prediction` and `rejected_prediction` count drafted tokens
    from the request's prediction. `by_draft_length[k][j]` counts the rounds that accepted j of k steps.
    `crowded_rounds` counts rounds that were plain because drafts do not pay with so many other requests.
    """

    COMPUTED: ClassVar = ("n_tokens", "acceptance_rate", "mean_generated_length", "tok_s", "decode_tok_s")
    COMPLETE: ClassVar = True

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    method: str
    n_prompt_tokens: int = 0
    target_passes: int = 0
    first_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    verified_widths: Annotated[Mapping[int, int], BY_NUMBER] = field(default_factory=dict)
    timings: Annotated[Timings, BY_PART] = field(default_factory=Timings)
    prefill_s: Figure = 0.0
    layer_set: LayerSet | None = None
    lossy: bool = False
    exact: bool = False
    refused: int = 0
    # JSON keeps the field's former name, "reckoned_cost".
    estimated_cost: float | None = field(default=None, metadata={"alias": "reckoned_cost"})
    accepted_prediction: int = field(default=0, metadata=WHERE_ANY)
    rejected_prediction: int = field(default=0, metadata=WHERE_ANY)
    n_cached: int = field(default=0, metadata=WHERE_ANY)
    crowded_rounds: int = field(default=0, metadata=WHERE_ANY)
    by_draft_length: Annotated[Mapping[int, tuple[int, ...]], BY_NUMBER] = field(
        default_factory=dict, metadata=WHERE_ANY
    )

    @property
    def n_tokens(self) -> int:
        """Tokens of the completion."""
        return len(self.token_ids)

    @property
    def acceptance_rate(self) -> float | None:
        """α; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_generated_length(self) -> float | None:
        """M; None if no target pass was needed."""
        return self.n_decoded / self.target_passes if self.target_passes else None

    @property
    def n_drafts(self) -> int:
        """Number of rounds that drafted."""
        return sum(map(sum, self.by_draft_length.values()))

    @property
    def n_decoded(self) -> int:
        """Tokens generated in rounds, without the one from the prefill."""
        return self.n_tokens - self.first_tokens

    @property
    def tok_s(self) -> float | None:
        """Tokens per second of the whole request: prompt, search and rounds, without the time in the queue."""
        total_s = self.timings.total_s
        return self.n_tokens / total_s if total_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second of decoding: tokens of rounds / seconds of rounds."""
        decode_s = self.timings.decode_s
        return self.n_decoded / decode_s if decode_s else None


# How messages name the origins of candidate layer sets.
ORIGINS: Mapping[str, str] = {
    "uniform": "first set",
    "trimmed": "first set with fewer sub-layers skipped",
    "in use": "repeats of the set in use",
    "final": "challengers again",
    "stored": "known sets",
    "family": "from a study of the layers",
    "move": "changes of the best set",
    "random": "at random",
    "late": "random, because a suggestion was late",
}


def origin_words(origin: str) -> str:
    """Return an origin's name for messages; an origin not in `ORIGINS` is the name of a search engine."""
    return ORIGINS.get(origin, f"suggested by {origin}")


@dataclass(frozen=True, slots=True)
class Trial(Record):
    """One candidate layer set, scored once.

    `origin` says where it came from: one of `ORIGINS`, or the name of the engine that suggested it. `score` is the
    value that is maximised; the window is the one at `position` of the prompt's text.
    """

    step: int
    layer_set: LayerSet
    origin: str
    matchness: Figure
    score: Figure
    prompt_id: str = ""
    position: int = 0
    seed: int = 0
    adopted: bool = False
    seconds: Figure = 0.0


NOT_FASTER = "not reliably faster here"  # Usual reason for the verdict "plain".


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """The verdict on held-out prompts: `use` only if the interval's lower end is above 1."""

    word: VerdictWord
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    expected: float | None = None
    n_prompts: int = 0
    reason: str = ""


def check_task(task: Any, what: str, error: type[InvalidInput] = LayerSetError) -> None:
    """Raises: `error`: the task is not a valid name in MODEL/TASK; `what` names it in the message."""
    if not isinstance(task, str) or not task.strip() or "/" in task or not task.isprintable():
        raise error(f"{what} {task!r} is not a valid name: use a word without '/', for example 'code'")
    if len(task) > MAX_NAME_LENGTH:
        raise error(f"{what} {task[:40]!r}... has {len(task)} characters: use at most {MAX_NAME_LENGTH}")
