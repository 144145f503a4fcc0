"""Finds by probing what a norm computes: class names do not say whether the weight is 1 + w or where epsilon goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kernels.layout import LAYER, RMS, RMS_PLUS_ONE

EPSILONS = ("variance_epsilon", "eps", "epsilon")  # Attribute names of epsilon in norm classes.
USUAL = (1e-5, 1e-6, 1e-8, 1e-12)  # Epsilons to try when no attribute holds it.
TOLERANCE = 1e-4  # Well above float32 rounding; a different kind of norm differs by at least 0.1.


@dataclass(frozen=True, slots=True)
class NormForm:
    """`kind` is one of `kernels.layout`; `weight` is (n,), ones where there is none, and `bias` (n,) or None.

    `eps` is added to the mean square, or to the variance.
    """

    kind: int
    eps: float
    weight: Tensor
    bias: Tensor | None


def _rms(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight


def _rms_plus_one(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _rms(x, 1 + weight, bias, eps)


def _layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _rms(x - x.mean(dim=-1, keepdim=True), weight, bias, eps) + bias


FORMS: dict[int, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    RMS: _rms,
    RMS_PLUS_ONE: _rms_plus_one,
    LAYER: _layer,
}


# Cached (kind, epsilon) by a norm's class, settings, tensor names and width.
_forms: dict[Any, tuple[int, float] | None] = {}


def form_of(norm: Any, width: int, dtype: torch.dtype, device: torch.device) -> NormForm | None:
    """Return what a norm of `width` values computes; None where that is none of `FORMS`.

    `dtype` and `device` are those of the ones where it has no weight.
    """
    tensors = {name: tensor for name, tensor in (*norm.named_parameters(), *norm.named_buffers()) if tensor is not None}
    if not tensors.keys() <= {"weight", "bias"}:
        return None
    settings = {name: value for name, value in vars(norm).items() if not name.startswith("_")}
    plain = all(isinstance(value, int | float | str | tuple) for value in settings.values())
    key = (type(norm), tuple(settings.items()), frozenset(tensors), width) if plain else None
    if key in _forms:
        kind_and_eps = _forms[key]
    else:
        # Do not cache a norm with other attributes, such as its own forward: it may differ from others of its class.
        kind_and_eps = _probed(norm, list(tensors), width, next(iter(tensors.values())).device if tensors else device)
        if plain:
            _forms[key] = kind_and_eps
    if kind_and_eps is None:
        return None
    kind, eps = kind_and_eps
    weight = tensors["weight"] if "weight" in tensors else torch.ones(width, dtype=dtype, device=device)
    return NormForm(kind, eps, weight, tensors.get("bias"))


def _probed(norm: Any, own: list[str], width: int, place: torch.device) -> tuple[int, float] | None:
    """Find a norm's kind and epsilon.

    Probe it in float32, with made-up weight and bias, on a row of ordinary values and one whose mean square is about
    epsilon.
    """
    draw = torch.Generator().manual_seed(0)
    row, weight, bias = ((torch.rand(width, generator=draw) + 0.25).to(place) for _ in range(3))
    given = [getattr(norm, name, None) for name in EPSILONS]
    stated = [value for value in given if isinstance(value, float) and value > 0][:1]
    made = {"weight": weight, "bias": bias}
    weight = weight if "weight" in own else torch.ones_like(row)
    bias = bias if "bias" in own else torch.zeros_like(row)
    for eps in stated or USUAL:
        x = torch.stack((row - 0.5, row * eps**0.5))[:, None]
        # The forward set by row_invariant.py passes inputs that require a gradient on to the original one.
        with torch.inference_mode(False), torch.enable_grad():
            try:
                output = torch.func.functional_call(
                    norm, {name: made[name] for name in own}, (x.clone().requires_grad_(),)
                ).detach()
            except Exception:  # A module may raise anything for this probe.
                return None
        for kind, compute in FORMS.items():
            if output.shape == x.shape and torch.allclose(output, compute(x, weight, bias, eps), TOLERANCE, TOLERANCE):
                return kind, eps
    return None
