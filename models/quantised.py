"""Linear maps with weights in 8 or 4 bits, rounded to the nearest code.

Packed for our kernels (`kernels/quantised.h`), weights have a scale and a zero per group, and activations are rounded
to 8 bits. For torch's weight-only kernels, int8 has a scale per row, and activations are not rounded. fp8 (e4m3) has a
scale per row in both cases; torch's kernel also rounds activations to fp8, and ours does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.settings import FORMATS, group_size
from .coded import by_rows, pack
from .kernels import device as kernels
from .kernels import device_codes, layout
from .kernels.layout import ROWS

LEVELS = 15  # Largest 4-bit code.
SMALLEST_GROUP = 32  # The inputs of packed weights are padded to a multiple of this.
# Shares of a group's range to try: clipping outliers may cost less than coarser steps.
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
BITS = {name: 4 if name.startswith("int4") else 8 for name in FORMATS}
FP8 = torch.float8_e4m3fn

aten = torch.ops.aten


class QuantisedLinear(nn.Module):
    """Linear maps of the same input as one map with quantised weights; biases are not quantised.

    Args: modules: the linear maps. name: a format of `core.settings`. made: codes and scales of the same maps from a
          file (None: they are computed). packed: lay the codes out for our kernels.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(
        self,
        modules: Sequence[nn.Module],
        name: str,
        made: tuple[Tensor, Tensor] | None = None,
        packed: bool = False,
    ) -> None:
        super().__init__()
        weights = [weight_of(module) for module in modules]
        self.n_out, self.n_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        self.packed, self.bits, self.fp8 = packed, BITS[name], name == "fp8"
        width = self.n_in + (-self.n_in % SMALLEST_GROUP if packed or self.fp8 else 0)
        self.group = group_size("int4" if packed and name == "int8" else name, width)
        biases = [cast("Tensor | None", getattr(module, "bias", None)) for module in modules]
        bias = None
        if any(bias_of_map is not None for bias_of_map in biases):
            pairs = zip(weights, biases, strict=True)
            bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])
        # The kernels do not support float64: a float64 model drafts in float32.
        self._dtype = weights[0].dtype if weights[0].dtype != torch.float64 else torch.float32
        codes, scales = made or self._quantised(weights)
        for buffer_name, tensor in (("codes", codes), ("scales", scales), ("bias", bias)):
            self.register_buffer(buffer_name, tensor)

    def _quantised(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        if self.fp8:
            return by_rows(quantise_fp8)(F.pad(weight, (0, -self.n_in % SMALLEST_GROUP, 0, -self.n_out % ROWS)))
        if self.packed:
            assert self.group is not None
            padded = F.pad(weight, (0, -self.n_in % self.group, 0, -self.n_out % ROWS))
            rounded = (quantise_int4 if self.bits == 4 else quantise_groups)(padded, self.group)
            codes, pairs = pack(*rounded, self.bits)
            return codes, pairs.to(torch.bfloat16)
        padded = F.pad(weight, (0, 0, 0, -self.n_out % ROWS))
        if self.group is None:
            return quantise_int8(padded, self._dtype)
        codes, scales, zeros = quantise_int4(padded, self.group)
        pairs = torch.stack((scales, zeros), dim=-1).transpose(0, 1)
        return _packed(codes), pairs.contiguous().to(torch.bfloat16 if weight.is_cuda else self._dtype)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.bias) if tensor is not None)

    def forward(self, x: Tensor) -> Tensor:
        out = self._product(x.to(self._dtype)).to(x.dtype)
        if out.shape[-1] != self.n_out:
            out = out[:, : self.n_out]
        return out if self.bias is None else out + self.bias

    def _product(self, x: Tensor) -> Tensor:
        if self.fp8 and self.packed:
            return kernels.linear(x, self.codes, scales=self.scales)
        if self.fp8:
            return fp8_product(x, self.codes, self.scales)
        if self.packed:  # Only on CUDA: on a CPU, our C++ kernels read packed weights themselves.
            assert self.group is not None
            form = self.codes, self.scales, self.bits, self.group, self.n_out, layout.ZERO_VALUES
            return device_codes.coded_linear(x, device_codes.CodedMap(*form))
        if self.group is None:
            return cast(Tensor, aten._weight_int8pack_mm(x, self.codes, self.scales))
        if x.is_cuda:
            return cast(Tensor, aten._weight_int4pack_mm(x.bfloat16(), self.codes, self.group, self.scales))
        return cast(Tensor, aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales))


@by_rows
def quantise_int8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes int8 (out, in) and scales (out,): weight ≈ codes · scales."""
    scales = weight.float().abs().amax(dim=1).div(127).clamp(min=torch.finfo(torch.float32).tiny)
    codes = weight.float().div(scales[:, None]).round().to(torch.int8).contiguous()
    return codes, scales.to(dtype)


def quantise_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes float8_e4m3fn (rows, in) and scales float32 (rows, 1): weight ≈ codes · scales."""
    whole = weight.float()
    scales = whole.abs().amax(dim=1, keepdim=True).div(torch.finfo(FP8).max)
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    return whole.div(scales).to(FP8), scales


def fp8_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply x (rows, in) by a weight (out, in) with torch's fp8 kernel; return bfloat16 (rows, out).

    Each row of x is rounded with a scale of its own.

    Args: codes, scales: the weight as `quantise_fp8` returns it; its inputs may be padded.
    """
    if x.shape[1] != codes.shape[1]:
        x = F.pad(x, (0, codes.shape[1] - x.shape[1]))
    x_codes, x_scales = quantise_fp8(x)
    return torch._scaled_mm(x_codes, codes.t(), x_scales, scales.t(), out_dtype=torch.bfloat16)


@cache
def cpu_multiplies_fp8() -> bool:
    """Tell whether torch's fp8 kernel for CPUs supports a scale per row; that of torch 2.11 takes one in all."""
    try:
        fp8_product(torch.zeros(1, SMALLEST_GROUP), *quantise_fp8(torch.zeros(ROWS, SMALLEST_GROUP)))
    except RuntimeError:
        return False
    return True


def cpu_multiplies_bf16() -> bool:
    """Tell whether torch has vectors for products in bfloat16 here; without them they take up to 30 times as long."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@by_rows
def quantise_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 1 … 255, uint8 (out, in), scales and zeros (out, in / group): w ≈ (codes - 128) · scale + zero."""
    grouped = weight.float().reshape(weight.shape[0], -1, group)
    least = torch.finfo(torch.bfloat16).tiny
    # Round the scale before computing codes: its rounding error is multiplied by the code.
    scale = grouped.abs().amax(dim=-1, keepdim=True).div_(127).bfloat16().float().clamp_(min=least)
    codes = grouped.div_(scale).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return codes.flatten(1), scale[..., 0], torch.zeros_like(scale[..., 0])


@by_rows
def quantise_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0 … 15, int32 (out, in), scales and zeros (out, in / group): weight ≈ (codes - 8) · scale + zero.

    Each group uses the shrunk range with the least squared error.
    """
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
    """Return the number of inner tiles of 16 weights in torch's CUDA layout: the fastest one that divides a row."""
    return next(n for n in (8, 4, 2) if width % (16 * n) == 0)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight (out, in) of a linear map."""
    weight = cast(Tensor, module.weight).data
    return weight.t() if isinstance(module, Conv1D) else weight
