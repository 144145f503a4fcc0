"""Passes on a CUDA device by our Triton kernels: norms alone, or all sums, so that no row depends on others.

A drafted completion then equals plain decoding's in bfloat16, too. Torch computes only element-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .coded import CodedLinear
from .kernels import device, layout
from .kernels.native import Unsupported, known_form, refuse_group, refuse_hooks
from .quantised_checkpoints import is_by_library
from .runtime import Runtime

HEAD_NORMS = ("q_norm", "k_norm")
NORMS = ("attn_norm", "attn_post", *HEAD_NORMS, "mlp_norm", "mlp_post")  # Names of a layer's norm modules.


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
    modules: dict[Any, Callable[[Tensor], Tensor]] = {}
    try:
        for norm, width, place in _norms(runtime):
            if isinstance(norm, nn.Module):  # Skip absent and fused norms.
                modules[norm] = _norm(norm, width, runtime.dtype, place)
        for module in runtime.hf_model.modules():
            if is_by_library(module):
                raise Unsupported("a library computes its maps")
            if isinstance(module, nn.Linear | Conv1D | CodedLinear):
                refuse_hooks(module)
                modules[module] = _map(module)
    except Unsupported as error:
        return str(error)
    for module, compute in modules.items():
        module.forward = partial(_unless_trained, compute, module.forward)
    runtime.row_invariant = True
    return None


def fuse_norms(runtime: Runtime) -> None:
    """Compute each of a runtime's norms by one kernel instead of torch's eight; the model's modules do not change."""

    def fused(norm: Any, width: int, place: torch.device) -> Any:
        with suppress(Unsupported):
            if isinstance(norm, nn.Module):
                return partial(_unless_trained, _norm(norm, width, runtime.dtype, place), norm)
        return norm

    final, *of_layers = (fused(*norm) for norm in _norms(runtime))
    runtime.final_norm = final
    made = iter(of_layers)
    for block in runtime.blocks:
        block.parts = replace(block.parts, **{name: next(made) for name in NORMS})


def _norms(runtime: Runtime) -> Iterator[tuple[Any, int, torch.device]]:
    """Yield the final norm and then those of each layer by `NORMS`, with the values of each and its device."""
    hidden = int(runtime.config.hidden_size)
    yield runtime.final_norm, hidden, runtime.norm_device
    for block in runtime.blocks:
        for name in NORMS:
            yield getattr(block.parts, name), block.heads.width if name in HEAD_NORMS else hidden, block.device


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


def _norm(module: nn.Module, width: int, dtype: torch.dtype, place: torch.device) -> Callable[[Tensor], Tensor]:
    refuse_hooks(module)
    form = known_form(module, width, dtype, place)
    return partial(
        device.norm,
        weight=form.weight,
        bias=form.bias,
        eps=form.eps,
        centred=form.kind == layout.LAYER,
        plus_one=form.kind == layout.RMS_PLUS_ONE,
    )
