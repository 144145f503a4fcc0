"""Code the values of a row that a Mamba-1 layer keeps, in 13 bits each; on a CPU, `kernels/coded_values.h` does.

A row needs few of the 8 bits of a bfloat16's exponent. Values below 2^-30 of the row's largest become zero when the row
is computed (`trimmed`), in every pass, so that all readers of the row see the same numbers. The exponents of the other
values then span 31 steps, which 5 bits hold.

A kept row has, in this order: the inputs after its values; the exponent just below code 1; a byte of sign and mantissa
per value; the low 4 bits of two exponents per byte, one of the first half of the values and one of the second; and the
high bits of eight exponents per byte, one of each eighth of the values.

DEVIATION: Mamba (Gu and Dao, arXiv:2312.00752) does not round small values to zero. bfloat16 itself rounds at 2^-9.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_STEPS = 31  # Steps between the largest exponent of a row and the exponent just below code 1.


def kept_width(n_inputs: int, n_values: int) -> int:
    """Return how many elements of two bytes a row of inputs takes that begins with so many values."""
    return n_inputs - n_values + 1 + n_values * 13 // 16


def trimmed(values: Tensor) -> Tensor:
    """Return bfloat16 values (rows, n), those below 2^-30 of their row's largest as zeros."""
    _, exponents, base = _exponents(values)
    return torch.where((exponents > base) | (base == 0), values, values * 0)


def coded(inputs: Tensor, n_values: int) -> Tensor:
    """Return bfloat16 inputs (rows, n_inputs), which begin with trimmed values, as kept: (rows, kept_width)."""
    bits, exponents, base = _exponents(inputs[:, :n_values])
    codes = (exponents - base).clamp(min=0)
    low = (codes & 15).view(-1, 2, n_values // 2)
    high = (codes >> 4).view(-1, 8, n_values // 8) << torch.arange(8, device=inputs.device)[:, None]
    parts = (bits >> 8 & 0x80) | (bits & 0x7F), low[:, 0] | low[:, 1] << 4, high.sum(dim=1)
    planes = torch.cat([part.to(torch.uint8) for part in parts], dim=-1).view(torch.int16)
    others = inputs[:, n_values:].contiguous().view(torch.int16)
    return torch.cat((others, base.to(torch.int16), planes), dim=-1).view(torch.bfloat16)


def decoded(rows: Tensor, n_values: int) -> Tensor:
    """Return the inputs (rows, n_inputs) of kept rows (rows, kept_width)."""
    whole = rows.contiguous().view(torch.int16)
    others, base, planes = torch.split(whole, [whole.shape[1] - 1 - n_values * 13 // 16, 1, n_values * 13 // 16], 1)
    sizes = [n_values, n_values // 2, n_values // 8]
    rest, low, high = torch.split(planes.contiguous().view(torch.uint8).int(), sizes, dim=1)
    high = high[:, None] >> torch.arange(8, device=rows.device)[:, None] & 1
    codes = torch.cat((low & 15, low >> 4), dim=1) | high.flatten(1) << 4
    exponents = torch.where(codes > 0, codes + base, 0)
    bits = (rest & 0x80) << 8 | exponents << 7 | (rest & 0x7F)
    return torch.cat((bits.to(torch.int16), others), dim=1).view(torch.bfloat16)


def _exponents(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bits of bfloat16 values and their exponents, int32 (rows, n), and each row's base."""
    bits = values.contiguous().view(torch.int16).int()
    exponents = bits >> 7 & 0xFF
    return bits, exponents, (exponents.amax(dim=-1, keepdim=True) - EXPONENT_STEPS).clamp(min=0)
