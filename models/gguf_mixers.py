"""How llama.cpp keeps the gated delta rule of a layer in a GGUF file: its rows and columns, and its numbers.

A file has the projections as our modules have them, or by key head, as checkpoints of Qwen3-Next do. Where value heads
are tiled (`GgufForm.tiled_heads`) they lie in another order, also in the columns of the map that follows. Rows of codes
can be taken in any order. Columns cannot: a block of codes may be wider than a head, so a map of codes is told the
order of the heads that it reads (`BlockLinear.head_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .family import GatedDelta
from .gguf_form import GgufForm
from .state_rules import StateForm, orders_of_delta

# The parameters that a file keeps under other names, and the names of these.
RENAMED = {".dt_bias": ".dt_proj.bias"}


class DeltaTensors:
    """The places of a model's gated delta rules in a file of this form."""

    def __init__(self, mixer: GatedDelta, form: GgufForm, config: Any) -> None:
        self.mixer, self.form = mixer, form
        names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        self.sizes = StateForm(*(int(getattr(config, f"linear_{name}")) for name in names))

    def name_of(self, module_name: str) -> str | None:
        """Return a module's name within the rule, "" for the rule itself; None: it is not in one."""
        _, mixer_name, name = f"{module_name}.".rpartition(f".{self.mixer.module}.")
        return name.removesuffix(".") if mixer_name else None

    @cached_property
    def head_order(self) -> Tensor | None:
        """Which of our value heads each of a file's is: int64 (heads,); None: they are in the same order."""
        sizes = self.sizes
        if not self.form.tiled_heads or sizes.n_heads == sizes.n_key_heads:
            return None
        return torch.arange(sizes.n_heads).view(sizes.n_key_heads, -1).t().flatten()

    @cached_property
    def _orders(self) -> Mapping[str, Tensor]:
        """By a module's name, which row of the file's tensor each of its rows is; of the last map, each column."""
        if self.head_order is None:
            return {}
        sizes, heads = self.sizes, self.head_order.argsort()
        values = (heads[:, None] * sizes.value_width + torch.arange(sizes.value_width)).flatten()
        n_keys = sizes.n_convolved - len(values)
        convolved = torch.cat((torch.arange(n_keys), n_keys + values))
        orders = dict(zip(self.mixer.into, (convolved, values, heads, heads), strict=True))
        return orders | {self.mixer.conv: convolved, "": heads, self.mixer.out: values}

    def rows(self, module_name: str) -> Tensor | None:
        """Return int64 (out,), which row of the file's tensor each row is; None: they are in the same order."""
        name = self.name_of(module_name)
        return None if name is None or name == self.mixer.out else self._orders.get(name)

    def columns(self, module_name: str) -> Tensor | None:
        """Return int64 (in,), likewise of columns."""
        return self._orders.get(self.mixer.out) if self.name_of(module_name) == self.mixer.out else None

    def by_key_head(self, module_name: str) -> tuple[str, Tensor] | None:
        """Return the name of a file's tensor that has a projection's rows by key head, and where: int64 (out,).

        None: the module is no such projection.
        """
        name = self.name_of(module_name)
        if name not in self.mixer.into:
            return None
        inputs, gates = orders_of_delta(self.sizes, by_key_head=True)
        mixed, numbers = inputs.tensor_split([self.sizes.n_convolved])
        amounts, steps = (numbers - len(mixed) - len(gates)).chunk(2)
        places = (("ssm_in", mixed), ("ssm_in", gates), ("ssm_ba", amounts), ("ssm_ba", steps))
        return dict(zip(self.mixer.into, places, strict=True))[name]

    def is_gated_norm(self, module_name: str) -> bool:
        """Tell whether a norm is that of what heads read, to whose weights nothing is added."""
        return self.name_of(module_name) == self.mixer.norm


def numbers_of(name: str, values: Tensor) -> Tensor:
    """Return a parameter's values, given those of the file: it has the decay of a state itself, -exp(A_log)."""
    return (-values).log() if name.endswith(".A_log") else values
