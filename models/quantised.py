"""Linear maps with weights in 8 or 4 bits: what the drafts of `models.copies` are made of.

Weights are rounded to the nearest. Packed for our kernels (`kernels/quantised.h`) they have a scale and a zero per
group, and activations are rounded to 8 bits; for torch's weight-only kernels int8 has a scale per row, and activations
stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.settings import group_size

LEVELS = 15  # steps of a 4-bit code
ROWS = 16  # the kernels want outputs in multiples of it; missing ones are zeros
SMALLEST_GROUP = 32  # inputs of packed weights come in multiples of it
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range that are tried: the tails may cost less than coarser steps
CHUNK = 1 << 15  # weights that are quantised at a time


aten = torch.ops.aten


class QuantisedLinear(nn.Module):
    """Linear maps of the same input, one behind the other, with quantised weights; their biases are added as they are.

    Args: weights: (out, in) each. biases: (out,) or None each. name: a format of `core.settings`.
          made: codes and scales of the same maps, from an earlier time. packed: for our kernels alone.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        name: str,
        made: tuple[Tensor, Tensor] | None = None,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.n_out, self.n_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        self.packed, self.bits = packed, 8 if name == "int8" else 4
        width = self.n_in + (-self.n_in % SMALLEST_GROUP if packed else 0)
        self.group = group_size("int4" if packed and name == "int8" else name, width)
        self.bias = _joined(weights, biases)
        # The kernels take no float64; a model in it runs its drafts in float32.
        self._dtype = weights[0].dtype if weights[0].dtype != torch.float64 else torch.float32
        self.codes, self.scales = made or self._quantised(weights)

    def _quantised(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        if self.packed:
            assert self.group is not None
            padded = F.pad(weight, (0, -self.n_in % self.group, 0, -self.n_out % ROWS))
            return pack(*(quantise_int4 if self.bits == 4 else quantise_groups)(padded, self.group), self.bits)
        padded = F.pad(weight, (0, 0, 0, -self.n_out % ROWS))
        if self.group is None:
            return quantise_int8(padded, self._dtype)
        codes, scales, zeros = quantise_int4(padded, self.group)
        pairs = torch.stack((scales, zeros), dim=-1).transpose(0, 1)
        return _packed(codes), pairs.contiguous().to(torch.bfloat16 if weight.is_cuda else self._dtype)

    @property
    def n_bytes(self) -> int:
        """Memory that the copy holds."""
        kept = [self.codes, self.scales] + ([] if self.bias is None else [self.bias])
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, in) to (rows, out)."""
        out = self._product(x.to(self._dtype)).to(x.dtype)
        if out.shape[-1] != self.n_out:
            out = out[:, : self.n_out]
        return out if self.bias is None else out + self.bias

    def _product(self, x: Tensor) -> Tensor:
        if self.group is None:
            return cast(Tensor, aten._weight_int8pack_mm(x, self.codes, self.scales))
        if x.is_cuda:
            return cast(Tensor, aten._weight_int4pack_mm(x.bfloat16(), self.codes, self.group, self.scales))
        return cast(Tensor, aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales))


def quantise_int8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes int8 (out, in) and scales (out,): weight ≈ codes · scales."""
    scales = weight.float().abs().amax(dim=1).div(127).clamp(min=torch.finfo(torch.float32).tiny)
    codes = weight.float().div(scales[:, None]).round().to(torch.int8).contiguous()
    return codes, scales.to(dtype)


def quantise_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 1 … 255, uint8 (out, in), scales and zeros (out, in / group): w ≈ (codes - 128) · scale + zero."""
    parts = []
    for rows in torch.split(weight, max(1, CHUNK // weight.shape[1])):
        grouped = rows.float().reshape(rows.shape[0], -1, group)
        least = torch.finfo(torch.bfloat16).tiny
        # Rounded first: an error of the scale counts as often as the code is large.
        scale = grouped.abs().amax(dim=-1, keepdim=True).div_(127).bfloat16().float().clamp_(min=least)
        codes = grouped.div_(scale).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
        parts.append((codes.flatten(1), scale[..., 0]))
    codes, scales = (torch.cat(same) for same in zip(*parts, strict=True))
    return codes, scales, torch.zeros_like(scales)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Lay out codes and scales as `kernels/quantised.h` wants them.

    Args:    codes: (out, in), in whole blocks and groups. scales, zeros: (out, in / group).
    Returns: uint8 (blocks, bytes of a block) and bfloat16 (blocks, groups, 2, 16).
    """
    n_out, n_in = codes.shape
    blocks = codes.to(torch.uint8).view(n_out // ROWS, ROWS, n_in // 4, 4).transpose(1, 2)  # (blocks, n_in / 4, 16, 4)
    if bits == 4:
        blocks = blocks[:, 0::2] | (blocks[:, 1::2] << 4)
    pairs = torch.stack((scales, zeros), dim=-1).view(n_out // ROWS, ROWS, -1, 2).permute(0, 2, 3, 1)
    return blocks.reshape(n_out // ROWS, -1).contiguous(), pairs.to(torch.bfloat16).contiguous()


def quantise_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0 … 15, int32 (out, in), scales and zeros (out, in / group): weight ≈ (codes - 8) · scale + zero.

    Of some shrunk ranges each group takes the one with the least squared error.
    """
    # A few rows at a time: on a CPU the steps then work in its caches, several times faster than on whole matrices.
    parts = [_quantise_rows(rows, group) for rows in torch.split(weight, max(1, CHUNK // weight.shape[1]))]
    codes, scales, zeros = (torch.cat(same) for same in zip(*parts, strict=True))
    return codes, scales, zeros


def _quantise_rows(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = weight.float().reshape(weight.shape[0], -1, group)
    low, high = grouped.amin(dim=-1, keepdim=True), grouped.amax(dim=-1, keepdim=True)
    middle, reach = (high + low) / 2, (high - low) / 2
    least = torch.full_like(low, float("inf"))
    scale, bottom = torch.empty_like(low), torch.empty_like(low)
    for shrink in SHRINKS:
        step = (2 * shrink * reach / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        start = middle - shrink * reach
        rounded = ((grouped - start) / step).round_().clamp_(0, LEVELS)
        error = rounded.mul_(step).add_(start).sub_(grouped).square_().sum(dim=-1, keepdim=True)
        better = error < least
        scale, bottom = torch.where(better, step, scale), torch.where(better, start, bottom)
        least = torch.minimum(error, least)
    codes = ((grouped - bottom) / scale).round_().clamp_(0, LEVELS).flatten(1).int().contiguous()
    return codes, scale[..., 0], (bottom + 8 * scale)[..., 0]


def _packed(codes: Tensor) -> Tensor:
    if codes.is_cuda:
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        return cast(Tensor, aten._convert_weight_to_int4pack(pairs, cuda_tiles(codes.shape[1])))
    return cast(Tensor, aten._convert_weight_to_int4pack_for_cpu(codes, 1))


def cuda_tiles(width: int) -> int:
    """Return the inner tiles of torch's CUDA layout, 16 weights each: the fastest number that divides a row."""
    return next(n for n in (8, 4, 2) if width % (16 * n) == 0)


def _joined(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)])


def replaced(modules: Sequence[nn.Module], make: Callable[[Sequence[nn.Module]], nn.Module]) -> nn.Module:
    """Copy a module with `make`'s in place of its linear maps, each made of those of all the like `modules`."""
    if isinstance(modules[0], nn.Linear | Conv1D):
        return make(modules)
    shell = copy.copy(modules[0])
    shell._modules = {
        name: replaced([getattr(module, name) for module in modules], make) if has_linears(child) else child
        for name, child in modules[0].named_children()
    }
    return shell


def has_linears(module: nn.Module) -> bool:
    """Tell whether there is a linear map in a module."""
    return any(isinstance(part, nn.Linear | Conv1D) for part in module.modules())


def quantised(
    modules: Sequence[nn.Module], name: str, made: tuple[Tensor, Tensor] | None = None, packed: bool = False
) -> QuantisedLinear:
    """Make one quantised map of linear maps of the same input; `made`: its codes and scales, where they are at hand."""
    weights = [cast(Tensor, m.weight).data for m in modules]
    oriented = [w.t() if isinstance(m, Conv1D) else w for m, w in zip(modules, weights, strict=True)]
    biases = [cast("Tensor | None", getattr(m, "bias", None)) for m in modules]
    return QuantisedLinear(oriented, biases, name, made, packed)
