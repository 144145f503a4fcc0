"""Linear maps and embeddings that keep a GGUF file's codes, packed for our kernels (`gguf_packing`).

DEVIATION: our kernels round a map's inputs to 8 bits with a scale per 32 inputs; llama.cpp has a scale per 32 or 256.
The weights are not rounded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from .coded import CodedLinear
from .gguf_packing import BlockForm, PackedArrays, packed_arrays
from .gguf_reader import FileTensor
from .kernels import layout
from .kernels.build import Kernels
from .kernels.layout import ROWS

DEQUANTISED = 4096  # Outputs that are de-quantised at a time, so that a large map needs no whole copy in float32.


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlocks:
    """A weight (out, in) as our kernels read it: codes and scales, each uint8 (blocks of `ROWS` outputs, bytes)."""

    codes: Tensor
    scales: Tensor
    n_out: int
    n_in: int
    form: BlockForm
    kernels: Kernels

    @classmethod
    def of(cls, arrays: PackedArrays) -> PackedBlocks:
        """Wrap packed numpy arrays without a copy."""
        codes, scales = torch.from_numpy(arrays.codes), torch.from_numpy(arrays.scales)
        return cls(codes, scales, arrays.n_out, arrays.n_in, arrays.form, arrays.kernels)

    def map(self, bias: Tensor | None = None) -> layout.Map:
        bias_at = None if bias is None else bias.data_ptr()
        return self.form.map(self.codes.data_ptr(), self.scales.data_ptr(), self.n_in, self.n_out, bias_at)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the de-quantised weight (out, in) in a dtype."""
        outputs = torch.arange(self.n_out)
        parts = (outputs[first : first + DEQUANTISED] for first in range(0, self.n_out, DEQUANTISED))
        return torch.cat([self.numbers(part).to(dtype) for part in parts])

    def numbers(self, outputs: Tensor | None = None) -> Tensor:
        """Return the de-quantised weights of some outputs, int64 (n,), or of all: float32 (n, in)."""
        outputs = torch.arange(self.n_out) if outputs is None else outputs.contiguous()
        numbers = outputs.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.n_out:
            raise IndexError(f"a weight has {self.n_out} outputs")
        if self.codes.device.type != "cpu":
            return self._moved(outputs.cpu())
        weights = torch.empty((len(outputs), self.n_in))
        self.kernels.dequantise(ctypes.byref(self.map()), outputs.data_ptr(), len(outputs), weights.data_ptr())
        return weights

    def _moved(self, outputs: Tensor) -> Tensor:
        """As `numbers`, for codes on another device: copies the blocks of these outputs to the CPU; not for passes."""
        blocks, block_of = torch.unique(outputs // ROWS, return_inverse=True)
        block_index = blocks.to(self.codes.device)
        codes, scales = self.codes[block_index].cpu(), self.scales[block_index].cpu()
        here = replace(self, codes=codes, scales=scales, n_out=len(blocks) * ROWS)
        return here.numbers(block_of * ROWS + outputs % ROWS).to(self.codes.device)


def packed_blocks(
    tensor: FileTensor,
    kernels: Kernels,
    order: Tensor | None = None,
    release: Callable[[FileTensor], None] = lambda tensor: None,
) -> PackedBlocks:
    """Pack a file's tensor (out, in); see `packed_arrays`. Args: order: int32 (out,)."""
    return PackedBlocks.of(packed_arrays(tensor, kernels, None if order is None else order.numpy(), release))


class BlockLinear(CodedLinear):
    """A linear map whose weights are packed blocks.

    Args: bias: (out,) or None. dtype: the model's. head_order: int64 (heads,), the head that each block of the inputs
          belongs to; the caller must order its inputs so. None: the heads are in order.
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockLinear:
        """Keep `packed` in step with codes and scales when they move to another device."""
        cast(Any, super())._apply(fn, recurse)
        self.packed = replace(self.packed, codes=self.codes.data, scales=self.scales.data)
        return self

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
