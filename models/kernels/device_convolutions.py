"""Short convolutions on CUDA devices, in Triton: those of LFM2 with their gates, and those before a recurrent state.

A table names the tokens that a row is convolved of. A row sums its taps in one order, so that neither the number of
rows nor whether its tokens are of this pass or of an earlier one changes a bit.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .device import on_its_device

WIDTH = 256  # Values of a row that a Triton program computes.

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from .device import sigmoid

    @triton.jit
    def silu_of_sum(mixed, dtype: tl.constexpr):
        # Round as torch does, which writes what a convolution gives, and then the activation.
        mixed = mixed.to(dtype).to(tl.float32)
        return (mixed * sigmoid(mixed)).to(dtype)

    @triton.jit
    def of_token(new, ring, place, n_new, new_stride, ring_stride, at, mask, GATED: tl.constexpr):
        # A token is a row of `new`, or of `ring` behind these; below 0 it lies before the text. Where it is GATED, a
        # row of `new` has a gate, another gate and values, of GATED values each.
        place = place.to(tl.int64)
        is_new = mask & (place < n_new) & (place >= 0)
        if GATED:
            from_new = tl.load(new + place * new_stride + 2 * GATED + at, mask=is_new, other=0.0).to(tl.float32)
            from_new *= tl.load(new + place * new_stride + at, mask=is_new, other=0.0).to(tl.float32)
            from_new = from_new.to(ring.dtype.element_ty)
        else:
            from_new = tl.load(new + place * new_stride + at, mask=is_new, other=0.0)
        from_ring = tl.load(ring + (place - n_new) * ring_stride + at, mask=mask & (place >= n_new), other=0.0)
        return tl.where(place < n_new, from_new, from_ring)

    @triton.jit
    def sum_of_taps(
        new, ring, places, taps, bias, n_new, new_stride, ring_stride, at, mask,
        N_TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ):  # fmt: skip
        mixed = tl.zeros(at.shape, dtype=tl.float32)
        for tap in tl.static_range(N_TAPS):
            token = of_token(new, ring, tl.load(places + tap), n_new, new_stride, ring_stride, at, mask, GATED)
            mixed += token.to(tl.float32) * tl.load(taps + at * N_TAPS + tap, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            mixed += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
        return mixed

    # Alignments differ with the row that a pass begins at, and could choose another order of a sum.
    @triton.jit(
        do_not_specialize=["n_new", "new_stride", "ring_stride"],
        do_not_specialize_on_alignment=["new", "ring", "table", "taps", "bias"],
    )
    def _gated_convolution(
        new, ring, table, taps, bias, out, n_new, new_stride, ring_stride,
        GATED: tl.constexpr, N_TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH_: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0) * WIDTH_ + tl.arange(0, WIDTH_)
        mask = at < GATED
        fields = table + row * (1 + N_TAPS)
        mixed = sum_of_taps(
            new, ring, fields + 1, taps, bias, n_new, new_stride, ring_stride, at, mask, N_TAPS, HAS_BIAS, GATED
        )
        # Rows of this pass are computed again by whoever reads them: a slot is written and not read here.
        own = of_token(new, ring, row, n_new, new_stride, ring_stride, at, mask, GATED)
        tl.store(ring + tl.load(fields).to(tl.int64) * ring_stride + at, own, mask=mask)
        mixed = mixed.to(own.dtype).to(tl.float32)
        gate = tl.load(new + row * new_stride + GATED + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * GATED + at, (gate * mixed).to(own.dtype), mask=mask)


@on_its_device
def gated_convolution(projected: Tensor, slots: Tensor, table: Tensor, conv: Any) -> Tensor:
    """Convolve gated values of rows, and write those of each row to its slot: (rows, n).

    Args: projected: (rows, 3 n): a gate of what goes into the convolution, one of what comes out, and values. slots:
          (n_slots, n), of the sequence. table: int64 (rows, 1 + taps): the slot of each row, and then its last tokens,
          rows of `projected`, and slots behind these; below 0 before the text. conv: a filter for each value.
    """
    projected, taps = projected.contiguous(), conv.weight.detach().contiguous()
    n_rows, n = len(projected), slots.shape[1]
    out = torch.empty((n_rows, n), dtype=projected.dtype, device=projected.device)
    _gated_convolution[(-(-n // WIDTH), n_rows)](
        projected, slots, table, taps, taps if conv.bias is None else conv.bias.detach(), out, n_rows,
        projected.stride(0), slots.stride(0), GATED=n, N_TAPS=taps.shape[-1], HAS_BIAS=conv.bias is not None,
        WIDTH_=WIDTH,
    )  # fmt: skip
    return out
