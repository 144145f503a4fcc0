"""Describes the ends of layers, and per-layer inputs, to the library; see `ends.h`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..layer_inputs import LayerEnding, PerLayerInputs
from . import layout

NormOf = Callable[..., layout.Norm]
MapOf = Callable[[Any], layout.Map]


def end_of(end: LayerEnding, norm_of: NormOf, map_of: MapOf, activation: int) -> layout.LayerEnd:
    scale = 1.0 if end.scale is None else float(end.scale)
    gate, out = (layout.Map() if module is None else map_of(module) for module in (end.gate, end.out))
    mlp = layout.Mlp(activation=activation, gate_scale=1.0)
    return layout.LayerEnd(norm_of(end.after), gate, out, mlp, scale)


def inputs_of(inputs: PerLayerInputs, norm_of: NormOf, map_of: MapOf) -> layout.LayerInputs:
    norm, project = norm_of(inputs.norm, inputs.width), map_of(inputs.project)
    return layout.LayerInputs(norm, project, inputs.map_scale, inputs.sum_scale, inputs.width)
