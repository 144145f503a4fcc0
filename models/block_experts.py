"""Experts that compute with a GGUF file's codes, each of their maps packed for our kernels; see `block_maps`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block_maps import PackedBlocks, packed_blocks
from .gguf_reader import FileTensor
from .kernels.build import Kernels

PARTS = ("gate", "up", "down")  # Maps of each expert, as llama.cpp names them.


class BlockExperts(nn.Module):
    """Experts of one layer; `maps` are (experts,) of each of `PARTS`.

    Our kernels read the codes. Elsewhere a map is de-quantised each time a row takes its expert.
    """

    def __init__(
        self, maps: Mapping[str, Sequence[PackedBlocks]], activation: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.maps, self.activation, self.dtype = maps, activation, dtype

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum (rows, hidden_size) of what each row's experts make of it."""
        total = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            row, place = torch.where(top_k_index == expert)
            gate, up, down = (self.maps[part][expert].weight(self.dtype) for part in PARTS)
            x = hidden_states[row]
            out = F.linear(self.activation(F.linear(x, gate)) * F.linear(x, up), down)
            total.index_add_(0, row, (out * top_k_weights[row, place, None]).to(total.dtype))
        return total


def packed_experts(
    tensor: FileTensor, kernels: Kernels, release: Callable[[FileTensor], None] = lambda tensor: None
) -> list[PackedBlocks]:
    """Pack a file's tensor (experts, out, in), expert by expert; see `packed_blocks`."""
    n_experts, *shape = tensor.shape
    whole = tensor.data.reshape(n_experts, -1)
    experts = (replace(tensor, shape=tuple(shape), data=whole[expert]) for expert in range(n_experts))
    return [packed_blocks(expert, kernels, release=release) for expert in experts]
