"""Describes mixtures of experts to the library: the maps of experts, and how a router chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from ..block_experts import PARTS, BlockExperts, biases_of
from ..block_maps import BlockLinear
from ..coded import GROUPS, CodedLinear
from ..expert_choice import NoExperts, owners_of
from ..family import Experts
from ..mixtures import NormedMixture
from ..quantised import QuantisedLinear
from ..quantised_experts import PackedMaps, QuantisedExperts
from . import layout
from .layout import ROWS, Unsupported

CORRECTIONS = ("correction_bias", "expert_bias")  # Names of the tensor that is added to scores to choose experts.
MAX_EXPERTS = 1024  # Per layer, with shared experts.


def _is_stack(weights: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(weights, Tensor) and weights.dim() == 3 and weights.dtype == dtype and weights.is_contiguous()


def stack_map(weight: Tensor, bias: Tensor | None = None) -> layout.Map:
    """Describe a map (out, in) of a stack; each output's weights are contiguous."""
    (n_out, n_in), bias_at = weight.shape, None if bias is None else bias.data_ptr()
    return layout.Map(weight.data_ptr(), bias_at, None, None, weight.stride(0), n_in, n_out, 0, 0, 0)


def _maps_in(packed: PackedMaps, n_maps: int, n_out: int) -> list[layout.Map]:
    """Describe `n_maps` maps with `n_out` outputs each, which are concatenated in packed weights as whole blocks."""
    assert packed.group is not None
    codes, scales = (torch.tensor_split(tensor, n_maps) for tensor in (packed.codes, packed.scales))
    form = packed.n_in, n_out, packed.bits, packed.group, layout.ZERO_VALUES
    return [
        layout.Map(map_codes.data_ptr(), None, map_scales.data_ptr(), None, 0, *form)
        for map_codes, map_scales in zip(codes, scales, strict=True)
    ]


def halves_of(module: Any) -> list[layout.Map]:
    """Describe a map to gate and up as two maps.

    Raises: Unsupported: it has a bias, or is not of a supported class.
    """
    is_plain = type(module) is nn.Linear
    n_out = module.out_features if is_plain else getattr(module, "n_out", 0)
    # Each half must fill whole blocks of packed weights, so that copies in fewer bits can be described, too.
    if getattr(module, "bias", None) is None and n_out % (2 * ROWS) == 0:
        if is_plain:
            return [stack_map(half) for half in module.weight.detach().chunk(2)]
        if isinstance(module, QuantisedLinear):
            return _maps_in(module, 2, n_out // 2)
        if isinstance(module, BlockLinear):
            packed = module.packed
            parts = zip(packed.codes.chunk(2), packed.scales.chunk(2), strict=True)
            return [replace(packed, codes=codes, scales=scales, n_out=n_out // 2).map() for codes, scales in parts]
    raise Unsupported(f"a joint gate of shared experts such as {type(module).__name__} is computed by torch")


def _alternating(*halves: Sequence[layout.Map]) -> list[layout.Map]:
    return [map_ for pair in zip(*halves, strict=True) for map_ in pair]


def _refuse_other_input(gate: Any, up: Any) -> None:
    """Raises: Unsupported: quantised gate and up cannot share one rounded input, or no kernel has their group size."""
    orders = [getattr(map_, "order", None) for map_ in (gate, up)]
    groups = {map_.group for map_ in (gate, up) if isinstance(map_, CodedLinear)}
    if len(groups) > 1 or len({None if order is None else tuple(order.tolist()) for order in orders}) > 1:
        raise Unsupported("experts whose gate and up are grouped in several ways are computed by torch")
    if not groups <= set(GROUPS):
        raise Unsupported(f"groups of {min(groups)} weights are computed by torch")


def maps_of(
    experts: Any, named: Experts, dtype: torch.dtype, halves: bool, keep: Callable[[Tensor], Tensor], gated: bool = True
) -> tuple[list[layout.Map], list[layout.Map]]:
    """Describe the input maps and the output maps of all experts.

    Args: halves: describe gate and up as two maps. Quantised maps, and those whose outputs alternate, always are two.
          keep: keeps a tensor alive as long as the description, and returns it. gated: experts have a gate.
    Raises: Unsupported: the kernels do not support the experts' form.
    """
    if isinstance(experts, NoExperts):
        return maps_of(experts.whole, named, dtype, halves, keep, gated)
    if isinstance(experts, QuantisedExperts):
        packed_into = _maps_in(experts.gate_up, 2 * experts.n_experts, experts.n_inner)
        return packed_into, _maps_in(experts.down, experts.n_experts, experts.n_hidden)
    if isinstance(experts, BlockExperts):
        biases = {part: keep(bias.to(dtype)) for part, bias in experts.biases.items()}
        by_part = {
            part: [map_.map(None if part not in biases else biases[part][e]) for e, map_ in enumerate(maps)]
            for part, maps in experts.maps.items()
        }
        if not gated:
            return by_part["up"], by_part["down"]
        for gate_map, up_map in zip(experts.maps["gate"], experts.maps["up"], strict=True):
            _refuse_other_input(gate_map, up_map)
        return _alternating(by_part["gate"], by_part["up"]), by_part["down"]
    into, out = (getattr(experts, name, None) for name in ("gate_up_proj" if gated else "up_proj", "down_proj"))
    if named.by_inputs and into is not None and out is not None:
        into, out = (weights.detach().transpose(1, 2) for weights in (into, out))
        if not _is_stack(into, dtype) or not _is_stack(out, dtype):
            raise Unsupported("experts stored as (inputs, outputs) are computed by torch")
    if named.alternating and into is not None and out is not None:
        biases = {part: keep(bias.to(dtype)) for part, bias in biases_of(experts, named).items()}
        weights_of = {"gate": into[:, ::2], "up": into[:, 1::2], "down": out}
        gate, up, down = (
            [stack_map(*pair) for pair in zip(weights_of[part], biases[part], strict=True)] for part in PARTS
        )
        return _alternating(gate, up), down
    if named.clamped or not _is_stack(into, dtype) or not _is_stack(out, dtype):
        raise Unsupported(f"experts such as {type(experts).__name__} are computed by torch")
    n_experts, n_hidden, n_inner = out.shape
    if into.shape != (n_experts, (1 + gated) * n_inner, n_hidden):
        raise Unsupported("experts of such a form are computed by torch")
    parts = into.detach().view(2 * n_experts, n_inner, n_hidden) if halves and gated else into.detach()
    return [stack_map(weight) for weight in parts], [stack_map(weight) for weight in out.detach()]


def routing_of(config: Any, mlp: nn.Module, named: Experts, n_experts: int) -> layout.Routing:
    """Describe how a router chooses experts; attributes of its modules take precedence over the config's fields.

    Raises: Unsupported: there are more experts than the kernels support, or a row chooses more than there are.
    """
    owners = (*(module for _, module in owners_of(mlp, named)), config)

    def setting(*names: str, default: Any) -> Any:
        return next((getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)), default)

    scores = named.scores if named.scores != "configured" else config.expert_selection_fn
    is_normalised = named.normalised
    if is_normalised is None:
        is_always = scores == "softmax" and named.scores == "configured"
        is_normalised = is_always or setting("norm_topk_prob", default=False)
    grouped = setting("topk_method", default="") != "greedy"  # DeepSeek-V2-Lite's config has groups without using them.
    n_chosen = int(setting("top_k", "num_experts_per_tok", "moe_topk", default=1))
    least = 0 if isinstance(mlp.get_submodule(named.experts), NoExperts) else 1  # 0: a draft with shared experts only.
    is_possible = n_chosen == 2 if scores == "sparse_mixer" else n_chosen >= least
    if not is_possible or not n_chosen <= n_experts < MAX_EXPERTS:
        raise Unsupported(f"a choice of {n_chosen} from {n_experts} experts is computed by torch")
    return layout.Routing(
        n_experts,
        n_chosen,
        (grouped and setting("num_group", "n_group", default=1)) or 1,
        (grouped and setting("topk_group", default=1)) or 1,
        layout.SCORES.index(scores),
        bool(is_normalised),
        named.n_best,
        float(setting("norm_min", default=1e-20)),
        float(setting("routed_scaling_factor", "router_scaling_factor", default=1.0)),
        float(setting("router_jitter_noise", default=0.0)),
    )


def norm_fields(mlp: nn.Module, norm_of: Callable[[Any], layout.Norm], keep: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Describe the last fields of `layout.Mixture`: norms of a `NormedMixture`, and factors of its weights and logits.

    Args:   norm_of: describes a norm. keep: as in `maps_of`.
    Raises: Unsupported: the router's norm has a weight.
    """
    if not isinstance(mlp, NormedMixture):
        return *(norm_of(None) for _ in range(4)), None, 1.0
    router = cast(Any, mlp.router).whole
    norm = norm_of(router.norm)
    if norm.kind not in (layout.RMS, layout.RMS_WIDE) or next(router.norm.parameters(), None) is not None:
        raise Unsupported("a router whose norm is of another kind is computed by torch")
    # `scale` is used as the weight of an RMS norm that rounds before it.
    norm.kind, norm.weight = layout.RMS, keep(router.scale.detach()).data_ptr()
    others = (norm_of(module) for module in (mlp.mlp_before, mlp.after, mlp.mlp_after))
    return norm, *others, keep(router.per_expert_scale.detach().float()).data_ptr(), float(router.scalar_root_size)


def is_mean(config: Any) -> bool:
    """Tell whether a layer's output is the mean, not the sum, of chosen experts and shared expert."""
    return getattr(config, "shared_expert_combination_strategy", "sum") == "average"


def correction_of(mlp: nn.Module) -> Tensor | None:
    """Return what is added to scores to choose experts, (experts,); None: the router has no correction."""
    tensors = (*mlp.named_buffers(), *mlp.named_parameters())
    corrections = [tensor for name, tensor in tensors if name.endswith(CORRECTIONS)]
    return corrections[0].reshape(-1) if corrections else None
