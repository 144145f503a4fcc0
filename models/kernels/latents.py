"""Describes the maps of heads in latent attention to the library; see `models/latents.py`."""

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
    """Return two arrays with a map for each head: from its query to the latent, and from the latent to its output.

    Args: module: the map from the latent to keys and values. keep: keeps a tensor or array alive, and returns it.
    """
    refuse_hooks(module)
    of_keys, of_values = maps_of_heads(heads, weight_of(module).to(dtype))
    # The map to keys is used in the other direction, from a query to the latent, so it is transposed.
    stacks = keep(of_keys.transpose(1, 2).contiguous()), keep(of_values)
    of_keys_maps, of_values_maps = ([stack_map(weight) for weight in stack] for stack in stacks)
    n = heads.n_heads
    return keep((layout.Map * n)(*of_keys_maps)), keep((layout.Map * n)(*of_values_maps))
