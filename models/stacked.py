"""Several rows, each at a layer of its own, advanced by one layer in a single step over stacked weights.

The layers' parameters of one name lie behind each other in one tensor (layers, …), of which the model's own become
views: nothing is held twice. Save such a model with `save_pretrained` (safetensors' `save_model` refuses views); one
that is moved or cast afterwards needs new stacks. Rows whose layers are evenly spaced read a strided view of the stack;
others a copy of their layers' weights.

Source: ParaDecode 2.2, "Batched matrix operations for parallelization".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import UnsupportedModel
from .blocks import LayerModules, attend, attention_out, mlp_out, queries_keys_values
from .buffer import KVBuffer
from .quantised import has_linears, replaced
from .runtime import Runtime

Pick = slice | Tensor  # of the layers: a strided slice, or an index


@dataclass(slots=True)
class _Chosen:
    """The layers of a step's rows, which all stacks read."""

    layers: Pick


class StackedLayers:
    """All layers of a runtime as one batched layer.

    Raises: UnsupportedModel: its layers are not alike, or lie on several devices.
    """

    def __init__(self, runtime: Runtime) -> None:
        if not runtime.one_device:
            raise UnsupportedModel(
                "layers of different devices cannot be stacked: load the model on one device to decode with paradecode"
            )
        self.runtime = runtime
        self._chosen = _Chosen(slice(None))
        if runtime.exact:
            return  # layer by layer, each row's bits are those of a pass, and weights stay where they are
        modules = {field.name: [getattr(b.parts, field.name) for b in runtime.blocks] for field in fields(LayerModules)}
        qkv = tuple(_stacked(same, self._chosen) for same in zip(*modules.pop("qkv"), strict=True))
        self._parts = LayerModules(qkv=qkv, **{name: _stacked(same, self._chosen) for name, same in modules.items()})
        runtime.weights_moved()

    @torch.inference_mode()
    def step(self, hidden: Tensor, layers: Sequence[int], slots: Sequence[int], buffer: KVBuffer) -> Tensor:
        """Run row i of `hidden` (rows, hidden_size), which stands at slot and position slots[i], through layers[i].

        Every layer must have the keys and values of all slots before, and no two rows the same layer.
        """
        runtime = self.runtime
        if runtime.exact:
            rows = zip(torch.split(hidden, 1), layers, slots, strict=True)
            return torch.cat([runtime.run_layers(row, slot, buffer, at, at + 1) for row, at, slot in rows])
        self._chosen.layers = _pick(layers, hidden.device)
        places = [(runtime.blocks[layer], slot) for layer, slot in zip(layers, slots, strict=True)]
        turns = [
            [part[slot : slot + 1, None] for part in table]
            for block, slot in places
            if (table := runtime.rotation(block.layer_type, block.device, slot + 1)) is not None
        ]
        cos, sin = (torch.cat(part) for part in zip(*turns, strict=True)) if turns else (None, None)
        query, key, value = queries_keys_values(self._parts, runtime.blocks[0].heads, hidden, cos, sin)
        mixed = []  # what each row's heads read from its own layer's keys and values
        for row, (block, slot) in enumerate(places):
            keys, values = buffer.keys[block.index], buffer.values[block.index]
            keys[:, slot], values[:, slot] = key[row], value[row]
            seen = slice(0 if block.window is None else max(0, slot + 1 - block.window), slot + 1)
            mixed.append(attend(query[row : row + 1], keys[:, seen], values[:, seen], None, block.scaling))
        after = hidden + attention_out(self._parts, torch.cat(mixed))
        return after + mlp_out(self._parts, hidden if runtime.parallel else after)


class _Linear(nn.Module):
    """A linear map per row, with the weights of the chosen layers."""

    def __init__(self, modules: Sequence[nn.Module], chosen: _Chosen) -> None:
        super().__init__()
        params, _ = _join(modules)
        weight = params["weight"]
        self.stack = weight.transpose(1, 2) if isinstance(modules[0], Conv1D) else weight  # (layers, out, in)
        self.bias_stack = params.get("bias")  # (layers, out)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, in) to (rows, out)."""
        weight = self.stack[self.chosen.layers]
        bias = None if self.bias_stack is None else self.bias_stack[self.chosen.layers]
        if x.shape[0] == 1 or (x.device.type == "cpu" and x.dtype != torch.float32):
            # On a CPU a batched product in 16 bits is several times slower than its rows one by one, and in 32 is not.
            rows = [F.linear(x[i : i + 1], weight[i], None if bias is None else bias[i]) for i in range(x.shape[0])]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        out = torch.bmm(x[:, None, :], weight.transpose(1, 2))[:, 0]
        return out if bias is None else out + bias


class _PerRow:
    """A module without linear maps, computed for each row with the parameters of its layer."""

    def __init__(self, modules: Sequence[nn.Module], chosen: _Chosen) -> None:
        params, buffers = _join(modules)
        self._skeleton, self._state, self._chosen = copy.deepcopy(modules[0]).to("meta"), {**params, **buffers}, chosen

    def __call__(self, x: Tensor) -> Tensor:
        state = {name: tensor[self._chosen.layers] for name, tensor in self._state.items()}
        return torch.func.vmap(self._call)(state, x)

    def _call(self, state: dict[str, Tensor], x: Tensor) -> Tensor:
        return cast(Tensor, torch.func.functional_call(self._skeleton, state, (x,)))


def _stacked(modules: Sequence[Any], chosen: _Chosen) -> Callable[[Tensor], Tensor] | None:
    """Return one module of every layer as a function of rows, each of a layer of its own."""
    if modules[0] is None:
        return None
    shapes = [[(name, p.shape, p.dtype) for name, p in module.named_parameters()] for module in modules]
    if any(own != shapes[0] for own in shapes):
        raise UnsupportedModel("the layers of this model are not alike, and paradecode stacks them: use adadecode")
    if has_linears(modules[0]):
        # The module's own code, its linear maps replaced; everything between them works row by row.
        return replaced(modules, lambda maps: _Linear(maps, chosen))
    return _PerRow(modules, chosen)


def _join(modules: Sequence[nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stack parameters and buffers of like modules; the parameters become views of their stack."""
    params: dict[str, Tensor] = {}
    for name, _ in modules[0].named_parameters():
        own = [module.get_parameter(name) for module in modules]
        stack = _existing(own)
        if stack is None:
            stack = torch.stack([parameter.data for parameter in own])
            for parameter, view in zip(own, stack, strict=True):
                parameter.data = view
        params[name] = stack
    buffers = {
        name: torch.stack([module.get_buffer(name) for module in modules]) for name, _ in modules[0].named_buffers()
    }
    return params, buffers


def _existing(own: Sequence[nn.Parameter]) -> Tensor | None:
    """Find the stack that the parameters are views of already, from an earlier runtime or method of the same model."""
    first = own[0].data
    step = first.numel() * first.element_size()
    behind = all(p.data.is_contiguous() and p.data.data_ptr() == first.data_ptr() + i * step for i, p in enumerate(own))
    storage = first.untyped_storage()
    if not behind or storage.data_ptr() != first.data_ptr() or storage.nbytes() != step * len(own):
        return None
    return first.as_strided((len(own), *first.shape), (first.numel(), *first.stride()), 0)


def _pick(layers: Sequence[int], device: torch.device) -> Pick:
    """Return the rows' layers as a strided slice where they are evenly spaced and rising, else as an index."""
    if len(layers) == 1:
        return slice(layers[0], layers[0] + 1)
    gap = layers[1] - layers[0]
    if gap > 0 and all(b - a == gap for a, b in pairwise(layers)):
        return slice(layers[0], layers[-1] + 1, gap)
    return torch.tensor(layers, device=device)
