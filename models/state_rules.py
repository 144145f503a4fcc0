"""The rules by which a row changes a recurrent layer's state: a gated delta rule, or a selective state space."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import UnsupportedModel
from .coded_values import kept_width
from .family import SelectiveScan

MOST_VALUES = 128  # Most values of a head of `ValueSteps`.


class StateForm(NamedTuple):
    """Sizes of a layer's recurrence; several of its heads share a key head.

    `n_numbers`: of each head in a row's inputs, besides queries, keys and values. `convolves_keys`: 1: queries
    and keys go through the convolution, as values do; 0: values alone do. `n_low`: values of the step of low rank that
    the inputs then end with.
    """

    n_heads: int
    n_key_heads: int
    key_width: int
    value_width: int
    n_taps: int
    n_numbers: int = 2
    convolves_keys: int = 1
    n_low: int = 0

    @property
    def n_keys(self) -> int:
        """Values of a row's queries and keys."""
        return 2 * self.n_key_heads * self.key_width

    @property
    def n_convolved(self) -> int:
        """Values of a row that go through the convolution; its inputs begin with them."""
        return self.n_keys * self.convolves_keys + self.n_heads * self.value_width

    @property
    def n_inputs(self) -> int:
        """Values that a row's update is made of: query, key, value, and the numbers of each head."""
        return self.n_keys + self.n_heads * (self.value_width + self.n_numbers) + self.n_low

    def codes_values(self, dtype: torch.dtype) -> bool:
        """Tell whether a row's values are kept in codes: where these are nearly all that a row keeps (Mamba-1)."""
        return self.n_low > 0 and dtype == torch.bfloat16 and self.n_convolved % 16 == 0

    def kept_width(self, dtype: torch.dtype) -> int:
        """Return how many elements of a dtype are kept of a row's inputs."""
        return kept_width(self.n_inputs, self.n_convolved) if self.codes_values(dtype) else self.n_inputs


@dataclass(frozen=True, slots=True, eq=False)
class StateRule:
    """A rule by which a layer's rows change its state, with a short convolution before it.

    `taps`: (n_convolved, n_taps), the newest token's last, in the order of an update's inputs: queries, keys, values;
    or values alone, after which queries and keys lie.
    `taps_bias`: (n_convolved,) or None. `log_decay`, `step_bias`: (heads,), the module's A_log and dt_bias.
    `input_order`, `gate_order`: int64, where inputs and gates lie in the projections' outputs. `norm_width`: values
    that share a mean square in the norm of what heads read. `out_scale`: what the layer gives is multiplied by it.
    """

    form: StateForm
    taps: Tensor
    taps_bias: Tensor | None
    log_decay: Tensor
    step_bias: Tensor
    input_order: Tensor
    gate_order: Tensor
    norm_width: int
    out_scale: float = field(default=1.0, kw_only=True)

    def step(self, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state (heads, key_width, value_width) after a row, and what it gives, (heads, value_width).

        Args: inputs: (n, n_inputs) of the row's last tokens, its own last; fewer than there are taps begin a text.
        """
        raise NotImplementedError

    def gated(self, norm: Any, read: Tensor, gates: Tensor) -> Tensor:
        """Return what heads read (rows, heads * value_width), normed and gated. Args: norm: takes the gate, too."""
        raise NotImplementedError

    def steps(self, inputs: Tensor) -> Tensor:
        """Return the step of each value (rows, heads * value_width) without its bias, by inputs (rows, n_inputs).

        Only a rule whose values have steps of their own has this.
        """
        raise NotImplementedError

    def convolved(self, tail: Tensor) -> Tensor:
        """Return what the convolution and its activation give for a row: (…, n_convolved).

        Args: tail: (…, n, n_convolved) of the row's last tokens, its own last; fewer than there are taps begin a text.
        """
        wide = torch.promote_types(tail.dtype, torch.float32)
        taps = self.taps[:, self.form.n_taps - tail.shape[-2] :].t().to(wide)
        mixed = (tail.to(wide) * taps).sum(dim=-2)
        if self.taps_bias is not None:
            mixed = mixed + self.taps_bias.to(wide)
        return F.silu(mixed.to(tail.dtype))

    def _parts(self, inputs: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (key heads, key_width), and values (heads, value_width), of the newest row."""
        form = self.form
        mixed = self.convolved(inputs[:, : form.n_convolved]).to(wide)
        n_keys = form.n_key_heads * form.key_width
        query, key, value = torch.split(mixed, [n_keys, n_keys, form.n_heads * form.value_width])
        by_head = (form.n_key_heads, form.key_width)
        return query.view(by_head), key.view(by_head), value.view(form.n_heads, form.value_width)

    def _of_heads(self, part: Tensor) -> Tensor:
        """Return for each head what its key head has."""
        return part.repeat_interleave(self.form.n_heads // self.form.n_key_heads, dim=0)

    def _decay(self, step_size: Tensor) -> Tensor:
        return (-self.log_decay.to(step_size.dtype).exp() * step_size).exp()


def _taps_of(conv: Any, form: StateForm, takes_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the taps (n_convolved, n_taps) of a convolution, and its bias (n_convolved,) or None.

    Raises: UnsupportedModel: the convolution is of another kind.
    """
    shape = tuple(conv.weight.shape)
    if (conv.bias is not None and not takes_bias) or shape != (form.n_convolved, 1, form.n_taps):
        raise UnsupportedModel(f"this model has a convolution of {shape} before its state, which is not supported")
    return conv.weight.detach()[:, 0], None if conv.bias is None else conv.bias.detach()


class DeltaRule(StateRule):
    """The gated delta rule of a layer (arXiv:2412.06464); a head's numbers are its update's amount and its step."""

    __slots__ = ()

    @classmethod
    def of(cls, module: Any, conv: Any, by_key_head: bool) -> DeltaRule:
        """Return the rule of a layer's module, with its convolution.

        Args:   by_key_head: as in `GatedDelta`.
        Raises: UnsupportedModel: the convolution is of another kind.
        """
        sizes = (module.num_v_heads, module.num_k_heads, module.head_k_dim, module.head_v_dim, conv.kernel_size[0])
        form = StateForm(*(int(size) for size in sizes))
        orders = orders_of_delta(form, by_key_head)
        decay = module.A_log.detach(), module.dt_bias.detach()
        return cls(form, *_taps_of(conv, form, takes_bias=False), *decay, *orders, norm_width=form.value_width)

    def step(self, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        form, wide = self.form, state.dtype
        query, key, value = self._parts(inputs, wide)
        query, key = self._of_heads(_unit(query)), self._of_heads(_unit(key))
        amount, step_size = torch.split(inputs[-1, form.n_convolved :], form.n_heads)
        decay = self._decay(F.softplus(step_size.to(wide) + self.step_bias.to(wide)))
        state = state * decay[:, None, None]
        recalled = (state * key[:, :, None]).sum(dim=1)
        change = (value - recalled) * amount.sigmoid().to(wide)[:, None]
        state = state + key[:, :, None] * change[:, None]
        out = (state * (query * form.key_width**-0.5)[:, :, None]).sum(dim=1)
        return state, out.to(inputs.dtype)

    def gated(self, norm: Any, read: Tensor, gates: Tensor) -> Tensor:
        by_head = (part.reshape(-1, self.norm_width) for part in (read, gates))
        return cast(Tensor, norm(*by_head)).view_as(read)


def _unit(part: Tensor) -> Tensor:
    """Return rows of length 1."""
    return part * (part.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def orders_of_delta(form: StateForm, by_key_head: bool) -> tuple[Tensor, Tensor]:
    """Return where the inputs of an update and the gates lie in the projections' outputs: int64 (n,) each.

    Args: by_key_head: each key head's query, key, values and gates lie together, then its two numbers per head.
    """
    n_keys, n_values = form.n_key_heads * form.key_width, form.n_heads * form.value_width
    if not by_key_head:
        at = torch.arange(2 * n_keys + 2 * n_values + 2 * form.n_heads)
        mixed, gates, numbers = torch.split(at, [2 * n_keys + n_values, n_values, 2 * form.n_heads])
        return torch.cat((mixed, numbers)), gates
    shared = form.n_heads // form.n_key_heads
    sizes = [form.key_width, form.key_width, shared * form.value_width, shared * form.value_width]
    by_head = torch.arange(2 * n_keys + 2 * n_values).view(form.n_key_heads, -1)
    *parts, gate_part = torch.split(by_head, sizes, dim=1)
    numbers = torch.arange(2 * form.n_heads).view(form.n_key_heads, -1) + by_head.numel()
    parts += torch.split(numbers, shared, dim=1)
    return torch.cat([part.flatten() for part in parts]), gate_part.flatten()


@dataclass(frozen=True, slots=True, eq=False)
class StateSpace(StateRule):
    """The selective state space of a Mamba-2 layer (arXiv:2405.21060); the number of a head is its step.

    In the paper's letters a query is C, a key is B, and a value is x. `skip`, (heads,), is D. A step lies within
    `step_limits`. Steps and gates are multiplied by `step_scale` and `gate_scale`; multipliers of queries, keys and
    values are in the taps.
    """

    skip: Tensor
    step_limits: tuple[float, float] = (0.0, math.inf)
    step_scale: float = 1.0
    gate_scale: float = 1.0

    @classmethod
    def of(cls, module: Any, conv: Any, out_scale: float = 1.0) -> StateSpace:
        """Return the state space of a layer's module, with its convolution.

        Raises: UnsupportedModel: the convolution is of another kind, or multipliers stand where they cannot be moved.
        """
        sizes = (module.num_heads, module.n_groups, module.ssm_state_size, module.head_dim, conv.kernel_size[0])
        form = StateForm(*(int(size) for size in sizes))._replace(n_numbers=1)
        n_keys, n_values = form.n_key_heads * form.key_width, form.n_heads * form.value_width
        at = torch.arange(2 * n_values + 2 * n_keys + form.n_heads)
        gates, values, keys, queries, steps = torch.split(at, [n_values, n_values, n_keys, n_keys, form.n_heads])
        order = torch.cat((queries, keys, values))
        taps, bias = (None if one is None else one[order - n_values] for one in _taps_of(conv, form, takes_bias=True))
        assert taps is not None
        scales = _multipliers(module, len(at))
        step_scale, gate_scale = (float(scales[part[0]]) for part in (steps, gates))
        if not (scales == 1).all():
            taps = taps.to(torch.promote_types(taps.dtype, torch.float32)) * scales[order, None].to(taps.device)
        _refuse_other_activation(module)
        limits = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        norm = getattr(module, "norm", None)
        n_norms = getattr(norm, "n_groups", None) or n_values // int(getattr(norm, "group_size", n_values))
        return cls(
            form,
            taps,
            bias,
            module.A_log.detach(),
            module.dt_bias.detach(),
            torch.cat((order, steps)),
            gates,
            n_values // n_norms,
            module.D.detach(),
            (float(limits[0]), float(limits[1])),
            step_scale,
            gate_scale,
            out_scale=out_scale,
        )

    def step(self, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        # DEVIATION: Steps of a state space lie within the config's limits, as in training. Transformers leaves them
        # out where it decodes one token at a time.
        wide = state.dtype
        query, key, value = self._parts(inputs, wide)
        step_size = inputs[-1, self.form.n_convolved :].to(wide) * self.step_scale + self.step_bias.to(wide)
        step_size = F.softplus(step_size).clamp(*self.step_limits)
        change = value * step_size[:, None]
        state = state * self._decay(step_size)[:, None, None] + self._of_heads(key)[:, :, None] * change[:, None]
        out = (state * self._of_heads(query)[:, :, None]).sum(dim=1) + value * self.skip.to(wide)[:, None]
        return state, out.to(inputs.dtype)

    def gated(self, norm: Any, read: Tensor, gates: Tensor) -> Tensor:
        if self.gate_scale != 1.0:
            gates = gates * self.gate_scale
        return read * F.silu(gates) if norm is None else cast(Tensor, norm(read, gates))


def _multipliers(module: Any, n_projected: int) -> Tensor:
    """Return what each output of a state space's projection is multiplied by: float32 (n_projected,).

    Raises: UnsupportedModel: the projection has a bias, which multipliers of its inputs leave out.
    """
    into, outputs = float(getattr(module, "ssm_in_multiplier", 1.0)), getattr(module, "mup_vector", None)
    scales = torch.full((n_projected,), into) if outputs is None else outputs.detach().float().flatten().cpu() * into
    if getattr(module.in_proj, "bias", None) is not None and not (scales == 1).all():
        raise UnsupportedModel("this model multiplies a projection that has a bias, which is not supported")
    return scales


@dataclass(frozen=True, slots=True, eq=False)
class ValueSteps(StateRule):
    """The selective state space of a Mamba-1 layer (arXiv:2312.00752): each value has a step and decays of its own.

    A head is a share of the values; all heads have one query (C) and one key (B). Of a row's inputs its values alone go
    through the convolution; the others, a query, a key and a step of low rank, are made of what comes out (`selected`).
    Steps of values are made of the last whenever a row changes a state: they would double what is kept of a row.
    `log_decay`: (heads, key_width, value_width). `step_bias`, `skip`, which is D: (heads, value_width). `low_map` gives
    a step of low rank, a key and a query, of which each goes through its norm, if it has one; `step_map` makes the
    first a step for each value, but for the bias.
    """

    skip: Tensor
    low_map: Any
    low_norms: tuple[Any, Any, Any]
    step_map: Any

    @classmethod
    def of(cls, module: Any, conv: Any, names: SelectiveScan) -> ValueSteps:
        """Return the state space of a layer's module, with its convolution.

        Raises: UnsupportedModel: the convolution is of another kind.
        """
        n_values, n_keys = (int(size) for size in module.A_log.shape)
        width = next(size for size in range(min(n_values, MOST_VALUES), 0, -1) if n_values % size == 0)
        rank = int(module.time_step_rank)
        form = StateForm(n_values // width, 1, n_keys, width, int(conv.kernel_size[0]), 0, convolves_keys=0, n_low=rank)
        _refuse_other_activation(module)
        step_map = module.get_submodule(names.steps)
        bare_map = copy(step_map)
        bare_map._parameters = {**step_map._parameters, "bias": None}
        decay = module.A_log.detach().view(form.n_heads, width, n_keys).transpose(1, 2)
        step_bias, skip = (part.detach().view(form.n_heads, width) for part in (step_map.bias, module.D))
        orders = torch.arange(n_values), torch.arange(n_values, 2 * n_values)
        step_norm, key_norm, query_norm = (getattr(module, name, None) for name in names.norms)
        maps = module.get_submodule(names.low), (step_norm, key_norm, query_norm), bare_map
        taps = _taps_of(conv, form, takes_bias=True)
        return cls(form, *taps, decay, step_bias, *orders, width, skip, *maps)

    def selected(self, convolved: Tensor) -> Tensor:
        """Return what a row's inputs have after its values: (rows, n_inputs - n_convolved).

        Args: convolved: what the convolution gives for rows, (rows, n_convolved).
        """
        low = self.low_map(convolved)
        n_keys = self.form.key_width
        parts = torch.split(low, [low.shape[-1] - 2 * n_keys, n_keys, n_keys], dim=-1)
        step, key, query = (
            part if norm is None else norm(part) for norm, part in zip(self.low_norms, parts, strict=True)
        )
        return torch.cat((query, key, step), dim=-1)

    def step(self, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        form, wide = self.form, state.dtype
        value = self.convolved(inputs[:, : form.n_convolved]).to(wide).view(form.n_heads, form.value_width)
        query, key, _ = torch.split(inputs[-1, form.n_convolved :], [form.key_width, form.key_width, form.n_low])
        query, key, step_size = (part.to(wide) for part in (query, key, self.steps(inputs[-1:])))
        step_size = F.softplus(step_size.view(form.n_heads, form.value_width) + self.step_bias.to(wide))
        state = state * self._decay(step_size[:, None]) + key[None, :, None] * (value * step_size)[:, None]
        out = (state * query[None, :, None]).sum(dim=1) + value * self.skip.to(wide)
        return state, out.to(inputs.dtype)

    def steps(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.step_map(inputs[:, -self.form.n_low :]))

    def gated(self, norm: Any, read: Tensor, gates: Tensor) -> Tensor:
        return read * F.silu(gates)


def _refuse_other_activation(module: Any) -> None:
    activation = getattr(module, "activation", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"this model has {activation} before its state, and only silu is supported there")
