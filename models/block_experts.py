"""Experts that compute with codes: those of a GGUF file, packed for our kernels (`block_maps`), or of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block_maps import PackedBlocks, packed_blocks
from .family import Experts
from .gguf_reader import FileTensor
from .kernels import layout
from .kernels.build import Kernels

PARTS = ("gate", "up", "down")  # Maps of each expert, as llama.cpp names them.
HALVES = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # The parts in each tensor of an experts' module.


class ExpertMap(Protocol):
    """A map of one expert by its codes."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    def map(self, bias: Tensor | None = None) -> layout.Map: ...

    def numbers(self) -> Tensor:
        """Return the de-quantised weight, float32 (out, in)."""
        ...


class BlockExperts(nn.Module):
    """Experts of one layer; `maps` are (experts,) of each of `PARTS`, and `biases` (experts, out).

    Our kernels read the codes. Elsewhere a map is de-quantised each time a row takes its expert.

    Args: named: what the family's row says of them. module: transformers' own, which has their activation and biases.
    """

    def __init__(
        self, maps: Mapping[str, Sequence[ExpertMap]], named: Experts, module: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.maps, self.dtype = maps, dtype
        self.biases = biases_of(module, named)
        self.gated = gating_of(module, named)
        if named.clamped:
            self.limit, self.alpha = module.limit, module.alpha

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum (rows, hidden_size) of what each row's experts make of it."""
        total = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            row, place = torch.where(top_k_index == expert)
            inner = self.gated(*(self._mapped(part, expert, hidden_states[row]) for part in HALVES["gate_up_proj"]))
            out = self._mapped("down", expert, inner)
            total.index_add_(0, row, (out * top_k_weights[row, place, None]).to(total.dtype))
        return total

    def _mapped(self, part: str, expert: int, x: Tensor) -> Tensor:
        bias = self.biases.get(part)
        return F.linear(x, self.maps[part][expert].numbers().to(self.dtype), None if bias is None else bias[expert])


def biases_of(module: Any, named: Experts) -> dict[str, Tensor]:
    """Return the biases (experts, out) of each of `PARTS`, of a module of transformers; {} where it has none."""
    if not named.alternating:
        return {}
    both = module.gate_up_proj_bias.data
    return {"gate": both[:, ::2].contiguous(), "up": both[:, 1::2].contiguous(), "down": module.down_proj_bias.data}


def gating_of(module: Any, named: Experts) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what experts make of a gate's outputs and those of the other half."""
    if not named.clamped:
        activation = module.act_fn
        return lambda gate, up: activation(gate) * up
    limit, alpha = module.limit, module.alpha

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        low = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (low * torch.sigmoid(low * alpha))

    return clamped


def stacked(parts: Mapping[str, Tensor], leaf: str, named: Experts) -> Tensor:
    """Return maps (experts, out, in), or biases (experts, out), of the parts of a tensor as transformers has them.

    Args: leaf: the tensor's name in the experts' module, a key of `HALVES`.
    """
    halves = [parts[part] for part in HALVES[leaf]]
    if not named.alternating:
        return torch.cat(halves, dim=1)
    together = torch.stack(halves, dim=2).flatten(1, 2)
    return together.transpose(1, 2) if together.dim() == 3 else together


def packed_experts(
    tensor: FileTensor, kernels: Kernels, release: Callable[[FileTensor], None] = lambda tensor: None
) -> list[PackedBlocks]:
    """Pack a file's tensor (experts, out, in), expert by expert; see `packed_blocks`."""
    n_experts, *shape = tensor.shape
    whole = tensor.data.reshape(n_experts, -1)
    experts = (replace(tensor, shape=tuple(shape), data=whole[expert]) for expert in range(n_experts))
    return [packed_blocks(expert, kernels, release=release) for expert in experts]
