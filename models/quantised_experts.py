"""Copies of a mixture's experts with quantised weights, for drafts with our kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import LINEAR
from .coded import unpack
from .family import Experts
from .kernels.layout import ROWS
from .mixtures import mixed_by_expert

STACKS = ("gate_up_proj", "down_proj")  # Tensors with the maps of all experts of a layer.


class PackedMaps(Protocol):
    """Linear maps with packed codes, as one map: a `QuantisedLinear`."""

    codes: Tensor
    scales: Tensor
    bits: int
    group: int | None
    n_in: int


class ExpertStack(nn.Module):
    """All experts' maps of one input width, as one linear map with their outputs one after the other.

    Each map's outputs are padded to whole blocks of packed weights, so that every map begins at a block.

    Args: maps: (maps, outputs, inputs).
    """

    def __init__(self, maps: Tensor) -> None:
        super().__init__()
        self.maps = maps.detach()

    @property
    def n_weights(self) -> int:
        return self.maps.numel()

    @property
    def weight(self) -> Tensor:
        n_missing = -self.maps.shape[1] % ROWS  # F.pad copies the maps, so it is not called without need.
        return (F.pad(self.maps, (0, 0, 0, n_missing)) if n_missing else self.maps).flatten(0, 1)


class QuantisedExperts(nn.Module):
    """Experts of one layer with packed codes, which our kernels read.

    Args: gate_up: for each expert, its gate map and then its up map. down: each expert's down map. n_inner: outputs of
          a gate. n_hidden: outputs of a down map. activation: of the gates. weighs_inputs: as in `Experts`.
    """

    def __init__(
        self,
        gate_up: PackedMaps,
        down: PackedMaps,
        n_experts: int,
        n_inner: int,
        n_hidden: int,
        activation: Callable[[Tensor], Tensor],
        weighs_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up, self.down, self.weighs_inputs = gate_up, down, weighs_inputs
        self.n_experts, self.n_inner, self.n_hidden, self.activation = n_experts, n_inner, n_hidden, activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum (rows, hidden_size) of each row's experts; a slow reference of our kernels."""
        dtype, n_in = hidden_states.dtype, hidden_states.shape[-1]
        gate_up = _weight(self.gate_up, dtype).view(2 * self.n_experts, -1, n_in)[:, : self.n_inner]
        down = _weight(self.down, dtype).view(self.n_experts, -1, self.n_inner)[:, : self.n_hidden]

        def computed(expert: int, rows: Tensor) -> Tensor:
            gate, up = (F.linear(rows, gate_up[2 * expert + half]) for half in (0, 1))
            return F.linear(self.activation(gate) * up, down[expert])

        return mixed_by_expert(hidden_states, top_k_index, top_k_weights, computed, self.weighs_inputs)


def _weight(packed: PackedMaps, dtype: torch.dtype) -> Tensor:
    """Return the de-quantised weight (outputs, inputs) of packed maps, padding included."""
    assert packed.group is not None
    codes, scales, zeros = unpack(packed.codes, packed.scales, packed.bits)
    middle = 1 << (packed.bits - 1)
    grouped = (codes.short() - middle).view(len(codes), -1, packed.group).float()
    weight = grouped * scales[..., None].float() + zeros[..., None].float()
    return weight.flatten(1)[:, : packed.n_in].to(dtype).contiguous()


def stacks_of(mlp: nn.Module, named: Experts) -> list[ExpertStack]:
    """Return the maps of a layer's experts, in the order of `STACKS`; [] if the experts have another form."""
    experts: Any = mlp.get_submodule(named.experts)
    into, out = (getattr(experts, name, None) for name in STACKS)
    if named.alternating or named.clamped or not hasattr(experts, "act_fn"):
        return []
    if not isinstance(into, Tensor) or not isinstance(out, Tensor):
        return []
    if named.by_inputs and out.dim() == 3:
        into, out = into.transpose(1, 2), out.transpose(1, 2)
    if out.dim() != 3 or into.shape != (len(out), 2 * out.shape[2], out.shape[1]):
        return []
    return [ExpertStack(into.reshape(2 * len(out), out.shape[2], out.shape[1])), ExpertStack(out)]


def quantised_mixture(mlp: nn.Module, named: Experts, make: Callable[[Sequence[nn.Module]], Any]) -> nn.Module:
    """Copy a mixture with its experts and shared experts quantised; router and shared gate stay as they are.

    Args: make: quantises linear maps of one input.
    """
    experts: Any = mlp.get_submodule(named.experts)
    stacks = stacks_of(mlp, named)
    n_experts, n_hidden, n_inner = stacks[1].maps.shape
    gate_up, down = (make([stack]) for stack in stacks)
    quantised = QuantisedExperts(
        gate_up, down, n_experts, n_inner, n_hidden, experts.act_fn, weighs_inputs=named.weighs_inputs
    )
    copied = with_submodule(mlp, named.experts, quantised)
    name, shared = shared_of(mlp, named)
    return copied if shared is None else with_submodule(copied, name, replaced([shared], make))


def replaced(modules: Sequence[nn.Module], make: Callable[[Sequence[nn.Module]], nn.Module]) -> nn.Module:
    """Copy a module, replacing each linear map by `make(maps)` of the same map in all `modules`."""
    if isinstance(modules[0], LINEAR):
        return make(modules)
    children = {
        name: replaced([getattr(module, name) for module in modules], make)
        for name, child in modules[0].named_children()
        if has_linears(child)
    }
    return shell(modules[0], **children)


def has_linears(module: nn.Module) -> bool:
    return any(isinstance(part, LINEAR) for part in module.modules())


def shared_of(mlp: nn.Module, named: Experts) -> tuple[str, nn.Module | None]:
    """Return the name of a layer's shared expert, and its module; None: the layer has none."""
    name = (named.shared or "").removesuffix("?")
    return name, getattr(mlp, name, None) if name else None


def shell(module: nn.Module, **children: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with other `children`; the module itself is not changed."""
    copied = copy.copy(module)
    # An instance's own forward, such as accelerate's hook, would run the original module.
    vars(copied).pop("forward", None)
    copied._modules = {**module._modules, **children}
    return copied


def with_submodule(root: nn.Module, name: str, submodule: nn.Module) -> nn.Module:
    """Return a shallow copy of a module that has another submodule at a dotted name."""
    child, _, rest = name.partition(".")
    return shell(root, **{child: with_submodule(root.get_submodule(child), rest, submodule) if rest else submodule})
