"""The words of swiftopt, as frozen values.

| paper | code                    | meaning, unit, range                                                    |
|-------|-------------------------|-------------------------------------------------------------------------|
| z     | `LayerSet`              | sub-layers the draft leaves out; 0-based; SWIFT keeps the ends    |
| r     | `skip_ratio`            | skipped / searchable sub-layers, searchable = 2 (L - 2); [0, 1]         |
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

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime
from operator import add
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from .errors import FileNotFound, LayerSetError, SettingsError, StoreError
from .serialization import BY_NUMBER, LARGEST, SORTED, Figure, Form, Record, Settings, count, ranged, share
from .settings import STORED, check_formats

SubLayer = tuple[Literal["attn", "mlp"], int]
FinishReason = Literal["stop", "length", "stop_string"]
VerdictWord = Literal["use", "plain", "unmeasured"]
LearnedKind = Literal["heads", "probe"]

DEFAULT_TASK = "default"  # of prompts and layer sets that name none

NOT_WRITTEN: Any = {"exclude": True}  # metadata of a field that JSON leaves out
A_NAME: Any = {"min_length": 1}
WHERE_ANY: Any = {"exclude_if": lambda n: not n}  # of a count that JSON leaves out where it is 0


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second: 2026-11-21T00:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _as_pairs(values: Any) -> Any:
    return tuple(values.items()) if isinstance(values, Mapping) else values


def _biases_as_object(biases: Sequence[tuple[int, float]]) -> dict[str, float]:
    return {str(token_id): bias for token_id, bias in biases}


def _biases_as_pairs(values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError("use an object of numbers by token id")
    return tuple((int(key) if str(key).isdecimal() else key, bias) for key, bias in values.items())


AS_OBJECT = Form(dict, dict[str, str], _as_pairs)  # of pairs
BY_TOKEN = Form(_biases_as_object, dict[str, float], _biases_as_pairs)  # of pairs, the first of each a token id
MOST_BIAS = 100.0  # of a token's logit, either way


def searchable(n_layers: int) -> tuple[SubLayer, ...]:
    """Sub-layers a draft may leave out, attention first: 2 (L - 2) of them, none in the first or last layer."""
    inner = range(1, n_layers - 1)
    return (*(("attn", i) for i in inner), *(("mlp", i) for i in inner))


@dataclass(frozen=True, slots=True)
class LayerSet(Record):
    """Sub-layers the draft pass leaves out; 0-based. SWIFT keeps the first and last layer, Self-SD need not.

    `formats` are (part, format) pairs of what the draft runs quantised: a part is `attn` or `mlp` (of all layers),
    `attn:3` or `mlp:3` (of one, which comes before) or `head`; a format is one of `core.settings`.

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

    def __post_init__(self) -> None:
        stray = sorted(i for i in self.skip_attn | self.skip_mlp if not 0 <= i < self.n_layers)
        if stray:
            raise LayerSetError(
                f"layer set skips layers {stray}, but of {self.n_layers} layers"
                f" only 0..{self.n_layers - 1} may be skipped"
            )
        if self.formats:
            check_formats(self.formats, self.n_layers)
            object.__setattr__(self, "formats", tuple(sorted(dict(self.formats).items())))

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
        """Sub-layers that the set was chosen from: those between the ends, or all where an end is left out."""
        ends = {0, self.n_layers - 1} & (self.skip_attn | self.skip_mlp)
        return 2 * self.n_layers if ends else 2 * max(0, self.n_layers - 2)

    def skips(self, kind: Literal["attn", "mlp"], layer: int) -> bool:
        """Whether that sub-layer is left out."""
        return layer in (self.skip_attn if kind == "attn" else self.skip_mlp)

    def format_of(self, kind: Literal["attn", "mlp", "head"], layer: int | None = None) -> str | None:
        """The format that the draft runs that part in, without a layer that of all which have none of their own.

        None: the model's own weights.
        """
        if not self.formats:
            return None
        known = dict(self.formats)
        name = known.get(f"{kind}:{layer}", known.get(kind, STORED))
        return None if name == STORED else name

    def filled(self, name: str) -> LayerSet:
        """The set with all that it names no format for in that format; "stored" leaves it as it is."""
        if name == STORED:
            return self
        general = {part: name for part in ("attn", "mlp", "head")}
        return replace(self, formats=tuple({**general, **dict(self.formats)}.items()))

    @property
    def is_whole(self) -> bool:
        """Whether this is the model itself: nothing left out and nothing quantised."""
        return not self.n_skipped and not self.formats

    def bits(self) -> tuple[int, ...]:
        """One 0/1 per searchable sub-layer, in the order of `searchable`; 1 is skipped."""
        return tuple(int(self.skips(kind, i)) for kind, i in searchable(self.n_layers))

    def with_bits(self, bits: Sequence[int]) -> LayerSet:
        """The set whose `bits` these are, with the same formats."""
        return self.skipping(sub for sub, bit in zip(searchable(self.n_layers), bits, strict=True) if bit)

    def skipping(self, sub_layers: Iterable[SubLayer]) -> LayerSet:
        """The set that leaves out those sub-layers and no others, with the same formats."""
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
    `stop` strings, beside those of the session; `reference` is what it is judged by (`core.templates`). Of several
    samples of a prompt each has a number: its draws start from the seed plus that.
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


@dataclass(frozen=True, slots=True)
class Sampling(Settings):
    """How a token is taken from the target's distribution; temperature 0 is greedy.

    `min_p` leaves out tokens that are less probable than this share of the most probable one. `repetition_penalty` None
    means what the model's own generation config says. `presence_penalty` is taken off the logits of the tokens that
    were generated so far, `frequency_penalty` once for each time; the prompt does not count. `logit_bias` are pairs of
    a token id and what is added to its logit.

    Raises: SettingsError: a value is out of its range.
    """

    NAME: ClassVar = "the sampling"

    temperature: float = ranged(0.0, ge=0)
    top_p: float = ranged(1.0, gt=0, le=1)
    top_k: int = count(0, least=0)  # 0: off
    min_p: float = share(0.0)  # 0: off
    repetition_penalty: float | None = ranged(None, gt=0)
    presence_penalty: float = ranged(0.0, ge=-2, le=2)
    frequency_penalty: float = ranged(0.0, ge=-2, le=2)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BY_TOKEN] = field(default_factory=tuple)
    seed: int = ranged(0, ge=-LARGEST, le=LARGEST)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not abs(bias) <= MOST_BIAS:
                raise SettingsError(
                    f"logit_bias {bias} of token {token_id} is out of range: use token ids of 0 or more and numbers"
                    f" from {-MOST_BIAS:g} to {MOST_BIAS:g}",
                    "logit_bias",
                )
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(self.logit_bias).items())))

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is taken, with no draw."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class TokenLogprob(Record):
    """A token's log probability (nats) by the model itself, before any processor; `top`: those of the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


TokenSource = Literal["target", "draft", "text", "prediction", "grammar"]


@dataclass(frozen=True, slots=True)
class TracedToken:
    """A committed token: where it came from, and the tokens that were drafted in its place and rejected.

    A source "target" is the model itself; the others drafted it: what the method drafts with, earlier text, the text
    that the request predicts, or a grammar that leaves no choice.
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
        """All four together."""
        return self.optimise_s + self.draft_s + self.verify_s + self.other_s

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
    """What one prompt came to, with the counts that α and M are made of.

    `target_passes` are the passes of the full model after the prefill; `first_tokens` (0 or 1) came from the
    prefill itself. `drafted` counts draft steps, `accepted` those whose position was accepted (a hit side leaf is
    one), `accepted_per_position[i]` the rounds in which draft step i was, `refused` the rounds in which the target
    contradicted a draft (what was drafted behind that token is thrown away unjudged). `verified_widths` counts the
    passes per number of rows that the target checked. `prefill_s` is part of `timings.other_s`. `reckoned_cost` is what
    the rounds cost by measured prices, in plain passes, where the drafter decides by such. `n_cached` tokens of the
    prompt had been read by an earlier request. `lossy` says that the
    method does not promise the target's own output; `exact` that the output is plain decoding's bit by bit: the method
    is lossless, and the kernels compute a row alike whatever rows are beside it. `accepted_prediction` and
    `rejected_prediction` count the drafted tokens that came from the request's prediction. `by_draft_length[k][j]` are
    the rounds that accepted j of k draft steps.
    """

    COMPUTED: ClassVar = ("n_tokens", "acceptance_rate", "mean_generated_length")
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
    reckoned_cost: float | None = None
    accepted_prediction: int = field(default=0, metadata=WHERE_ANY)
    rejected_prediction: int = field(default=0, metadata=WHERE_ANY)
    n_cached: int = field(default=0, metadata=WHERE_ANY)
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
        return (self.n_tokens - self.first_tokens) / self.target_passes if self.target_passes else None


@dataclass(frozen=True, slots=True)
class Trial(Record):
    """One candidate layer set, scored once.

    `origin` says where it came from: "uniform" (the start), "trimmed" (the start after r was lowered), "in use" and
    "final" (the set in use and its challengers, scored once more side by side), "stored" (known from elsewhere),
    "random", "late" (a suggestion was due but not there yet, so the step was drawn at random), or a word of the
    strategy's own. `score` is the value that is maximised; the window is the one at `position` of the prompt's text.
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


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """The answer on held-out prompts: `use` only if the interval's lower end is above 1."""

    word: VerdictWord
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    expected: float | None = None
    n_prompts: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo(Record):
    """What the store must know of a model so that look-ups need no torch."""

    fingerprint: str
    architecture: str
    n_layers: int
    n_parameters: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSetRecord(Record):
    """A stored layer set with its figures and provenance: the object of the CLI, the API and the export file.

    `version` is given by the store; None before it is stored. Figures are None where nothing was measured (an imported
    set). `evidence` is what the verdict was made of: of each text plain decoding's tokens and seconds, and those with
    the set. `prompt_state`, see `core.prompt_states`, is for the store: those who ask it get the known sets instead.
    """

    SCHEMA: ClassVar = "swiftopt.layer-set/1"
    FLAT: ClassVar = "layer_set"
    COMPUTED: ClassVar = ("quantised", "skip_ratio")
    ERROR: ClassVar = LayerSetError

    model: str = field(metadata=A_NAME)
    task: str = field(metadata=A_NAME)
    layer_set: LayerSet
    fingerprint: str | None = field(default=None, metadata=A_NAME)
    matchness: float | None = None
    acceptance_rate: float | None = None
    mean_generated_length: float | None = None
    expected_speedup: float | None = None
    measured_speedup: float | None = None
    measured_interval: tuple[float, float] | None = None
    verdict: VerdictWord = "unmeasured"
    device: str | None = field(default=None, metadata=A_NAME)
    dtype: str | None = field(default=None, metadata=A_NAME)
    settings: Mapping[str, Any] = field(default_factory=dict)
    stream_sha256: str | None = None
    swiftopt_version: str = ""
    created_at: str = ""
    version: int | None = field(default=None, metadata={"exclude_if": lambda version: version is None})
    job: str | None = field(default=None, metadata=NOT_WRITTEN)
    evidence: tuple[tuple[int, float, int, float], ...] = field(
        default=(), repr=False, compare=False, metadata=NOT_WRITTEN
    )
    prompt_state: tuple[float, ...] | None = field(default=None, repr=False, compare=False, metadata=NOT_WRITTEN)

    @classmethod
    def adapt(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `values` without what is null, and with the task "default" where there is none."""
        return {"task": DEFAULT_TASK, **{key: value for key, value in values.items() if value is not None}}

    @classmethod
    def load(cls, path: Path) -> LayerSetRecord:
        """Return the layer set of an exported file, without the version that another store gave it.

        Raises: FileNotFound: no such file. LayerSetError: it holds no layer set.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            hint = "export one with `swiftopt layers export`"
            raise FileNotFound(f"there is no layer-set file {path}: {hint}") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise LayerSetError(f"{path} cannot be read as JSON: {error}") from error
        return cls.unstored(values, str(path))

    @classmethod
    def unstored(cls, values: Any, where: str) -> LayerSetRecord:
        """Return the exchanged object as a set that no store has given a version yet.

        Raises: LayerSetError: it is none, or its task could not be called that in MODEL/TASK.
        """
        record = cls.from_json(values, where)
        check_task(record.task, where)
        return replace(record, version=None, job=None)

    @property
    def quantised(self) -> dict[str, str]:
        """Return formats by part, as in `LayerSet.formats`."""
        return dict(self.layer_set.formats)

    @property
    def skip_ratio(self) -> float:
        """Return r, rounded."""
        return round(self.layer_set.skip_ratio, 4)

    @property
    def found_for(self) -> Literal["swift", "adaptive"]:
        """The method whose search found it; sets from elsewhere count as SWIFT's."""
        return "adaptive" if self.settings.get("method") == "adaptive" else "swift"


@dataclass(frozen=True, slots=True)
class LayerSetList(Record):
    """Stored layer sets, newest first."""

    SCHEMA: ClassVar = "swiftopt.layer-sets/1"
    ERROR: ClassVar = StoreError

    layer_sets: tuple[LayerSetRecord, ...]


@dataclass(frozen=True, slots=True)
class ModelList(Record):
    """Models that were loaded once, and every name that a look-up knows."""

    SCHEMA: ClassVar = "swiftopt.stored-models/1"
    ERROR: ClassVar = StoreError

    models: tuple[ModelInfo, ...]
    names: tuple[str, ...]


def check_task(task: str, where: str) -> None:
    """Raises: LayerSetError: no task could be called that in MODEL/TASK; `where` names its origin."""
    if not task.strip() or "/" in task or not task.isprintable():
        raise LayerSetError(f"{where}: task {task!r} is no name: use a word without '/', such as 'code'")


@dataclass(frozen=True, slots=True)
class LearnedRecord(Record):
    """Trained heads or a trained probe; `version` is given by the store, counted per model, task and kind.

    `depths` are the layers run before each head, or the probe's one depth; `figures` what training measured (final
    loss, agreement with the last layer, seconds, tokens); `curve` pairs of (step, loss) for the picture. The weights
    are stored apart.
    """

    SCHEMA: ClassVar = "swiftopt.learned/1"

    kind: LearnedKind
    model: str
    task: str
    fingerprint: str
    depths: tuple[int, ...]
    n_parameters: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = field(default=(), metadata=NOT_WRITTEN)
    stream_sha256: str | None = None
    swiftopt_version: str = ""
    created_at: str = ""
    version: int | None = None


AS_FOUND: Mapping[str, Any] = {"draft_format": STORED}  # settings of a plan whose set names all formats itself


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """How to decode for a model and task: a method of `decoding.methods`, and what it needs.

    `learned` are the heads or the probe that the method reads; `draft_model` the name of the smaller model that drafts
    (None: the target without the layer set's sub-layers, where the method drafts with a model). The figures are those
    of the comparison or the verdict that made the plan. `engine` is the other engine that it is for, whose settings
    `settings` then are; None: swiftopt itself.
    """

    method: str
    layer_set: LayerSetRecord | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    verdict: VerdictWord = "unmeasured"
    learned: LearnedRecord | None = None
    draft_model: str | None = None
    measured_speedup: float | None = None
    measured_interval: tuple[float, float] | None = None
    device: str | None = field(default=None, metadata=NOT_WRITTEN)
    dtype: str | None = field(default=None, metadata=NOT_WRITTEN)
    engine: str | None = field(default=None, metadata={"exclude_if": lambda engine: engine is None})

    @property
    def usual_alias(self) -> str:
        """Return what look-ups ask for to find such plans: `best`, or the name of the engine that they are for."""
        return self.engine or "best"


@dataclass(frozen=True, slots=True)
class FoundPlan(Record):
    """A look-up's answer; `fallback` says in words what differs from what was asked, None for an exact hit.

    `alias` None: the version itself was asked for.
    """

    SCHEMA: ClassVar = "swiftopt.plan/1"
    FLAT: ClassVar = "plan"
    ERROR: ClassVar = StoreError

    plan: Plan
    version: int
    alias: str | None
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class PlanVersion:
    """A stored plan among the versions of its model and task.

    `names` are the model's, the shortest first, its fingerprint last where it is known. `best_for` lists the device,
    dtype and time since which its usual alias means this version there. `created_at` None: the time is not stored.
    """

    names: tuple[str, ...]
    fingerprint: str | None
    task: str
    version: int
    plan: Plan
    created_at: str | None
    best_for: tuple[tuple[str | None, str | None, str], ...] = ()

    @property
    def model(self) -> str:
        """Return the name to look it up by."""
        return self.names[0]

    @property
    def own_set(self) -> LayerSetRecord | None:
        """Return the layer set that the plan was stored with; None where it took one over, or needs none."""
        record = self.plan.layer_set
        mine = record is not None and (record.version, record.task) == (self.version, self.task)
        return record if mine else None


@dataclass(frozen=True, slots=True)
class AliasMove:
    """An alias has come to mean a version; `taken_back` by a later rollback, or itself what such a rollback did."""

    version: int
    device: str | None
    dtype: str | None
    created_at: str
    is_rollback: bool
    taken_back: bool
