"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), on the latents themselves.

A row is projected to a latent of its queries, a latent of its keys and values, and one rotated key for all heads. A map
makes what heads have of each latent. The map of keys and values is applied to queries and to what heads read: a query
times a head's share of it scores the latents (`absorbed`), and the latents read go through the share of the values. So
a slot keeps a latent and a rotated key for all heads, and no key and value for each.

The rotated values of queries and keys lie first here, as in other families, and last in the model's maps: scores do not
depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config_layout import HeadLayout


def maps_of_heads(heads: HeadLayout, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return each head's share of the map from a latent to keys (heads, kept, rank), and to values (heads, out, rank).

    Args: weight: of the map, (outputs, rank): head by head what is not rotated of its key, then its value.
    """
    sizes = heads.latent
    assert sizes is not None
    both = weight.reshape(heads.n_heads, sizes.kept + sizes.value_width, sizes.rank)
    return both[:, : sizes.kept], both[:, sizes.kept :]


def heads_of_latents(
    heads: HeadLayout, norms: Sequence[Any], maps: Sequence[Any], projected: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return queries (rows, heads, width) and the one key of all heads (rows, 1, width), before the rotation.

    The key's latent is what heads read.

    Args: norms, maps: of the queries' latent, None where it has none, and of the other one. projected: what the row's
          projections give, (rows, values) each, one after the other.
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
    """Return heads' outputs (rows, heads * value width) of what they read of keys (rows, heads * width)."""
    sizes = heads.latent
    assert sizes is not None
    read = mixed.view(len(mixed), heads.n_heads, -1)[..., sizes.rotary :]
    return torch.einsum("rhc,hvc->rhv", read, maps_of_heads(heads, project.weight)[1]).flatten(1)
