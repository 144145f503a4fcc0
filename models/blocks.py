"""Computes what a decoder layer's attention and its MLP each add to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import UnsupportedModel
from ..core.layer_sets import KINDS, LayerSet
from .buffer import KVBuffer
from .coded import CodedLinear
from .coded_values import trimmed
from .config_layout import AttentionWindow, heads_of, key_sources
from .convolutions import gated_convolution
from .family import Family, GatedDelta, Mixer, Selective, SelectiveScan, ShortConv, names_in
from .heads import attend, split_gates, split_heads
from .latents import heads_of_latents, values_of_latents
from .layer_inputs import LayerEnding
from .mixtures import NormedMixture, mlp_beside_experts, weighed_inputs
from .recurrent import RecurrentStates, StateRows
from .rotation import RotaryTables, joined_rotation, rotate
from .state_rules import DeltaRule, StateRule, StateSpace, ValueSteps

LINEAR = nn.Linear | Conv1D | CodedLinear  # Linear maps that can be quantised.
PLAIN_LINEAR = {"Linear", "Conv1D", "FalconLinear"}  # Names of classes that compute x · weight + bias, and no more.


def submodule(root: nn.Module, names: str | None) -> Any:
    """Return a part of a model by its names in a row of `FAMILIES`; None: the model lacks it, and the row allows that.

    Raises: AttributeError: the model lacks a part that the row requires.
    """
    if names is None:
        return None
    for name in names_in(names):
        parent_name, _, leaf = name.rpartition(".")
        module = getattr(root.get_submodule(parent_name), leaf, None) if leaf else root
        if module is not None:
            return None if isinstance(module, nn.Identity) else module
    return None if names.endswith("?") else root.get_submodule(names_in(names)[0])


@dataclass(slots=True)
class RowGroup:
    """Rows of one sequence that a sub-layer runs on, and the slots they attend to; shared by all layers of a pass.

    `spans` says where keys and values are written: consecutive parts of the group, each as (first row in the group,
    first slot, length). `mask` is as for `attend`, over slots start … end - 1. `before` says where the last tokens lie
    that a convolution reads for a row; see `places_of`. `seen` and `is_text` are as in `Rows`.
    """

    rotation: RotaryTables | None
    spans: tuple[tuple[int, int, int], ...]
    start: int
    end: int
    mask: Tensor | None
    before: Tensor | None = None
    seen: Tensor | None = None
    is_text: bool = False

    @property
    def n_rows(self) -> int:
        return sum(length for _, _, length in self.spans)


class LayerRows(Protocol):
    """The rows of any number of sequences that a layer runs on.

    `rotation` has the rows of the rotary tables; None: `attend` rotates queries and keys itself, or nothing is rotated.
    """

    rotation: RotaryTables | None

    def attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the rows' keys and values, if the layer has its own; return heads' outputs (rows, heads * width)."""
        ...

    def convolution(self, block: Block, conv: Any, projected: Tensor) -> Tensor:
        """Write the rows' gated values; return what a short convolution and its gates give, (rows, values).

        Args: projected: (rows, 3 * values), see `gated_convolution`.
        """
        ...

    def recurrence_convolved(self, block: Block, inputs: Tensor) -> Tensor:
        """Return what the convolution of a recurrent layer gives for each row, (rows, values); write nothing.

        Args: inputs: the rows' own, (rows, values).
        """
        ...

    def recurrence(self, block: Block, inputs: Tensor) -> Tensor:
        """Advance a recurrent layer's state by inputs (rows, values); return its outputs (rows, heads * width)."""
        ...


@dataclass(frozen=True, slots=True)
class LayerModules:
    """Modules of a layer; None for each that it lacks.

    `latents` are the maps from latents to heads: of queries, and of keys and values; `q_norm` and `k_norm` are then the
    norms of these latents. `beside` has the modules of a mixer that runs in parallel to attention.
    """

    attn_norm: Any = None
    qkv: tuple[Any, ...] = ()
    latents: tuple[Any, ...] = ()
    q_norm: Any = None
    k_norm: Any = None
    v_norm: Any = None
    inner_norm: Any = None
    out: Any = None
    attn_post: Any = None
    mlp_norm: Any = None
    mlp: Any = None
    mlp_post: Any = None
    conv: Any = None
    mixer: Any = None
    beside: LayerModules | None = None

    def modules(self) -> Iterator[Any]:
        """Yield every module; None where the layer lacks it."""
        for part in fields(self):
            value = getattr(self, part.name)
            is_nested = isinstance(value, LayerModules)
            yield from value.modules() if is_nested else value if isinstance(value, tuple) else (value,)

    def with_map(self, old: nn.Module, new: nn.Module) -> LayerModules:
        """Return the modules with one linear map of the token mixers replaced."""
        if not any(module is old for module in self.maps()):
            return self
        qkv, latents = (tuple(new if map_ is old else map_ for map_ in maps) for maps in (self.qkv, self.latents))
        beside = None if self.beside is None else self.beside.with_map(old, new)
        return replace(self, qkv=qkv, latents=latents, out=new if self.out is old else self.out, beside=beside)

    def maps(self) -> list[Any]:
        """Return the linear maps of the layer's token mixers: attention, a convolution or a recurrence."""
        linear_maps = [] if self.out is None else [*self.qkv, *filter(None, self.latents), self.out]
        return linear_maps if self.beside is None else [*linear_maps, *self.beside.maps()]


def queries_keys_values(
    block: Block, parts: LayerModules, normed: Tensor, rotation: RotaryTables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries (rows, heads, width), keys and values (rows, kv_heads, width) of normed states.

    kv_heads is 0 if the layer reads another layer's keys and values.
    """
    return rotated_heads(block, parts, [project(normed) for project in parts.qkv], rotation)


def rotated_heads(
    block: Block, parts: LayerModules, projected: Sequence[Tensor], rotation: RotaryTables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `queries_keys_values`, given the outputs of the projections."""
    if block.heads.latent is not None:
        query, key = heads_of_latents(block.heads, (parts.q_norm, parts.k_norm), parts.latents, projected)
        value = key
    else:
        query, key, value = split_heads(block.heads, projected)
    is_normed, kind = parts.q_norm is not None and (parts.k_norm is not None or not key.numel()), block.head_norm
    if is_normed and kind == "whole":
        query = parts.q_norm(query.flatten(1)).view_as(query)
        key = parts.k_norm(key.flatten(1)).view_as(key)
    elif is_normed and kind == "by_head":
        query, key = parts.q_norm(query), parts.k_norm(key) if key.numel() else key
    if parts.v_norm is not None:
        value = parts.v_norm(value)
    if block.clip is not None:
        query, key, value = (part.clamp(-block.clip, block.clip) for part in (query, key, value))
    if rotation is not None:
        query, key = rotate(query, rotation), rotate(key, rotation)
    if is_normed and kind == "rotated":
        query, key = parts.q_norm(query), parts.k_norm(key)
    if rotation is not None and rotation.query_scale is not None:
        query = (query * rotation.query_scale).to(query.dtype)
    return query, key, value if block.heads.latent is None else key


def attention_out(block: Block, parts: LayerModules, mixed: Tensor) -> Tensor:
    """Return attention's output (rows, hidden_size), given its heads' outputs (rows, heads * width)."""
    if block.heads.latent is not None:
        mixed = values_of_latents(block.heads, parts.latents[1], mixed)
    out = cast(Tensor, parts.out(mixed if parts.inner_norm is None else parts.inner_norm(mixed)))
    return out if parts.attn_post is None else cast(Tensor, parts.attn_post(out))


def convolved(block: Block, parts: LayerModules, normed: Tensor, rows: LayerRows) -> Tensor:
    """Return the output of a gated short convolution for normed states (rows, hidden_size)."""
    out = cast(Tensor, parts.out(rows.convolution(block, parts.conv, parts.qkv[0](normed))))
    return out if parts.attn_post is None else cast(Tensor, parts.attn_post(out))


def recalled(block: Block, parts: LayerModules, normed: Tensor, rows: LayerRows) -> Tensor:
    """Return the output of a recurrent layer for normed states (rows, hidden_size)."""
    rule = block.rule
    assert rule is not None
    projected = torch.cat([project(normed) for project in parts.qkv], dim=-1)
    inputs, gates = projected[:, rule.input_order], projected[:, rule.gate_order]
    if isinstance(rule, ValueSteps):
        inputs = trimmed(inputs) if rule.form.codes_values(inputs.dtype) else inputs
        inputs = torch.cat((inputs, rule.selected(rows.recurrence_convolved(block, inputs))), dim=-1)
    mixed = rule.gated(parts.inner_norm, rows.recurrence(block, inputs), gates)
    if block.head_order is not None:
        mixed = mixed.view(len(normed), rule.form.n_heads, -1)[:, block.head_order].flatten(1)
    out = cast(Tensor, parts.out(mixed))
    out = out if parts.attn_post is None else cast(Tensor, parts.attn_post(out))
    return out if rule.out_scale == 1.0 else out * rule.out_scale


def has_experts(mlp: nn.Module) -> bool:
    """Tell whether a layer's MLP is a mixture of experts."""
    return isinstance(getattr(mlp, "experts", None), nn.Module)


def mlp_out(parts: LayerModules, normed: Tensor) -> Tensor:
    if has_experts(parts.mlp):  # Such a module takes (batch, rows, hidden_size); it may also return router scores.
        mixed = parts.mlp(normed[None])
        out = cast(Tensor, (mixed[0] if isinstance(mixed, tuple) else mixed)[0])
    else:
        out = cast(Tensor, parts.mlp(normed))
    return out if parts.mlp_post is None else cast(Tensor, parts.mlp_post(out))


class LayersMaps(nn.Module):
    """The MLP of a layer whose MLP maps are modules of the layer itself (OPT); they keep their names."""

    def __init__(self, layer: nn.Module, family: Family) -> None:
        super().__init__()
        self._names = (*family.mlp_in, cast(str, family.activation), family.mlp_out)
        for name in self._names:
            self.add_module(name, layer.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        for name in self._names:
            x = getattr(self, name)(x)
        return x


def _mlp_of(layer: nn.Module, family: Family) -> nn.Module:
    named = family.experts
    if named is not None and named.norms is not None:
        has_router = getattr(layer, named.router.partition(".")[0], None) is not None
        return NormedMixture(layer, named, family.mlp) if has_router else layer.get_submodule(family.mlp)
    if named is not None and named.beside is not None and getattr(layer, named.beside) is not None:
        return mlp_beside_experts(layer, named, family.mlp)
    if named is not None and named.weighs_inputs and has_experts(mixture := layer.get_submodule(family.mlp)):
        return weighed_inputs(mixture, named)
    return layer.get_submodule(family.mlp) if family.mlp else LayersMaps(layer, family)


class Block:
    """The sub-layers of one decoder layer, each with the norms around it.

    kinds: the sub-layers that it has.
    has_attention: whether attention is one of its token mixers.
    n_taps: number of tokens that its short convolution reads, the row's own included; 0: it has no convolution.
    rule: the recurrence in place of attention or in parallel to it, which reads what the convolution gives; or None.
    head_order: for each block of the output map's inputs, the head of `rule` it belongs to; None: in the rule's order.
    clip: outputs of the projections are limited to ± this value; None: they are not limited.
    head_norm: as in `Family`.
    layer_type: selects its rotary tables; None: no rotation.
    softcap: bound of attention scores, see `attend`; None: no bound.
    sinks: (heads,) scores without a value, which only enlarge the softmax's sum; or None.
    attn_scale, added_scale: factors of attention's output, and of what every sub-layer adds to the residual stream.
    source: the layer whose keys and values attention reads.
    end: what the layer computes after its sub-layers; None: nothing.
    """

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        config: Any,
        family: Family,
        window: AttentionWindow | None,
        layer_type: str | None,
    ) -> None:
        self.index = index
        self.kinds = family.kinds_of(config, index)
        self.has_attention = family.has_attention(config, index)
        self.window = window
        self.layer_type = layer_type if self.has_attention else None
        self.heads = heads_of(config, index)
        self.source = key_sources(config)[index]
        self.end = LayerEnding.of(layer, index, family, config)
        self.head_norm = family.head_norm
        self.scaling, self.attn_scale = 1.0, 1.0
        self.clip = _number(config, family.clip)
        self.softcap = _number(config, "attn_logit_softcapping")
        self.sinks: Tensor | None = None
        scales = (_number(owner, family.residual_scale) for owner in (config, layer))  # In MiniCPM 3 it is the layer's.
        self.added_scale = next((scale for scale in scales if scale is not None), 1.0)
        mixer = family.mixer_of(config, index)
        mixing = None if mixer is None else self._mixer_modules(layer, family, mixer)
        attention = self._attention_modules(layer, family, config) if self.has_attention else None
        parts = replace(attention, beside=mixing) if attention else mixing or LayerModules()
        if "mlp" in self.kinds:
            mlp, mlp_norm = _mlp_of(layer, family), submodule(layer, family.mlp_norm)
            mlp_norm = None if isinstance(mlp, NormedMixture) else mlp_norm  # A NormedMixture applies its own norms.
            parts = replace(parts, mlp_norm=mlp_norm, mlp=mlp, mlp_post=submodule(layer, family.mlp_post_norm))
        self.parts = parts
        self.n_taps = mixing.conv.kernel_size[0] if mixing else 0
        # None: the layer has a plain MLP, or none.
        self.experts = family.experts if parts.mlp is not None and has_experts(parts.mlp) else None
        self.rule: StateRule | None = None
        if mixing and isinstance(mixer, GatedDelta):
            self.rule = DeltaRule.of(mixing.mixer, mixing.conv, mixer.by_key_head)
        elif mixing and isinstance(mixer, Selective):
            self.rule = StateSpace.of(mixing.mixer, mixing.conv, _number(config, mixer.out_scale) or 1.0)
        elif mixing and isinstance(mixer, SelectiveScan):
            self.rule = ValueSteps.of(mixing.mixer, mixing.conv, mixer)
        if mixing and self.rule is not None:
            order = getattr(mixing.out, "head_order", None)
            is_of_rule = order is None or torch.equal(order, torch.arange(len(order)))
            self.head_order: Tensor | None = None if is_of_rule else order
        self.device = next(layer.parameters()).device

    @property
    def row_form(self) -> tuple[Any, ...]:
        """Key of the row groups that the layer reads; layers with equal keys share them."""
        return self.window, self.layer_type, self.n_taps, self.has_attention, self.heads, self.device

    def _attention_modules(self, layer: nn.Module, family: Family, config: Any) -> LayerModules:
        attn: Any = layer.get_submodule(family.attn)
        self.scaling = float(getattr(attn, family.scaling))
        self.sinks = None if family.sinks is None else getattr(attn, family.sinks)
        q_norm, k_norm = family.head_norms or (None, None)
        # A fused projection is one map. Layers without keys or values of their own have fewer projections.
        qkv = tuple(submodule(attn, name) for name in family.qkv[: self.heads.projected])
        latents = tuple(submodule(attn, name) for name in family.latents or ())
        if latents and not (isinstance(latents[1], CodedLinear) or type(latents[1]).__name__ in PLAIN_LINEAR):
            raise UnsupportedModel(
                f"a {type(latents[1]).__name__} computes this model's map from latents, and swiftopt needs its weights"
                " head by head: use the model as it was before it was quantised"
            )
        if family.attn_scales is not None:
            # Scores are linear in queries and in keys, and the output is linear in values. So factors of the inputs and
            # of the keys can be applied to scores and output instead.
            input_scale, key_scale, out_scale = (_number(config, name) or 1.0 for name in family.attn_scales)
            self.scaling, self.attn_scale = (
                self.scaling * input_scale * input_scale * key_scale,
                input_scale * out_scale,
            )
            has_bias = any(getattr(project, "bias", None) is not None for project in qkv)
            if (input_scale, key_scale) != (1.0, 1.0) and has_bias:
                raise UnsupportedModel("this model multiplies a projection that has a bias, which is not supported")
        return LayerModules(
            attn_norm=submodule(layer, family.attn_norm),
            qkv=qkv,
            latents=latents,
            q_norm=submodule(attn, q_norm),
            k_norm=submodule(attn, k_norm) if self.heads.projected > 1 else None,
            v_norm=submodule(attn, family.value_norm) if self.heads.projected > 1 else None,
            inner_norm=submodule(attn, family.inner_norm),
            out=attn.get_submodule(family.out),
            attn_post=submodule(layer, family.attn_post_norm),
        )

    def _mixer_modules(self, layer: nn.Module, family: Family, mixer: Mixer) -> LayerModules:
        module = layer.get_submodule(mixer.module)
        return LayerModules(
            attn_norm=submodule(layer, family.attn_norm),
            qkv=tuple(module.get_submodule(name) for name in mixer.into),
            inner_norm=submodule(module, mixer.norm),
            out=module.get_submodule(mixer.out),
            attn_post=submodule(layer, family.attn_post_norm),
            conv=module.get_submodule(mixer.conv),
            mixer=None if isinstance(mixer, ShortConv) else module,
        )

    def attention(self, normed: Tensor, rows: LayerRows, parts: LayerModules | None = None) -> Tensor:
        """Return what attention, or the mixer in its place, adds to the residual stream; write what the buffer keeps.

        Args: normed: (rows, hidden_size). parts: the modules of a quantised copy (None: the layer's own).
        """
        parts = parts or self.parts
        if not self.has_attention:
            mix = convolved if self.rule is None else recalled
            return self.added(mix(self, parts, normed, rows))
        projected = [project(normed) for project in parts.qkv]
        query, key, value = rotated_heads(self, parts, projected, rows.rotation)
        mixed = rows.attend(self, query, key, value)
        if self.heads.gated:
            gates = split_gates(self.heads, projected)
            mixed = mixed * torch.sigmoid(gates)
        out = attention_out(self, parts, mixed)
        out = out if self.attn_scale == 1.0 else out * self.attn_scale
        return self.added(out if parts.beside is None else out + recalled(self, parts.beside, normed, rows))

    def mlp(self, normed: Tensor, parts: LayerModules | None = None) -> Tensor:
        return self.added(mlp_out(parts or self.parts, normed))

    def added(self, out: Tensor) -> Tensor:
        """Return what a sub-layer's output adds to the residual stream."""
        return out if self.added_scale == 1.0 else out * self.added_scale


def _number(config: Any, name: str | None) -> float | None:
    value = None if name is None else getattr(config, name, None)
    return None if value is None else float(value)


class BufferRows:
    """Rows for torch's attention, grouped by sequence, each group with its KV buffer; see `LayerRows`."""

    def __init__(self, groups: Sequence[tuple[RowGroup, KVBuffer]]) -> None:
        self.groups = groups
        self.rotation = joined_rotation([group.rotation for group, _ in groups])

    def attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self.groups) == 1:
            return _attended(block, query, key, value, *self.groups[0])
        n_rows = [group.n_rows for group, _ in self.groups]
        group_parts = zip(*(torch.split(part, n_rows) for part in (query, key, value)), self.groups, strict=True)
        return torch.cat([_attended(block, *parts, *group) for *parts, group in group_parts])

    def convolution(self, block: Block, conv: Any, projected: Tensor) -> Tensor:
        given, n_rows = [], [group.n_rows for group, _ in self.groups]
        for group_rows, (group, buffer) in zip(torch.split(projected, n_rows), self.groups, strict=True):
            assert group.before is not None
            given.append(gated_convolution(group_rows, buffer.keys[block.index][0], group.before, conv))
        return given[0] if len(given) == 1 else torch.cat(given)

    def recurrence_convolved(self, block: Block, inputs: Tensor) -> Tensor:
        rule = block.rule
        assert rule is not None
        return torch.cat([states.convolved(block.index, rule, rows) for states, rows in self._of_states(inputs)])

    def recurrence(self, block: Block, inputs: Tensor) -> Tensor:
        assert block.rule is not None
        return torch.cat([states.advance(block.index, block.rule, rows) for states, rows in self._of_states(inputs)])

    def _of_states(self, inputs: Tensor) -> Iterator[tuple[RecurrentStates, StateRows]]:
        """Yield each sequence's recurrent states and rows."""
        n_rows = [group.n_rows for group, _ in self.groups]
        for group_inputs, (group, buffer) in zip(torch.split(inputs, n_rows), self.groups, strict=True):
            assert buffer.states is not None
            slots = [slot + i for _, slot, length in group.spans for i in range(length)]
            yield buffer.states, StateRows(group_inputs, slots, group.seen, group.is_text)


def _attended(block: Block, query: Tensor, key: Tensor, value: Tensor, group: RowGroup, buffer: KVBuffer) -> Tensor:
    for row, slot, length in group.spans if key.numel() else ():
        whole = length == key.shape[0]
        keys, values = buffer.between(slot, slot + length)
        keys[block.index].copy_((key if whole else key[row : row + length]).transpose(0, 1))
        values[block.index].copy_((value if whole else value[row : row + length]).transpose(0, 1))
    keys, values = buffer.between(group.start, group.end)
    layer_slots = keys[block.index].to(query.device), values[block.index].to(query.device)
    return attend(query, *layer_slots, group.mask, block.scaling, block.softcap, block.sinks)


def whole_set(blocks: Sequence[Block]) -> LayerSet:
    """Return the set of all sub-layers that the model has: nothing is skipped."""
    absent = (f"{kind}:{block.index}" for block in blocks for kind in KINDS if kind not in block.kinds)
    return LayerSet(len(blocks), absent=tuple(absent))
