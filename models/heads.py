"""Attention heads in torch: splits the outputs of the projections into heads, and computes attention over slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .config_layout import HeadLayout


def split_heads(heads: HeadLayout, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Split the outputs of the projections, (rows, width) each, into queries, keys and values (rows, heads, width).

    Without a projection of values, the keys are the values. With queries alone, keys and values are (rows, 0, width).
    """
    rows = projected[0].shape[0]
    if heads.grouped:
        grouped = projected[0].view(rows, heads.n_kv_heads, heads.n_groups + 2, heads.width)
        return grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    query, *others = (part.view(rows, -1, heads.width) for part in _by_projection(heads, projected))
    key, value = (others[0], others[-1]) if others else (query[:, :0], query[:, :0])
    return query[:, :: 1 + heads.gated], key, value


def split_gates(heads: HeadLayout, projected: Sequence[Tensor]) -> Tensor:
    """Return the heads' gates (rows, heads * width); the projection has each after the head's query."""
    queries = _by_projection(heads, projected)[0]
    return queries.view(len(queries), heads.n_heads, 2, heads.width)[:, :, 1].flatten(1)


def _by_projection(heads: HeadLayout, projected: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(projected) > 1:
        return projected
    kv = [heads.n_kv_heads * heads.width] * (heads.projected - 1)
    return torch.split(projected[0], [(1 + heads.gated) * heads.n_heads * heads.width, *kv], dim=-1)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of queries (rows, heads, head_dim) over keys and values (kv_heads, slots, head_dim).

    Query heads that share a key head become extra rows of it, so keys and values are read in place and never repeated.

    Args:    mask: additive, (groups * rows, slots), see `of_groups`; None: each row sees all slots. softcap: bounds
             scores as softcap · tanh(score / softcap). sinks: (heads,) scores without a value, which only enlarge the
             softmax's sum.
    Returns: (rows, heads * head_dim).
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    # (rows, kv_heads, groups, width) -> (kv_heads, groups * rows, width)
    folded = query.view(rows, kv_heads, groups, width).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * rows, width)
    if softcap is None and sinks is None:
        mixed = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scaling)
    else:
        scores = folded @ keys.transpose(1, 2) * scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores if mask is None else scores + mask
        if sinks is not None:
            sink_scores = sinks.to(scores.dtype).view(1, kv_heads, groups, 1).expand(-1, -1, -1, rows)
            scores = torch.cat((scores, sink_scores.reshape(1, kv_heads, groups * rows, 1)), dim=-1)
        wide = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        mixed = wide[..., : keys.shape[1]].to(query.dtype) @ values
    return mixed.view(kv_heads, groups, rows, width).permute(2, 0, 1, 3).reshape(rows, heads * width)


def of_groups(heads: HeadLayout, mask: Tensor) -> Tensor:
    """Repeat a mask (rows, slots) for each query head of a key head; return (groups * rows, slots)."""
    return mask if heads.n_groups == 1 else mask.repeat(heads.n_groups, 1)
