"""The end of a layer after its sub-layers: a term from per-layer inputs (Gemma 4), and a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from .family import Family


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Per-layer inputs: a vector of `width` values for each token and layer, which depends on the token only.

    It is (norm(map_scale · project(embedding)) + row of `embed`) · sum_scale.
    """

    embed: Any
    project: Any
    norm: Any
    n_layers: int
    width: int
    map_scale: float
    sum_scale: float

    @classmethod
    def of(cls, model: nn.Module, family: Family, config: Any) -> PerLayerInputs | None:
        """Return the per-layer inputs of a model; None: it has none."""
        named = family.layer_inputs
        width = 0 if named is None else named.width(config)
        if named is None or not width:
            return None
        embed, project, norm = (model.get_submodule(name) for name in (named.embed, named.project, named.norm))
        map_scale = int(config.hidden_size) ** -0.5
        return cls(embed, project, norm, int(config.num_hidden_layers), width, map_scale, sum_scale=0.5**0.5)

    def modules(self) -> Iterator[Any]:
        yield from (self.embed, self.project, self.norm)

    def of_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the tokens' rows of `embed`, (rows, layers * width)."""
        return cast(Tensor, self.embed(token_ids))

    def joined(self, embedded: Tensor, of_tokens: Tensor) -> Tensor:
        """Return the inputs (rows, layers * width) of tokens.

        Args: embedded: their embeddings (rows, hidden_size). of_tokens: as `of_tokens` returns them.
        """
        projected = (self.project(embedded) * self.map_scale).view(-1, self.n_layers, self.width)
        joined: Tensor = (self.norm(projected) + of_tokens.view_as(projected)) * self.sum_scale
        return joined.flatten(1)


@dataclass(frozen=True, slots=True)
class LayerEnding:
    """What a layer computes after its sub-layers, also if a draft skips these.

    The output is (x + after(out(activation(gate(x)) · inputs of the layer))) · scale. Without `gate` the second term is
    missing; without `scale`, a tensor (1,), the factor is 1.
    """

    index: int
    gate: Any = None
    out: Any = None
    after: Any = None
    activation: Any = None
    scale: Tensor | None = None

    @classmethod
    def of(cls, layer: nn.Module, index: int, family: Family, config: Any) -> LayerEnding | None:
        """Return the end of a decoder layer; None: it ends with its sub-layers."""
        scale = None if family.layer_scale is None else getattr(layer, family.layer_scale)
        named = family.layer_inputs
        if named is not None and named.width(config):
            names = named.gate, named.out, named.after, named.activation
            gate, out, after, activation = (layer.get_submodule(name) for name in names)
            return cls(index, gate, out, after, activation, scale)
        return None if scale is None else cls(index, scale=scale)

    def modules(self) -> Iterator[Any]:
        yield from (self.gate, self.out, self.after, self.activation)

    def ended(self, states: Tensor, inputs: Tensor | None) -> Tensor:
        """Return the states (rows, hidden_size) after the layer. Args: inputs: (rows, layers * width) or None."""
        if self.activation is not None:
            assert inputs is not None
            inner = self.activation(self.gate(states))
            width = inner.shape[-1]
            vectors = inputs[:, self.index * width : (self.index + 1) * width].to(inner.device)
            states = states + self.after(self.out(inner * vectors))
        return states if self.scale is None else states * self.scale


Held = TypeVar("Held", PerLayerInputs, LayerEnding)


def with_map(holder: Held, old: nn.Module, new: nn.Module) -> Held:
    """Return a copy of `holder` with one linear map replaced."""
    changed: dict[str, Any] = {part.name: new for part in fields(holder) if getattr(holder, part.name) is old}
    return replace(holder, **changed) if changed else holder
