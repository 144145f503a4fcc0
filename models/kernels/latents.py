"""Describes to the library each head's maps between its query, a latent, and its output; see `models/latents.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..config_layout import HeadLayout
from ..latents import maps_of_heads
from ..quantised import weight_of
from . import layout
from .experts import stack_map
from .limits import refuse_hooks


def maps_by_head(heads: HeadLayout, module: Any, dtype: torch.dtype, keep: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return an array of each head's maps to the latent, and one of those from it.

    Args: module: the map from the latent to keys and values. keep: keeps what an array points to alive, and returns it.
    """
    refuse_hooks(module)
    of_keys, of_values = maps_of_heads(heads, weight_of(module).to(dtype))
    # A query times a head's map has as many sums as the latent has values: it is read by outputs.
    stacks = keep(of_keys.transpose(1, 2).contiguous()), keep(of_values)
    of_keys_maps, of_values_maps = ([stack_map(one) for one in stack] for stack in stacks)
    n = heads.n_heads
    return keep((layout.Map * n)(*of_keys_maps)), keep((layout.Map * n)(*of_values_maps))
