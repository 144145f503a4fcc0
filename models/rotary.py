"""The rotations of positions, asked of a model's own rotary module once and kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RotaryTables:
    """Cosines and sines per layer type and device; `module` None: a model without rotary."""

    def __init__(self, module: Any, dtype: torch.dtype, max_positions: int) -> None:
        self._module, self._dtype, self._max_positions = module, dtype, max_positions
        self._tables: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def of(self, layer_type: str, device: torch.device, n_positions: int) -> tuple[Tensor, Tensor] | None:
        """Cosine and sign-folded sine (positions, rotary_dim) for at least `n_positions`; None without rotary."""
        if self._module is None:
            return None
        table = self._tables.get((layer_type, device))
        if table is None or table[0].shape[0] < n_positions:
            size = min(self._max_positions, max(n_positions, 1024, 2 * (0 if table is None else table[0].shape[0])))
            probe = torch.empty(0, dtype=self._dtype, device=device)
            positions = torch.arange(max(size, n_positions), device=device)[None]
            cos, sin = self._module(probe, positions, layer_type) if layer_type else self._module(probe, positions)
            half = sin.shape[-1] // 2
            folded = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            # Dispatched over devices, the rotary module answers on its own, whatever device it was asked for.
            table = (cos[0].to(device), folded.to(device))
            self._tables[(layer_type, device)] = table
        return table
