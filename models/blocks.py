"""Computes what a decoder layer's attention and its MLP each add to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .buffer import KVBuffer
from .coded import CodedLinear
from .families import Family


def submodule(root: nn.Module, dotted: str | None) -> Any:
    return None if dotted is None else root.get_submodule(dotted)


# (layer type, device, minimum number of positions) -> cosine and sine tables (positions, rotary_dim), the first half of
# the sine negated; None: no rotary embedding.
RotationTables = Callable[[str, torch.device, int], tuple[Tensor, Tensor] | None]
LINEAR = nn.Linear | Conv1D | CodedLinear  # Linear maps that can be quantised.


@dataclass(slots=True)
class RowGroup:
    """Rows of one sequence that a sub-layer runs on, and the slots they attend to; shared by all layers of a pass.

    `spans`: consecutive shares of the group, as (first row in the group, first slot, length): where their keys and
    values go. `mask`: as for `attend`, over [start, end).
    """

    cos: Tensor | None  # (rows, 1, rotary_dim)
    sin: Tensor | None  # (rows, 1, rotary_dim), first half negated
    spans: tuple[tuple[int, int, int], ...]
    start: int
    end: int
    mask: Tensor | None

    @property
    def n_rows(self) -> int:
        return sum(length for _, _, length in self.spans)


class LayerRows(Protocol):
    """The rows that a layer's attention runs on, from any number of sequences, with rotations as in `RowGroup`."""

    cos: Tensor | None
    sin: Tensor | None

    def attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the rows' keys and values; return the attention heads' outputs, (rows, heads * width)."""
        ...


@runtime_checkable
class AddingNorm(Protocol):
    """A norm that one kernel computes together with the sum before it."""

    def after(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of two tensors (rows, n), and the norm of it."""
        ...


@dataclass(frozen=True, slots=True)
class LayerModules:
    attn_norm: Any
    qkv: tuple[Any, ...]
    q_norm: Any
    k_norm: Any
    out: Any
    attn_post: Any
    mlp_norm: Any
    mlp: Any
    mlp_post: Any

    def modules(self) -> Iterator[Any]:
        """Yield every module; None where the layer lacks it."""
        for part in fields(self):
            module_or_modules = getattr(self, part.name)
            yield from module_or_modules if isinstance(module_or_modules, tuple) else (module_or_modules,)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a layer's projections are cut into heads; `interleaved`: query, key and value of each head lie together."""

    n_heads: int
    n_kv_heads: int
    width: int
    interleaved: bool

    def of_groups(self, mask: Tensor) -> Tensor:
        """Repeat a mask (rows, slots) for every query head of a key head: (groups * rows, slots)."""
        groups = self.n_heads // self.n_kv_heads
        return mask if groups == 1 else mask.repeat(groups, 1)


def queries_keys_values(
    parts: LayerModules, heads: HeadLayout, normed: Tensor, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (rows, heads, width), keys and values (rows, kv_heads, width) of normed states, rotated."""
    query, key, value = split_heads(heads, [project(normed) for project in parts.qkv])
    if parts.q_norm is not None and parts.k_norm is not None:
        query, key = parts.q_norm(query), parts.k_norm(key)
    if cos is not None and sin is not None:
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    return query, key, value


def attention_out(parts: LayerModules, mixed: Tensor) -> Tensor:
    """Return attention's output, given its heads' outputs (rows, heads * width)."""
    out = cast(Tensor, parts.out(mixed))
    return out if parts.attn_post is None else cast(Tensor, parts.attn_post(out))


def mlp_out(parts: LayerModules, normed: Tensor) -> Tensor:
    out = cast(Tensor, parts.mlp(normed))
    return out if parts.mlp_post is None else cast(Tensor, parts.mlp_post(out))


class Block:
    """The two sub-layers of one decoder layer, each with the norms around it."""

    def __init__(self, layer: nn.Module, index: int, config: Any, family: Family, window: int | None) -> None:
        attn = layer.get_submodule(family.attn)
        self.index = index
        self.window = window
        self.layer_type = str(config.layer_types[index]) if family.rotary_by_type else ""
        n_heads = int(config.num_attention_heads)
        n_kv_heads = int(getattr(config, "num_key_value_heads", None) or n_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // n_heads)
        self.heads = HeadLayout(n_heads, n_kv_heads, width, family.projection == "heads")
        self.scaling = float(cast(Any, attn).scaling)
        q_norm, k_norm = family.head_norms or (None, None)
        self.parts = LayerModules(
            attn_norm=submodule(layer, family.attn_norm),
            qkv=tuple(attn.get_submodule(name) for name in family.qkv),
            q_norm=submodule(attn, q_norm),
            k_norm=submodule(attn, k_norm),
            out=attn.get_submodule(family.out),
            attn_post=submodule(layer, family.attn_post_norm),
            mlp_norm=submodule(layer, family.mlp_norm),
            mlp=layer.get_submodule(family.mlp),
            mlp_post=submodule(layer, family.mlp_post_norm),
        )
        self.device = next(attn.parameters()).device

    def attention(self, normed: Tensor, rows: LayerRows, parts: LayerModules | None = None) -> Tensor:
        """Return what attention adds to states, given their norm (rows, hidden_size); write the rows' keys and values.

        Args: parts: a quantised copy's modules, None for the layer's own.
        """
        parts = parts or self.parts
        query, key, value = queries_keys_values(parts, self.heads, normed, rows.cos, rows.sin)
        return attention_out(parts, rows.attend(self, query, key, value))

    def mlp(self, normed: Tensor, parts: LayerModules | None = None) -> Tensor:
        return mlp_out(parts or self.parts, normed)


class Residual:
    """The residual stream of some rows, (rows, hidden_size). Its last sum may be left to the kernel of the next norm.

    Args: added: what the last sub-layer gave, not yet in `states`.
    """

    def __init__(self, states: Tensor, added: Tensor | None = None) -> None:
        self._states, self._added = states, added

    def whole(self) -> Tensor:
        if self._added is not None:
            self._states, self._added = self._states + self._added, None
        return self._states

    def normed(self, norm: Any, index: Tensor | None = None) -> Tensor:
        """Return the norm of all rows, or of those that `index` names."""
        if self._added is None or index is not None or not isinstance(norm, AddingNorm):
            return cast(Tensor, norm(self.whole() if index is None else self.whole()[index]))
        self._states, normed = norm.after(self._states, self._added)
        self._added = None
        return normed

    def plus(self, added: Tensor, index: Tensor | None = None) -> Residual:
        """Return the stream after a sub-layer added to all rows, or to those that `index` names."""
        return Residual(self.whole(), added) if index is None else Residual(self.whole().index_add(0, index, added))


class BufferRows:
    """Rows for torch's attention, grouped by sequence, each group with its KV buffer; see `LayerRows`."""

    def __init__(self, groups: Sequence[tuple[RowGroup, KVBuffer]]) -> None:
        self.groups = groups
        self.cos, self.sin = _joined(group.cos for group, _ in groups), _joined(group.sin for group, _ in groups)

    def attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self.groups) == 1:
            return _attended(block, query, key, value, *self.groups[0])
        n_rows = [group.n_rows for group, _ in self.groups]
        group_parts = zip(*(torch.split(part, n_rows) for part in (query, key, value)), self.groups, strict=True)
        return torch.cat([_attended(block, *parts, *group) for *parts, group in group_parts])


def _joined(parts: Iterable[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)) if tensors else None


def _attended(block: Block, query: Tensor, key: Tensor, value: Tensor, group: RowGroup, buffer: KVBuffer) -> Tensor:
    for row, slot, length in group.spans:
        whole = length == key.shape[0]
        keys, values = buffer.between(slot, slot + length)
        keys[block.index].copy_((key if whole else key[row : row + length]).transpose(0, 1))
        values[block.index].copy_((value if whole else value[row : row + length]).transpose(0, 1))
    keys, values = buffer.between(group.start, group.end)
    return attend(query, keys[block.index], values[block.index], group.mask, block.scaling)


def split_heads(heads: HeadLayout, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the outputs of the projections, (rows, width) each, into queries, keys and values by head."""
    rows = projected[0].shape[0]
    if heads.interleaved:
        query, key, value = projected[0].view(rows, heads.n_heads, 3 * heads.width).chunk(3, dim=-1)
        return query, key, value
    if len(projected) == 1:
        kv = heads.n_kv_heads * heads.width
        projected = torch.split(projected[0], [heads.n_heads * heads.width, kv, kv], dim=-1)
    query, key, value = (part.view(rows, -1, heads.width) for part in projected)
    return query, key, value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of `x` (rows, heads, head_dim) by position; `sin` has its first half negated."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + x.roll(width // 2, -1) * sin
    turned = x[..., :width]
    return torch.cat((turned * cos + turned.roll(width // 2, -1) * sin, x[..., width:]), dim=-1)


def rotation_tables(module: Any, dtype: torch.dtype, max_positions: int) -> RotationTables:
    """Return the tables of a model's own rotary module, each kept, and replaced by a longer one when it is too short.

    The module is None for a model without rotary positions, which has no tables.
    """
    tables: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def table_of(layer_type: str, device: torch.device, n_positions: int) -> tuple[Tensor, Tensor] | None:
        if module is None:
            return None
        table = tables.get((layer_type, device))
        if table is None or table[0].shape[0] < n_positions:
            size = min(max_positions, max(n_positions, 1024, 2 * (0 if table is None else table[0].shape[0])))
            probe = torch.empty(0, dtype=dtype, device=device)
            positions = torch.arange(max(size, n_positions), device=device)[None]
            cos, sin = module(probe, positions, layer_type) if layer_type else module(probe, positions)
            half = sin.shape[-1] // 2
            folded = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            # With accelerate's dispatch over several devices, the rotary module returns tensors on its own device: move
            # them.
            table = tables[layer_type, device] = cos[0].to(device), folded.to(device)
        return table

    return table_of


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Compute attention of (rows, heads, head_dim) over (kv_heads, slots, head_dim): (rows, heads * head_dim).

    The query heads that share a key head become extra rows of it, so that keys and values are read in place and
    never repeated. `mask` is additive, (groups * rows, slots), see `HeadLayout.of_groups`; None: each row sees all.
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    # (rows, kv_heads, groups, width) -> (kv_heads, groups * rows, width)
    folded = query.view(rows, kv_heads, groups, width).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * rows, width)
    mixed = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scaling)
    return mixed.view(kv_heads, groups, rows, width).permute(2, 0, 1, 3).reshape(rows, heads * width)
