"""Describes to the library what sequences keep, and what mixes their tokens in place of attention."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks import Block
from ..rows import Pass
from . import layout
from .layout import Unsupported

MOST_TAPS = 64  # Most tokens that a short convolution reads.
WIDEST_DELTA = 256  # Largest head dimension of a gated delta rule.
Keep = Callable[[Any], Any]  # Returns a tensor, which lives as long as what describes the model.


def sequence_of(pass_: Pass, seen: Tensor | None) -> layout.Sequence:
    """Describe the rows of a pass and what their sequence keeps; both, and `seen` (see `Rows`), must outlive it."""
    buffer, rows = pass_.buffer, pass_.rows
    sequence = layout.Sequence(None if seen is None else seen.data_ptr(), *map(ctypes.addressof, buffer.addresses))
    sequence.head_stride, sequence.n_rows, sequence.first_slot = (
        buffer.head_stride,
        len(rows.token_ids),
        rows.first_slot,
    )
    if buffer.states is not None:
        sequence.roots, sequence.committed = buffer.states.roots.data_ptr(), buffer.states.committed
        sequence.n_kept, sequence.lag, sequence.is_text = buffer.states.n_kept, buffer.states.lag, rows.is_text
    return sequence


def convolution_of(
    block: Block, conv: Any, norms: Sequence[layout.Norm], maps: Sequence[layout.Map], keep: Keep
) -> layout.Convolution:
    """Describe a gated short convolution. Args: norms: before and behind it. maps: into it and out of it."""
    if block.n_taps > MOST_TAPS or conv.weight.shape != (maps[1].n_in, 1, block.n_taps):
        raise Unsupported(f"a convolution of {tuple(conv.weight.shape)} is computed by torch")
    bias = keep(None if conv.bias is None else conv.bias.detach().float())
    taps = keep(conv.weight.detach()[:, 0].t().float().contiguous())
    bias_at = None if bias is None else bias.data_ptr()
    return layout.Convolution(*norms, *maps, taps.data_ptr(), bias_at, block.n_taps, block.added_scale)


def delta_of(
    block: Block,
    norm: Any,
    norm_at: int,
    norms: Sequence[layout.Norm],
    maps: Sequence[layout.Map],
    out: layout.Map,
    keep: Keep,
) -> layout.Delta:
    """Describe a gated delta rule. Args: norm: of what heads read, whose weight lies at `norm_at`."""
    rule = block.rule
    assert rule is not None
    form = rule.form
    widest = max(form.key_width, form.value_width)
    if form.n_taps > MOST_TAPS or widest > WIDEST_DELTA or form.n_heads % form.n_key_heads:
        raise Unsupported(f"a gated delta rule of {form} is computed by torch")
    if not _is_gated_norm(norm, form.value_width):
        raise Unsupported(f"a norm such as {type(norm).__name__} is computed by torch")
    tensors: list[Tensor] = [block.input_order.int(), block.gate_order.int(), block.head_order.argsort().int()]
    tensors += [rule.taps.t().float(), -rule.log_decay.float().exp(), rule.step_bias.float()]
    return layout.Delta(
        *norms,
        (layout.Map * 4)(*maps),
        out,
        *(keep(tensor.contiguous()).data_ptr() for tensor in tensors),
        norm_at,
        float(norm.variance_epsilon),
        len(maps),
        *form,
        block.added_scale,
    )


def _is_gated_norm(module: Any, width: int) -> bool:
    """Tell by a probe whether a norm is the kernels': of the values alone, times its weight and the gate's silu."""
    weight, eps = module.weight.detach(), getattr(module, "variance_epsilon", None)
    if eps is None or weight.shape != (width,):
        return False
    x, gate = torch.linspace(-1.5, 1.5, 2 * width).reshape(2, width).to(weight.dtype)
    unit = x.float() * (x.float().square().mean() + eps).rsqrt()
    expected = weight.float() * unit * F.silu(gate.float())
    return bool(torch.allclose(module(x[None], gate[None])[0].float(), expected, rtol=2e-2, atol=2e-2))
