"""Products with packed weights on CUDA devices, in Triton: codes of 4, 5, 6 and 8 bits, as numbers or table indices.

The kernel reads the layout of `quantised.h` and `codes.h`. It does not de-quantise weights: it multiplies with codes as
small integers, and scales the sum of each group. It supports every type of scales and codes in `layout`: copies for
drafts, checkpoints of integers, MXFP4, and GGUF files.
"""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import layout
from .device import TILE, on_its_device, split_inputs, sum_parts

# Outputs and 32-bit words of codes that a Triton program reads per step; LEAST_WORDS if WORDS do not divide a group.
CODED_OUTPUTS, WORDS, LEAST_WORDS = 128, 16, 8
CODED_PROGRAMS, CODED_STAGES = 700, 2
# By dtype: a pair of floats whose lowest mantissa bits are replaced by a code each, and their value for code 0.
MAGIC = {
    torch.bfloat16: (0x43004300, 128),
    torch.float16: (0x64006400, 1024),
}
LINE = 4 * layout.ROWS  # Bytes of a line of codes.
# By number of bits: lines with the low 4 bits in a unit; codes of 5 and 6 bits have one more line, with the high bits.
LOWER_LINES = {4: 1, 5: 4, 6: 2, 8: 1}
# The dtypes as which scales are read that packing leaves as bytes.
READ_AS = {
    **{layout.PAIRS: torch.float16, layout.CENTRED: torch.float16, layout.EXPONENTS: torch.uint8},
    **{layout.SUPER_PAIRS: torch.uint8, layout.SUPER_CENTRED: torch.int8},
}

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    ZERO_VALUES = tl.constexpr(layout.ZERO_VALUES)
    PAIRS, CENTRED, EXPONENTS = (tl.constexpr(kind) for kind in (layout.PAIRS, layout.CENTRED, layout.EXPONENTS))
    SUPER_PAIRS = tl.constexpr(layout.SUPER_PAIRS)  # SUPER_CENTRED is the only type behind it.
    E2M1, IQ4 = tl.constexpr(layout.E2M1), tl.constexpr(layout.IQ4)

    @triton.jit
    def _scales(
        scales, shared, blocks, is_there, group, n_groups, step,
        SCALES: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    ):  # fmt: skip
        """Return the scales (outputs,) of a group, and the zeros that are added to codes or products, if any."""
        line = scales + (blocks.to(tl.int64) * step)[:, None]
        is_read = is_there & (group < n_groups)
        sixteen = tl.arange(0, 16)[None, :]
        if SCALES >= SUPER_PAIRS:
            numbers: tl.constexpr = 32 if SCALES == SUPER_PAIRS else 16
            n_own: tl.constexpr = 256 // GROUP
            begun = group // n_own * (numbers * (2 + n_own))
            halves = shared + (blocks.to(tl.int64) * (step // 2))[:, None] + begun // 2 + sixteen
            numbers_at = line + begun + 2 * numbers + group % n_own * numbers + sixteen
            scale = tl.load(halves, mask=is_read, other=0.0).to(tl.float32)
            scale *= tl.load(numbers_at, mask=is_read, other=0).to(tl.float32)
            zero = scale
            if SCALES == SUPER_PAIRS:
                zero = tl.load(halves + 16, mask=is_read, other=0.0).to(tl.float32)
                zero *= -tl.load(numbers_at + 16, mask=is_read, other=0).to(tl.float32)
        elif SCALES == CENTRED:
            scale = tl.load(line + group * 16 + sixteen, mask=is_read, other=0.0).to(tl.float32)
            zero = scale
        elif SCALES == EXPONENTS:  # Half the scale, because codes stand for doubled values; 2^-127 is subnormal.
            power = tl.load(line + group * 16 + sixteen, mask=is_read, other=0).to(tl.int32)
            scale = 0.5 * tl.where(power == 0, 1 << 22, power << 23).to(tl.float32, bitcast=True)
            zero = scale
        else:
            pair = tl.load(line + group * 32 + tl.arange(0, 32)[None, :], mask=is_read, other=0.0)
            scale, zero = tl.split(tl.permute(tl.reshape(pair, (OUTPUTS // 16, 2, 16)), (0, 2, 1)))
        return tl.reshape(scale, (OUTPUTS,)).to(tl.float32), tl.reshape(zero, (OUTPUTS,)).to(tl.float32)

    @triton.jit
    def _doubled(codes):
        """Return 12 + twice the E2M1 floats in the lowest 4 bits of both halves of a word."""
        low = codes & 0x00070007
        is_four = (low >> 2) & 0x00010001
        is_six = is_four & (low >> 1)
        size = low + (low & (3 * is_four)) + ((low & is_six) << 1)
        return 0x000C000C + size - 2 * (size & (15 * ((codes >> 3) & 0x00010001)))

    @triton.jit
    def _iq4(places):
        """Return the numbers in ggml's table of 4 bits; the table has four bytes to a word, each shifted by 128."""
        low = tl.where(places < 4, 0x3F2D1801, 0x766A5D4F)
        high = tl.where(places < 12, 0xA6998D81 - (1 << 32), 0xF1D9C5B5 - (1 << 32))
        return ((tl.where(places < 8, low, high) >> (8 * (places & 3))) & 255) - 128

    @triton.jit(do_not_specialize=["n_rows", "n_tiles"])
    def _coded(
        x, codes, scales, shared, out, order, tiles, n_tiles, n_rows, n_in, n_out, x_stride, n_words, n_lines, n_groups,
        scale_step, code_stride, scale_stride,
        TAKEN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, SCALES: tl.constexpr,
        TABLE: tl.constexpr, LOWER: tl.constexpr, MAGIC: tl.constexpr, BASE: tl.constexpr, STAGES: tl.constexpr,
        ROWS_: tl.constexpr, OUTPUTS: tl.constexpr, READ: tl.constexpr, STEPS: tl.constexpr,
    ):  # fmt: skip
        # Multiply with the floats BASE + code: a code is put into a float's mantissa, which is faster than converting
        # it. Each group's sum is then corrected for BASE and scaled. Codes of 5 and 6 bits have LOWER words with their
        # low 4 bits, and then a word with the high bits.
        per_word: tl.constexpr = 4 if BITS == 8 else 8
        more: tl.constexpr = 0 if BITS == 8 else BITS - 4
        # The float that a code of 0 is multiplied as, and the middle code, which is subtracted if there is no zero.
        base: tl.constexpr = 0 if TABLE == IQ4 else (17 * BASE if BITS == 8 else BASE)
        middle: tl.constexpr = 0 if TABLE == IQ4 else (12 if TABLE == E2M1 else 1 << (BITS - 1))
        half = x.dtype.element_ty
        rows = tl.program_id(0) * ROWS_ + tl.arange(0, ROWS_)
        is_row, read_rows = rows < n_rows, rows
        if TAKEN:  # As in `_dense`.
            tile = tl.program_id(0)
            count = tl.load(tiles + 2 * n_tiles + tile)
            if count <= 0:
                return
            is_row = tl.arange(0, ROWS_) < count
            rows = tl.load(order + tl.load(tiles + n_tiles + tile) + tl.arange(0, ROWS_), mask=is_row, other=0)
            read_rows = rows // TAKEN
            expert = tl.load(tiles + tile).to(tl.int64)
            codes += expert * code_stride
            scales += expert * scale_stride
            if SCALES >= SUPER_PAIRS:
                shared += expert * (scale_stride // 2)
        # Codes and scales are stored in blocks of 16 outputs, so that loads are wide.
        blocks = tl.program_id(1) * (OUTPUTS // 16) + tl.arange(0, OUTPUTS // 16)
        there = (blocks * 16 < n_out)[:, None]
        first = tl.program_id(2) * (STEPS * READ)
        read = codes + (blocks.to(tl.int64) * n_lines * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
        ones = tl.full((2 * READ, OUTPUTS), 1.0, half)
        total = tl.zeros((ROWS_, OUTPUTS), dtype=tl.float32)
        for step in tl.range(STEPS, num_stages=STAGES):  # A pipelined loop also prefetches the scales.
            words = first + step * READ + tl.arange(0, READ)
            is_read = (words < n_words)[:, None, None] & there[None, :, :]
            lines = words // LOWER * (LOWER + 1) + words % LOWER if more else words
            packed = tl.load(read + lines[:, None, None] * 16, mask=is_read, other=0)
            packed = tl.reshape(packed, (READ, OUTPUTS))
            above = packed
            if more:
                lines_above = words // LOWER * (LOWER + 1) + LOWER
                above = tl.load(read + lines_above[:, None, None] * 16, mask=is_read, other=0)
                above = tl.reshape(above, (READ, OUTPUTS)) >> (words % LOWER * (2 * more))[:, None]
            begun = (first + step * READ) * per_word
            steps = tl.arange(0, READ * per_word)
            x_part = tl.load(
                x + read_rows[:, None] * x_stride + (begun + steps)[None, :],
                mask=is_row[:, None] & (begun + steps < n_in)[None, :],
                other=0.0,
            )
            for span in tl.static_range(READ * per_word // SPAN):
                group = (begun + span * SPAN) // GROUP
                scale, zero = _scales(
                    scales, shared, blocks, there, group, n_groups, scale_step, SCALES, GROUP, OUTPUTS
                )
                x_span = x_part
                if READ * per_word > SPAN:
                    x_span = tl.where((steps // SPAN == span)[None, :], x_part, 0.0)
                # Pair up the inputs whose codes have the same bit offset in the two 16-bit halves of a word.
                if BITS == 8:
                    x0, x2 = tl.split(tl.reshape(x_span, (ROWS_, READ, 2, 2)))
                    x1, x3 = x0, x2
                else:
                    even, odd = tl.split(tl.permute(tl.reshape(x_span, (ROWS_, READ, 2, 2, 2)), (0, 1, 3, 2, 4)))
                    x0, x1 = tl.split(even)
                    x2, x3 = tl.split(odd)
                low = tl.zeros((ROWS_, OUTPUTS), dtype=tl.float32)
                high, sums = low, low
                for i in tl.static_range(4):
                    both = (packed >> (4 * i)) & 0x000F000F
                    if more:
                        upper = above >> (8 * (i // 2) + more * (i % 2))
                        both |= (upper & (0x00010001 if more == 1 else 0x00030003)) << 4
                    if TABLE == E2M1:
                        both = _doubled(both)
                    if TABLE == IQ4:
                        front, back = _iq4(both & 15).to(half), _iq4(both >> 16).to(half)
                    elif MAGIC:
                        both |= MAGIC
                        front = both.to(tl.int16).to(half, bitcast=True)
                        back = (both >> 16).to(tl.int16).to(half, bitcast=True)
                    else:
                        front, back = (both & 0xFFFF).to(half), (both >> 16).to(half)
                    weight = tl.reshape(tl.permute(tl.join(front, back), (0, 2, 1)), (2 * READ, OUTPUTS))
                    x_quad = tl.reshape(x0 if i == 0 else (x1 if i == 1 else (x2 if i == 2 else x3)), (ROWS_, 2 * READ))
                    if BITS == 8 and i % 2 == 1:
                        high = tl.dot(x_quad, weight, high, input_precision="ieee")
                    else:
                        low = tl.dot(x_quad, weight, low, input_precision="ieee")
                        sums = tl.dot(x_quad, ones, sums, input_precision="ieee")
                if BITS == 8:
                    low += 16.0 * high
                if SCALES == ZERO_VALUES:
                    total += low * scale[None, :] + sums * (zero - (base + middle) * scale)[None, :]
                elif SCALES == PAIRS or SCALES == SUPER_PAIRS:  # noqa: SIM109 Triton knows no "in".
                    total += low * scale[None, :] + sums * (zero - base * scale)[None, :]
                elif SCALES < PAIRS:
                    total += (low + sums * (zero - (base + middle))[None, :]) * scale[None, :]
                else:
                    total += (low - (base + middle) * sums) * scale[None, :]
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        at = tl.program_id(2).to(tl.int64) * n_rows * n_out + rows[:, None] * n_out + outputs[None, :]
        tl.store(out + at, total, mask=is_row[:, None] & (outputs < n_out)[None, :])


class CodedMap(NamedTuple):
    """A map with codes and scales in the layout of `quantised.h`, or the maps of all experts, (experts, …).

    `group`: number of inputs that share a scale. `scale_type`, `table`: constants of `layout`.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group: int
    n_out: int
    scale_type: int
    table: int = layout.NUMBERS


@on_its_device
def coded_linear(x: Tensor, by: CodedMap, bias: Tensor | None = None) -> Tensor:
    """Apply a map with packed weights to `x` (rows, in); return (rows, out).

    Products with codes are summed in float32 and then scaled, group by group.
    """
    return sum_parts(coded_parts(x, by), None, bias, x.dtype)


@on_its_device
def coded_parts(
    x: Tensor, by: CodedMap, order: Tensor | None = None, tiles: Tensor | None = None, n_chosen: int = 1
) -> Tensor:
    """Return partial sums, float32 (parts, rows, out); with `tiles`, those of choices as in `device.expert_parts`."""
    x = x.contiguous()
    (n_rows, n_in), (codes, scales, bits, group, n_out, scale_type, table) = x.shape, by
    per_word, lower = 4 if bits == 8 else 8, LOWER_LINES[bits]
    n_lines = codes.shape[-1] // LINE
    n_words = n_lines if bits % 4 == 0 else n_lines // (lower + 1) * lower
    read = WORDS if group % (WORDS * per_word) == 0 else LEAST_WORDS
    steps, n_parts = split_inputs(n_out, CODED_OUTPUTS, n_words, read, -(-CODED_PROGRAMS // n_chosen))
    n_sums = n_rows if order is None else len(order)
    parts = torch.empty((n_parts, n_sums, n_out), dtype=torch.float32, device=x.device)
    magic, base = MAGIC.get(x.dtype, (0, 0))
    n_tiles, n_groups = 0 if tiles is None else tiles.shape[1], n_words * per_word // group
    words = codes.view(torch.int32)
    shared = scales.view(torch.float16) if scale_type >= layout.SUPER_PAIRS else scales
    scales = scales.view(READ_AS.get(scale_type, scales.dtype))
    scale_step = scales.shape[-1] if scale_type in READ_AS else 32 * n_groups
    _coded[(n_tiles or -(-n_rows // TILE), -(-n_out // CODED_OUTPUTS), n_parts)](
        x, words, scales, shared, parts, x if order is None else order, x if tiles is None else tiles, n_tiles, n_sums,
        n_in, n_out, x.stride(0), n_words, n_lines, n_groups, scale_step, words.stride(0), scales.stride(0),
        TAKEN=0 if order is None else n_sums // n_rows, BITS=bits, GROUP=group, SPAN=math.gcd(group, read * per_word),
        SCALES=scale_type, TABLE=table, LOWER=lower, MAGIC=magic, BASE=base, STAGES=CODED_STAGES, ROWS_=TILE,
        OUTPUTS=CODED_OUTPUTS, READ=read, STEPS=steps,
    )  # fmt: skip
    return parts
