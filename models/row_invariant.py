"""Passes on a CUDA device with our Triton kernels, in which a row's bits do not depend on other rows.

So drafting does not change a completion, in bfloat16 either. Torch computes only element-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .block_experts import HALVES, PARTS, UNGATED, BlockExperts, gating_of
from .block_maps import PackedBlocks
from .blocks import Block
from .coded import CodedLinear
from .expert_choice import chooser_of
from .family import Experts
from .fused import GATES, FusedNorm, fuse, norms_of
from .kernels import device, device_codes, device_experts, device_states, layout
from .kernels.experts import correction_of, routing_of
from .kernels.layout import Unsupported
from .kernels.limits import norm_gating_of, refuse_group, refuse_hooks
from .mixtures import in_order
from .quantised_checkpoints import is_by_library
from .runtime import Runtime
from .state_rules import StateRule, ValueSteps


def make_row_invariant(runtime: Runtime) -> str | None:
    """Let the row-invariant kernels compute a runtime's passes; return why they cannot, or None.

    If they cannot, nothing changes. Otherwise the model's modules use these kernels wherever they are called, except
    for inputs that require a gradient.
    """
    if reason := device.obstacle():
        return reason
    if runtime.dtype not in device.DTYPES:
        return f"they do not compute in {runtime.dtype_name}"
    places = sorted({parameter.device.type for parameter in runtime.hf_model.parameters()})
    if len(places) > 1:
        return f"the model lies on {' and '.join(places)}"
    if any(block.has_attention and block.heads.latent is not None for block in runtime.blocks):
        return "torch computes its latent attention"
    if not runtime.has_alike_attention:
        return "torch computes its layers, which have heads of several forms or per-layer inputs"
    modules: dict[Any, Callable[..., Any]] = {}
    try:
        for norm, width, place in norms_of(runtime):
            if isinstance(norm, nn.Module):  # Skip absent and fused norms.
                modules[norm] = FusedNorm(norm, width, runtime.dtype, place).compute
        for module in runtime.hf_model.modules():
            if is_by_library(module):
                raise Unsupported("a library computes its maps")
            if isinstance(module, nn.Linear | Conv1D | CodedLinear):
                refuse_hooks(module)
                modules[module] = _map(module)
        for block in runtime.blocks:
            if block.rule is not None:
                modules |= _recurrence(block, block.rule, runtime.dtype)
            if block.experts is not None:
                modules |= _mixture(runtime, block, block.experts)
    except Unsupported as error:
        return str(error)
    fuse(runtime)
    for block in runtime.blocks:
        for module in (*block.parts.qkv, *(() if block.parts.mlp is None else block.parts.mlp.modules())):
            if isinstance(module, nn.Linear) and module not in modules:
                modules[module] = _map(module)
    for module, compute in modules.items():
        module.forward = partial(_unless_trained, compute, module.forward)
    runtime.row_invariant = True
    return None


def _unless_trained(compute: Callable[..., Any], otherwise: Callable[..., Any], x: Tensor, *others: Tensor) -> Any:
    return otherwise(x, *others) if x.requires_grad else compute(x, *others)


def _recurrence(block: Block, rule: StateRule, dtype: torch.dtype) -> dict[Any, Callable[..., Any]]:
    """Return the functions that replace the forward of the norms and maps inside a recurrence, by module.

    Raises: Unsupported: the kernels do not support the rule or one of its norms.
    """
    if not device_states.supports(rule.form):
        raise Unsupported(f"a recurrence of {rule.form} is computed by torch")
    parts = block.parts.beside or block.parts
    modules: dict[Any, Callable[..., Any]] = {}
    if parts.inner_norm is not None:
        refuse_hooks(parts.inner_norm)
        modules[parts.inner_norm] = partial(_gated_norm, parts.inner_norm, rule, norm_gating_of(parts.inner_norm, rule))
    if isinstance(rule, ValueSteps):
        modules[rule.step_map] = _map(rule.step_map)
        widths = (rule.form.n_low, rule.form.key_width, rule.form.key_width)
        for norm, width in zip(rule.low_norms, widths, strict=True):
            if norm is not None:
                modules[norm] = FusedNorm(norm, width, dtype, block.device).compute
    return modules


def _gated_norm(norm: Any, rule: StateRule, gating: int, read: Tensor, gates: Tensor) -> Tensor:
    before = gating == layout.GATED_BEFORE_NORM
    return device.gated_norm(read, gates, norm.weight, norm.variance_epsilon, rule.norm_width, before)


def _mixture(runtime: Runtime, block: Block, named: Experts) -> dict[Any, Callable[..., Any]]:
    """Return the functions that replace the forward of a mixture's router and of its experts, by module.

    The mixture's own module still computes the shared expert and adds it.

    Raises: Unsupported: the kernels do not support the experts or the router.
    """
    mlp = block.parts.mlp
    for module in mlp.modules():
        refuse_hooks(module)
    router, experts = mlp.get_submodule(named.router), mlp.get_submodule(named.experts)
    products = _products(runtime, experts, named)
    n_experts = router.weight.shape[0]
    routing, correction = routing_of(runtime.config, mlp, named, n_experts), correction_of(mlp)
    bias: Any = getattr(router, "bias", None)
    rounded = router.weight.dtype if named.rounds_logits else torch.float32
    chooser = chooser_of(mlp, named)
    # Some modules pass the correction to the module that chooses.
    inputs = (router.weight.new_zeros((1, router.weight.shape[1])), correction)
    answer = chooser(*inputs[: len(signature(chooser.forward).parameters)])
    is_reversed = in_order(answer) is not answer

    def chosen(hidden: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows: Any = hidden.flatten(0, -2).to(router.weight.dtype)
        logits = device.linear(rows, router.weight, bias, dtype=rounded)
        taken, weights = device_experts.choose(logits, correction, routing)
        return (taken, weights, logits) if is_reversed else (logits, weights, taken)

    def computed(hidden: Tensor, taken: Tensor, weights: Tensor) -> Tensor:
        taken, weights = taken.int().contiguous(), weights.contiguous()
        tiles = device_experts.shared_out(taken, n_experts)
        readers = taken
        if named.weighs_inputs:  # Each choice of a row reads the row times its weight.
            hidden, readers = (hidden[:, None] * weights[..., None].to(hidden.dtype)).flatten(0, 1), taken.view(-1, 1)
            weights = torch.ones_like(weights)
        return products(hidden, readers, taken, weights, *tiles)

    return {chooser: chosen, experts: computed}


# (inputs, experts that read each input, experts of each row, weights, order, tiles) -> sums of experts (rows, out).
_Products = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _products(runtime: Runtime, experts: Any, named: Experts) -> _Products:
    """Return the function that computes experts, from plain weights or from codes."""
    gate = _gate(runtime, experts, named)
    if isinstance(experts, BlockExperts):
        if "gate" not in experts.maps:
            raise Unsupported("experts by codes without a gate are computed by torch")
        maps = {part: _coded_stack(experts.maps[part]) for part in PARTS}
        biases_of_parts = [experts.biases.get(part) for part in PARTS]

        def by_codes(
            hidden: Tensor, readers: Tensor, taken: Tensor, weights: Tensor, order: Tensor, tiles: Tensor
        ) -> Tensor:
            halves = []
            for part, bias in zip(PARTS[:2], biases_of_parts, strict=False):
                stack, inputs = maps[part]
                read, by = (hidden, readers) if inputs is None else _in_order(hidden, inputs, readers)
                halves.append(device_experts.expert_linear(read, stack, bias, by, order, tiles))
            inner, (stack, inputs) = gate(torch.cat(halves, dim=-1)), maps["down"]
            inner = inner if inputs is None else _in_order(inner, inputs, taken.view(-1, 1))[0]
            return device_experts.mixed(inner, stack, biases_of_parts[2], taken, weights, order, tiles)

        return by_codes
    names = tuple(HALVES if runtime.family.gated else UNGATED)
    into, out = (_stack(experts, name, runtime.dtype, named.by_inputs) for name in names)
    into_bias, out_bias = (getattr(experts, f"{name}_bias", None) for name in names)

    def by_weights(
        hidden: Tensor, readers: Tensor, taken: Tensor, weights: Tensor, order: Tensor, tiles: Tensor
    ) -> Tensor:
        projected = device_experts.expert_linear(hidden, into, into_bias, readers, order, tiles)
        return device_experts.mixed(gate(projected), out, out_bias, taken, weights, order, tiles)

    return by_weights


def _coded_stack(maps: Sequence[Any]) -> tuple[device_codes.CodedMap, Tensor | None]:
    """Stack the maps of all experts; return the stack, and the orders of their inputs, (experts, in) or None.

    The experts' codes and scales become views of the stack.

    Raises: Unsupported: the kernels do not support such codes.
    """
    first = maps[0]
    if not all(
        isinstance(map_, PackedBlocks) or (isinstance(map_, CodedLinear) and map_.bias is None) for map_ in maps
    ):
        raise Unsupported("experts of such codes are computed by torch")
    if len({coded_map(map_)[2:] for map_ in maps}) > 1:
        raise Unsupported("experts of several codes are computed by torch")
    if isinstance(first, CodedLinear):
        refuse_group(first)
    stacks = [torch.stack([getattr(map_, name).data for map_ in maps]) for name in ("codes", "scales")]
    for name, stack in zip(("codes", "scales"), stacks, strict=True):
        for map_, view in zip(maps, stack, strict=True):
            getattr(map_, name).data = view
    orders = None
    orders_or_none = [getattr(map_, "order", None) for map_ in maps]
    if any(order is not None for order in orders_or_none):
        usual = torch.arange(first.n_in, device=first.codes.device)
        orders = torch.stack([usual if order is None else order.long() for order in orders_or_none])
    return coded_map(first)._replace(codes=stacks[0], scales=stacks[1]), orders


def coded_map(packed: CodedLinear | PackedBlocks) -> device_codes.CodedMap:
    """Describe packed weights to the kernels."""
    form = packed.form if isinstance(packed, PackedBlocks) else packed
    numbers = form.bits, form.group, packed.n_out, form.scale_type, form.table
    return device_codes.CodedMap(packed.codes.detach(), packed.scales.detach(), *numbers)


def _in_order(x: Tensor, orders: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each choice's input in its expert's order, (choices, in), and its expert, (choices, 1).

    Args: x: (rows, in). experts: (rows, chosen).
    """
    chosen = experts.flatten().long()
    return x.repeat_interleave(experts.shape[1], dim=0).gather(1, orders[chosen]), experts.view(-1, 1)


def _gate(runtime: Runtime, experts: Any, named: Experts) -> Callable[[Tensor], Tensor]:
    """Return the function of the outputs of gate and up, (rows, 2 inner), or of up alone, that the down map reads."""
    by_turns = named.alternating and not isinstance(experts, BlockExperts)
    if named.clamped:
        numbers = {"limit": float(experts.limit), "slope": float(experts.alpha)}
        return partial(device.gated, activation=device.CLAMPED, by_turns=by_turns, **numbers)
    if not runtime.family.gated:
        return gating_of(experts, named)
    activation = runtime.family.setting(runtime.config, "hidden_act")
    if activation in GATES:
        return partial(device.gated, activation=GATES[activation], by_turns=by_turns)
    gated = experts.gated if isinstance(experts, BlockExperts) else gating_of(experts, named)
    return lambda both: gated(*both.chunk(2, dim=-1))


def _stack(experts: nn.Module, name: str, dtype: torch.dtype, by_inputs: bool) -> Tensor:
    """Return the maps of experts as (experts, out, in); `by_inputs`: they are stored as (experts, in, out)."""
    weight = getattr(experts, name, None)
    if not isinstance(weight, Tensor) or weight.dim() != 3 or weight.dtype != dtype:
        raise Unsupported(f"experts such as {type(experts).__name__} are computed by torch")
    return weight.detach().transpose(1, 2) if by_inputs else weight.detach()


def _map(module: nn.Linear | Conv1D | CodedLinear) -> Callable[[Tensor], Tensor]:
    if isinstance(module, CodedLinear):
        refuse_group(module)
        return partial(_coded, module)
    return partial(_linear, module, turned=isinstance(module, Conv1D))


def _linear(module: Any, x: Tensor, turned: bool) -> Tensor:
    weight = module.weight.t() if turned else module.weight
    return device.linear(x.flatten(0, -2), weight, module.bias).view(*x.shape[:-1], -1)


def _coded(module: CodedLinear, x: Tensor) -> Tensor:
    rows_in_order = x.flatten(0, -2) if module.order is None else x.flatten(0, -2)[:, module.order]
    mapped = device_codes.coded_linear(rows_in_order, coded_map(module), module.bias)
    return mapped.view(*x.shape[:-1], -1)
