"""Records that the store keeps for a model: layer sets, plans, heads, probes; import of files; states of prompts."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import sqrt
from operator import mul
from pathlib import Path
from typing import Any, ClassVar, Literal

from .errors import FileNotFound, InvalidInput, LayerSetError, StoreError
from .layer_sets import LayerSet
from .serialization import Figure, Record
from .settings import STORED
from .types import DEFAULT_TASK, NOT_WRITTEN, VerdictWord, check_task

LearnedKind = Literal["heads", "probe"]
# A mean hidden state, scaled to length 1; shape (hidden_size,).
State = tuple[float, ...]

A_NAME: Any = {"min_length": 1}
# Field metadata: leave the field out of JSON when it is None.
WHERE_GIVEN: Any = {"exclude_if": lambda value: value is None}


@dataclass(frozen=True, slots=True)
class ModelInfo(Record):
    """A model's data in the store, so that lookups need no torch.

    `earlier` are fingerprints of the same model in other forms: what is stored under them is assigned to this one.
    """

    fingerprint: str
    architecture: str
    n_layers: int
    n_parameters: int
    names: tuple[str, ...] = ()
    earlier: tuple[str, ...] = field(default=(), metadata={"exclude": True})


@dataclass(frozen=True, slots=True)
class ModelList(Record):
    """Models that were loaded before, with every name that a lookup accepts."""

    SCHEMA: ClassVar = "swiftopt.stored-models/1"
    ERROR: ClassVar = StoreError

    models: tuple[ModelInfo, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Record):
    """The verdict on drafts and its figures (None if not measured); the common part of layer sets and plans.

    The speedup is the ratio to plain decoding, with its 95 % interval. α and M are those of the drafts. All figures
    were measured on `device` in `dtype`.
    """

    verdict: VerdictWord = "unmeasured"
    measured_speedup: float | None = None
    measured_interval: tuple[float, float] | None = None
    acceptance_rate: float | None = None
    mean_generated_length: float | None = None
    device: str | None = field(default=None, metadata=A_NAME)
    dtype: str | None = field(default=None, metadata=A_NAME)

    @property
    def figures(self) -> dict[str, Any]:
        """Return only the fields of `Measurement`, for another record of the same measurement."""
        return {column.name: getattr(self, column.name) for column in fields(Measurement)}


@dataclass(frozen=True, slots=True)
class LayerSetRecord(Measurement):
    """A stored layer set with its figures and provenance: the object of the CLI, the API and the export file.

    `version` is assigned by the store; None before. `evidence` is the data of the verdict: for each text, tokens and
    seconds of plain decoding and of decoding with the set. `prompt_state` is the mean hidden state of its prompts, from
    which the store builds `KnownSet`s.
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
    expected_speedup: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    stream_sha256: str | None = None
    swiftopt_version: str = ""
    created_at: str = ""
    version: int | None = field(default=None, metadata=WHERE_GIVEN)
    job: str | None = field(default=None, metadata=NOT_WRITTEN)
    evidence: tuple[tuple[int, float, int, float], ...] = field(
        default=(), repr=False, compare=False, metadata=NOT_WRITTEN
    )
    prompt_state: State | None = field(default=None, repr=False, compare=False, metadata=NOT_WRITTEN)

    @classmethod
    def adapt(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `values` without nulls, and with the task "default" if there is none."""
        return {"task": DEFAULT_TASK, **{key: value for key, value in values.items() if value is not None}}

    @classmethod
    def load(cls, path: Path) -> LayerSetRecord:
        """Return the layer set of an exported file, without its version in another store.

        Raises: FileNotFound: no such file. LayerSetError: it contains no layer set.
        """
        return cls._read_set_file(_read_set(path), path)

    @classmethod
    def _read_set_file(cls, values: Mapping[str, Any], path: Path) -> LayerSetRecord:
        record = cls.from_json(values, str(path))
        check_task(record.task, f"{path}: the task")
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
class LearnedRecord(Record):
    """Trained heads or a trained probe; the store assigns `version`, counted per model, task and kind.

    `depths` are the layers run before each head, or before the probe; `figures` are those of the training (final
    loss, agreement with the last layer, seconds, tokens); `curve` has pairs of (step, loss) for a chart. The weights
    are stored separately.
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


# Settings of a plan whose layer set already names the weight formats of its draft: no further format is applied.
FOUND_SET_SETTINGS: Mapping[str, Any] = {"draft_format": STORED}


@dataclass(frozen=True, slots=True)
class Plan(Measurement):
    """How to decode for a model and task: a method of `decoding.methods`, and what it needs.

    `learned` are the heads or the probe that the method uses; `draft_model` is the name of the smaller model that
    drafts (None: if the method drafts with a model, that is the target without the layer set's sub-layers). The
    figures come from the comparison, the verdict or the served requests that created the plan, not from an earlier
    measurement of its layer set. `engine` names another engine that the plan is for, and `settings` are then that
    engine's; None: swiftopt itself.
    """

    method: str
    layer_set: LayerSetRecord | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    learned: LearnedRecord | None = None
    draft_model: str | None = None
    engine: str | None = field(default=None, metadata=WHERE_GIVEN)

    @property
    def usual_alias(self) -> str:
        """Return the alias under which lookups find such plans: `best`, or the name of their engine."""
        return self.engine or "best"


@dataclass(frozen=True, slots=True)
class FoundPlan(Record):
    """A lookup's result; `fallback` describes how it differs from the request, None for an exact match.

    `alias` None: a version was requested by its number.
    """

    SCHEMA: ClassVar = "swiftopt.plan/1"
    FLAT: ClassVar = "plan"
    ERROR: ClassVar = StoreError

    plan: Plan
    version: int
    alias: str | None
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class PlanInUse(Measurement):
    """The plan that commands use for a task, as a lookup finds it, without its layer set, heads and settings.

    `version` None: none is stored. The figures are those of the drafts, even if the verdict is to decode plainly.
    """

    COMPUTED: ClassVar = ("sentence",)
    ERROR: ClassVar = StoreError

    task: str
    version: int | None = None
    method: str = "plain"
    fallback: str | None = None

    @classmethod
    def of(cls, task: str, found: FoundPlan) -> PlanInUse:
        return cls(task, found.version, found.plan.method, found.fallback, **found.plan.figures)

    @property
    def drafts(self) -> bool:
        """Whether commands decode with its drafts."""
        return self.version is not None and self.verdict == "use"

    @property
    def brief(self) -> str:
        """Return a short description of the plan: its version and ratio, or `plain`."""
        ratio = "" if self.measured_speedup is None else f" {self.measured_speedup:.2f}x"
        return f"v{self.version}{ratio}" if self.drafts else "plain"

    @property
    def sentence(self) -> str:
        """Return a sentence on how commands decode the task, with the figures that decided it."""
        figures = "" if self.measured_speedup is None else f"measured {self.measured_speedup:.2f}x"
        if figures and self.measured_interval is not None:
            figures += f", 95 % {self.measured_interval[0]:.2f} to {self.measured_interval[1]:.2f}"
        if self.drafts:
            remark_text = "; ".join(filter(None, (figures, self.fallback))) or "not measured"
            return f"{self.task}: decode with {self.method} drafts of version {self.version} ({remark_text})"
        if self.version is None:
            reason = "no plan is in use"
        elif self.verdict == "unmeasured":
            reason = f"the drafts of version {self.version} were not compared with plain decoding"
        elif not figures:
            reason = "no method that was compared is reliably faster"
        else:
            is_slower = self.measured_interval is not None and self.measured_interval[1] < 1
            reason = f"drafts {figures}: {'slower' if is_slower else 'not enough to be sure'}"
        return f"{self.task}: decode plainly ({reason})"


@dataclass(frozen=True, slots=True)
class PlanVersion:
    """A stored plan among the versions of its model and task.

    `names` are the model's names, the shortest first, its fingerprint last if known. `best_for` lists each device and
    dtype for which the usual alias points to this version, and since when. `created_at` None: the time is not stored.
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
        """Return the model name for lookups."""
        return self.names[0]

    @property
    def own_set(self) -> LayerSetRecord | None:
        """Return the layer set stored together with the plan; None if the plan refers to another's, or needs none."""
        record = self.plan.layer_set
        is_own = record is not None and (record.version, record.task) == (self.version, self.task)
        return record if is_own else None

    def to_json(self) -> dict[str, Any]:
        """Return the object of `swiftopt layers list`."""
        identity = {"model": self.model, "task": self.task, "version": self.version}
        return {**identity, **self.plan.to_json(), "created_at": self.created_at, "best": bool(self.best_for)}


@dataclass(frozen=True, slots=True)
class AliasMove:
    """An alias was moved to a version; `taken_back`: a later rollback undid it, or it is what such a rollback undid."""

    version: int
    device: str | None
    dtype: str | None
    created_at: str
    is_rollback: bool
    taken_back: bool


# --- import of layer sets from files


def import_file(path: str | Path, n_layers_of: Callable[[str], int | None]) -> list[LayerSetRecord]:
    """Read one exported layer set, or all of the `skip_layers.json` that SWIFT and Self-SD publish.

    The latter is {"MODEL_TASK": {"attention": [..], "mlp": [..]}}.

    Args:   n_layers_of: returns a model's number of layers, which a published file does not contain; None: unknown.
    Raises: FileNotFound: no such file. LayerSetError: it cannot be read, a layer is out of range, or a depth is
        unknown.
    """
    path = Path(path)
    values = _read_set(path)
    if "schema" in values:
        return [LayerSetRecord._read_set_file(values, path)]
    if not values:
        raise LayerSetError(f"{path} contains no layer set: expected an exported one or SWIFT's skip_layers.json")
    return [_read_published_set(path, key, value, n_layers_of) for key, value in values.items()]


def _read_set(path: Path) -> dict[str, Any]:
    return read_object(path, "a layer set", LayerSetError, ", or export one with `swiftopt layers export`")


def read_object(path: Path, what: str, kind: type[InvalidInput] = InvalidInput, otherwise: str = "") -> dict[str, Any]:
    """Return the JSON object of a file, which should hold `what`.

    Args:   otherwise: further advice for the error if there is no such file.
    Raises: FileNotFound: no such file. `kind`: it cannot be read, or contains no object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFound(f"there is no file {path} with {what}: check the path{otherwise}") from error
    except OSError as error:
        raise kind(f"{path} cannot be read ({error.strerror}): check that it is a readable file") from error
    except UnicodeDecodeError as error:
        raise kind(f"{path} is not UTF-8 text: expected one JSON object with {what}") from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} is not JSON ({error}): expected one object with {what}") from error
    if not isinstance(values, dict):
        raise kind(f"{path} contains a {type(values).__name__}: expected one JSON object with {what}")
    return values


def _read_published_set(path: Path, key: str, value: Any, n_layers_of: Callable[[str], int | None]) -> LayerSetRecord:
    model, _, task = key.rpartition("_")
    # Example: key "llama-2-13b_chat_cnndm" is model "llama-2-13b-chat" and task "cnndm".
    model = model.replace("_", "-")
    if not model or not task:
        raise LayerSetError(f"{path}: key {key!r} is not of the form MODEL_TASK: use the names of model and task")
    if not isinstance(value, dict) or set(value) != {"attention", "mlp"}:
        raise LayerSetError(f'{path}: key {key!r} is not a layer set: expected {{"attention": [..], "mlp": [..]}}')
    n_layers = n_layers_of(model)
    if n_layers is None:
        raise LayerSetError(f"{path}: the number of layers of {model!r} is unknown: pass --n-layers")
    layer_set_values = {"n_layers": n_layers, "skip_attn": value["attention"], "skip_mlp": value["mlp"]}
    check_task(task, f"{path}: the task")
    return LayerSetRecord(model, task, LayerSet.from_json(layer_set_values, f"{path}: key {key!r}"))


# --- mean hidden states of prompts, by which a search finds layer sets of similar text


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A layer set, and the mean state of the prompts of a task that it was in use for."""

    layer_set: LayerSet
    state: State
    task: str = ""


def nearest(known_sets: Iterable[KnownSet], state: State, n_sets: int) -> list[LayerSet]:
    """At most `n_sets` different sets, ordered by decreasing cosine of their prompts' state with `state`.

    Sets whose state has another size (from another model) are skipped.
    """
    comparable = [candidate for candidate in known_sets if len(candidate.state) == len(state)]
    comparable.sort(key=lambda candidate: sum(map(mul, candidate.state, state)), reverse=True)
    return list(dict.fromkeys(candidate.layer_set for candidate in comparable))[:n_sets]


def unit(values: Sequence[float]) -> State:
    """The vector scaled to length 1; a zero vector stays zero."""
    norm = sqrt(sum(map(mul, values, values)))
    return tuple(value / norm for value in values) if norm else tuple(values)


def pack_state(state: State) -> bytes:
    """Return the state as bytes, in single precision, little-endian."""
    return struct.pack(f"<{len(state)}f", *state)


def unpack_state(data: bytes) -> State:
    """Inverse of `pack_state`.

    Raises: ValueError: the bytes are not a packed state.
    """
    if len(data) % 4:
        raise ValueError(f"a state has four bytes per value, but there are {len(data)} bytes")
    return struct.unpack(f"<{len(data) // 4}f", data)


def round_to_single(state: Sequence[float]) -> State:
    """The values as rounded by `pack_state`, so that a search resumed from a checkpoint computes the same."""
    return unpack_state(pack_state(tuple(state)))
