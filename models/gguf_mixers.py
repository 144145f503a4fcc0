"""Maps the tensors of a gated delta rule in a GGUF file to those of our modules: order of rows and columns, and values.

A file has the projections as our modules have them, or by key head, as checkpoints of Qwen3-Next do. With tiled value
heads (`GgufForm.tiled_heads`) the heads have another order, also in the columns of the output map. Rows of quantised
maps can be reordered. Columns cannot, because a block of codes may be wider than a head; so a quantised output map has
the order of the heads that it reads (`BlockLinear.head_order`).
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

# Parameters with other names in files, and these names.
RENAMED = {".dt_bias": ".dt_proj.bias"}


class DeltaTensors:
    """Where a file of this form has the parameters of a model's gated delta rules."""

    def __init__(self, mixer: GatedDelta, form: GgufForm, config: Any) -> None:
        self.mixer, self.form = mixer, form
        names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        self.sizes = StateForm(*(int(getattr(config, f"linear_{name}")) for name in names))

    def name_of(self, module_name: str) -> str | None:
        """Return a module's name within the rule ("" for the rule itself); None: it is not in one."""
        _, mixer_name, name = f"{module_name}.".rpartition(f".{self.mixer.module}.")
        return name.removesuffix(".") if mixer_name else None

    @cached_property
    def head_order(self) -> Tensor | None:
        """For each value head in the file, its index in our order, int64 (heads,); None: the orders are equal."""
        sizes = self.sizes
        if not self.form.tiled_heads or sizes.n_heads == sizes.n_key_heads:
            return None
        return torch.arange(sizes.n_heads).view(sizes.n_key_heads, -1).t().flatten()

    @cached_property
    def _orders(self) -> Mapping[str, Tensor]:
        """By module, the row of the file's tensor for each row of ours; for the output map, the columns."""
        if self.head_order is None:
            return {}
        sizes, heads = self.sizes, self.head_order.argsort()
        values = (heads[:, None] * sizes.value_width + torch.arange(sizes.value_width)).flatten()
        n_keys = sizes.n_convolved - len(values)
        convolved = torch.cat((torch.arange(n_keys), n_keys + values))
        orders = dict(zip(self.mixer.into, (convolved, values, heads, heads), strict=True))
        return orders | {self.mixer.conv: convolved, "": heads, self.mixer.out: values}

    def rows(self, module_name: str) -> Tensor | None:
        """Return for each of our rows the row of the file's tensor, int64 (out,); None: the orders are equal."""
        name = self.name_of(module_name)
        return None if name is None or name == self.mixer.out else self._orders.get(name)

    def columns(self, module_name: str) -> Tensor | None:
        """Return the same for columns, int64 (in,)."""
        return self._orders.get(self.mixer.out) if self.name_of(module_name) == self.mixer.out else None

    def by_key_head(self, module_name: str) -> tuple[str, Tensor] | None:
        """Return the file's tensor that has a projection's rows by key head, and the indices of the rows, int64 (out,).

        None: the module is not such a projection.
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
        """Tell whether a norm is the gated norm of the heads' outputs, to whose weights the converter adds nothing."""
        return self.name_of(module_name) == self.mixer.norm


def numbers_of(name: str, values: Tensor) -> Tensor:
    """Return a parameter's values, given those of the file, which has -exp(A_log) in place of A_log."""
    return (-values).log() if name.endswith(".A_log") else values
