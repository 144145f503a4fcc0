"""Describes a model to the library: a structure for each sub-layer, norm and linear map, with addresses of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.layer_sets import Kind, PartForm
from ..blocks import LINEAR, PLAIN_LINEAR, Block, LayerModules, has_experts, submodule
from ..coded import GROUPS, CodedLinear
from ..norms import NormForm
from ..quantised import QuantisedLinear, weight_of
from ..state_rules import StateRule, ValueSteps
from . import layout
from .activations import ACTIVATIONS, curve_of
from .calls import map_of
from .ends import end_of, inputs_of
from .experts import correction_of, halves_of, is_mean, maps_of, norm_fields, routing_of
from .latents import maps_by_head
from .layout import ROWS, Unsupported
from .limits import known_form, refuse_group, refuse_hooks
from .mixers import Selection, convolution_of, recurrence_of

if TYPE_CHECKING:
    from ..runtime import Runtime

HEAD_NORMS = {
    "by_head": layout.BY_HEAD,
    "whole": layout.WHOLE,
    "rotated": layout.ROTATED,
    "latent": layout.LATENT,
}
MAX_HEAD_WIDTH = 1024  # Largest supported head dimension of attention.
MIN_GROUP = min(GROUPS)  # Smallest number of inputs of a row that share an activation scale.


class ModelDescription:
    """The structures by which the library reads a model. They are invalid once weights have moved in memory.

    `ends` has the layers with a `LayerEnding`, by index. `inputs` computes per-layer inputs; None: the model has none.
    `norm` is the final norm.

    Raises: Unsupported: the kernels do not support a part of the model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        name = runtime.family.hidden_act or runtime.family.setting(runtime.config, "hidden_act")
        if name not in ACTIVATIONS:
            raise Unsupported(f"the activation {name} is computed by torch")
        self._activation = ACTIVATIONS[name]
        self._n_hidden = int(runtime.config.hidden_size)
        self._parts: dict[tuple[str, int, PartForm | None], list[ctypes.Structure]] = {}
        self._norms: list[NormForm] = []
        self._held: list[Any] = []  # Tensors and arrays that parts point to.
        self._of_heads: dict[Any, tuple[Any, Any]] = {}  # Map from a latent -> arrays of the maps of each head.
        for block in runtime.blocks:
            for kind in block.kinds:
                self.parts_of(kind, block.index, None)
        describe = self.norm_of, self.map_of
        ends = {block.index: block.end for block in runtime.blocks if block.end is not None}
        self.ends = {layer: end_of(end, *describe, self._activation) for layer, end in ends.items()}
        self.inputs = None if runtime.layer_inputs is None else inputs_of(runtime.layer_inputs, *describe)
        self.norm = self.norm_of(runtime.final_norm)
        self._head = self.map_of(runtime.head_module(None))

    def parts_of(self, kind: Kind, layer: int, form: PartForm | None) -> list[ctypes.Structure]:
        """Describe a sub-layer: one structure, or two if a mixer runs in parallel to attention."""
        key = (kind, layer, form)
        if key not in self._parts:
            block = self.runtime.blocks[layer]
            parts = block.parts if form is None else self.runtime.copies.parts(kind, layer, form)
            described: list[ctypes.Structure]
            if kind == "mlp":
                described = [(self._mixture_of if has_experts(parts.mlp) else self._mlp_of)(block, parts)]
            elif not block.has_attention:
                described = [self._mixer_of(block, parts)]
            else:
                described = [self._attention_of(block, parts)]
                described += [] if parts.beside is None else [self._mixer_of(block, parts.beside)]
            self._parts[key] = described
        return self._parts[key]

    def head_of(self, name: str | None) -> layout.Map:
        """Describe the head, or its copy in a format."""
        return self._head if name is None else self.map_of(self.runtime.head_module(name))

    def _attention_of(self, block: Block, parts: LayerModules) -> layout.Attention:
        maps = self._maps_of(parts.qkv)
        heads, kv_heads, width = block.heads.n_heads, block.heads.n_kv_heads, block.heads.width
        if width > MAX_HEAD_WIDTH or heads % kv_heads:
            raise Unsupported(f"attention with {heads} heads of {width} over {kv_heads} is computed by torch")
        groups, sizes = block.heads.n_groups, block.heads.latent
        if sizes is not None:  # The queries, then one key, which is also the value.
            places = (0, 0, heads * width, 0, 0, 0)
        elif block.heads.grouped:
            step = (groups + 2) * width
            places = (0, step, groups * width, step, (groups + 1) * width, step)
        else:
            queries = (1 + block.heads.gated) * heads  # Gates included.
            values = queries + kv_heads * (block.heads.projected > 2)  # Without their projection, they are the keys.
            places = (0, queries // kv_heads * width, queries * width, width, values * width, width)

        def head_norm(module: Any, n_heads: int) -> layout.Norm:
            if sizes is not None:
                return self.norm_of(module, sizes.query_rank if module is parts.q_norm else sizes.rank)
            is_whole = block.head_norm == "whole"
            return self.norm_of(module, n_heads * width) if is_whole else self.norm_of(module, width, n_heads)

        return layout.Attention(
            *(self.norm_of(norm) for norm in (parts.attn_norm, parts.attn_post)),
            head_norm(parts.q_norm, heads),
            head_norm(parts.k_norm, kv_heads),
            self.norm_of(parts.v_norm, width, kv_heads),
            self.norm_of(parts.inner_norm, heads * width),
            (layout.Map * 3)(*maps),
            self.map_of(parts.out),
            *self._latents_of(block, parts),
            len(maps),
            heads,
            kv_heads,
            width,
            0 if sizes is None else sizes.rotary,
            *places,
            HEAD_NORMS[block.head_norm],
            block.heads.gated,
            block.heads.projected == 1,
            block.scaling,
            block.softcap or 0.0,
            block.clip or 0.0,
            block.attn_scale * block.added_scale,
            None if block.sinks is None else self._address(self._kept(block.sinks)),
        )

    def _latents_of(self, block: Block, parts: LayerModules) -> tuple[layout.Map, int | None, int | None]:
        """Describe the map from the queries' latent; return it, and where the heads' maps of the other latent are."""
        if block.heads.latent is None:
            return layout.Map(), None, None
        of_queries, both = parts.latents
        if both not in self._of_heads:
            self._of_heads[both] = maps_by_head(block.heads, both, self.runtime.dtype, self._kept)
        keys_at, values_at = (ctypes.addressof(maps) for maps in self._of_heads[both])
        return layout.Map() if of_queries is None else self.map_of(of_queries), keys_at, values_at

    def _mixer_of(self, block: Block, parts: LayerModules) -> layout.Convolution | layout.Recurrence:
        for module in filter(None, (parts.conv, parts.inner_norm)):
            refuse_hooks(module)
        norms = [self.norm_of(norm) for norm in (parts.attn_norm, parts.attn_post)]
        maps, out = self._maps_of(parts.qkv), self.map_of(parts.out)
        if block.rule is None:
            return convolution_of(block, parts.conv, norms, (*maps, out), self._kept)
        norm = parts.inner_norm
        norm_at = None if norm is None else self._address(self._kept(norm.weight))
        return recurrence_of(block, norm, norm_at, norms, maps, out, self._selection_of(block.rule), self._kept)

    def _selection_of(self, rule: StateRule) -> Selection:
        if not isinstance(rule, ValueSteps):
            return layout.Map(), layout.Map(), ()
        low, steps = self.map_of(rule.low_map), self.map_of(rule.step_map)
        widths = (steps.n_in, rule.form.key_width, rule.form.key_width)
        if low.n_in != rule.form.n_convolved or low.n_out != sum(widths) or steps.n_out != low.n_in:
            raise Unsupported(f"maps of {low.n_in} values to {low.n_out}, and to {steps.n_out}, are computed by torch")
        return low, steps, [self.norm_of(norm, width) for norm, width in zip(rule.low_norms, widths, strict=True)]

    def _mlp_of(self, block: Block, parts: LayerModules) -> layout.Mlp:
        mlp, family = parts.mlp, self.runtime.family
        for module in mlp.modules():
            refuse_hooks(module)
        maps = self._maps_of([getattr(mlp, name) for name in family.mlp_in])
        out = self.map_of(getattr(mlp, family.mlp_out))
        # A quantised copy stores blocks of ROWS outputs, so each half of a joint gate must fill whole blocks.
        if family.gated and len(maps) == 1 and out.n_in % ROWS:
            raise Unsupported(f"a joint gate of width {out.n_in} is computed by torch")
        gate_scale, out_scale = [float(getattr(mlp, name)) for name in family.mlp_scales or ()] or (1.0, 1.0)
        return layout.Mlp(
            *(self.norm_of(norm) for norm in (parts.mlp_norm, parts.mlp_post)),
            self.norm_of(submodule(mlp, family.mlp_inner_norm), out.n_in),
            (layout.Map * 2)(*maps),
            out,
            len(maps),
            family.gated,
            out.n_in,
            self._activation,
            curve_of(mlp, self._activation),
            gate_scale,
            out_scale * block.added_scale,
        )

    def _mixture_of(self, block: Block, parts: LayerModules) -> layout.Mixture:
        mlp, named = parts.mlp, self.runtime.family.experts
        assert named is not None
        for module in mlp.modules():
            refuse_hooks(module)
        router, experts = mlp.get_submodule(named.router), mlp.get_submodule(named.experts)
        shared = submodule(mlp, named.shared)
        # A shared expert has gate and up as two maps, so all experts are then described with two.
        family = self.runtime.family
        into, out = maps_of(experts, named, self.runtime.dtype, shared is not None, self._kept, family.gated)
        n_experts, n_inner = len(out), out[0].n_in
        activation = layout.Mlp(gated=family.gated, activation=self._activation, gate_scale=1.0)
        if named.clamped:
            activation.activation, activation.curve[:2] = layout.CLAMPED, (experts.limit, experts.alpha)
        if shared is not None:
            shared_into = [getattr(shared, name) for name in family.mlp_in]
            joint = family.gated and len(shared_into) == 1
            into += halves_of(shared_into[0]) if joint else [self.map_of(module) for module in shared_into]
            out.append(self.map_of(getattr(shared, family.mlp_out)))
        gate = submodule(mlp, named.shared_gate)
        routing = routing_of(self.runtime.config, mlp, named, n_experts)
        share = 0.5 if is_mean(self.runtime.config) else 1.0  # Factor of chosen experts, and of the shared one.
        routing.scale *= share
        weight = self._kept(router.weight)
        correction = self._kept(correction_of(mlp))
        bias = self._kept(getattr(router, "bias", None))
        maps = (layout.Map * len(into))(*into), (layout.Map * len(out))(*out)
        self._held.append(maps)
        all_maps = [*into, *out]
        pointers = {
            name: next(filter(None, (getattr(map_, name) for map_ in all_maps)), None) for name in ("scales", "order")
        }
        widest = layout.Map(n_in=max(map_.n_in for map_ in all_maps), **pointers)
        return layout.Mixture(
            *(self.norm_of(norm) for norm in (parts.mlp_norm or getattr(mlp, "before", None), parts.mlp_post)),
            weight.data_ptr(),
            None if correction is None else self._kept(correction.float()).data_ptr(),
            None if bias is None else self._kept(bias.float()).data_ptr(),
            widest,
            *(ctypes.addressof(array) for array in maps),
            None if gate is None else self._address(self._kept(gate.weight)),
            routing,
            shared is not None,
            weight.dtype != self.runtime.dtype,
            named.rounds_logits,
            named.weighs_inputs,
            len(into) // len(out),
            n_inner,
            0 if shared is None else out[-1].n_in,
            activation,
            share,
            block.added_scale,
            *norm_fields(mlp, self.norm_of, self._kept),
        )

    def _kept(self, tensor: Any) -> Any:
        """Return a tensor after keeping a reference to it, because structures hold only its address."""
        if tensor is not None:
            self._held.append(tensor)
        return tensor

    def norm_of(self, module: Any, width: int | None = None, n_heads: int = 0) -> layout.Norm:
        """Describe a norm of `width` values (None: the hidden size).

        Args: n_heads: for a norm by head, which may have a weight for each head; 0: it is a norm of all values.
        """
        if module is None:
            return layout.Norm(None, None, 0.0, layout.NO_NORM)
        refuse_hooks(module)
        width = width or self._n_hidden
        form = known_form(module, width, self.runtime.dtype, self.runtime.device, n_heads)
        self._norms.append(form)  # Keep the form alive: it may hold the only reference to the weight.
        bias = None if form.bias is None else self._address(form.bias)
        return layout.Norm(self._address(form.weight), bias, form.eps, form.kind, width if form.weight.dim() > 1 else 0)

    def _maps_of(self, modules: Sequence[Any]) -> list[layout.Map]:
        """Describe maps that share an input, which is rounded only once."""
        maps = [self.map_of(module) for module in modules]
        orders = [getattr(module, "order", None) for module in modules]
        grouped = {
            (max(linear.group, MIN_GROUP), None if order is None else tuple(order.tolist()))
            for linear, order in zip(maps, orders, strict=True)
            if linear.scales
        }
        if len(grouped) > 1:
            raise Unsupported("maps of one input whose weights are grouped in several ways are computed by torch")
        return maps

    def map_of(self, module: Any) -> layout.Map:
        bias = getattr(module, "bias", None)
        if bias is not None:
            self._address(bias)
        if isinstance(module, QuantisedLinear):
            return map_of(module, bias)
        refuse_hooks(module)
        if isinstance(module, CodedLinear):
            refuse_group(module)
            return map_of(module, bias)
        if type(module).__name__ not in PLAIN_LINEAR or not isinstance(module, LINEAR):
            raise Unsupported(f"a linear map such as {type(module).__name__} is computed by torch")
        weight = weight_of(module)
        if weight.dtype != self.runtime.dtype or (weight.shape[1] > 1 and weight.stride(1) != 1):
            raise Unsupported("weights of such a layout are computed by torch")
        return map_of(weight, bias)

    def _address(self, tensor: Tensor) -> int:
        if tensor.dtype != self.runtime.dtype or not tensor.is_contiguous():
            types = f"a parameter of {tensor.dtype} with weights of {self.runtime.dtype}"
            raise Unsupported(f"{types} is computed by torch")
        return tensor.data_ptr()
