"""Gated short convolutions (LFM2), whose inputs lie in slots as keys do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import device, device_convolutions


def places_of(slots: Tensor) -> Tensor:
    """Return where the inputs of rows' tokens lie, as `gated_convolution` reads them: int64 (rows, 1 + n).

    Args: slots: int64 (rows, n), of the last tokens of each row, its own last, which ascend from row to row; below 0
          before the text.
    """
    own, n_rows = slots[:, -1].contiguous(), len(slots)
    rows = torch.searchsorted(own, slots).clamp(max=n_rows - 1)
    places = torch.where(slots < 0, -1, torch.where(own[rows] == slots, rows, n_rows + slots))
    return torch.cat((own[:, None], places), dim=1)


def gated_convolution(projected: Tensor, slots: Tensor, places: Tensor, conv: Any) -> Tensor:
    """Convolve gated values of rows, by our kernel or by torch; see `device_convolutions.gated_convolution`."""
    if device.runs(projected):
        return device_convolutions.gated_convolution(projected, slots, places, conv)
    into_gate, out_gate, values = projected.chunk(3, dim=-1)
    inputs, n_rows = into_gate * values, len(projected)
    slots[places[:, 0]] = inputs
    tokens = places[:, 1:]
    # The rows' slots have their inputs now.
    read = torch.where(tokens < n_rows, places[:, 0][tokens.clamp(0, n_rows - 1)], tokens - n_rows)
    tails = slots[read] * (tokens >= 0)[..., None]
    wide = torch.promote_types(inputs.dtype, torch.float32)
    mixed = (tails.to(wide) * conv.weight[:, 0].t().to(wide)).sum(dim=1)
    if conv.bias is not None:
        mixed = mixed + conv.bias
    given: Tensor = out_gate * mixed.to(inputs.dtype)
    return given
