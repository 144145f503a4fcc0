"""Linear maps by oneDNN, over weights in its own order: fast at many rows, but not row-invariant."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...core.errors import SettingsError

if TYPE_CHECKING:
    from ..runtime import Runtime


def packed(weight: Tensor, rows: int | None = None) -> Tensor:
    """A weight (outputs, inputs) in oneDNN's order, for passes of about `rows` rows.

    Raises: RuntimeError, AttributeError: oneDNN is not there, or does not know the dtype on this processor.
    """
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The map of `packed` weights: (rows, outputs) of (rows, inputs)."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


class PackedLinear(nn.Module):
    """A linear map in oneDNN's order; `weight` gives the plain one, made anew each time."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.packed, self.bias = packed(plain.weight), plain.bias

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs)."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """(…, outputs) of (…, inputs)."""
        return linear(x, self.packed, self.bias)


@torch.inference_mode()
def pack(runtime: Runtime) -> None:
    """Put the model's linear maps in oneDNN's order, in place of the plain ones; a head tied to the embedding stays.

    Raises: SettingsError: oneDNN cannot compute here; nothing has changed then.
    """
    model: Any = runtime.hf_model
    try:
        if runtime.device.type != "cpu":
            raise RuntimeError(f"the model lies on {runtime.device}")
        linear(torch.zeros((1, 16), dtype=runtime.dtype), packed(torch.zeros((16, 16), dtype=runtime.dtype)))
    except (RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(f"oneDNN cannot compute this model here ({reason}): use another speed") from error
    tied = model.get_input_embeddings().weight
    made: dict[Any, PackedLinear] = {}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight is not tied:
            made[module] = PackedLinear(module)
            model.set_submodule(name, made[module])
            module.weight.data = module.weight.data.new_empty(0)
    for block in runtime.blocks:
        qkv = tuple(made.get(one, one) for one in block.parts.qkv)
        block.parts = replace(block.parts, qkv=qkv, out=made.get(block.parts.out, block.parts.out))
    head = runtime.head_module(None)
    runtime.take_head(made.get(head, head))
