"""One decoder layer as two functions of the residual stream: what its attention adds, and what its MLP adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .buffer import KVBuffer
from .families import Family


def submodule(root: nn.Module, dotted: str | None) -> Any:
    """The module at a dotted name, None for no name."""
    return None if dotted is None else root.get_submodule(dotted)


@dataclass(slots=True)
class RowGroup:
    """Rows that a sub-layer runs for, and how they see the buffer; shared by all layers of a pass.

    `spans`: consecutive shares of the group, as (first row in the group, first slot, length): where their keys and
    values go. `mask`: additive, (group rows, end), or None when each row sees all of [start, end).
    """

    cos: Tensor | None  # (rows, 1, rotary_dim)
    sin: Tensor | None  # (rows, 1, rotary_dim), first half negated
    spans: tuple[tuple[int, int, int], ...]
    start: int
    end: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Parts:
    """The modules of one decoder layer."""

    attn_norm: Any
    qkv: tuple[Any, ...]
    q_norm: Any
    k_norm: Any
    out: Any
    attn_post: Any
    mlp_norm: Any
    mlp: Any
    mlp_post: Any


class Block:
    """The two sub-layers of one decoder layer, each with the norms around it."""

    def __init__(self, layer: nn.Module, index: int, config: Any, family: Family, window: int | None) -> None:
        attn = layer.get_submodule(family.attn)
        self.index = index
        self.window = window
        self.layer_type = str(config.layer_types[index]) if family.rotary_by_type else ""
        self.n_heads = int(config.num_attention_heads)
        self.n_kv_heads = int(getattr(config, "num_key_value_heads", None) or self.n_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.n_heads)
        self.scaling = float(cast(Any, attn).scaling)
        self._interleaved = family.projection == "heads"
        self.parts = Parts(
            attn_norm=submodule(layer, family.attn_norm),
            qkv=tuple(attn.get_submodule(name) for name in family.qkv),
            q_norm=getattr(attn, "q_norm", None),
            k_norm=getattr(attn, "k_norm", None),
            out=attn.get_submodule(family.out),
            attn_post=submodule(layer, family.attn_post_norm),
            mlp_norm=submodule(layer, family.mlp_norm),
            mlp=layer.get_submodule(family.mlp),
            mlp_post=submodule(layer, family.mlp_post_norm),
        )
        self.device = next(attn.parameters()).device

    def attention(self, hidden: Tensor, group: RowGroup, buffer: KVBuffer, parts: Parts | None = None) -> Tensor:
        """What attention adds to `hidden` (rows, hidden_size), after writing the rows' keys and values.

        Args: parts: a quantised copy's modules, None for the layer's own.
        """
        parts = parts or self.parts
        query, key, value = self._project(parts.attn_norm(hidden), parts)
        if group.cos is not None and group.sin is not None:
            query, key = rotate(query, group.cos, group.sin), rotate(key, group.cos, group.sin)
        keys, values = buffer.keys[self.index], buffer.values[self.index]
        for row, slot, length in group.spans:
            keys[:, slot : slot + length] = key[row : row + length].transpose(0, 1)
            values[:, slot : slot + length] = value[row : row + length].transpose(0, 1)
        mixed = attend(
            query, keys[:, group.start : group.end], values[:, group.start : group.end], group.mask, self.scaling
        )
        out = cast(Tensor, parts.out(mixed))
        return out if parts.attn_post is None else cast(Tensor, parts.attn_post(out))

    def mlp(self, hidden: Tensor, parts: Parts | None = None) -> Tensor:
        """What the MLP adds to `hidden` (rows, hidden_size)."""
        parts = parts or self.parts
        out = cast(Tensor, parts.mlp(parts.mlp_norm(hidden)))
        return out if parts.mlp_post is None else cast(Tensor, parts.mlp_post(out))

    def _project(self, normed: Tensor, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (rows, heads, head_dim), keys and values (rows, kv_heads, head_dim), normed where the family does."""
        query, key, value = self.split_heads([project(normed) for project in parts.qkv])
        if parts.q_norm is not None and parts.k_norm is not None:
            query, key = parts.q_norm(query), parts.k_norm(key)
        return query, key, value

    def split_heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What the projections gave, (rows, width) each, as queries, keys and values by head."""
        rows = projected[0].shape[0]
        if self._interleaved:
            query, key, value = projected[0].view(rows, self.n_heads, 3 * self.head_dim).chunk(3, dim=-1)
            return query, key, value
        if len(projected) == 1:
            kv = self.n_kv_heads * self.head_dim
            projected = torch.split(projected[0], [self.n_heads * self.head_dim, kv, kv], dim=-1)
        query, key, value = (part.view(rows, -1, self.head_dim) for part in projected)
        return query, key, value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the leading dimensions of `x` (rows, heads, head_dim); `sin` has its first half negated."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + x.roll(width // 2, -1) * sin
    turned = x[..., :width]
    return torch.cat((turned * cos + turned.roll(width // 2, -1) * sin, x[..., width:]), dim=-1)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of (rows, heads, head_dim) over (kv_heads, slots, head_dim); returns (rows, heads * head_dim).

    The query heads that share a key head become extra rows of it, so that keys and values are read where they lie and
    never repeated. `mask` is additive, (rows, slots).
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    # (rows, kv_heads, groups, width) -> (kv_heads, groups * rows, width)
    folded = query.view(rows, kv_heads, groups, width).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * rows, width)
    if mask is not None and groups > 1:
        mask = mask.repeat(groups, 1)
    mixed = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scaling)
    return mixed.view(kv_heads, groups, rows, width).permute(2, 0, 1, 3).reshape(rows, heads * width)
