"""Cuts what the projections of attention give into heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config_layout import HeadLayout


def split_heads(heads: HeadLayout, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the outputs of the projections, (rows, width) each, into queries, keys and values by head.

    Without a projection of values these are the keys; without both there are none, (rows, 0, width).
    """
    rows = projected[0].shape[0]
    if heads.grouped:
        grouped = projected[0].view(rows, heads.n_kv_heads, heads.n_groups + 2, heads.width)
        return grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    query, *others = (part.view(rows, -1, heads.width) for part in _parted(heads, projected))
    key, value = (others[0], others[-1]) if others else (query[:, :0], query[:, :0])
    return query[:, :: 1 + heads.gated], key, value


def split_gates(heads: HeadLayout, projected: Sequence[Tensor]) -> Tensor:
    """Return the gates of heads, (rows, heads * width), each of which lies after its query."""
    queries = _parted(heads, projected)[0]
    return queries.view(len(queries), heads.n_heads, 2, heads.width)[:, :, 1].flatten(1)


def _parted(heads: HeadLayout, projected: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(projected) > 1:
        return projected
    kv = [heads.n_kv_heads * heads.width] * (heads.projected - 1)
    return torch.split(projected[0], [(1 + heads.gated) * heads.n_heads * heads.width, *kv], dim=-1)
