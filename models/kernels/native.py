"""Runs a runtime's passes with our C++ kernels, on the weights in place: nothing is packed or copied.

A row's logits have the same bits whatever other rows are in the pass (`dense.h`, `attention.h`), so a drafted
completion equals plain decoding's in bfloat16, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.costs import ExpertCounts
from ...core.types import Kind, LayerSet, PartForm
from ..blocks import LINEAR, PLAIN_LINEAR, Block, LayerModules, has_experts, submodule
from ..coded import GROUPS, CodedLinear
from ..norms import NormForm
from ..quantised import QuantisedLinear, weight_of
from ..rows import HeadRows, Pass, keepers
from ..state_rules import StateRule, ValueSteps
from . import layout
from .activations import ACTIVATIONS, curve_of
from .build import Kernels
from .calls import best_to, likeliest, linear, map_of, run
from .ends import end_of, inputs_of
from .experts import apart_of, choosing_of, correction_of, halves_of, is_mean, maps_of
from .latents import maps_by_head
from .layout import ROWS, Unsupported
from .limits import known_form, refuse_group, refuse_hooks
from .mixers import Selection, convolution_of, recurrence_of, sequence_of

if TYPE_CHECKING:
    from ..runtime import Runtime

DTYPES = (torch.float32, torch.bfloat16)
HEAD_NORMS = {
    "by_head": layout.BY_HEAD,
    "whole": layout.WHOLE,
    "rotated": layout.ROTATED,
    "latent": layout.LATENT,
}
STEPS: dict[type[ctypes.Structure], int] = {
    **{layout.Attention: layout.ATTENTION, layout.Convolution: layout.CONVOLUTION},
    **{layout.Recurrence: layout.RECURRENCE, layout.Mlp: layout.MLP, layout.Mixture: layout.MIXTURE},
}
MOST_PROGRAMS = 64
WIDEST_HEAD = 1024  # Largest supported head dimension of attention.
FINEST = min(GROUPS)  # Smallest number of inputs of a row that share an activation scale.


@dataclass(slots=True)
class Program:
    """The steps of a pass for some layer sets, and which layer sets' rows each row list holds.

    `n_out`: of the head that the last step computes, on rows of one more list; 0: it ends with a layer.
    """

    steps: ctypes.Array[layout.Step]
    lists: list[frozenset[int]]
    held: list[Any] = field(default_factory=list)  # Objects that the steps point to, kept alive with them.
    n_out: int = 0


class NativePasses:
    """A runtime's passes, computed by the library.

    Raises: Unsupported: the model has something that the kernels do not compute.
    """

    def __init__(self, runtime: Runtime, kernels: Kernels) -> None:
        self.runtime, self.kernels, self.level = runtime, kernels, kernels.level
        self.library = kernels.path.stem
        # Seconds per kind of work in `layout.WORK`; None: not timed.
        self.seconds: ctypes.Array[ctypes.c_double] | None = None
        self._experts = layout.CountedExperts()  # Of the passes since `taken_experts` was called last.
        if runtime.device.type != "cpu" or not runtime.one_device:
            raise Unsupported(f"the model lies on {runtime.device}, and the kernels are for a CPU")
        if runtime.dtype not in DTYPES:
            raise Unsupported(f"weights of {runtime.dtype} are computed by torch; ask for float32 or bfloat16")
        name = runtime.family.hidden_act or runtime.family.setting(runtime.config, "hidden_act")
        if name not in ACTIVATIONS:
            raise Unsupported(f"the activation {name} is computed by torch")
        self._activation = ACTIVATIONS[name]
        self._whole = LayerSet(runtime.n_layers)
        self._n_hidden = int(runtime.config.hidden_size)
        self._types = list(dict.fromkeys(block.layer_type for block in runtime.blocks))
        self.forget()

    def forget(self) -> None:
        """Describe the model to the library again, after weights have moved in memory."""
        self._program = lru_cache(maxsize=MOST_PROGRAMS)(self._made)
        self._parts: dict[tuple[str, int, PartForm | None], list[ctypes.Structure]] = {}
        self._norms: list[NormForm] = []
        self._held: list[Any] = []  # Tensors and arrays that parts point to.
        self._of_heads: dict[Any, tuple[Any, Any]] = {}  # Arrays of each head's maps, by the map of a latent.
        for block in self.runtime.blocks:
            for kind in block.kinds:
                self._parts_of(kind, block.index, None)
        how = self._norm_of, self._map_of
        ends = {block.index: block.end for block in self.runtime.blocks if block.end is not None}
        self._ends = {layer: end_of(end, *how, self._activation) for layer, end in ends.items()}
        self._inputs = None if self.runtime.layer_inputs is None else inputs_of(self.runtime.layer_inputs, *how)
        self._norm = self._norm_of(self.runtime.final_norm)
        self._head = self._map_of(self.runtime.head_module(None))

    # -- Describing the model to the library ---------------------------------------------------------------------------

    def _parts_of(self, kind: Kind, layer: int, form: PartForm | None) -> list[ctypes.Structure]:
        """Describe a sub-layer: one structure, or two where a mixer stands beside attention."""
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

    def _attention_of(self, block: Block, parts: LayerModules) -> layout.Attention:
        maps = self._maps_of(parts.qkv)
        heads, kv_heads, width = block.heads.n_heads, block.heads.n_kv_heads, block.heads.width
        if width > WIDEST_HEAD or heads % kv_heads:
            raise Unsupported(f"attention with {heads} heads of {width} over {kv_heads} is computed by torch")
        groups, sizes = block.heads.n_groups, block.heads.latent
        if sizes is not None:  # All queries, and the key that is the value, too.
            places = (0, 0, heads * width, 0, 0, 0)
        elif block.heads.grouped:
            step = (groups + 2) * width
            places = (0, step, groups * width, step, (groups + 1) * width, step)
        else:
            queries = (1 + block.heads.gated) * heads  # With their gates.
            values = queries + kv_heads * (block.heads.projected > 2)  # Else they are the keys.
            places = (0, queries // kv_heads * width, queries * width, width, values * width, width)

        def head_norm(module: Any, n_heads: int) -> layout.Norm:
            if sizes is not None:
                return self._norm_of(module, sizes.query_rank if module is parts.q_norm else sizes.rank)
            is_whole = block.head_norm == "whole"
            return self._norm_of(module, n_heads * width) if is_whole else self._norm_of(module, width, n_heads)

        return layout.Attention(
            *(self._norm_of(norm) for norm in (parts.attn_norm, parts.attn_post)),
            head_norm(parts.q_norm, heads),
            head_norm(parts.k_norm, kv_heads),
            self._norm_of(parts.v_norm, width, kv_heads),
            self._norm_of(parts.inner_norm, heads * width),
            (layout.Map * 3)(*maps),
            self._map_of(parts.out),
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
        """Describe the map from the queries' latent, and where those of each head are, to and from the other latent."""
        if block.heads.latent is None:
            return layout.Map(), None, None
        of_queries, both = parts.latents
        if both not in self._of_heads:
            self._of_heads[both] = maps_by_head(block.heads, both, self.runtime.dtype, self._kept)
        at = (ctypes.addressof(maps) for maps in self._of_heads[both])
        return layout.Map() if of_queries is None else self._map_of(of_queries), next(at), next(at)

    def _mixer_of(self, block: Block, parts: LayerModules) -> layout.Convolution | layout.Recurrence:
        for module in filter(None, (parts.conv, parts.inner_norm)):
            refuse_hooks(module)
        norms = [self._norm_of(norm) for norm in (parts.attn_norm, parts.attn_post)]
        maps, out = self._maps_of(parts.qkv), self._map_of(parts.out)
        if block.rule is None:
            return convolution_of(block, parts.conv, norms, (*maps, out), self._kept)
        norm = parts.inner_norm
        norm_at = None if norm is None else self._address(self._kept(norm.weight))
        return recurrence_of(block, norm, norm_at, norms, maps, out, self._selection_of(block.rule), self._kept)

    def _selection_of(self, rule: StateRule) -> Selection:
        if not isinstance(rule, ValueSteps):
            return layout.Map(), layout.Map(), ()
        low, steps = self._map_of(rule.low_map), self._map_of(rule.step_map)
        widths = (steps.n_in, rule.form.key_width, rule.form.key_width)
        if low.n_in != rule.form.n_convolved or low.n_out != sum(widths) or steps.n_out != low.n_in:
            raise Unsupported(f"maps of {low.n_in} values to {low.n_out}, and to {steps.n_out}, are computed by torch")
        return low, steps, [self._norm_of(norm, width) for norm, width in zip(rule.low_norms, widths, strict=True)]

    def _mlp_of(self, block: Block, parts: LayerModules) -> layout.Mlp:
        mlp, family = parts.mlp, self.runtime.family
        for module in mlp.modules():
            refuse_hooks(module)
        maps = self._maps_of([getattr(mlp, name) for name in family.mlp_in])
        out = self._map_of(getattr(mlp, family.mlp_out))
        # A quantised copy stores blocks of ROWS outputs, so each half of a joint gate must fill whole blocks.
        if family.gated and len(maps) == 1 and out.n_in % ROWS:
            raise Unsupported(f"a joint gate of width {out.n_in} is computed by torch")
        gate_scale, out_scale = [float(getattr(mlp, name)) for name in family.mlp_scales or ()] or (1.0, 1.0)
        return layout.Mlp(
            *(self._norm_of(norm) for norm in (parts.mlp_norm, parts.mlp_post)),
            self._norm_of(submodule(mlp, family.mlp_inner_norm), out.n_in),
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
        # Shared experts have gate and up as two maps, so that these are described as two of all others, too.
        family = self.runtime.family
        into, out = maps_of(experts, named, self.runtime.dtype, shared is not None, self._kept, family.gated)
        n_experts, n_inner = len(out), out[0].n_in
        activation = layout.Mlp(gated=family.gated, activation=self._activation, gate_scale=1.0)
        if named.clamped:
            activation.activation, activation.curve[:2] = layout.CLAMPED, (experts.limit, experts.alpha)
        if shared is not None:
            own_into = [getattr(shared, name) for name in family.mlp_in]
            joint = family.gated and len(own_into) == 1
            into += halves_of(own_into[0]) if joint else [self._map_of(one) for one in own_into]
            out.append(self._map_of(getattr(shared, family.mlp_out)))
        gate = submodule(mlp, named.shared_gate)
        choosing = choosing_of(self.runtime.config, mlp, named, n_experts)
        share = 0.5 if is_mean(self.runtime.config) else 1.0  # Of a layer's output, for chosen and for shared experts.
        choosing.scale *= share
        weight = self._kept(router.weight)
        correction = self._kept(correction_of(mlp))
        bias = self._kept(getattr(router, "bias", None))
        maps = (layout.Map * len(into))(*into), (layout.Map * len(out))(*out)
        self._held.append(maps)
        every = [*into, *out]
        some = {name: next((at for one in every if (at := getattr(one, name))), None) for name in ("scales", "order")}
        widest = layout.Map(n_in=max(one.n_in for one in every), **some)
        apart = apart_of(mlp, self._norm_of, self._kept)
        return layout.Mixture(
            *(self._norm_of(norm) for norm in (parts.mlp_norm or getattr(mlp, "before", None), parts.mlp_post)),
            weight.data_ptr(),
            None if correction is None else self._kept(correction.float()).data_ptr(),
            None if bias is None else self._kept(bias.float()).data_ptr(),
            widest,
            *(ctypes.addressof(array) for array in maps),
            None if gate is None else self._address(self._kept(gate.weight)),
            choosing,
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
            *apart,
        )

    def _kept(self, tensor: Any) -> Any:
        """Return a tensor, which lives as long as what describes the model to the library."""
        if tensor is not None:
            self._held.append(tensor)
        return tensor

    def _norm_of(self, module: Any, width: int | None = None, n_heads: int = 0) -> layout.Norm:
        """Describe a norm of `width` values, None: as many as a hidden state has.

        Args: n_heads: of a norm by head, which may have weights of its own for each; 0: it is of all values together.
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
        maps = [self._map_of(module) for module in modules]
        orders = [getattr(module, "order", None) for module in modules]
        grouped = {
            (max(linear.group, FINEST), None if order is None else tuple(order.tolist()))
            for linear, order in zip(maps, orders, strict=True)
            if linear.scales
        }
        if len(grouped) > 1:
            raise Unsupported("maps of one input whose weights are grouped in several ways are computed by torch")
        return maps

    def _map_of(self, module: Any) -> layout.Map:
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

    # -- Running passes ------------------------------------------------------------------------------------------------

    def join(self, embedded: Tensor, of_tokens: Tensor) -> Tensor:
        """Return what `PerLayerInputs.joined` does, in place of `of_tokens`."""
        assert self._inputs is not None
        step = layout.Step(ctypes.addressof(self._inputs), layout.LAYER_INPUTS, 0, 0, 0, -1, 0)
        call = layout.Call(inputs=of_tokens.data_ptr(), n_inputs=of_tokens.shape[1])
        run(self.kernels, call, embedded.contiguous(), (layout.Step * 1)(step), [None])
        return of_tokens

    def run_layers(
        self,
        hidden: Tensor,
        passes: Sequence[Pass],
        first: int,
        last: int,
        read: HeadRows | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor | None:
        """Change `hidden` (rows of all passes, hidden_size) to the states after layers first … last - 1.

        Args: inputs: vectors of the rows' tokens, for models that have them; see `PerLayerInputs`.

        Returns: the logits (rows, vocab) of the rows to `read`, which the same run computes; None if there are none.
        """
        self._check(hidden)
        sequences: list[layout.Sequence] = []
        positions: list[int] = []
        visible: list[Tensor | None] = []
        members: dict[LayerSet, list[range]] = {}  # Row ranges by layer set.
        n = 0
        for pass_ in passes:
            rows, n_rows_of_pass = pass_.rows, len(pass_.rows.token_ids)
            end = rows.first_slot + n_rows_of_pass
            seen = rows.seen()
            if end > pass_.buffer.capacity or (seen is not None and seen.shape != (n_rows_of_pass, end)):
                raise ValueError(
                    f"{n_rows_of_pass} rows from slot {rows.first_slot} on do not fit the buffer, or what they see"
                )
            if rows.positions is not None and len(rows.positions) != n_rows_of_pass:
                raise ValueError(f"{n_rows_of_pass} rows have {len(rows.positions)} positions")
            positions += range(rows.first_slot, end) if rows.positions is None else rows.positions
            visible.append(None if seen is None else seen.contiguous())  # Keep it alive until the pass has run.
            sequences.append(sequence_of(pass_, visible[-1]))
            sets = rows.variants or (self._whole,)
            for i, layer_set in enumerate(sets):
                share = n_rows_of_pass // len(sets)
                members.setdefault(layer_set, []).append(range(n + i * share, n + (i + 1) * share))
            n += n_rows_of_pass
        program = self._program(tuple(members), first, last, None if read is None else (read[0],))
        shares = list(members.values())
        indices = [None if len(some) == len(shares) else _rows_of(shares[i] for i in some) for some in program.lists]
        at = torch.tensor(positions, dtype=torch.int32)
        rotations = self._rotations(max(positions, default=0) + 1)
        call = layout.Call(positions=at.data_ptr(), rotations=rotations, n_sequences=len(sequences))
        call.sequences = (layout.Sequence * len(sequences))(*sequences)
        call.seconds = self.seconds
        if inputs is not None:
            call.inputs, call.n_inputs = inputs.data_ptr(), inputs.shape[1]
        call.experts = ctypes.pointer(self._experts)
        logits = None
        if read is not None:
            indices.append(read[1])
            logits = torch.empty((n if read[1] is None else len(read[1]), program.n_out), dtype=hidden.dtype)
            call.logits, call.norm = logits.data_ptr(), ctypes.pointer(self._norm)
        run(self.kernels, call, hidden, program.steps, indices)
        return logits

    def taken_experts(self) -> ExpertCounts | None:
        """Return what the rows of passes since the last call took of mixtures; None without any."""
        n, self._experts = self._experts, layout.CountedExperts()
        return ExpertCounts(n.distinct / n.mixtures, n.taken, n.repeated) if n.mixtures else None

    def _rotations(self, n_positions: int) -> ctypes.Array[layout.Rotation]:
        tables = (layout.Rotation * len(self._types))()
        for i, layer_type in enumerate(self._types):
            table = self.runtime.rotation(layer_type, self.runtime.device, n_positions)
            if table is not None:
                scale = None if table.query_scale is None else table.query_scale.data_ptr()
                is_wide = table.cos.dtype != self.runtime.dtype
                at = table.cos.data_ptr(), table.sin.data_ptr()
                tables[i] = layout.Rotation(*at, scale, table.cos.shape[1], table.pairs, is_wide)
        return tables

    def logits(
        self, hidden: Tensor, name: str | None = None, index: Tensor | None = None, normed: bool = True
    ) -> Tensor:
        """Logits (rows, vocab) of states (rows, hidden_size), or of those at `index`; by the head's copy in a format.

        Args: normed: the final norm comes first.
        """
        self._check(hidden)
        return linear(self.kernels, self._head_of(name), hidden, index, self._norm if normed else None)

    def mapped(self, x: Tensor, module: Any) -> Tensor:
        """Apply a linear map beside the layers to `x` (rows, n_in)."""
        self._check(x)
        return linear(self.kernels, self._map_of(module), x.contiguous())

    def likeliest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        self._check(logits)
        return likeliest(self.kernels, logits)

    def best(self, logits: Tensor) -> Tensor:
        """Return the first most probable token of each row of `logits` (rows, vocab): int64 (rows,)."""
        self._check(logits)
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
        best_to(self.kernels, logits, token_ids.data_ptr(), None)
        return token_ids

    def _check(self, hidden: Tensor) -> None:
        if hidden.dtype != self.runtime.dtype:
            raise ValueError(f"the states of a pass are {hidden.dtype}, and the model's weights {self.runtime.dtype}")

    def _head_of(self, name: str | None) -> layout.Map:
        return self._head if name is None else self._map_of(self.runtime.head_module(name))

    def _made(
        self, variants: tuple[LayerSet, ...], first: int, last: int, head: tuple[str | None] | None = None
    ) -> Program:
        runtime, kept = self.runtime, keepers(self.runtime.n_layers, variants, self.runtime.givers)
        lists: list[frozenset[int]] = []
        steps: list[layout.Step] = []
        held: list[Any] = []

        def add(kind: int, block: Block, part: ctypes.Structure | None, members: frozenset[int]) -> None:
            if members not in lists:
                lists.append(members)
            held.append(part)
            at = None if part is None else ctypes.addressof(part)
            has_rotary = runtime.rotation(block.layer_type, runtime.device, 1) is not None
            rotation = self._types.index(block.layer_type) if has_rotary else -1
            window = block.window
            size = 0 if window is None else -window.size if window.chunks else window.size
            steps.append(layout.Step(at, kind, block.index, size, lists.index(members), rotation, 0))

        everyone = frozenset(range(len(variants)))
        for block in runtime.blocks[first:last]:
            members_by_kind = kept[block.index]
            from_kept = runtime.parallel and bool(members_by_kind["attn"])
            if from_kept and members_by_kind["mlp"]:
                add(layout.KEEP, block, None, everyone)
            if block.parts.beside is not None and members_by_kind["attn"]:
                add(layout.KEEP, block, None, everyone)
            for kind in block.kinds:
                for form, members in members_by_kind[kind]:
                    for number, part in enumerate(self._parts_of(kind, block.index, form)):
                        add(STEPS[type(part)], block, part, members)
                        steps[-1].from_kept = number > 0 or (from_kept and kind == "mlp")
            if block.index in self._ends:
                add(layout.LAYER_END, block, self._ends[block.index], everyone)
        if head is not None:
            held.append(self._head_of(*head))
            steps.append(layout.Step(ctypes.addressof(held[-1]), layout.LOGITS, 0, 0, len(lists), -1, 0))
        n_out = 0 if head is None else held[-1].n_out
        return Program((layout.Step * len(steps))(*steps), lists, held, n_out)


def _rows_of(shares: Iterable[Iterable[range]]) -> Tensor:
    return torch.tensor(sorted(row for share in shares for part in share for row in part), dtype=torch.int32)
