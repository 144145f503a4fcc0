"""Recurrent states on CUDA devices, in Triton: the gated delta rule, and the state spaces of Mamba-1 and Mamba-2.

One kernel makes what each move's update is of, by itself: the convolution of its last tokens, unit queries and keys,
decays. Another takes the updates into a head's state, one after the other, whether their inputs are of this pass or of
an earlier one's. Both compute a move by one order of operations, so that neither the number of rows nor where a text
was cut changes a bit.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .device import on_its_device, runs

if TYPE_CHECKING:
    from ..state_rules import StateForm, StateRule

ROOT, OLDER, CARRIED = range(3)  # Where a move begins: at the root's state, the older one, or after the move before.
FIELDS = 3  # Of a move in a table, before its tokens: where it begins, its row (-1: none), and whether its state stays.
WIDEST = 256  # Largest width of a head.
COLUMNS = 16  # Of a head's state that a Triton program has in registers.
VALUES = 256  # That a Triton program convolves.

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from .device import sigmoid
    from .device_convolutions import of_token, silu_of_sum, sum_of_taps

    @triton.jit
    def _softplus(x):
        small = tl.exp(-tl.abs(x))
        whole = 1.0 + small
        # What rounding takes off 1 + small is put back: log1p.
        behind = tl.where(whole == 1.0, small, tl.log(whole) * (small / tl.where(whole == 1.0, 1.0, whole - 1.0)))
        return tl.maximum(x, 0.0) + behind

    # Alignments differ with the row that a pass begins at, and could choose another order of a sum.
    @triton.jit(do_not_specialize=["n_new"], do_not_specialize_on_alignment=["new", "ring", "taps", "bias", "table"])
    def _updates(
        new, ring, table, taps, bias, log_decay, step_bias, steps, updates, n_new, n_inputs, n_convolved, n_heads,
        n_key_heads, key_width, value_width, least, largest, step_scale, query_scale,
        N_TAPS: tl.constexpr, N_FIELDS: tl.constexpr, HAS_BIAS: tl.constexpr, CORRECTS: tl.constexpr,
        BY_VALUE: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        move, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        is_key = part < 2 * n_key_heads
        head = part - 2 * n_key_heads
        first = tl.where(is_key, part * key_width, 2 * n_key_heads * key_width + head * value_width)
        at = tl.arange(0, WIDTH)
        mask = at < tl.where(is_key, key_width, value_width)
        places = table + move * (N_FIELDS + N_TAPS) + N_FIELDS
        place = tl.load(places + N_TAPS - 1)
        is_mixed, mixed_at = mask, first + at
        if BY_VALUE:
            is_mixed, mixed_at = mask & (is_key == 0), tl.maximum(head, 0) * value_width + at
        mixed = sum_of_taps(
            new, ring, places, taps, bias, n_new, n_inputs, n_inputs, mixed_at, is_mixed, N_TAPS, HAS_BIAS, 0
        )
        mixed = silu_of_sum(mixed, new.dtype.element_ty).to(tl.float32)
        if CORRECTS:
            unit = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) + 1e-6)
            unit = tl.where(part < n_key_heads, unit * query_scale, unit)
            mixed = tl.where(is_key, unit, mixed)
        if BY_VALUE:  # Queries and keys lie behind the values, and are used as they are.
            key_at = n_convolved + part * key_width + at
            key = of_token(new, ring, place, n_new, n_inputs, n_inputs, key_at, mask & is_key, 0)
            mixed = tl.where(is_key, key.to(tl.float32), mixed)
        n_numbers = n_heads * (value_width if BY_VALUE else 2)
        update = updates + move * (2 * n_key_heads * key_width + n_heads * value_width + n_numbers)
        tl.store(update + first + at, mixed, mask=mask)
        numbers = update + 2 * n_key_heads * key_width + n_heads * value_width
        if BY_VALUE:
            step = tl.load(steps + move * n_heads * value_width + mixed_at, mask=is_mixed, other=0.0).to(tl.float32)
            step = _softplus(step + tl.load(step_bias + mixed_at, mask=is_mixed, other=0.0).to(tl.float32))
            tl.store(numbers + mixed_at, step, mask=is_mixed)
            return
        number = n_convolved + tl.maximum(head, 0)
        if CORRECTS:
            amount = of_token(new, ring, place, n_new, n_inputs, n_inputs, number, place >= 0, 0).to(tl.float32)
            amount = sigmoid(amount).to(new.dtype.element_ty).to(tl.float32)
            number += n_heads
        step = of_token(new, ring, place, n_new, n_inputs, n_inputs, number, place >= 0, 0).to(tl.float32)
        of_head = tl.maximum(head, 0)
        step = _softplus(step * step_scale + tl.load(step_bias + of_head).to(tl.float32))
        step = tl.minimum(tl.maximum(step, least), largest)
        decay = tl.exp(-tl.exp(tl.load(log_decay + of_head).to(tl.float32)) * step)
        if CORRECTS == 0:
            amount = step
        tl.store(numbers + of_head, decay, mask=is_key == 0)
        tl.store(numbers + n_heads + of_head, amount, mask=is_key == 0)

    @triton.jit(
        do_not_specialize=["n_new"], do_not_specialize_on_alignment=["new", "ring", "taps", "bias", "table", "out"]
    )
    def _convolved(
        new, ring, table, taps, bias, out, n_new, n_inputs, n,
        N_TAPS: tl.constexpr, N_FIELDS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH_: tl.constexpr,
    ):  # fmt: skip
        fields = table + tl.program_id(1).to(tl.int64) * (N_FIELDS + N_TAPS)
        at = tl.program_id(0) * WIDTH_ + tl.arange(0, WIDTH_)
        row = tl.load(fields + 1)
        mask = (at < n) & (row >= 0)
        mixed = sum_of_taps(new, ring, fields + N_FIELDS, taps, bias, n_new, n, n_inputs, at, mask, N_TAPS, HAS_BIAS, 0)
        tl.store(out + row.to(tl.int64) * n + at, silu_of_sum(mixed, out.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["n_moves"], do_not_specialize_on_alignment=["root", "older", "table"])
    def _taken(
        table, updates, root, older, skip, log_decay, read, n_moves, n_heads, n_key_heads, key_width, value_width,
        decay_head, decay_key, decay_value,
        N_TAPS: tl.constexpr, N_FIELDS: tl.constexpr, CORRECTS: tl.constexpr, BY_VALUE: tl.constexpr,
        KEYS: tl.constexpr, COLUMNS_: tl.constexpr,
    ):  # fmt: skip
        head = tl.program_id(0)
        keys, columns = tl.arange(0, KEYS), tl.program_id(1) * COLUMNS_ + tl.arange(0, COLUMNS_)
        is_key, is_column = keys < key_width, columns < value_width
        mask = is_key[:, None] & is_column[None, :]
        at = (head * key_width + keys[:, None]) * value_width + columns[None, :]
        n_keys = n_key_heads * key_width
        key_head = head // (n_heads // n_key_heads)
        if BY_VALUE:
            decay_at = head * decay_head + keys[:, None] * decay_key + columns[None, :] * decay_value
            rates = -tl.exp(tl.load(log_decay + decay_at, mask=mask, other=0.0).to(tl.float32))
            skipped = tl.load(skip + head * value_width + columns, mask=is_column, other=0.0).to(tl.float32)
        n_numbers = n_heads * (value_width if BY_VALUE else 2)
        stays_at = tl.load(root + at, mask=mask, other=0.0)
        state = stays_at
        move = tl.program_id(0).to(tl.int64) * 0
        while move < n_moves:
            fields = table + move * (N_FIELDS + N_TAPS)
            begins, row, stays = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
            if begins == 0:
                state = stays_at
            if begins == 1:
                state = tl.load(older + at, mask=mask, other=0.0)
            update = updates + move * (2 * n_keys + n_heads * value_width + n_numbers)
            query = tl.load(update + key_head * key_width + keys, mask=is_key, other=0.0)
            key = tl.load(update + n_keys + key_head * key_width + keys, mask=is_key, other=0.0)
            value = tl.load(update + 2 * n_keys + head * value_width + columns, mask=is_column, other=0.0)
            numbers = update + 2 * n_keys + n_heads * value_width
            if BY_VALUE:
                amount = tl.load(numbers + head * value_width + columns, mask=is_column, other=0.0)
                decay = tl.exp(rates * amount[None, :])
            else:
                decay, amount = tl.load(numbers + head), tl.load(numbers + n_heads + head)
            state = state * decay
            change = value * amount
            if CORRECTS:
                change = (value - tl.sum(state * key[:, None], axis=0)) * amount
            state = state + key[:, None] * change[None, :]
            if stays != 0:
                stays_at = state
            if row >= 0:
                out = tl.sum(state * query[:, None], axis=0)
                if BY_VALUE:
                    out += value * skipped
                elif CORRECTS == 0:
                    out += value * tl.load(skip + head).to(tl.float32)
                to = (row.to(tl.int64) * n_heads + head) * value_width + columns
                tl.store(read + to, out.to(read.dtype.element_ty), mask=is_column)
            move += 1
        tl.store(root + at, stays_at, mask=mask)


def supports(form: StateForm) -> bool:
    """Tell whether the kernels take rows into states of these sizes."""
    return max(form.key_width, form.value_width) <= WIDEST


def computes(rule: StateRule, inputs: Tensor) -> bool:
    """Tell whether the kernels take rows with these inputs into states of a rule."""
    return supports(rule.form) and runs(inputs)


@on_its_device
def convolved(new: Tensor, ring: Tensor, rule: StateRule, table: Tensor, n_rows: int) -> Tensor:
    """Return what the convolution before a state gives for rows, (rows, n_convolved), by the last tokens of each.

    Args: new: what is convolved of the rows, (rows, n_convolved). ring, table: as in `take`.
    """
    form, taps = rule.form, rule.taps.contiguous()
    new, n = new.contiguous(), form.n_convolved
    out = torch.empty((n_rows, n), dtype=new.dtype, device=new.device)
    _convolved[(-(-n // VALUES), len(table))](
        new, ring, table, taps, taps if rule.taps_bias is None else rule.taps_bias.contiguous(), out, len(new),
        form.n_inputs, n, N_TAPS=form.n_taps, N_FIELDS=FIELDS, HAS_BIAS=rule.taps_bias is not None, WIDTH_=VALUES,
    )  # fmt: skip
    return out


@on_its_device
def take(root: Tensor, older: Tensor, rule: StateRule, new: Tensor, ring: Tensor, table: Tensor, read: Tensor) -> None:
    """Take tokens into a state, one after the other.

    Args: root, older: float32 (heads, key_width, value_width); the first becomes the state that stays. new, ring:
          inputs, (rows, n_inputs). table: int32 (moves, FIELDS + taps), one or more; the tokens of each are rows of
          `new`, then of `ring`, its own last, and below 0 before the text. read: (rows of the pass, heads *
          value_width), in which what rows read of the state is written.
    """
    form, n_moves = rule.form, len(table)
    n_keys, n_values = form.n_keys, form.n_heads * form.value_width
    skip = getattr(rule, "skip", None)
    least, largest = getattr(rule, "step_limits", (0.0, torch.inf))
    new, ring, taps = new.contiguous(), ring.contiguous(), rule.taps.contiguous()
    by_value = rule.log_decay.dim() > 1  # Each value of a head has decays and a step of its own.
    steps = rule.steps(_last_inputs(new, ring, table)) if by_value else new
    n_numbers = n_values if by_value else 2 * form.n_heads
    updates = torch.empty((n_moves, n_keys + n_values + n_numbers), dtype=torch.float32, device=new.device)
    _updates[(n_moves, 2 * form.n_key_heads + form.n_heads)](
        new, ring, table, taps, taps if rule.taps_bias is None else rule.taps_bias.contiguous(), rule.log_decay,
        rule.step_bias.contiguous(), steps.contiguous(), updates, len(new), form.n_inputs, form.n_convolved,
        form.n_heads, form.n_key_heads, form.key_width, form.value_width, float(least), float(largest),
        float(getattr(rule, "step_scale", 1.0)), form.key_width**-0.5, N_TAPS=form.n_taps, N_FIELDS=FIELDS,
        HAS_BIAS=rule.taps_bias is not None, CORRECTS=skip is None, BY_VALUE=by_value,
        WIDTH=triton.next_power_of_2(max(form.key_width, form.value_width)),
    )  # fmt: skip
    _taken[(form.n_heads, -(-form.value_width // COLUMNS))](
        table, updates, root, older, rule.log_decay if skip is None else skip.contiguous(), rule.log_decay, read,
        n_moves, form.n_heads, form.n_key_heads, form.key_width, form.value_width,
        *(rule.log_decay.stride() if by_value else (0, 0, 0)), N_TAPS=form.n_taps, N_FIELDS=FIELDS,
        CORRECTS=skip is None, BY_VALUE=by_value, KEYS=triton.next_power_of_2(form.key_width), COLUMNS_=COLUMNS,
    )  # fmt: skip


def _last_inputs(new: Tensor, ring: Tensor, table: Tensor) -> Tensor:
    """Return the inputs of each move's own token: (moves, n_inputs)."""
    place, n_new = table[:, -1].long(), len(new)
    of_new, of_ring = new[place.clamp(max=n_new - 1)], ring[(place - n_new).clamp(min=0)]
    return torch.where((place < n_new)[:, None], of_new, of_ring)
