"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1), computed on the latents.

A row is projected to a latent for queries, a latent for keys and values, and one rotated key that all heads share. The
map from the second latent to keys is absorbed into the queries, which then score latents directly; the map to values is
applied to attention's output. So a slot stores one latent and one rotated key, not a key and a value for each head.

Here the rotated values of queries and keys come first, as in other families; in the model's maps they come last. Scores
do not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config_layout import HeadLayout


def maps_of_heads(heads: HeadLayout, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split the map from a latent into that to keys (heads, kept, rank) and that to values (heads, value width, rank).

    Args: weight: (outputs, rank); the outputs are, head by head, the unrotated part of the key, then the value.
    """
    sizes = heads.latent
    assert sizes is not None
    both = weight.reshape(heads.n_heads, sizes.kept + sizes.value_width, sizes.rank)
    return both[:, : sizes.kept], both[:, sizes.kept :]


def heads_of_latents(
    heads: HeadLayout, norms: Sequence[Any], maps: Sequence[Any], projected: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return queries (rows, heads, width) and the key that all heads share (rows, 1, width), before the rotation.

    The latent in the key also serves as the value.

    Args: norms, maps: of the latent of queries (None: it has none), and of that of keys and values. projected: outputs
          of the row's projections, (rows, values) each.
    """
    sizes = heads.latent
    assert sizes is not None
    together = torch.cat(list(projected), dim=-1) if len(projected) > 1 else projected[0]
    of_queries, latent, turned = torch.split(together, sizes.projected(heads), dim=-1)
    norm, project = norms[0], maps[0]
    of_queries = of_queries if norm is None else norm(of_queries.contiguous())
    query = (of_queries if project is None else project(of_queries)).view(len(together), heads.n_heads, -1)
    of_keys, _ = maps_of_heads(heads, maps[1].weight)
    absorbed = torch.einsum("rhk,hkc->rhc", query[..., : sizes.kept], of_keys)
    key = torch.cat((turned, norms[1](latent.contiguous())), dim=-1)[:, None]
    return torch.cat((query[..., sizes.kept :], absorbed), dim=-1), key


def values_of_latents(heads: HeadLayout, project: Any, mixed: Tensor) -> Tensor:
    """Map attention's sums over keys (rows, heads * width) to the heads' outputs (rows, heads * value width)."""
    sizes = heads.latent
    assert sizes is not None
    read = mixed.view(len(mixed), heads.n_heads, -1)[..., sizes.rotary :]
    return torch.einsum("rhc,hvc->rhv", read, maps_of_heads(heads, project.weight)[1]).flatten(1)
