"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): heads from the latents of a row.

A row is projected to a latent of its queries, a latent of its keys and values, and one rotated key for all heads. Each
latent has a norm, and a map to what the heads have of it. The rotated values of queries and keys lie first here, as in
other families, and last in the model's maps: scores do not depend on the order.

Keys and values are kept head by head. Values, which may be narrower than keys, are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config_layout import HeadLayout


def heads_of_latents(
    heads: HeadLayout, norms: Sequence[Any], maps: Sequence[Any], projected: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and padded values (rows, heads, width) before the rotation.

    Args: norms, maps: of the queries' latent, None where it has none, and of the other one. projected: what the row's
          projections give, (rows, values) each, one after the other.
    """
    sizes = heads.latent
    assert sizes is not None
    together = torch.cat(list(projected), dim=-1) if len(projected) > 1 else projected[0]
    of_queries, latent, turned = torch.split(together, sizes.projected(heads), dim=-1)
    norm, project = norms[0], maps[0]
    of_queries = of_queries if norm is None else norm(of_queries.contiguous())
    query = (of_queries if project is None else project(of_queries)).unflatten(-1, (heads.n_heads, heads.width))
    kept = heads.width - sizes.rotary
    both = maps[1](norms[1](latent.contiguous())).unflatten(-1, (heads.n_heads, kept + sizes.value_width))
    turned = turned[:, None].expand(-1, heads.n_heads, -1)
    key = torch.cat((turned, both[..., :kept]), dim=-1)
    value = F.pad(both[..., kept:], (0, heads.width - sizes.value_width))
    return torch.cat((query[..., kept:], query[..., :kept]), dim=-1), key, value


def without_padding(heads: HeadLayout, mixed: Tensor) -> Tensor:
    """Return what heads read (rows, heads * width) without the values' padding."""
    if heads.latent is None:
        return mixed
    return mixed.view(len(mixed), heads.n_heads, -1)[..., : heads.latent.value_width].flatten(1)
