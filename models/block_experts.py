"""Experts with quantised weights: of a GGUF file, packed for our kernels (`block_maps`), or of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block_maps import PackedBlocks, packed_blocks
from .family import Experts
from .gguf_reader import FileTensor
from .kernels import layout
from .kernels.build import Kernels
from .mixtures import mixed_by_expert

PARTS = ("gate", "up", "down")  # Maps of each expert, as llama.cpp names them; some experts have no gate.
# The parts in each tensor of an experts' module.
HALVES = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
UNGATED = {"up_proj": ("up",), "down_proj": ("down",)}


class ExpertMap(Protocol):
    """A quantised linear map of one expert."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    def map(self, bias: Tensor | None = None) -> layout.Map: ...

    def numbers(self) -> Tensor:
        """Return the de-quantised weight, float32 (out, in)."""
        ...


class BlockExperts(nn.Module):
    """The quantised experts of one layer.

    Our kernels read the codes. Without them, a map is de-quantised each time that a row takes its expert.

    Args: maps: for each of `PARTS` that the experts have, the map of every expert. named: the family's row on experts.
          module: transformers' module of the same experts, for activation and biases. dtype: the model's.
    """

    def __init__(
        self, maps: Mapping[str, Sequence[ExpertMap]], named: Experts, module: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.maps, self.dtype = maps, dtype
        self.biases = biases_of(module, named)
        self.gated, self.weighs_inputs = gating_of(module, named), named.weighs_inputs
        if named.clamped:
            self.limit, self.alpha = module.limit, module.alpha

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum (rows, hidden_size) of the outputs of each row's experts."""

        def computed(expert: int, rows: Tensor) -> Tensor:
            inner = self.gated(*(self._mapped(part, expert, rows) for part in PARTS[:2] if part in self.maps))
            return self._mapped("down", expert, inner)

        return mixed_by_expert(hidden_states, top_k_index, top_k_weights, computed, self.weighs_inputs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockExperts:
        """Also move maps and biases, which are not registered as submodules."""
        for maps in self.maps.values():
            for map_ in maps:
                if isinstance(map_, nn.Module):
                    cast(Any, map_)._apply(fn, recurse)
                else:
                    map_.codes.data, map_.scales.data = fn(map_.codes.data), fn(map_.scales.data)
        self.biases = {part: fn(bias) for part, bias in self.biases.items()}
        return cast(BlockExperts, cast(Any, super())._apply(fn, recurse))

    def _mapped(self, part: str, expert: int, x: Tensor) -> Tensor:
        bias = self.biases.get(part)
        return F.linear(x, self.maps[part][expert].numbers().to(self.dtype), None if bias is None else bias[expert])


def biases_of(module: Any, named: Experts) -> dict[str, Tensor]:
    """Return the biases (experts, out) of each of `PARTS` in transformers' module; {} if it has none."""
    if not named.alternating:
        return {}
    both = module.gate_up_proj_bias.data
    return {"gate": both[:, ::2].contiguous(), "up": both[:, 1::2].contiguous(), "down": module.down_proj_bias.data}


def gating_of(module: Any, named: Experts) -> Callable[..., Tensor]:
    """Return the function of the outputs of gate and up map, or of the up map alone, that the down map reads."""
    if not named.clamped:
        activation = module.act_fn
        return lambda gate, up=None: activation(gate) if up is None else activation(gate) * up
    limit, alpha = module.limit, module.alpha

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        low = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (low * torch.sigmoid(low * alpha))

    return clamped


def stacked(parts: Mapping[str, Tensor], leaf: str, named: Experts) -> Tensor:
    """Join the maps (experts, out, in), or biases (experts, out), of gate and up as transformers' tensors have them.

    Args: leaf: the tensor's name in the experts' module, a key of `HALVES` or `UNGATED`.
    """
    halves = [parts[part] for part in {**HALVES, **UNGATED}[leaf]]
    together = torch.stack(halves, dim=2).flatten(1, 2) if named.alternating else torch.cat(halves, dim=1)
    return together.transpose(1, 2) if named.by_inputs and together.dim() == 3 else together


def packed_experts(
    tensor: FileTensor, kernels: Kernels, release: Callable[[FileTensor], None] = lambda tensor: None
) -> list[PackedBlocks]:
    """Pack a file's tensor (experts, out, in), expert by expert; see `packed_blocks`."""
    n_experts, *shape = tensor.shape
    whole = tensor.data.reshape(n_experts, -1)
    experts = (replace(tensor, shape=tuple(shape), data=whole[expert]) for expert in range(n_experts))
    return [packed_blocks(expert, kernels, release=release) for expert in experts]
