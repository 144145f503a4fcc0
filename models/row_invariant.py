"""Passes on a CUDA device by our Triton kernels, which sum each row in one order, so that no row depends on others.

A drafted completion then equals plain decoding's in bfloat16, too. Torch computes only element-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .block_experts import gating_of
from .blocks import Block, in_order
from .coded import CodedLinear
from .expert_choice import chooser_of
from .family import Experts
from .fused import GATES, FusedNorm, fuse, norms_of
from .kernels import device, device_experts
from .kernels.experts import choosing_of, correction_of
from .kernels.layout import Unsupported
from .kernels.limits import refuse_group, refuse_hooks
from .quantised_checkpoints import is_by_library
from .runtime import Runtime


def make_row_invariant(runtime: Runtime) -> str | None:
    """Compute a runtime's passes by the row-invariant kernels; return why they cannot, or None.

    If they cannot, nothing is changed. The model's modules use these kernels wherever they are called, except for
    inputs that require a gradient.
    """
    if reason := device.obstacle():
        return reason
    if runtime.dtype not in device.DTYPES:
        return f"they do not compute in {runtime.dtype_name}"
    places = sorted({parameter.device.type for parameter in runtime.hf_model.parameters()})
    if len(places) > 1:
        return f"the model lies on {' and '.join(places)}"
    if not runtime.has_only_attention:
        return "torch computes its short convolutions"
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
            if block.experts is not None:
                modules |= _mixture(runtime, block, block.experts)
    except Unsupported as error:
        return str(error)
    fuse(runtime)
    for block in runtime.blocks:
        for module in (*block.parts.qkv, *block.parts.mlp.modules()):
            if isinstance(module, nn.Linear) and module not in modules:
                modules[module] = _map(module)
    for module, compute in modules.items():
        module.forward = partial(_unless_trained, compute, module.forward)
    runtime.row_invariant = True
    return None


def _unless_trained(compute: Callable[..., Any], otherwise: Callable[..., Any], x: Tensor, *others: Tensor) -> Any:
    return otherwise(x, *others) if x.requires_grad else compute(x, *others)


def _mixture(runtime: Runtime, block: Block, named: Experts) -> dict[Any, Callable[..., Any]]:
    """Return what computes a mixture's choice of experts, and what computes the experts, by their modules.

    The rest of a mixture, its shared experts and its sums, is left to its own module.

    Raises: Unsupported: experts or their choice have a form that the kernels do not compute.
    """
    mlp = block.parts.mlp
    for module in mlp.modules():
        refuse_hooks(module)
    router, experts = mlp.get_submodule(named.router), mlp.get_submodule(named.experts)
    into, out = (_stack(experts, name, runtime.dtype, named.by_inputs) for name in ("gate_up_proj", "down_proj"))
    how, correction = choosing_of(runtime.config, mlp, named, len(into)), correction_of(mlp)
    bias: Any = getattr(router, "bias", None)
    rounded = router.weight.dtype if named.rounds_logits else torch.float32
    chooser = chooser_of(mlp, named)
    # Some modules give the correction to the one that chooses.
    inputs = (router.weight.new_zeros((1, router.weight.shape[1])), correction)
    answer = chooser(*inputs[: len(signature(chooser.forward).parameters)])
    is_reversed = in_order(answer) is not answer

    def chosen(hidden: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows: Any = hidden.flatten(0, -2).to(router.weight.dtype)
        logits = device.linear(rows, router.weight, bias, dtype=rounded)
        taken, weights = device_experts.choose(logits, correction, how)
        return (taken, weights, logits) if is_reversed else (logits, weights, taken)

    biases = {name: getattr(experts, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")}
    gate = _gate(runtime, experts, named)

    def computed(hidden: Tensor, taken: Tensor, weights: Tensor) -> Tensor:
        taken, weights = taken.int().contiguous(), weights.contiguous()
        tiles = device_experts.shared_out(taken, len(into))
        readers = taken
        if named.weighs_inputs:  # Each choice has an input of its own.
            hidden, readers = (hidden[:, None] * weights[..., None].to(hidden.dtype)).flatten(0, 1), taken.view(-1, 1)
            weights = torch.ones_like(weights)
        both = device.expert_linear(hidden, into, biases["gate_up_proj"], readers, *tiles)
        return device_experts.mixed(gate(both), out, biases["down_proj"], taken, weights, *tiles)

    return {chooser: chosen, experts: computed}


def _gate(runtime: Runtime, experts: Any, named: Experts) -> Callable[[Tensor], Tensor]:
    """Return what experts make of the outputs of their first maps."""
    if named.clamped:
        numbers = {"limit": float(experts.limit), "slope": float(experts.alpha)}
        return partial(device.gated, activation=device.CLAMPED, by_turns=named.alternating, **numbers)
    activation = runtime.family.setting(runtime.config, "hidden_act")
    if activation in GATES:
        return partial(device.gated, activation=GATES[activation], by_turns=named.alternating)
    gated = gating_of(experts, named)
    return lambda both: gated(*both.chunk(2, dim=-1))


def _stack(experts: nn.Module, name: str, dtype: torch.dtype, by_inputs: bool) -> Tensor:
    """Return the maps (experts, out, in) of experts; `by_inputs`: they lie as (experts, in, out)."""
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
    codes, scales = module.codes, module.scales
    mapped = device.coded_linear(
        rows_in_order, codes, scales, module.bits, module.group, module.n_out, True, module.bias
    )
    return mapped.view(*x.shape[:-1], -1)
