"""Layer sets: which sub-layers a draft leaves out, and how it runs the others.

Source: SWIFT (arXiv:2410.06916), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from .errors import LayerSetError
from .serialization import SORTED, Form, Record
from .settings import STORED, check_absent, check_experts, check_formats

Kind = Literal["attn", "mlp"]
SubLayer = tuple[Kind, int]
# Kinds of sub-layers in their order within a layer, with their names in messages.
KINDS: Mapping[Kind, str] = {"attn": "attention", "mlp": "MLP"}


def _read_pairs(values: Any) -> Any:
    return tuple(values.items()) if isinstance(values, Mapping) else values


AS_OBJECT = Form(dict, dict[str, str], _read_pairs)
AS_COUNTS = Form(dict, dict[str, int], _read_pairs)


def searchable(n_layers: int) -> tuple[SubLayer, ...]:
    """Sub-layers a draft may leave out, attention first: 2 (L - 2) of them, none in the first or last layer."""
    inner_layers = range(1, n_layers - 1)
    return (*(("attn", layer) for layer in inner_layers), *(("mlp", layer) for layer in inner_layers))


class PartForm(NamedTuple):
    """How a draft runs a sub-layer that it keeps, where that differs from the model.

    `format`: format of its weights; None: the model's own. `experts`: number of experts per token in a mixture, without
    shared ones; None: as many as the model uses.
    """

    format: str | None = None
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class LayerSet(Record):
    """Sub-layers the draft pass leaves out; 0-based. SWIFT keeps the first and last layer, Self-SD need not.

    `formats` are (part, format) pairs of quantised parts: a part is `attn` or `mlp` (all layers), `attn:3` or `mlp:3`
    (one layer; takes precedence) or `head`; a format is one of `core.settings`. `experts` are (part, number) pairs
    with the number of experts per token where the draft uses fewer than the model: a part is `mlp` or `mlp:3`; 0 means
    only the shared ones. `absent` are sub-layers, such as `mlp:3`, that the model's layers do not have: they count in
    no share or number, and equality ignores them.

    Raises: LayerSetError: the model has no such layer, or a format is unknown.
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
        """Number of skipped sub-layers."""
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
        """The weight format of a part of the draft; `layer` None: that of layers without their own entry.

        None: the model's own weights.
        """
        if not self.formats:
            return None
        formats_by_part = dict(self.formats)
        format_name = formats_by_part.get(f"{kind}:{layer}", formats_by_part.get(kind, STORED))
        return None if format_name == STORED else format_name

    def experts_of(self, layer: int) -> int | None:
        """Number of experts per token in a layer of the draft; None: as many as the model uses."""
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
        """Whether this is the model itself: nothing skipped, nothing quantised, and all experts."""
        return not self.n_skipped and not self.formats and not self.experts

    def bits(self) -> tuple[int, ...]:
        """One 0/1 per searchable sub-layer, in the order of `searchable`; 1 is skipped."""
        return tuple(int(self.skips(kind, i)) for kind, i in searchable(self.n_layers))

    def with_bits(self, bits: Sequence[int]) -> LayerSet:
        """The set whose `bits` these are, with the same formats and numbers of experts."""
        return self.skipping(sub_layer for sub_layer, bit in zip(searchable(self.n_layers), bits, strict=True) if bit)

    def in_whole_layers(self) -> LayerSet:
        """The set that skips the same number of sub-layers (or one fewer) in whole layers; same formats and experts.

        Layers of which this set skips both sub-layers come first, then those of which it skips one.
        """
        both, either = self.skip_attn & self.skip_mlp, self.skip_attn | self.skip_mlp
        layers = [*sorted(both), *sorted(either - both)][: self.n_skipped // 2]
        return replace(self, skip_attn=frozenset(layers), skip_mlp=frozenset(layers))

    def keeping_attn(self, layers: frozenset[int]) -> LayerSet:
        """The same set, except that it keeps the attention of those layers."""
        return replace(self, skip_attn=self.skip_attn - layers) if self.skip_attn & layers else self

    def skipping(self, sub_layers: Iterable[SubLayer]) -> LayerSet:
        """The set that skips exactly those sub-layers, with the same formats and numbers of experts."""
        skipped: dict[str, set[int]] = {"attn": set(), "mlp": set()}
        for kind, layer in sub_layers:
            skipped[kind].add(layer)
        return replace(self, skip_attn=frozenset(skipped["attn"]), skip_mlp=frozenset(skipped["mlp"]))


def n_skipped_for(n_layers: int, skip_ratio: float) -> int:
    """`skip_ratio` times the number of searchable sub-layers, rounded to the nearest integer."""
    return round(skip_ratio * 2 * max(0, n_layers - 2))
