"""Probes what a norm computes: class names do not say whether the factor is w or 1 + w, or where epsilon is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .kernels.layout import LAYER, RMS, RMS_PLUS_ONE, RMS_WIDE

EPSILONS = ("variance_epsilon", "eps", "epsilon")  # Attribute names of epsilon in norm classes.
USUAL = (1e-5, 1e-6, 1e-8, 1e-12)  # Epsilons to try when no attribute holds it.
TOLERANCE = 1e-4  # Well above float32 rounding; a different kind of norm differs by at least 0.1.


@dataclass(frozen=True, slots=True)
class NormForm:
    """What a norm computes.

    kind: one of `kernels.layout`.
    eps: added to the mean square, or to the variance.
    weight: (n,), ones if the norm has none; (heads, n) for a norm by head with a weight for each head.
    bias: of the same shape, or None.
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


def _layer_plus_one(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _layer(x, 1 + weight, bias, eps)


LAYER_PLUS_ONE = -1  # Not a kind of the kernels: they get 1 + weight.
FORMS: dict[int, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    RMS: _rms,
    RMS_PLUS_ONE: _rms_plus_one,
    LAYER: _layer,
    LAYER_PLUS_ONE: _layer_plus_one,
}


# Cache: a norm's class, settings, tensors' names and shapes, width and number of heads -> (kind, epsilon).
_forms: dict[Any, tuple[int, float] | None] = {}


def form_of(norm: Any, width: int, dtype: torch.dtype, device: torch.device, n_heads: int = 0) -> NormForm | None:
    """Return what a norm of `width` values computes; None: none of `FORMS`.

    Args: dtype, device: of the ones that replace a missing weight. n_heads: for a norm by head, which reads (rows,
          heads, width) and may have a weight for each head, in one tensor or in a module per head.
    """
    named = [*norm.named_parameters(), *norm.named_buffers()]
    tensors = {name: tensor for name, tensor in named if tensor is not None}
    if any(leaf not in ("weight", "bias") for leaf in map(_leaf, tensors)):
        return None
    settings = {name: value for name, value in vars(norm).items() if not name.startswith("_")}
    plain = all(isinstance(value, int | float | str | tuple) for value in settings.values()) and not norm._modules
    key = (
        (
            type(norm),
            tuple(settings.items()),
            frozenset((name, tensor.shape) for name, tensor in tensors.items()),
            width,
            n_heads,
        )
        if plain
        else None
    )
    if key in _forms:
        kind_and_eps = _forms[key]
    else:
        # A norm with other attributes, such as its own forward, may differ from others of its class: do not cache it.
        kind_and_eps = _probed(norm, tensors, (n_heads or 1, width), device)
        if plain:
            _forms[key] = kind_and_eps
    if kind_and_eps is None:
        return None
    kind, eps = kind_and_eps
    weight, bias = (_joined(tensors, leaf) for leaf in ("weight", "bias"))
    if weight is None:
        weight = torch.ones(width, dtype=dtype, device=device)
    return NormForm(LAYER, eps, weight + 1, bias) if kind == LAYER_PLUS_ONE else NormForm(kind, eps, weight, bias)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _joined(tensors: Mapping[str, Tensor], leaf: str) -> Tensor | None:
    """Return a norm's weight or bias: (n,), or (heads, n) if there is a module for each head; None: it has none."""
    named = [tensor for name, tensor in tensors.items() if _leaf(name) == leaf]
    return torch.stack(named) if len(named) > 1 else named[0] if named else None


@torch.inference_mode(False)
def _probed(
    norm: Any, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
) -> tuple[int, float] | None:
    """Find a norm's kind and epsilon.

    Probe it in float32, with made-up weight and bias, on a row of ordinary values and one whose mean square is about
    epsilon.
    """
    place = next(iter(tensors.values())).device if tensors else device
    draw = torch.Generator().manual_seed(0)
    row = (torch.rand(shape, generator=draw) + 0.25).to(place)
    made = {name: (torch.rand(tensor.shape, generator=draw) + 0.25).to(place) for name, tensor in tensors.items()}
    weight, bias = (_joined(made, leaf) for leaf in ("weight", "bias"))
    if any(tensor is not None and tensor.shape not in (shape, shape[1:]) for tensor in (weight, bias)):
        return None
    weight = torch.ones_like(row) if weight is None else weight
    bias = torch.zeros_like(row) if bias is None else bias
    attributes = [getattr(part, name, None) for part in norm.modules() for name in EPSILONS]
    stated = [value for value in attributes if isinstance(value, float) and value > 0][:1]
    for eps in stated or USUAL:
        x = torch.stack((row - 0.5, row * eps**0.5))
        output = _called(norm, made, x)
        if output is None:
            return None
        for kind, compute in FORMS.items():
            if output.shape == x.shape and torch.allclose(output, compute(x, weight, bias, eps), TOLERANCE, TOLERANCE):
                return RMS_WIDE if kind == RMS and _is_wide(norm, made, row - 0.5, weight, eps) else kind, eps
    return None


def _called(norm: Any, made: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    # For inputs that require a gradient, the forward that row_invariant.py sets calls the original one.
    with torch.enable_grad():
        try:
            probe = x.clone().requires_grad_()
            return cast(Tensor, torch.func.functional_call(norm, dict(made), (probe,))).detach()
        except Exception:  # A module may raise anything for this probe.
            return None


def _is_wide(norm: Any, made: Mapping[str, Tensor], row: Tensor, weight: Tensor, eps: float) -> bool:
    """Tell whether an RMS norm in bfloat16 rounds only after the weight; Llama's also rounds before it."""
    half = {name: tensor.bfloat16() for name, tensor in made.items()}
    x, weight = row[None].bfloat16(), weight.bfloat16()
    output = _called(norm, half, x)
    if output is None or output.dtype != torch.bfloat16:
        return False
    scaled = _rms(x.float(), torch.ones_like(row), torch.zeros_like(row), eps)
    once, twice = (scaled * weight.float()).bfloat16(), scaled.bfloat16() * weight
    return int((output != once).sum()) < int((output != twice).sum())
