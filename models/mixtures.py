"""Mixtures of experts in torch; all modules of experts are called with rows, chosen experts and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .family import Experts


def mixed_by_expert(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    computed: Callable[[int, Tensor], Tensor],
    weighs_inputs: bool = False,
) -> Tensor:
    """Return the weighted sum (rows, hidden_size) of the outputs of each row's experts.

    Args: hidden_states: (rows, hidden_size). top_k_index, top_k_weights: (rows, chosen). computed: returns an expert's
          outputs for rows. weighs_inputs: weights multiply the experts' inputs.
    """
    total = torch.zeros_like(hidden_states)
    for expert in torch.unique(top_k_index).tolist():
        row, place = torch.where(top_k_index == expert)
        rows, weights = hidden_states[row], top_k_weights[row, place, None]
        out = computed(expert, (rows * weights).to(rows.dtype)) if weighs_inputs else computed(expert, rows) * weights
        total.index_add_(0, row, out.to(total.dtype))
    return total


def in_order(answer: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a router's logits, weights and chosen experts; Granite's router in transformers 5.17 reverses them."""
    return answer if answer[0].is_floating_point() else answer[::-1]


class SharedMixture(nn.Module):
    """A mixture that adds its chosen experts and an MLP, the shared expert.

    Args: router, experts, shared: names from the family's row, and modules.
    """

    def __init__(self, router: tuple[str, Any], experts: tuple[str, Any], shared: tuple[str, Any]) -> None:
        super().__init__()
        self._names = router[0], experts[0], shared[0]
        for name, module in (router, experts, shared):
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        router, experts, shared = (getattr(self, name) for name in self._names)
        rows = x.view(-1, x.shape[-1])
        _, weights, chosen = in_order(router(rows))
        return cast(Tensor, experts(rows, chosen, weights).view_as(x) + shared(x))


def mlp_beside_experts(layer: nn.Module, named: Experts, mlp: str) -> SharedMixture:
    """Return the mixture of a layer that has router and experts in one module, and the shared MLP outside of it."""
    mixture = layer.get_submodule(named.beside or "")
    router, experts = ((name, mixture.get_submodule(name)) for name in (named.router, named.experts))
    return SharedMixture(router, experts, (mlp, layer.get_submodule(mlp)))


class LateRouter(nn.Module):
    """Llama 4's router; it returns logits, weights and chosen experts, as those of other families do."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole, self.top_k = whole, whole.top_k

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.whole.weight)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(rows, self.weight)
        best, chosen = logits.topk(self.top_k, dim=-1)
        return logits, best.float().sigmoid().to(logits.dtype), chosen


class WeighedExperts(nn.Module):
    """Llama 4's experts, computed only for the rows that take them; transformers' module computes all for every row."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole, self.act_fn = whole, whole.act_fn

    @property
    def gate_up_proj(self) -> nn.Parameter:
        return cast(nn.Parameter, self.whole.gate_up_proj)

    @property
    def down_proj(self) -> nn.Parameter:
        return cast(nn.Parameter, self.whole.down_proj)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def computed(expert: int, rows: Tensor) -> Tensor:
            gate, up = (rows @ self.gate_up_proj[expert]).chunk(2, dim=-1)
            return cast(Tensor, up * self.act_fn(gate)) @ self.down_proj[expert]

        return mixed_by_expert(hidden_states, top_k_index, top_k_weights, computed, weighs_inputs=True)


def weighed_inputs(mixture: nn.Module, named: Experts) -> SharedMixture:
    """Return Llama 4's mixture, whose weights multiply the experts' inputs."""
    shared = cast(str, named.shared)
    experts = mixture.get_submodule(named.experts)
    # Experts that compute with codes are already called with each row's experts.
    of_rows = WeighedExperts(experts) if isinstance(getattr(experts, "gate_up_proj", None), Tensor) else experts
    router = LateRouter(mixture.get_submodule(named.router))
    return SharedMixture((named.router, router), (named.experts, of_rows), (shared, mixture.get_submodule(shared)))


class ScaledRouter(nn.Module):
    """Gemma 4's router: it reads the norm of a row times a scale, and multiplies weights by a scale of each expert.

    Args: whole: transformers' module, which has no attribute for the number of experts that a token takes.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole, self.top_k = whole, int(whole.config.top_k_experts)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (n, experts), and weights and indices of experts, (n, top_k), for rows (n, hidden)."""
        whole = self.whole
        logits = whole.proj(whole.norm(rows) * whole.scale * whole.scalar_root_size)
        weights, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True) * whole.per_expert_scale[chosen]
        return logits, weights, chosen


class NormedMixture(nn.Module):
    """The sum of a layer's MLP and experts, each between norms of its own; it reads the residual stream (Gemma 4)."""

    def __init__(self, layer: nn.Module, named: Experts, mlp: str) -> None:
        super().__init__()
        norms = named.norms
        assert norms is not None
        self.router, self._mlp_name = ScaledRouter(layer.get_submodule("router")), mlp
        self.experts = cast(Any, layer.get_submodule(named.experts))
        self.add_module(mlp, layer.get_submodule(mlp))
        self.before, self.after = layer.get_submodule(norms.before), layer.get_submodule(norms.after)
        self.mlp_before, self.mlp_after = layer.get_submodule(norms.mlp_before), layer.get_submodule(norms.mlp_after)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        _, weights, chosen = self.router(rows)
        mixed = self.after(self.experts(self.before(rows), chosen, weights))
        return cast(Tensor, (self.mlp_after(getattr(self, self._mlp_name)(self.mlp_before(rows))) + mixed).view_as(x))
