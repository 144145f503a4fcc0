"""Passes on a CUDA device by our Triton kernels, which sum each row in one order, so that no row depends on others.

A drafted completion then equals plain decoding's in bfloat16, too. Torch computes only element-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .blocks import has_experts
from .coded import CodedLinear
from .fused import FusedNorm, fuse, norms_of
from .kernels import device
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
    if any(has_experts(block.parts.mlp) for block in runtime.blocks):
        return "torch computes its experts"
    if not runtime.has_only_attention:
        return "torch computes its short convolutions"
    modules: dict[Any, Callable[[Tensor], Tensor]] = {}
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


def _unless_trained(compute: Callable[[Tensor], Tensor], otherwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return otherwise(x) if x.requires_grad else compute(x)


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
