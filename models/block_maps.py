"""Linear maps and embeddings that compute with a GGUF file's codes, packed once for our kernels (`kernels/gguf.h`).

The numbers of the file are kept: codes as they are, or in more bits where no kernel has theirs; scales as they are.
DEVIATION: our kernels round what goes into a map to 8 bits per 32 inputs, as llama.cpp does per 32 or 256; the weights
are not rounded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.settings import n_threads
from .coded import ROWS, CodedLinear
from .gguf_reader import FileTensor
from .kernels import layout
from .kernels.build import Kernels

SUPER = 256  # Inputs of a super-block: K-quant types store one float16 scale (and minimum) for each.
# Numbers per group for these scale types; all other types have two.
SCALE_NUMBERS = {layout.CENTRED: 1, layout.SUPER_CENTRED: 1, layout.EXPONENTS: 1}
SCALE_BYTES = {layout.ZERO_CODES_F32: 4, layout.EXPONENTS: 1}  # Bytes per number; other types have two.
MOST_TYPES = 64
PACKED_BYTES = 16 << 20  # Bytes of a file that are packed at once.
DEQUANTISED = 4096  # Outputs de-quantised per step, so that no float32 copy of a large map is held.


class BlockForm(NamedTuple):
    """How the kernels pack a GGUF tensor type, and the bytes and inputs of a block in the file."""

    block_bytes: int
    inputs: int
    bits: int
    group: int
    scale_type: int
    table: int

    def scale_bytes(self, n_in: int) -> int:
        """Return the bytes of the scales of `ROWS` outputs."""
        numbers, groups = SCALE_NUMBERS.get(self.scale_type, 2) * ROWS, n_in // self.group
        if self.scale_type >= layout.SUPER_PAIRS:
            return numbers * (groups + 2 * n_in // SUPER)
        return numbers * groups * SCALE_BYTES.get(self.scale_type, 2)


@cache
def forms(kernels: Kernels) -> dict[int, BlockForm]:
    """Return the GGUF tensor types that the kernels support, by type number."""
    numbers = (ctypes.c_int32 * (7 * MOST_TYPES))()
    n_types = kernels.gguf_types(numbers)
    rows = (numbers[7 * i : 7 * i + 7] for i in range(n_types))
    return {kind: BlockForm(*form) for kind, *form in rows}


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlocks:
    """A weight (out, in) as our kernels read it: uint8 (blocks of `ROWS` outputs, bytes) each of codes and scales."""

    codes: Tensor
    scales: Tensor
    n_out: int
    n_in: int
    form: BlockForm
    kernels: Kernels

    def map(self, bias: Tensor | None = None) -> layout.Map:
        return layout.Map(
            self.codes.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self.scales.data_ptr(),
            None,
            0,
            self.n_in,
            self.n_out,
            self.form.bits,
            self.form.group,
            self.form.scale_type,
            self.form.table,
        )

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the de-quantised weight (out, in) in a dtype."""
        outputs = torch.arange(self.n_out)
        parts = (outputs[first : first + DEQUANTISED] for first in range(0, self.n_out, DEQUANTISED))
        return torch.cat([self.numbers(part).to(dtype) for part in parts])

    def numbers(self, outputs: Tensor | None = None) -> Tensor:
        """Return the de-quantised weights of some outputs, int64 (n,), or of all: float32 (n, in)."""
        outputs = torch.arange(self.n_out) if outputs is None else outputs.contiguous()
        out_of_range = outputs.numel() and not 0 <= int(outputs.min()) <= int(outputs.max()) < self.n_out
        if out_of_range:
            raise IndexError(f"a weight has {self.n_out} outputs")
        weights = torch.empty((len(outputs), self.n_in))
        self.kernels.numbers(ctypes.byref(self.map()), outputs.data_ptr(), len(outputs), weights.data_ptr())
        return weights


def packed_blocks(
    tensor: FileTensor,
    kernels: Kernels,
    order: Tensor | None = None,
    release: Callable[[FileTensor], None] = lambda tensor: None,
) -> PackedBlocks:
    """Pack a file's tensor (out, in).

    Args:   order: int32 (out,), the row of the tensor for each output. release: called with each part of the tensor
            that is packed, so that little of the file is in memory beside its packed copy.
    Raises: MemoryError: there is too little memory.
    """
    form, (n_out, n_in) = forms(kernels)[tensor.kind], tensor.shape
    n_blocks, row_bytes = -(-n_out // ROWS), n_in // form.inputs * form.block_bytes
    codes = torch.empty((n_blocks, n_in * ROWS * form.bits // 8), dtype=torch.uint8)
    scales = torch.empty((n_blocks, form.scale_bytes(n_in)), dtype=torch.uint8)
    # An order may lead to any row, so the rows are then packed in one go.
    step = n_out if order is not None else max(1, PACKED_BYTES // row_bytes // ROWS) * ROWS
    for first in range(0, n_out, step):
        n_rows, block = min(step, n_out - first), first // ROWS
        rows = tensor.data.reshape(-1)[first * row_bytes : (first + n_rows) * row_bytes]
        part = PackedBlocks(codes[block:], scales[block:], n_rows, n_in, form, kernels)
        order_at = None if order is None else order.data_ptr()
        source = ctypes.c_void_p(rows.__array_interface__["data"][0])
        if kernels.repack(tensor.kind, source, order_at, ctypes.byref(part.map()), n_threads()):
            raise MemoryError(f"laying out {tensor.name} needs more memory or threads than there are")
        release(replace(tensor, data=rows))
    return PackedBlocks(codes, scales, n_out, n_in, form, kernels)


class BlockLinear(CodedLinear):
    """A linear map whose weights are packed blocks.

    Args: bias: (out,) or None. dtype: of the model. head_order: int64 (heads,), the head whose values the caller has to
          put in each block of inputs; None: the heads are in order.
    """

    def __init__(
        self, packed: PackedBlocks, bias: Tensor | None, dtype: torch.dtype, head_order: Tensor | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.packed, self.dtype, self.head_order = packed, dtype, head_order
        self.n_out, self.n_in = packed.n_out, packed.n_in
        self.bits, self.group = packed.form.bits, packed.form.group
        self.codes = nn.Parameter(packed.codes, requires_grad=False)
        self.scales = nn.Parameter(packed.scales, requires_grad=False)
        self.register_buffer("order", None, persistent=False)
        bias_parameter = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        self.register_parameter("bias", bias_parameter)

    @property
    def scale_type(self) -> int:
        return self.packed.form.scale_type

    @property
    def table(self) -> int:
        return self.packed.form.table

    @property
    def weight(self) -> Tensor:
        """The de-quantised weight (out, in) in the model's dtype, computed at each call."""
        return self.packed.weight(self.dtype)


class BlockEmbedding(nn.Module):
    """An embedding stored as packed blocks; rows are multiplied by `scale` in families that scale them."""

    embed_scale: Tensor | None

    def __init__(self, packed: PackedBlocks, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__()
        self.packed, self.dtype = packed, dtype
        self.codes = nn.Parameter(packed.codes, requires_grad=False)
        self.scales = nn.Parameter(packed.scales, requires_grad=False)
        self.register_buffer("embed_scale", scale, persistent=False)
        self.n_out, self.n_in = packed.n_out, packed.n_in

    @property
    def weight(self) -> Tensor:
        """The de-quantised weight (tokens, hidden_size), computed at each call."""
        return self.packed.weight(self.dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.packed.numbers(token_ids.flatten().long()).to(self.dtype)
        rows = rows.view(*token_ids.shape, self.packed.n_in)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(self.dtype)
