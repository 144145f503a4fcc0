"""What a config says about the layout of each layer: heads, slots, windows and rotations; and the most positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..core.errors import UnsupportedModel
from .families import CHUNKS, FAMILIES, SLIDING
from .family import Family, ShortConv, SlotShape

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

UNROTATED = "unrotated"  # Rotation type of layers whose queries are scaled by position but not rotated.
Positions = TypeVar("Positions", int, "Tensor", "NDArray[Any]")

MOST_POSITIONS = 1 << 20  # Limit for models whose configs have none.


def is_parallel(config: Any) -> bool:
    """Tell whether attention and MLP of a layer read the same residual."""
    parallel = FAMILIES[config.model_type].parallel
    return parallel if isinstance(parallel, bool) else any(getattr(config, flag, False) for flag in parallel)


def mixes_in_turns(config: Any) -> bool:
    """Tell whether some layers have attention, and others another token mixer."""
    family = FAMILIES[config.model_type]
    return len({family.has_attention(config, layer) for layer in range(int(config.num_hidden_layers))}) > 1


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """Sizes of multi-head latent attention, see `models/latents.py`.

    query_rank, rank: widths of the latent of queries (0: there is none), and of that of keys and values.
    rotary, kept: numbers of rotated and of unrotated values in a head's query.
    value_width: width of a head's value.
    """

    query_rank: int
    rank: int
    rotary: int
    kept: int
    value_width: int

    def projected(self, heads: HeadLayout) -> list[int]:
        """Return the widths of a row's projections: queries or their latent, the other latent, and the rotated key."""
        return [self.query_rank or heads.n_heads * (self.rotary + self.kept), self.rank, self.rotary]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the outputs of a layer's projections are split into heads.

    grouped: the queries, the key and the value of a key head are adjacent.
    gated: each query is followed by a gate of its width.
    latent: sizes of latent attention, in which all heads share one key, which is also the value; None: other attention.
    projected: number of projections among queries, keys and values, in this order. With 2, the keys are the values;
        with 1, the layer reads another layer's keys and values.
    """

    n_heads: int
    n_kv_heads: int
    width: int
    grouped: bool
    gated: bool = False
    latent: LatentLayout | None = None
    projected: int = 3

    @property
    def n_groups(self) -> int:
        """Query heads per key head."""
        return self.n_heads // self.n_kv_heads


def layer_config(config: Any, layer: int) -> Any:
    """Return the config of one layer if the config has fields by layer; otherwise the config itself."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def heads_of(config: Any, layer: int = 0) -> HeadLayout:
    """Return the layout of a layer's heads; a model without attention has one head of width 1."""
    if getattr(config, "num_attention_heads", None) is None:
        return HeadLayout(1, 1, 1, grouped=False)
    family, n_heads = FAMILIES[config.model_type], int(config.num_attention_heads)
    if family.latents is not None:
        names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        sizes = LatentLayout(*(int(getattr(config, name) or 0) for name in names))
        return HeadLayout(n_heads, 1, sizes.rotary + sizes.rank, False, latent=sizes)
    of_layer = layer_config(config, layer)
    width = int(getattr(of_layer, "head_dim", None) or config.hidden_size // n_heads)
    if family.projection == "multi_query":
        is_new = getattr(config, "new_decoder_architecture", False)
        n_kv_heads = config.num_kv_heads if is_new else 1 if config.multi_query else n_heads
        return HeadLayout(n_heads, int(n_kv_heads), width, bool(is_new or not config.multi_query))
    n_kv_heads = int(getattr(of_layer, "num_key_value_heads", None) or n_heads)
    projected = 3
    if family.key_values and getattr(config, family.key_values) and config.layer_types[layer] != SLIDING:
        projected = 2
    if family.sharing and key_sources(config)[layer] != layer:
        projected = 1
    is_grouped = family.projection == "grouped"
    return HeadLayout(n_heads, n_kv_heads, width, is_grouped, family.gated_heads, projected=projected)


def key_sources(config: Any) -> list[int]:
    """Return for each layer the layer whose keys and values its attention reads: itself, or an earlier one.

    Raises: UnsupportedModel: a layer that shares has no earlier layer of its type with keys and values.
    """
    family, n_layers = FAMILIES[config.model_type], int(config.num_hidden_layers)
    n_sharing = getattr(config, family.sharing, None) or 0 if family.sharing else 0
    n_own = n_layers - n_sharing
    last_of = {kind: layer for layer, kind in enumerate(config.layer_types[:n_own])} if n_sharing else {}
    sharing = config.layer_types[n_own:] if n_sharing else ()
    missing = next((kind for kind in sharing if kind not in last_of), None)
    if n_own < 1 or missing is not None:
        raise UnsupportedModel(
            f"this config says {family.sharing} {n_sharing} of {n_layers} layers, and no layer before these has keys"
            f" for {missing or 'them'}: copy or download it again"
        )
    return [*range(n_own), *(last_of[kind] for kind in sharing)]


def slot_shapes(config: Any) -> list[SlotShape | None]:
    """Return what each layer stores in a slot; None: nothing.

    Recurrent layers without attention, and layers that read another layer's keys, store nothing in slots.
    """

    def shape_of(layer: int) -> SlotShape | None:
        if not family.has_attention(config, layer):
            has_inputs = isinstance(family.mixer_of(config, layer), ShortConv)
            return SlotShape(1, int(config.hidden_size)) if has_inputs else None
        heads = heads_of(config, layer)
        value_width = heads.width if heads.latent is None else 0  # A latent is both key and value.
        return None if heads.projected == 1 else SlotShape(heads.n_kv_heads, heads.width, value_width)

    family = FAMILIES[config.model_type]
    return [shape_of(layer) for layer in range(int(config.num_hidden_layers))]


class AttentionWindow(NamedTuple):
    """A row sees the last `size` positions, its own included; with `chunks`, those in its own chunk of this size."""

    size: int
    chunks: bool = False

    def oldest(self, positions: Positions) -> Positions:
        """Return the first position that rows at these positions see; negative: they see all earlier ones."""
        return positions - positions % self.size if self.chunks else positions + 1 - self.size


def windows_of(config: Any, family: Family, n_layers: int) -> tuple[AttentionWindow | None, ...]:
    """Return each layer's window; None: its rows see all earlier positions."""
    in_chunks = family.sliding == "chunks"
    size = getattr(config, "attention_chunk_size" if in_chunks else "sliding_window", None)
    if family.sliding == "none" or size is None:
        return (None,) * n_layers
    window, has_window = AttentionWindow(int(size), in_chunks), CHUNKS if in_chunks else SLIDING
    if family.sliding == "all":
        return (window,) * n_layers
    return tuple(window if kind == has_window else None for kind in config.layer_types)


def rows_as_costly(
    attentions: Iterable[tuple[HeadLayout, AttentionWindow | None]], n_parameters: int, n_rows: int, n_slots: int
) -> int:
    """Return how many rows after `n_slots` slots cost as many multiply-adds as `n_rows` rows after none.

    The result is a multiple of 16, and at least 16 (or `n_rows`): with fewer rows, reading the weights costs too much.

    Args: attentions: heads and window of each layer with attention.
    """
    of_attention = sum(
        2 * heads.n_heads * heads.width * min(n_slots, window.size if window else n_slots)
        for heads, window in attentions
    )
    affordable = n_rows * n_parameters // max(1, n_parameters + of_attention)
    return max(min(n_rows, 16), affordable // 16 * 16)


def rotation_types(config: Any, family: Family, windows: Sequence[AttentionWindow | None]) -> list[str | None]:
    """Return for each layer the type that its rotary module takes ("": it takes none); None: no rotation.

    `UNROTATED`: queries are scaled by position but not rotated.
    """
    n_layers, has_windows = len(windows), getattr(config, "sliding_window", None) is not None
    rotated = {
        "none": [True] * n_layers,
        "listed": list(getattr(config, "no_rope_layers", None) or [True] * n_layers)[:n_layers],
        "windowless": [window is not None for window in windows],
        "beside_windows": [window is not None or not has_windows for window in windows],
    }[family.unrotated]
    if (
        getattr(config, "prefix_dense_sliding_window_pattern", None) == 1
    ):  # Cohere 2 MoE's first layers, without experts.
        mlp_types = config.mlp_layer_types
        rotated = [is_rotated or kind == "dense" for is_rotated, kind in zip(rotated, mlp_types, strict=True)]
    types = [str(kind) for kind in config.layer_types] if family.rotary_by_type else [""] * n_layers
    scale = query_scale(config, family)
    other = UNROTATED if scale is not None and scale.unrotated else None
    return [kind if is_rotated else other for kind, is_rotated in zip(types, rotated, strict=True)]


class QueryScale(NamedTuple):
    """Factor of queries at position p: 1 + beta log(1 + floor((p + first) / n)).

    It applies to layers of the type `UNROTATED` (`unrotated`), or to all other layers.
    """

    beta: float
    n: int
    first: int = 0
    unrotated: bool = False


def query_scale(config: Any, family: Family) -> QueryScale | None:
    """Return how queries are scaled by their positions; None: they are not."""
    if family.scales_queries == "unrotated":
        is_scaled = config.attn_temperature_tuning
        return QueryScale(float(config.attn_scale), int(config.floor_scale), 1, True) if is_scaled else None
    rope = getattr(config, "rope_parameters", None) or {}
    beta = rope.get("llama_4_scaling_beta") if family.scales_queries == "rotated" else None
    return None if beta is None else QueryScale(float(beta), int(rope["original_max_position_embeddings"]))


def context_limit(config: Any) -> int:
    """Return the most positions (prompt and completion) of this model.

    Schemes that change rotary frequencies beyond the trained length ("dynamic", "longrope") are limited to that length,
    because a position must always have the same rotation. "yarn" reaches its factor times the trained length, because
    it is added to a config whose own limit stays as it was. Recurrent states have no limit.

    Raises: UnsupportedModel: the limit is less than 1.
    """
    positions = getattr(config, "max_position_embeddings", None)
    limit = MOST_POSITIONS if positions is None else int(positions)
    rope = getattr(config, "rope_parameters", None) or {}
    per_type = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for parameters in per_type:
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, int(parameters.get("original_max_position_embeddings", limit)))
        if parameters.get("rope_type") == "yarn":
            trained = parameters.get("original_max_position_embeddings") or limit
            limit = max(limit, int(trained * (parameters.get("factor") or 1.0)))
    if limit < 1:
        raise UnsupportedModel(f"this model's config says max_position_embeddings {limit}: copy or download it again")
    return limit
