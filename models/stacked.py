"""Several rows, each at a layer of its own, advanced by one layer in a single step over stacked weights.

The layers' parameters of one name lie behind each other in one tensor (layers, …), of which the model's own become
views: nothing is held twice. Save such a model with `save_pretrained` (safetensors' `save_model` refuses views); one
that is moved or cast afterwards needs new stacks. Rows whose layers are evenly spaced read a strided view of the stack;
others a copy of their layers' weights.

Source: ParaDecode 2.2, "Batched matrix operations for parallelization".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import UnsupportedModel
from .blocks import Block, attend, rotate, split_heads
from .buffer import KVBuffer
from .quantised import has_linears, replaced
from .runtime import Runtime

Pick = slice | Tensor  # of the layers: a strided slice, or an index


class StackedLayers:
    """All layers of a runtime as one batched layer.

    Raises: UnsupportedModel: its layers are not alike, or lie on several devices.
    """

    def __init__(self, runtime: Runtime) -> None:
        blocks = runtime.blocks
        if not runtime.one_device:
            raise UnsupportedModel(
                "layers of different devices cannot be stacked: load the model on one device to decode with paradecode"
            )
        self.runtime = runtime
        if (
            runtime.native is not None
        ):  # one row through one layer is the library's own step, and weights stay where they are
            return
        self._attn_norm = _stacked([block.parts.attn_norm for block in blocks])
        self._qkv = [_stacked(list(same)) for same in zip(*(block.parts.qkv for block in blocks), strict=True)]
        self._q_norm, self._k_norm = (
            _stacked_or_none([getattr(b.parts, n) for b in blocks]) for n in ("q_norm", "k_norm")
        )
        self._out = _stacked([block.parts.out for block in blocks])
        self._attn_post = _stacked_or_none([block.parts.attn_post for block in blocks])
        self._mlp_norm = _stacked([block.parts.mlp_norm for block in blocks])
        self._mlp = _stacked([block.parts.mlp for block in blocks])
        self._mlp_post = _stacked_or_none([block.parts.mlp_post for block in blocks])
        runtime.weights_moved()

    @torch.inference_mode()
    def step(self, hidden: Tensor, layers: Sequence[int], slots: Sequence[int], buffer: KVBuffer) -> Tensor:
        """Run row i of `hidden` (rows, hidden_size), which stands at slot and position slots[i], through layers[i].

        Every layer must have the keys and values of all slots before, and no two rows the same layer.
        """
        if self.runtime.native is not None:
            rows = zip(torch.split(hidden, 1), layers, slots, strict=True)
            return torch.cat([self.runtime.run_layers(row, slot, buffer, at, at + 1) for row, at, slot in rows])
        pick = _pick(layers, hidden.device)
        blocks = [self.runtime.blocks[layer] for layer in layers]
        mixed = self._attention(self._attn_norm(hidden, pick), pick, blocks, slots, buffer)
        delta = self._out(mixed, pick)
        after = hidden + (delta if self._attn_post is None else self._attn_post(delta, pick))
        source = hidden if self.runtime.parallel else after
        delta = self._mlp(self._mlp_norm(source, pick), pick)
        return after + (delta if self._mlp_post is None else self._mlp_post(delta, pick))

    def _attention(
        self, normed: Tensor, pick: Pick, blocks: Sequence[Block], slots: Sequence[int], buffer: KVBuffer
    ) -> Tensor:
        """Compute what each row's heads read from its own layer's keys and values, (rows, heads * head_dim)."""
        query, key, value = split_heads(blocks[0].heads, [project(normed, pick) for project in self._qkv])
        if self._q_norm is not None and self._k_norm is not None:
            query, key = self._q_norm(query, pick), self._k_norm(key, pick)
        mixed = []
        for row, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
            own_query, own_key = query[row : row + 1], key[row : row + 1]
            table = self.runtime.rotation(block.layer_type, block.device, slot + 1)
            if table is not None:
                cos, sin = table[0][slot : slot + 1, None], table[1][slot : slot + 1, None]
                own_query, own_key = rotate(own_query, cos, sin), rotate(own_key, cos, sin)
            keys, values = buffer.keys[block.index], buffer.values[block.index]
            keys[:, slot] = own_key[0]
            values[:, slot] = value[row]
            start = 0 if block.window is None else max(0, slot + 1 - block.window)
            mixed.append(attend(own_query, keys[:, start : slot + 1], values[:, start : slot + 1], None, block.scaling))
        return torch.cat(mixed)


class _Linear(nn.Module):
    """A linear map per row: `layers` of the stacked weights, chosen before each call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.stack, self.bias_stack = weight, bias  # (layers, out, in), (layers, out)
        self.pick: Pick = slice(None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, in) to (rows, out)."""
        weight = self.stack[self.pick]
        bias = None if self.bias_stack is None else self.bias_stack[self.pick]
        if x.shape[0] == 1 or (x.device.type == "cpu" and x.dtype != torch.float32):
            # On a CPU a batched product in 16 bits is several times slower than its rows one by one, and in 32 is not.
            rows = [F.linear(x[i : i + 1], weight[i], None if bias is None else bias[i]) for i in range(x.shape[0])]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        out = torch.bmm(x[:, None, :], weight.transpose(1, 2))[:, 0]
        return out if bias is None else out + bias


class _Stacked:
    """One module of every layer as a function of (rows, …) and the rows' layers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._linears: list[_Linear] = []
        self._has_linears = has_linears(modules[0])
        if self._has_linears:
            # The module's own code, its linear maps replaced; everything between them works row by row.
            self._skeleton = replaced(modules, self._linear)
        else:
            params, buffers = _join(modules)
            self._skeleton, self._state = copy.deepcopy(modules[0]).to("meta"), {**params, **buffers}

    def __call__(self, x: Tensor, pick: Pick) -> Tensor:
        if self._has_linears:
            for linear in self._linears:
                linear.pick = pick
            return cast(Tensor, self._skeleton(x))
        state = {name: tensor[pick] for name, tensor in self._state.items()}
        return torch.func.vmap(self._call)(state, x)

    def _call(self, state: dict[str, Tensor], x: Tensor) -> Tensor:
        return cast(Tensor, torch.func.functional_call(self._skeleton, state, (x,)))

    def _linear(self, modules: Sequence[nn.Module]) -> nn.Module:
        linear = _Linear(*_linear_stack(modules))
        self._linears.append(linear)
        return linear


def _stacked(modules: Sequence[nn.Module]) -> _Stacked:
    shapes = [[(name, p.shape, p.dtype) for name, p in module.named_parameters()] for module in modules]
    if any(own != shapes[0] for own in shapes):
        raise UnsupportedModel("the layers of this model are not alike, and paradecode stacks them: use adadecode")
    return _Stacked(modules)


def _stacked_or_none(modules: Sequence[nn.Module | None]) -> _Stacked | None:
    return None if modules[0] is None else _stacked([module for module in modules if module is not None])


def _linear_stack(modules: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Return weights (layers, out, in) and biases (layers, out)."""
    params, _ = _join(modules)
    weight = params["weight"]
    return (weight.transpose(1, 2) if isinstance(modules[0], Conv1D) else weight), params.get("bias")


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
