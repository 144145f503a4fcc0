"""How many experts a token takes in a layer, and layers that take fewer, for drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LayerSetError
from ..core.layer_sets import LayerSet
from .blocks import Block
from .family import Experts
from .quantised_experts import shared_of, shell, with_submodule

CHOSEN = "top_k"  # Attribute of transformers' modules with the number of experts that a token takes.


class NoExperts(nn.Module):
    """Replaces a layer's experts if tokens take none of them; `whole` is their module."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def owners_of(mlp: nn.Module, named: Experts) -> Iterator[tuple[str, Any]]:
    """Yield the modules that may have the attribute `CHOSEN`, with their names, from the router outwards."""
    name = named.router
    while name:
        yield name, mlp.get_submodule(name)
        name = name.rpartition(".")[0]
    yield "", mlp


def chooser_of(mlp: nn.Module, named: Experts) -> Any:
    """Return the module that chooses experts; it returns each row's logits, weights and experts."""
    return next(module for _, module in owners_of(mlp, named) if hasattr(module, CHOSEN))


def n_chosen(mlp: nn.Module, named: Experts) -> int:
    """Return how many experts a token takes, besides the shared ones."""
    return int(getattr(chooser_of(mlp, named), CHOSEN))


def least_chosen(mlp: nn.Module, named: Experts) -> int:
    """Return the fewest experts that a draft's token may take: 0 if the layer also has shared experts."""
    if named.scores == "sparse_mixer":  # Its weights are defined for two experts.
        return n_chosen(mlp, named)
    return 1 if shared_of(mlp, named)[1] is None else 0


@dataclass(frozen=True, slots=True)
class Mixtures:
    """A model's mixtures of experts: their layers, the experts of a layer, and those that a token takes.

    Shared experts, which all tokens take, are not counted. A draft's token takes at least `least`.
    """

    layers: tuple[int, ...]
    n_experts: int
    n_chosen: int
    least: int


def mixtures_of(blocks: Sequence[Block]) -> Mixtures | None:
    """Describe the mixtures of a model's layers; None: no layer has one."""
    mixtures = {block.index: (block.parts.mlp, block.experts) for block in blocks if block.experts is not None}
    if not mixtures:
        return None
    return Mixtures(
        layers=tuple(mixtures),
        n_experts=max(mlp.get_submodule(named.router).weight.shape[0] for mlp, named in mixtures.values()),
        n_chosen=max(n_chosen(mlp, named) for mlp, named in mixtures.values()),
        least=max(least_chosen(mlp, named) for mlp, named in mixtures.values()),
    )


def refuse_experts(layer_set: LayerSet, blocks: Sequence[Block]) -> None:
    """Raises: LayerSetError: a draft's token cannot take as many experts as the layer set says."""
    mixtures = [(block.parts.mlp, block.experts, block.index) for block in blocks if block.experts is not None]
    if not mixtures:
        raise LayerSetError(
            "the layer set takes fewer experts, but this model has none: use a set that was tuned on this model"
        )
    for mlp, named, layer in mixtures:
        number, most, least = layer_set.experts_of(layer), n_chosen(mlp, named), least_chosen(mlp, named)
        if number is not None and not least <= number <= most:
            advice = f"use {least} to {most}" if least < most else "use the set without experts"
            raise LayerSetError(
                f"the layer set takes {number} experts, but a token of this model takes {most}: {advice}"
            )


def with_fewer(mlp: nn.Module, named: Experts, number: int) -> nn.Module:
    """Return a shallow copy of a mixture in which a token takes `number` experts; 0: only the shared ones."""
    fewer = mlp
    for name, module in list(owners_of(mlp, named)):
        if hasattr(module, CHOSEN):
            owner: Any = shell(fewer.get_submodule(name))
            setattr(owner, CHOSEN, number)
            fewer = with_submodule(fewer, name, owner) if name else owner
    if number == 0:
        fewer = with_submodule(fewer, named.experts, NoExperts(mlp.get_submodule(named.experts)))
    return fewer
