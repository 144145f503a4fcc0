"""The words of swiftopt, as frozen values.

| paper | code                    | meaning, unit, range                                                    |
|-------|-------------------------|-------------------------------------------------------------------------|
| z     | `LayerSet`              | sub-layers the draft leaves out; 0-based; SWIFT keeps the ends    |
| r     | `skip_ratio`            | skipped / searchable sub-layers: inner ones that there are; [0, 1]      |
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

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime
from operator import add
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from .errors import InvalidInput, LayerSetError, SettingsError
from .serialization import BY_NUMBER, LARGEST, SORTED, Figure, Form, Record, Settings, count, ranged, share
from .settings import STORED, check_absent, check_experts, check_formats

Kind = Literal["attn", "mlp"]
SubLayer = tuple[Kind, int]
FinishReason = Literal["stop", "length", "stop_string"]
VerdictWord = Literal["use", "plain", "unmeasured"]

# Kinds of sub-layers in their order within a layer, with their names in messages.
KINDS: Mapping[Kind, str] = {"attn": "attention", "mlp": "MLP"}
DEFAULT_TASK = "default"  # Task of prompts and layer sets without a task.
# Largest length of a task or prompt id, in characters: a database index cannot hold names of kilobytes.
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


def _read_pairs(values: Any) -> Any:
    return tuple(values.items()) if isinstance(values, Mapping) else values


AS_OBJECT = Form(dict, dict[str, str], _read_pairs)
AS_COUNTS = Form(dict, dict[str, int], _read_pairs)
BY_TOKEN = Form(lambda pairs: {str(token_id): bias for token_id, bias in pairs}, dict[str, float], _read_biases)
MAX_BIAS = 100.0  # Largest absolute value of a logit bias.
# A `top_p` below this keeps only the most probable token: its probability is larger, as no vocabulary has a million
# tokens.
MIN_PROBABILITY = 1e-6


def searchable(n_layers: int) -> tuple[SubLayer, ...]:
    """Sub-layers a draft may leave out, attention first: 2 (L - 2) of them, none in the first or last layer."""
    inner_layers = range(1, n_layers - 1)
    return (*(("attn", layer) for layer in inner_layers), *(("mlp", layer) for layer in inner_layers))


class PartForm(NamedTuple):
    """How a draft runs a sub-layer that it keeps, as far as that is not the model's own way.

    `format`: of its weights, None: the model's own. `experts`: that a token takes of a mixture besides the shared
    ones, None: as many as the model takes.
    """

    format: str | None = None
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class LayerSet(Record):
    """Sub-layers the draft pass leaves out; 0-based. SWIFT keeps the first and last layer, Self-SD need not.

    `formats` are (part, format) pairs of what the draft runs quantised: a part is `attn` or `mlp` (of all layers),
    `attn:3` or `mlp:3` (of one, which comes before) or `head`; a format is one of `core.settings`. `experts` are
    (part, number) pairs of how many experts a token takes where the draft takes fewer than the model: a part is `mlp`
    or `mlp:3`; 0 means the shared ones alone. `absent` are the sub-layers, such as `mlp:3`, that the model's layers do
    not have: no share or count has them, and sets are equal without it.

    Raises: LayerSetError: a layer is named that the model does not have, or a format that there is not.
    """

    COMPLETE: ClassVar = True
    ERROR: ClassVar = LayerSetError

    n_layers: int = field(metadata={"ge": 1})
    skip_attn: Annotated[frozenset[int], SORTED] = frozenset()
    skip_mlp: Annotated[frozenset[int], SORTED] = frozenset()
    formats: Annotated[tuple[tuple[str, str], ...], AS_OBJECT] = field(
        default=(), metadata={"alias": "quantised", "exclude_if": lambda formats: not formats}
    )
    experts: Annotated[tuple[tuple[str, int], ...], AS_COUNTS] = field(
        default=(), metadata={"exclude_if": lambda experts: not experts}
    )
    absent: tuple[str, ...] = field(default=(), compare=False, metadata={"exclude_if": lambda absent: not absent})

    def __post_init__(self) -> None:
        invalid_layers = sorted(i for i in self.skip_attn | self.skip_mlp if not 0 <= i < self.n_layers)
        if invalid_layers:
            raise LayerSetError(
                f"layer set skips layers {invalid_layers}, but of {self.n_layers} layers"
                f" only 0..{self.n_layers - 1} may be skipped"
            )
        if self.formats:
            check_formats(self.formats, self.n_layers)
            object.__setattr__(self, "formats", tuple(sorted(dict(self.formats).items())))
        if self.experts:
            check_experts(self.experts, self.n_layers)
            object.__setattr__(self, "experts", tuple(sorted(dict(self.experts).items())))
        check_absent(self.absent, self.n_layers)

    @classmethod
    def uniform(cls, n_layers: int, n_skipped: int) -> LayerSet:
        """The set that a search starts from (SWIFT 4.1.1): half attention, half MLP, each evenly spaced in depth."""
        n_inner = max(0, n_layers - 2)
        n_skipped = min(n_skipped, 2 * n_inner)

        def spaced(n: int) -> frozenset[int]:
            return frozenset(1 + math.floor((j + 0.5) * n_inner / n) for j in range(n))

        return cls(n_layers, spaced(n_skipped // 2), spaced(n_skipped - n_skipped // 2))

    @property
    def n_skipped(self) -> int:
        """How many sub-layers are left out."""
        return len(self.skip_attn) + len(self.skip_mlp)

    @property
    def skip_ratio(self) -> float:
        """r: skipped / searchable sub-layers; 0 for a model with nothing to skip."""
        return self.n_skipped / max(1, self.n_searched)

    @property
    def n_searched(self) -> int:
        """Number of sub-layers that could be skipped: all if the set skips in an end layer, else only inner ones."""
        end_layers = {0, self.n_layers - 1}
        if end_layers & (self.skip_attn | self.skip_mlp):
            return 2 * self.n_layers - len(self.absent)
        absent_layers = [int(part.partition(":")[2]) for part in self.absent]
        return 2 * max(0, self.n_layers - 2) - sum(layer not in end_layers for layer in absent_layers)

    def has(self, kind: Kind, layer: int) -> bool:
        """Whether the model's layer has that sub-layer."""
        return f"{kind}:{layer}" not in self.absent

    def skips(self, kind: Kind, layer: int) -> bool:
        """Whether that sub-layer is left out."""
        return layer in (self.skip_attn if kind == "attn" else self.skip_mlp)

    def format_of(self, kind: Literal["attn", "mlp", "head"], layer: int | None = None) -> str | None:
        """The weight format of a part of the draft; `layer` None: that of all layers that have none of their own.

        None: the model's own weights.
        """
        if not self.formats:
            return None
        formats_by_part = dict(self.formats)
        format_name = formats_by_part.get(f"{kind}:{layer}", formats_by_part.get(kind, STORED))
        return None if format_name == STORED else format_name

    def experts_of(self, layer: int) -> int | None:
        """How many experts a token takes in a layer of the draft; None: as many as the model takes."""
        if not self.experts:
            return None
        numbers_by_part = dict(self.experts)
        return numbers_by_part.get(f"mlp:{layer}", numbers_by_part.get("mlp"))

    def form_of(self, kind: Kind, layer: int) -> PartForm | None:
        """How the draft runs a sub-layer; None: as the model does."""
        if not self.formats and not self.experts:
            return None
        form = PartForm(self.format_of(kind, layer), self.experts_of(layer) if kind == "mlp" else None)
        return None if form == PartForm() else form

    def filled(self, format_name: str) -> LayerSet:
        """The set with format `format_name` for all parts without a format; "stored" returns the set unchanged."""
        if format_name == STORED:
            return self
        formats_by_part = {part: format_name for part in (*KINDS, "head")}
        return replace(self, formats=tuple({**formats_by_part, **dict(self.formats)}.items()))

    @property
    def is_whole(self) -> bool:
        """Whether this is the model itself: nothing left out, nothing quantised and no expert fewer."""
        return not self.n_skipped and not self.formats and not self.experts

    def bits(self) -> tuple[int, ...]:
        """One 0/1 per searchable sub-layer, in the order of `searchable`; 1 is skipped."""
        return tuple(int(self.skips(kind, i)) for kind, i in searchable(self.n_layers))

    def with_bits(self, bits: Sequence[int]) -> LayerSet:
        """The set whose `bits` these are, with the same formats and numbers of experts."""
        return self.skipping(sub_layer for sub_layer, bit in zip(searchable(self.n_layers), bits, strict=True) if bit)

    def in_whole_layers(self) -> LayerSet:
        """The set that leaves out as many sub-layers in whole layers, or one fewer, with the same formats and experts.

        Layers of which this set leaves out both sub-layers come first, then those of which it leaves out one.
        """
        both, either = self.skip_attn & self.skip_mlp, self.skip_attn | self.skip_mlp
        layers = [*sorted(both), *sorted(either - both)][: self.n_skipped // 2]
        return replace(self, skip_attn=frozenset(layers), skip_mlp=frozenset(layers))

    def keeping_attn(self, layers: frozenset[int]) -> LayerSet:
        """The set that leaves out the same, but for the attention of those layers."""
        return replace(self, skip_attn=self.skip_attn - layers) if self.skip_attn & layers else self

    def skipping(self, sub_layers: Iterable[SubLayer]) -> LayerSet:
        """The set that leaves out those sub-layers and no others, with the same formats and numbers of experts."""
        skipped: dict[str, set[int]] = {"attn": set(), "mlp": set()}
        for kind, layer in sub_layers:
            skipped[kind].add(layer)
        return replace(self, skip_attn=frozenset(skipped["attn"]), skip_mlp=frozenset(skipped["mlp"]))


def n_skipped_for(n_layers: int, skip_ratio: float) -> int:
    """Number of sub-layers that `skip_ratio` of the searchable ones is, rounded to the nearest."""
    return round(skip_ratio * 2 * max(0, n_layers - 2))


@dataclass(frozen=True, slots=True)
class Prompt(Record):
    """One line of a stream: raw `text`, or chat `turns` of the user (or whole `messages`) for the chat template.

    `token_ids` take the place of all three where the prompt was encoded already. A completion ends before one of the
    `stop` strings, in addition to those of the session; `reference` is what it is judged by (`core.templates`). Of
    several samples of a prompt each has a number: its draws start from the seed plus that.
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

    `min_p` leaves out tokens that are less probable than this share of the most probable one. `repetition_penalty` None
    means what the model's own generation config says. `presence_penalty` is taken off the logits of the tokens that
    were generated so far, `frequency_penalty` once for each time; the prompt does not count. `logit_bias` are pairs of
    a token id and what is added to its logit.

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
    """A token's log probability (nats) by the model itself, before any processor; `top`: those of the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


TokenSource = Literal["target", "draft", "text", "corpus", "prediction", "grammar"]


@dataclass(frozen=True, slots=True)
class TracedToken:
    """A committed token: where it came from, and the tokens that were drafted in its place and rejected.

    A source "target" is the model itself; the others drafted it: what the method drafts with, earlier text, finished
    answers of the task, the text that the request predicts, or a grammar that leaves no choice.
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
        """Seconds of rounds: drafting and checking, without prompt and search."""
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

    `target_passes` are the passes of the full model after the prefill; `first_tokens` (0 or 1) came from the
    prefill itself. `drafted` counts draft steps, `accepted` those whose position was accepted (a hit side leaf is
    one), `accepted_per_position[i]` the rounds in which draft step i was, `refused` the rounds in which the target
    contradicted a draft (what was drafted after that token is thrown away unjudged). `verified_widths` counts the
    passes per number of rows that the target checked. `prefill_s` is part of `timings.other_s`. `estimated_cost` is
    what the rounds cost by measured prices, in plain passes, where the drafter decides by such. `n_cached` tokens of
    the prompt had been read by another request. `lossy` says that the method does not promise the target's own
    output; `exact` that the output is plain decoding's bit by bit: the method promises its tokens, and the kernels
    compute a row alike whatever other rows the pass has. `accepted_prediction` and `rejected_prediction` count the
    drafted tokens that came from the request's prediction. `by_draft_length[k][j]` are the rounds that accepted j of k
    steps. `crowded_rounds` were plain because drafts do not pay with so many other requests.
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
        """Rounds that drafted."""
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
    "trimmed": "first set with less left out",
    "in use": "set in use again",
    "final": "challengers again",
    "stored": "known sets",
    "family": "by a study of the layers",
    "move": "changes to the best",
    "random": "at random",
    "late": "at random, before a suggestion came",
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
    """The answer on held-out prompts: `use` only if the interval's lower end is above 1."""

    word: VerdictWord
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    expected: float | None = None
    n_prompts: int = 0
    reason: str = ""


def check_task(task: Any, what: str, error: type[InvalidInput] = LayerSetError) -> None:
    """Raises: `error`: no task could be called that in MODEL/TASK; `what` names it."""
    if not isinstance(task, str) or not task.strip() or "/" in task or not task.isprintable():
        raise error(f"{what} {task!r} is no name: use a word without '/', such as 'code'")
    if len(task) > MAX_NAME_LENGTH:
        raise error(f"{what} {task[:40]!r}... has {len(task)} characters: use a name of {MAX_NAME_LENGTH} at most")
