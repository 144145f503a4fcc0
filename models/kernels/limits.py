"""Refuses parts of a model that the kernels do not compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..block_maps import BlockLinear
from ..coded import GROUPS, CodedLinear
from ..norms import NormForm, form_of
from ..state_rules import DeltaRule, StateRule
from . import layout
from .layout import Unsupported


def known_form(norm: Any, width: int, dtype: torch.dtype, device: torch.device, n_heads: int = 0) -> NormForm:
    """Return what a norm of `width` values computes; see `form_of`.

    Raises: Unsupported: the kernels do not support this kind of norm.
    """
    form = form_of(norm, width, dtype, device, n_heads)
    if form is None:
        raise Unsupported(f"a norm such as {type(norm).__name__} is computed by torch")
    return form


def refuse_group(module: CodedLinear) -> None:
    """Raises: Unsupported: the kernels do not support groups of this size."""
    if module.group not in GROUPS and not isinstance(module, BlockLinear):
        raise Unsupported(f"groups of {module.group} weights are computed by torch")


def refuse_hooks(module: nn.Module) -> None:
    """Raises: Unsupported: the module has hooks, which the kernels would never call."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise Unsupported(f"a {type(module).__name__} with hooks is computed by torch")


def norm_gating_of(norm: Any, rule: StateRule) -> int:
    """Tell by a probe how a module norms and gates what heads read, as one of the kernels' ways.

    Raises: Unsupported: it computes something else.
    """
    if norm is None:
        return layout.GATED_ALONE
    weight: Tensor = norm.weight.detach()
    width, form = rule.norm_width, rule.form
    n_norms = 1 if isinstance(rule, DeltaRule) else form.n_heads * form.value_width // width
    eps = getattr(norm, "variance_epsilon", None)
    if eps is not None and weight.shape == (n_norms * width,):
        x = torch.linspace(-1.5, 1.5, 4 * n_norms * width).reshape(2, 2, n_norms * width).to(weight)
        given = norm(x[0], x[1]).float()
        value, gate = x[0].float(), F.silu(x[1].float())

        def unit(values: Tensor) -> Tensor:
            grouped = values.view(2, n_norms, width)
            scale: Tensor = (grouped.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
            return (grouped * scale).flatten(1) * weight.float()

        ways = {layout.GATED_AFTER_NORM: unit(value) * gate, layout.GATED_BEFORE_NORM: unit(value * gate)}
        for way, expected in ways.items():
            if torch.allclose(given, expected, rtol=2e-2, atol=2e-2):
                return way
    raise Unsupported(f"a norm such as {type(norm).__name__} is computed by torch")
