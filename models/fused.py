"""Fewer kernels per layer on a CUDA device, for the speeds `graphs` and `exact`.

Linear maps of the same input become one. A gate's activation and product are one kernel, and so are an addition to the
residual stream and the norm after it. Without that, a pass over one row of a 13B model takes 688 kernels, and a quarter
of its time is not spent on weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Block, LayerModules, has_experts
from .family import Family
from .kernels import device, layout
from .kernels.layout import Unsupported
from .kernels.limits import known_form, refuse_hooks
from .runtime import Runtime

HEAD_NORMS = ("q_norm", "k_norm")
NORMS = (
    "attn_norm",
    "attn_post",
    *HEAD_NORMS,
    "inner_norm",
    "mlp_norm",
    "mlp_post",
)  # Names of a layer's norm modules.
GATES = {"silu": device.SILU, "gelu_pytorch_tanh": device.GELU_TANH}  # Activations that the gate's kernel computes.


class FusedNorm:
    """A norm computed by one kernel, which can also compute the addition before it.

    Raises: Unsupported: no kernel computes this norm.
    """

    def __init__(self, module: nn.Module, width: int, dtype: torch.dtype, place: torch.device) -> None:
        refuse_hooks(module)
        form = known_form(module, width, dtype, place)
        if form.weight.dim() > 1:
            raise Unsupported("a norm with a weight for each head is computed by torch")
        self.module, self._form = module, form
        self._kind = {"centred": form.kind == layout.LAYER, "plus_one": form.kind == layout.RMS_PLUS_ONE}
        self._kind["wide"] = form.kind == layout.RMS_WIDE

    def compute(self, x: Tensor) -> Tensor:
        return device.norm(x, self._form.weight, self._form.bias, self._form.eps, **self._kind)

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = self.module(x) if x.requires_grad else self.compute(x)
        return normed

    def after(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of two tensors (rows, n), and the norm of the sum."""
        return device.added_norm(hidden, added, self._form.weight, self._form.bias, self._form.eps, **self._kind)


class GatedMlp(nn.Module):
    """A gated MLP with one input map, to gate and then up; activation and product are one kernel."""

    def __init__(self, into: nn.Module, down: nn.Module, activation: str) -> None:
        super().__init__()
        self.into, self.down_proj, self._kernel = into, down, GATES.get(activation)
        from transformers.activations import ACT2FN

        self._activation: Callable[[Tensor], Tensor] = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        projected = self.into(x)
        if self._kernel is None or projected.requires_grad:
            gate, up = projected.chunk(2, dim=-1)
            inner = self._activation(gate) * up
        else:
            inner = device.gated(projected, self._kernel)
        out: Tensor = self.down_proj(inner)
        return out


def fuse(runtime: Runtime) -> None:
    """Let a runtime compute its layers with fewer kernels; weights of its modules become views of joined ones."""
    join_maps(runtime)
    final, *of_layers = (_fused_norm(*norm, runtime.dtype) for norm in norms_of(runtime))
    runtime.final_norm = final
    made = iter(of_layers)
    for block in runtime.blocks:
        block.parts = replace(block.parts, **{name: next(made) for name in norm_names(block)})
    runtime.weights_moved()


def _fused_norm(norm: Any, width: int, place: torch.device, dtype: torch.dtype) -> Any:
    with suppress(Unsupported):
        if isinstance(norm, nn.Module):
            return FusedNorm(norm, width, dtype, place)
    return norm


def norm_names(block: Block) -> Sequence[str]:
    """Return the names of a layer's norms; the norm inside a recurrence, which also takes gates, is none of them."""
    return NORMS if block.has_attention else [name for name in NORMS if name != "inner_norm"]


def norms_of(runtime: Runtime) -> Iterator[tuple[Any, int, torch.device]]:
    """Yield the final norm, and then those of each layer as `norm_names`, each with its width and device."""
    hidden = int(runtime.config.hidden_size)
    yield runtime.final_norm, hidden, runtime.norm_device
    for block in runtime.blocks:
        for name in norm_names(block):
            yield getattr(block.parts, name), _width_of(name, block, hidden), block.device


def _width_of(norm: str, block: Block, hidden: int) -> int:
    heads = block.heads
    if heads.latent is not None and norm in HEAD_NORMS:
        return heads.latent.query_rank if norm == "q_norm" else heads.latent.rank
    of_all = {"q_norm": heads.n_heads, "k_norm": heads.n_kv_heads, "inner_norm": heads.n_heads}
    if norm not in of_all:
        return hidden
    return heads.width if norm in HEAD_NORMS and block.head_norm != "whole" else of_all[norm] * heads.width


@torch.inference_mode(False)
@torch.no_grad()
def join_maps(runtime: Runtime) -> None:
    """Join each layer's plain linear maps of one input: queries, keys and values; gate and up."""
    for block in runtime.blocks:
        block.parts = _joined_layer(block, runtime.family, runtime.family.setting(runtime.config, "hidden_act"))


def _joined_layer(block: Block, family: Family, activation: str) -> LayerModules:
    from transformers.activations import ACT2FN

    parts = block.parts
    if (qkv := joined(parts.qkv)) is not None:
        parts = replace(parts, qkv=(qkv,))
    is_usual = family.gated and not family.mlp_inner_norm and not family.mlp_scales and not has_experts(parts.mlp)
    if not is_usual or parts.mlp is None or activation not in ACT2FN or isinstance(parts.mlp, GatedMlp):
        return parts
    with suppress(Unsupported):
        for module in parts.mlp.modules():
            refuse_hooks(module)
        if (into := joined([getattr(parts.mlp, name) for name in family.mlp_in])) is not None:
            parts = replace(parts, mlp=GatedMlp(into, getattr(parts.mlp, family.mlp_out), activation))
    return parts


def joined(maps: Sequence[Any]) -> nn.Linear | None:
    """Join linear maps of one input; None: they are not plain, or there is only one.

    Their weights and biases become views of the joined ones.
    """
    with suppress(Unsupported):
        for module in maps:
            refuse_hooks(module)
        plain = all(type(module) is nn.Linear and module.weight.is_contiguous() for module in maps)
        if len(maps) < 2 or not plain:
            return None
        if len({(module.weight.dtype, module.weight.device, module.bias is None) for module in maps}) > 1:
            return None
        whole = nn.Linear(1, 1, bias=maps[0].bias is not None, device="meta")
        whole.in_features, whole.out_features = maps[0].in_features, sum(module.out_features for module in maps)
        for name in ("weight", "bias"):
            if getattr(whole, name) is not None:
                whole.register_parameter(name, _joined_parameter([getattr(module, name) for module in maps]))
        return whole.eval()
    return None


def _joined_parameter(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return nn.Parameter(whole, requires_grad=False)
