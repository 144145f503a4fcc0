"""Describes to the library what sequences keep, and what mixes their tokens in place of attention."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block
from ..rows import Pass
from ..state_rules import StateSpace, ValueSteps
from . import layout
from .layout import Unsupported
from .limits import norm_gating_of

MAX_TAPS = 64  # Tokens that a short convolution reads at most.
MAX_STATE_WIDTH = 256  # Largest head dimension of a recurrence.
# Of `ValueSteps`: its maps to what a row selects by and to steps, and the norms between them.
Selection = tuple[layout.Map, layout.Map, Sequence[layout.Norm]]
Keep = Callable[[Any], Any]  # Returns a tensor, which lives as long as what describes the model.


def sequence_of(pass_: Pass, seen: Tensor | None) -> layout.Sequence:
    """Describe the rows of a pass and what their sequence keeps; both, and `seen` (see `Rows`), must outlive it."""
    buffer, rows = pass_.buffer, pass_.rows
    sequence = layout.Sequence(None if seen is None else seen.data_ptr(), *map(ctypes.addressof, buffer.addresses))
    sequence.capacity, sequence.n_rows, sequence.first_slot = buffer.capacity, len(rows.token_ids), rows.first_slot
    coded = buffer.coded
    if coded is not None:
        coded.cut(rows.first_slot)  # Slots from there on are written now.
        if pass_.reads_coded:
            sequence.coded, sequence.n_coded = ctypes.addressof(coded.addresses), coded.n_slots
            sequence.coded_units = coded.n_units
    if buffer.states is not None:
        sequence.roots, sequence.committed = buffer.states.roots.data_ptr(), buffer.states.committed
        sequence.n_kept, sequence.lag, sequence.is_text = buffer.states.n_kept, buffer.states.lag, rows.is_text
    return sequence


def convolution_of(
    block: Block, conv: Any, norms: Sequence[layout.Norm], maps: Sequence[layout.Map], keep: Keep
) -> layout.Convolution:
    """Describe a gated short convolution. Args: norms: before and after it. maps: into it and out of it."""
    if block.n_taps > MAX_TAPS or conv.weight.shape != (maps[1].n_in, 1, block.n_taps):
        raise Unsupported(f"a convolution of {tuple(conv.weight.shape)} is computed by torch")
    bias = keep(None if conv.bias is None else conv.bias.detach().float())
    taps = keep(conv.weight.detach()[:, 0].t().float().contiguous())
    bias_at = None if bias is None else bias.data_ptr()
    return layout.Convolution(*norms, *maps, taps.data_ptr(), bias_at, block.n_taps, block.added_scale)


def recurrence_of(
    block: Block,
    norm: Any,
    norm_at: int | None,
    norms: Sequence[layout.Norm],
    maps: Sequence[layout.Map],
    out: layout.Map,
    low: Selection,
    keep: Keep,
) -> layout.Recurrence:
    """Describe a gated delta rule or a state space.

    Args: norm: of what heads read, whose weight lies at `norm_at`; None: this is gated alone. low: of `ValueSteps`.
    """
    rule = block.rule
    assert rule is not None
    form = rule.form
    widest = max(form.key_width, form.value_width)
    if form.n_taps > MAX_TAPS or widest > MAX_STATE_WIDTH or form.n_heads % form.n_key_heads:
        raise Unsupported(f"a recurrence of {form} is computed by torch")
    space = rule if isinstance(rule, StateSpace) else None
    if space is not None and block.head_order is not None:
        raise Unsupported("a state space whose heads lie in another order is computed by torch")
    gating = norm_gating_of(norm, rule)
    least, largest = (0.0, math.inf) if space is None else space.step_limits
    taps = rule.taps.t().float()
    decay, bias = -rule.log_decay.float().exp(), rule.step_bias.float()
    skip = rule.skip.float() if isinstance(rule, StateSpace | ValueSteps) else None
    taps_bias = None if rule.taps_bias is None else rule.taps_bias.float()
    runs = runs_of(rule.input_order)
    heads = torch.arange(form.n_heads) if block.head_order is None else block.head_order.argsort()
    orders = (runs.int(), rule.gate_order.int(), heads.int())
    tensors = (*orders, taps, taps_bias, decay, bias, skip)
    kept = [None if one is None else keep(one.contiguous()) for one in tensors]
    return layout.Recurrence(
        *norms,
        (layout.Map * 4)(*maps),
        out,
        *low[:2],
        (layout.Norm * 3)(*low[2]),
        *(None if one is None else one.data_ptr() for one in kept),
        norm_at,
        0.0 if norm is None else float(norm.variance_epsilon),
        least,
        largest,
        1.0 if space is None else space.step_scale,
        1.0 if space is None else space.gate_scale,
        rule.out_scale * block.added_scale,
        len(runs),
        len(maps),
        *form,
        gating,
        rule.norm_width,
    )


def runs_of(order: Tensor) -> Tensor:
    """Return the runs of consecutive numbers in int64 (n,): (runs, 2), the first number and the length of each."""
    starts = torch.cat((torch.zeros(1, dtype=torch.long), (order.diff() != 1).nonzero()[:, 0] + 1))
    lengths = torch.cat((starts, torch.tensor([len(order)]))).diff()
    return torch.stack((order[starts], lengths), dim=1)
