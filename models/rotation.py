"""Rotates queries and keys by their positions (RoPE, arXiv:2104.09864), with tables from the model's own module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config_layout import UNROTATED, QueryScale
from .family import Family


class RotaryTables(NamedTuple):
    """Cosines and sines (positions, rotary_dim), in the dtype in which the rotation is computed.

    The two values of a pair are half the rotated width apart, or neighbours (`pairs`). The sine of a pair's first value
    is negated. Queries are then multiplied by `query_scale`, (positions,); None: 1. Tables of width 0 rotate nothing.
    """

    cos: Tensor
    sin: Tensor
    pairs: bool = False
    query_scale: Tensor | None = None

    def at(self, positions: Tensor | slice) -> RotaryTables:
        """Return the rotation of rows at these positions: tables (rows, 1, …)."""
        scale = None if self.query_scale is None else self.query_scale[positions][:, None, None]
        return RotaryTables(self.cos[positions][:, None], self.sin[positions][:, None], self.pairs, scale)

    def of_rows(self, index: Tensor) -> RotaryTables:
        scale = None if self.query_scale is None else self.query_scale[index]
        return RotaryTables(self.cos[index], self.sin[index], self.pairs, scale)

    def is_usual(self, dtype: torch.dtype) -> bool:
        """Tell whether the rotation is Llama's: halves, each product rounded to the model's dtype, no query scale."""
        return not self.pairs and self.query_scale is None and self.cos.dtype == dtype


# (layer type, device, minimum number of positions) -> rotation; None: no rotary embedding.
TablesByType = Callable[[str | None, torch.device, int], RotaryTables | None]


def joined_rotation(rotations: Sequence[RotaryTables | None]) -> RotaryTables | None:
    """Concatenate the rotations of several groups of rows; None: they have none."""
    tables = [rotation for rotation in rotations if rotation is not None]
    if len(tables) <= 1:
        return tables[0] if tables else None
    scales = [table.query_scale for table in tables if table.query_scale is not None]
    cos, sin = torch.cat([table.cos for table in tables]), torch.cat([table.sin for table in tables])
    return RotaryTables(cos, sin, tables[0].pairs, torch.cat(scales) if scales else None)


def rotate(x: Tensor, rotation: RotaryTables) -> Tensor:
    """Rotate the leading dimensions of `x` (rows, heads, head_dim) by each row's position; see `RotaryTables.at`."""
    cos, sin, width = rotation.cos, rotation.sin, rotation.cos.shape[-1]
    if width == 0:
        return x
    turned = x[..., :width]
    partner = (
        turned.view(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2) if rotation.pairs else turned.roll(width // 2, -1)
    )
    turned = (turned * cos + partner * sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def rotation_tables(
    module: Any, dtype: torch.dtype, max_positions: int, family: Family, scale: QueryScale | None
) -> TablesByType:
    """Return a function that gives tables of the model's rotary module; they are cached, and grow as needed.

    Args: module: the rotary module (None: the model has none). scale: how queries are scaled by position (None: not).
    """
    tables: dict[tuple[str, torch.device], RotaryTables] = {}

    def made(layer_type: str, device: torch.device, n_positions: int) -> RotaryTables:
        positions = torch.arange(n_positions, device=device)[None]
        probe = torch.empty(
            0, dtype=torch.float32 if family.rotates_wide and dtype.itemsize < 4 else dtype, device=device
        )
        scales = None
        if scale is not None and scale.unrotated == (layer_type == UNROTATED):
            steps = torch.floor((positions[0] + scale.first) / scale.n)
            scales = (1 + scale.beta * torch.log(1 + steps)).to(probe.dtype)
        if layer_type == UNROTATED:
            nothing = probe.new_empty((n_positions, 0))
            return RotaryTables(nothing, nothing, query_scale=scales)
        # Some modules need a position for each of frame, row and column of an image; for text the three are equal.
        places = positions.expand(3, 1, -1) if hasattr(module, "mrope_section") else positions
        rotations = module(probe, places, layer_type) if layer_type else module(probe, places)
        # Llama 4's and DeepSeek-V2's modules return complex numbers.
        cos, sin = (rotations.real, rotations.imag) if isinstance(rotations, Tensor) else rotations
        # With accelerate's dispatch over several devices, the rotary module returns tensors on its own device.
        cos, sin = (table[0].to(device, probe.dtype) for table in (cos, sin))
        if family.half_tables:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        half = cos.shape[-1] // 2
        if family.rotation == "pairs":
            if not torch.equal(cos[:, ::2], cos[:, 1::2]):  # Some modules repeat each value, others the whole row.
                cos, sin = cos[:, :half].repeat_interleave(2, -1), sin[:, :half].repeat_interleave(2, -1)
            sin = torch.stack((-sin[:, ::2], sin[:, 1::2]), -1).flatten(-2)
        else:
            signed = (-sin[:, :half], sin[:, half:])
            sin = torch.cat(signed if family.rotation == "halves" else [-part for part in signed], dim=-1)
        return RotaryTables(cos, sin, family.rotation == "pairs", scales)

    def table_of(layer_type: str | None, device: torch.device, n_positions: int) -> RotaryTables | None:
        if module is None or layer_type is None:
            return None
        table = tables.get((layer_type, device))
        if table is None or table.cos.shape[0] < n_positions:
            size = min(max_positions, max(n_positions, 1024, 2 * (0 if table is None else table.cos.shape[0])))
            table = tables[layer_type, device] = made(layer_type, device, max(size, n_positions))
        return table

    return table_of
