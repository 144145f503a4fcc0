"""Early exit: heads at intermediate layers, acceptance probes, and passes whose rows are at different layers.

Heads and probes are trained on a frozen model. The store keeps them as safetensors files, and `export` writes these.

`StackedLayers` advances several rows, each at a different layer, by one layer in a single step. The parameters of all
layers are stacked in one tensor (layers, …) per name, and the model's own parameters become views of it, so no weight
is stored twice. Save such a model with `save_pretrained`: safetensors' `save_model` refuses views. Build new stacks
after moving or casting the model. If the rows' layers are evenly spaced, a step reads a strided view of the stack,
otherwise a copy of these layers' weights. Source: ParaDecode 2.2, "Batched matrix operations for parallelization".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import InvalidInput, UnsupportedModel
from ..core.records import LearnedKind, LearnedRecord
from ..models.blocks import LayerModules, attention_out, mlp_out, queries_keys_values
from ..models.buffer import KVBuffer
from ..models.heads import attend
from ..models.quantised_experts import has_linears, replaced
from ..models.residual import normed
from ..models.rotation import joined_rotation
from ..models.rows import Pass, PassKind, Rows
from ..models.runtime import Runtime
from ..models.transfers import uploaded

SCHEMA = "swiftopt.learned-weights/1"
HEADER_BYTES = 8  # A safetensors file starts with its header's length as a little-endian integer of this many bytes.
Pick = slice | Tensor  # Selects layers of a stack: a strided slice or an index tensor.


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Lightweight LM heads: the head at a depth (number of layers run) has the weights E* · T, E* the model's own head.

    DEVIATION: the final norm is applied to the state before T, which AdaDecode 2.1 does not mention. With T = identity
    this is the model's own head at an intermediate layer, as in the paper's ablation, and training starts from there.
    """

    KIND: ClassVar[LearnedKind] = "heads"

    transforms: Mapping[int, Tensor]  # Depth -> T (hidden_size, hidden_size), in the model's dtype.
    full: bool = False  # True: `transforms` holds full heads (vocab, hidden_size), "full-parameterized" in Table 3.

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(sorted(self.transforms))

    def logits(self, runtime: Runtime, depth: int, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocab) of states (rows, hidden_size) after `depth` layers."""
        transform = self.transforms[depth]
        transformed = F.linear(runtime.normed(hidden).to(transform.device), transform)
        return transformed.to(runtime.device) if self.full else runtime.head(transformed)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by their names in a file: `head.DEPTH` for each head."""
        return {f"head.{depth}": self.transforms[depth] for depth in self.depths}


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A linear probe: the probability σ(v · h + b) that the token read from the state h at `depth` is accepted.

    Source: AdaSPEED II.B.
    """

    KIND: ClassVar[LearnedKind] = "probe"

    depth: int
    direction: Tensor  # v, float32 (hidden_size,).
    bias: float  # b.

    @property
    def depths(self) -> tuple[int, ...]:
        return (self.depth,)

    def acceptance(self, hidden: Tensor) -> Tensor:
        """Return the acceptance probability of a state (1, hidden_size): float32 (), on the probe's device."""
        return torch.sigmoid(hidden[-1].to(self.direction.device).float() @ self.direction + self.bias)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by their names in a file: `direction` and `bias`."""
        return {"direction": self.direction, "bias": torch.tensor([self.bias], dtype=torch.float64)}


class StagedPass:
    """A chain of rows at slots `first_slot`, `first_slot` + 1, …, which may have run different numbers of layers.

    Early exit reads a row at an intermediate layer and starts the next row. The deeper layers of the first one are
    deferred until a later row needs their keys and values. One pass over these layers then runs all rows that wait for
    them, so no layer of a row runs twice. A row is never deeper than the rows before it. All work is yielded as passes
    over ranges of layers.

    Source: AdaDecode 2.2, Algorithm 1. In LayerSkip, all draft rows wait at the same depth.
    """

    def __init__(self, runtime: Runtime, buffer: KVBuffer, first_slot: int) -> None:
        self.runtime, self.buffer, self.first_slot = runtime, buffer, first_slot
        self.depths: list[int] = []  # Number of layers each row has run; never increases from row to row.
        self._hidden: list[Tensor] = []  # State (1, hidden_size) of each row after depths[row] layers.
        self._tokens: list[int | Tensor] = []

    @property
    def n_rows(self) -> int:
        return len(self.depths)

    @property
    def newest(self) -> Tensor:
        """State (1, hidden_size) of the newest row, after as many layers as it has run."""
        return self._hidden[-1]

    def add(self, token_id: int | Tensor) -> None:
        """Start a row for a token id, which may be a device tensor (int64, shape ())."""
        token_ids = token_id[None] if isinstance(token_id, Tensor) else [token_id]
        self._hidden.append(self.runtime.embed(token_ids, self.first_slot + self.n_rows))
        self._tokens.append(token_id)
        self.depths.append(0)

    def advance(
        self, depth: int, with_logits: bool = False, kind: PassKind = "draft"
    ) -> Generator[Pass, Tensor, Tensor]:
        """Run every row to at least `depth` layers; return the newest row's logits (1, vocab) at that depth.

        Args: with_logits: if False, an empty tensor is returned. kind: see `Pass`.
        """
        logits = self.newest[:0]
        while self.depths[-1] < depth:
            # All rows that have run as many layers as the newest one continue together, up to the next deeper row.
            first_row = self.depths.index(self.depths[-1])
            end_depth = min(depth, self.depths[first_row - 1]) if first_row else depth
            read_rows = (self.n_rows - first_row - 1,) if with_logits and end_depth == depth else ()
            logits = yield from self._run_rows(first_row, end_depth, read_rows, kind)
        return logits

    def finish(self) -> Generator[Pass, Tensor, Tensor]:
        """Run the remaining layers of every row; return the final logits (rows, vocab)."""
        yield from self.advance(self.depths[0], kind="check")  # To the depth of the first row, which is the deepest.
        return (yield from self._run_rows(0, self.runtime.n_layers, None, "check"))

    def _token_ids(self, first_row: int) -> Sequence[int] | Tensor:
        """Return the token ids of the rows from `first_row` on if the model's layers read them, else zeros."""
        tokens = self._tokens[first_row:]
        if self.runtime.layer_inputs is None:
            return [0] * len(tokens)
        return torch.stack([torch.as_tensor(token, device=self.runtime.device) for token in tokens])

    def _run_rows(
        self, first_row: int, end_depth: int, read_rows: Sequence[int] | None, kind: PassKind
    ) -> Generator[Pass, Tensor, Tensor]:
        hidden = self._hidden[first_row] if first_row == self.n_rows - 1 else torch.cat(self._hidden[first_row:])
        states: list[Tensor] = []
        rows = Rows(self._token_ids(first_row), self.first_slot + first_row)
        layer_range = (self.depths[first_row], end_depth)
        logits = yield Pass(self.runtime, rows, self.buffer, read_rows, {end_depth: states}, hidden, layer_range, kind)
        self._hidden[first_row:] = torch.split(states[0], 1)
        self.depths[first_row:] = [end_depth] * (self.n_rows - first_row)
        return logits


def n_parameters(learned: Heads | Probe) -> int:
    return sum(tensor.numel() for tensor in learned.tensors().values())


def learned_to_bytes(learned: Heads | Probe, record: LearnedRecord) -> bytes:
    """Return heads or a probe as the bytes of a safetensors file, with metadata from `record`."""
    identity = {"kind": record.kind, "fingerprint": record.fingerprint, "model": record.model, "task": record.task}
    values: dict[str, Any] = {"depths": list(record.depths), "settings": dict(record.settings)}
    if isinstance(learned, Heads):
        values["full"] = learned.full
    metadata = {"schema": SCHEMA, **identity, **{name: json.dumps(value) for name, value in values.items()}}
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in learned.tensors().items()}, metadata)


def learned_from_bytes(kind: LearnedKind, data: bytes, runtime: Runtime) -> Heads | Probe:
    """Read heads (converted to the runtime's dtype) or a probe, and move them to the runtime's device.

    Raises: InvalidInput: the file is damaged or of another kind, or its weights are for another model.
    """
    try:
        header_size = int.from_bytes(data[:HEADER_BYTES], "little")
        tensors = load(data)  # Validates the header, which is parsed below.
        metadata: dict[str, str] = json.loads(data[HEADER_BYTES : HEADER_BYTES + header_size]).get("__metadata__", {})
        depths, full = json.loads(metadata["depths"]), metadata.get("full") == "true"
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"the {kind} cannot be read as safetensors of swiftopt: train or export them again"
        ) from error
    if (metadata.get("schema"), metadata.get("kind")) != (SCHEMA, kind):
        content = metadata.get("kind", "tensors of another program")
        raise InvalidInput(f"this file holds {content}, not {kind}: give a file that swiftopt wrote for {kind}")
    if metadata.get("fingerprint") != runtime.info.fingerprint:
        raise InvalidInput(
            f"the {kind} were trained on {metadata.get('model')} ({metadata.get('fingerprint')}), but this model is"
            f" {runtime.info.fingerprint}: run `swiftopt {kind} train` for it"
        )
    for depth in depths:
        if not 0 < depth < runtime.n_layers:
            raise InvalidInput(
                f"the {kind} cannot read the state after {depth} layers: this model has {runtime.n_layers}; train again"
            )
    hidden_size = int(runtime.config.get_text_config().hidden_size)
    if kind == "probe":
        direction = _checked_tensor(tensors, "direction", (hidden_size,)).float().to(runtime.device)
        return Probe(depths[0], direction, float(_checked_tensor(tensors, "bias", (1,))))
    shape = (runtime.vocab_size if full else hidden_size, hidden_size)
    heads = {depth: _checked_tensor(tensors, f"head.{depth}", shape) for depth in depths}
    return Heads({depth: tensor.to(runtime.device, runtime.dtype) for depth, tensor in heads.items()}, full)


def _checked_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        problem = "is missing" if tensor is None else f"has the shape {tuple(tensor.shape)}"
        raise InvalidInput(f"the tensor {name!r} {problem}, but {shape} was expected: train or export again")
    return tensor


@dataclass(slots=True)
class _ChosenLayers:
    """The layers of the current step's rows, shared by all stacked modules."""

    layers: Pick


class StackedLayers:
    """All layers of a runtime as one batched layer.

    Raises: UnsupportedModel: the layers differ in form, shape, dtype or rotation, or are on several devices.
    """

    def __init__(self, runtime: Runtime) -> None:
        if not runtime.one_device:
            raise UnsupportedModel(
                "layers of different devices cannot be stacked: load the model on one device to decode with paradecode"
            )
        if not runtime.has_alike_layers:
            raise UnsupportedModel(
                "layers without attention, with attention and a state, or of several forms cannot be stacked: decode"
                " with another method than paradecode"
            )
        if len({block.layer_type is None for block in runtime.blocks}) > 1:
            raise UnsupportedModel(
                "layers with and without a rotation by position cannot be stacked: decode with another method than"
                " paradecode"
            )
        self.runtime = runtime
        self._chosen_layers = _ChosenLayers(slice(None))
        if runtime.exact:
            return  # `step` runs layer by layer, which gives the same bits as a pass and needs no stacks.
        modules: dict[str, list[Any]] = {
            field.name: [getattr(block.parts, field.name) for block in runtime.blocks] for field in fields(LayerModules)
        }
        modules.pop("beside")
        several: dict[str, Any] = {
            name: tuple(
                _stack_modules(layer_modules, self._chosen_layers)
                for layer_modules in zip(*modules.pop(name), strict=True)
            )
            for name in ("qkv", "latents")
        }
        stacked: dict[str, Any] = {
            name: _stack_modules(layer_modules, self._chosen_layers) for name, layer_modules in modules.items()
        }
        self._parts = LayerModules(**several, **stacked)
        runtime.weights_moved()

    @torch.inference_mode()
    def step(self, hidden: Tensor, layers: Sequence[int], slots: Sequence[int], buffer: KVBuffer) -> Tensor:
        """Run row i of `hidden` (rows, hidden_size), at slot and position slots[i], through layer layers[i].

        The layer must hold the keys and values of all earlier slots, and no two rows may be at the same layer.

        Returns: the rows' states after their layers, (rows, hidden_size).
        """
        runtime = self.runtime
        if runtime.exact:
            rows = zip(torch.split(hidden, 1), layers, slots, strict=True)
            return torch.cat([runtime.run_layers(row, slot, buffer, layer, layer + 1) for row, layer, slot in rows])
        self._chosen_layers.layers = _layer_index(layers, hidden.device)
        blocks_and_slots = [(runtime.blocks[layer], slot) for layer, slot in zip(layers, slots, strict=True)]
        rotations = [
            table.at(slice(slot, slot + 1))
            for block, slot in blocks_and_slots
            if (table := runtime.rotation(block.layer_type, block.device, slot + 1)) is not None
        ]
        block_form = runtime.blocks[0]  # Its scalars and flags are those of every layer.
        states = normed(self._parts.attn_norm, hidden)
        query, key, value = queries_keys_values(block_form, self._parts, states, joined_rotation(rotations))
        attention_rows = []  # Attention output of each row over its layer's keys and values.
        for row, (block, slot) in enumerate(blocks_and_slots):
            keys, values = buffer.keys[block.index], buffer.values[block.index]
            keys[:, slot], values[:, slot] = key[row], value[row]
            visible_slots = slice(0 if block.window is None else max(0, block.window.oldest(slot)), slot + 1)
            seen = keys[:, visible_slots], values[:, visible_slots]
            attention_rows.append(attend(query[row : row + 1], *seen, None, block.scaling, block.softcap, block.sinks))
        attention = attention_out(block_form, self._parts, torch.cat(attention_rows))
        after_attention = hidden + block_form.added(attention)
        mlp_input = hidden if runtime.parallel else after_attention
        return after_attention + block_form.added(mlp_out(self._parts, normed(self._parts.mlp_norm, mlp_input)))


class _Linear(nn.Module):
    """A linear map per row, with the weights of the chosen layers."""

    def __init__(self, modules: Sequence[nn.Module], chosen: _ChosenLayers) -> None:
        super().__init__()
        params, _ = _stack_parameters(modules)
        weight = params["weight"]
        # Weights of all layers: (layers, out, in).
        self.stack = weight.transpose(1, 2) if isinstance(modules[0], Conv1D) else weight
        self.bias_stack = params.get("bias")  # Biases of all layers: (layers, out).
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stack[self.chosen.layers]
        bias = None if self.bias_stack is None else self.bias_stack[self.chosen.layers]
        if x.shape[0] == 1 or (x.device.type == "cpu" and x.dtype != torch.float32):
            # On a CPU a 16-bit bmm is several times slower than one product per row; a float32 bmm is not.
            rows = [
                F.linear(x[row : row + 1], weight[row], None if bias is None else bias[row])
                for row in range(x.shape[0])
            ]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        outputs = torch.bmm(x[:, None, :], weight.transpose(1, 2))[:, 0]
        return outputs if bias is None else outputs + bias


class _PerRow:
    """A module without linear maps, computed for each row with the parameters of its layer."""

    def __init__(self, modules: Sequence[nn.Module], chosen: _ChosenLayers) -> None:
        params, buffers = _stack_parameters(modules)
        self._skeleton = copy.deepcopy(modules[0]).to("meta")
        self._state = {**params, **buffers}
        self._chosen_layers = chosen

    def __call__(self, x: Tensor) -> Tensor:
        state = {name: tensor[self._chosen_layers.layers] for name, tensor in self._state.items()}
        out: Tensor = torch.func.vmap(partial(torch.func.functional_call, self._skeleton))(state, x)
        return out


def _stack_modules(modules: Sequence[Any], chosen: _ChosenLayers) -> Callable[[Tensor], Tensor] | None:
    """Return a function that applies one module of every layer to rows, each row with its own layer's weights."""
    if modules[0] is None:
        return None
    shapes = [
        [(name, parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()]
        for module in modules
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise UnsupportedModel("paradecode stacks layers, and those of this model differ in shape: use adadecode")
    if has_linears(modules[0]):
        # Run the module's own code with stacked linear maps; its other operations work row by row.
        return replaced(modules, lambda linear_maps: _Linear(linear_maps, chosen))
    return _PerRow(modules, chosen)


def _stack_parameters(modules: Sequence[nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and the buffers of the modules by name, each stacked as (layers, …)."""
    params: dict[str, Tensor] = {}
    for name, _ in modules[0].named_parameters():
        parameters = [module.get_parameter(name) for module in modules]
        stack = _find_stack(parameters)
        if stack is None:
            stack = torch.stack([parameter.data for parameter in parameters])
            for parameter, view in zip(parameters, stack, strict=True):
                parameter.data = view
        params[name] = stack
    buffers = {
        name: torch.stack([module.get_buffer(name) for module in modules]) for name, _ in modules[0].named_buffers()
    }
    return params, buffers


def _find_stack(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return the stacked tensor if the parameters are already views of one, from earlier stacks of the model."""
    first = parameters[0].data
    n_bytes, storage = first.numel() * first.element_size(), first.untyped_storage()
    are_adjacent = all(
        parameter.data.is_contiguous() and parameter.data.data_ptr() == first.data_ptr() + index * n_bytes
        for index, parameter in enumerate(parameters)
    )
    fill_storage = storage.data_ptr() == first.data_ptr() and storage.nbytes() == n_bytes * len(parameters)
    if not (are_adjacent and fill_storage):
        return None
    return first.as_strided((len(parameters), *first.shape), (first.numel(), *first.stride()), 0)


def _layer_index(layers: Sequence[int], device: torch.device) -> Pick:
    """Return the layers as a strided slice if they ascend in equal steps, else as an index tensor."""
    if len(layers) == 1:
        return slice(layers[0], layers[0] + 1)
    stride = layers[1] - layers[0]
    if stride > 0 and all(next_layer - layer == stride for layer, next_layer in pairwise(layers)):
        return slice(layers[0], layers[-1] + 1, stride)
    return uploaded(layers, device)
