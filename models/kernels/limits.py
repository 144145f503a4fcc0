"""Refuses parts of a model that the kernels do not compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..block_maps import BlockLinear
from ..coded import GROUPS, CodedLinear
from ..norms import NormForm, form_of
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
