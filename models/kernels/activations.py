"""Describes activations to the library."""

from __future__ import annotations

import ctypes
from typing import Any

import torch.nn.functional as F
from torch import nn

from . import layout

ACTIVATIONS = {
    "silu": layout.SILU,
    "swish": layout.SILU,
    "gelu": layout.GELU,
    "gelu_new": layout.GELU_TANH,
    "gelu_fast": layout.GELU_TANH,
    "gelu_pytorch_tanh": layout.GELU_TANH,
    "relu": layout.RELU,
    "relu2": layout.RELU_SQUARED,
    "xielu": layout.XIELU,
}


def curve_of(mlp: nn.Module, activation: int) -> Any:
    """Return the parameters of an MLP's learned activation (XIELU); zeros for other activations."""
    numbers = [0.0] * 4
    for module in mlp.modules() if activation == layout.XIELU else ():
        if hasattr(module, "alpha_p"):
            learned: Any = module
            positive, negative = (F.softplus(alpha.float()) for alpha in (learned.alpha_p, learned.alpha_n))
            beta, eps = float(learned.beta), float(learned.eps)
            numbers = [float(positive), beta + float(negative), beta, eps]
    return (ctypes.c_float * 4)(*numbers)
