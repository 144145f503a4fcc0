"""Early exit: light heads at intermediate layers, a probe that predicts acceptance, and passes of rows that stop early.

Heads and probes are trained on a frozen model. Their files are safetensors: the bytes that the store keeps and `export`
writes.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..core.errors import InvalidInput
from ..core.records import LearnedKind, LearnedRecord
from .buffer import KVBuffer
from .rows import Pass, Rows
from .runtime import Runtime

SCHEMA = "swiftopt.learned-weights/1"
HEADER_BYTES = 8  # length of the header of a safetensors file, little-endian


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Light heads: at depth l (layers run), the head's weights E* · T with T (hidden, hidden) of that depth.

    DEVIATION: the final norm is applied to the state before T, which AdaDecode 2.1 does not say; T = identity is then
    the model's own head read early, the paper's ablation, and training starts from there.
    """

    KIND: ClassVar[LearnedKind] = "heads"

    transforms: Mapping[int, Tensor]  # depth -> (hidden_size, hidden_size), in the model's dtype
    full: bool = False  # the tensors are whole heads (vocab, hidden_size) instead (Table 3, full-parameterized)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths with a head, shallowest first."""
        return tuple(sorted(self.transforms))

    def logits(self, runtime: Runtime, depth: int, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocab) of states (rows, hidden_size) after `depth` layers."""
        moved = torch.nn.functional.linear(runtime.normed(hidden), self.transforms[depth])
        return moved if self.full else runtime.head(moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by their names in a file: `head.DEPTH` each."""
        return {f"head.{depth}": self.transforms[depth] for depth in self.depths}


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A linear probe: the probability σ(v · h + b) that the token read from the state h at `depth` is accepted.

    Source: AdaSPEED II.B. `direction` is float32 (hidden_size,).
    """

    KIND: ClassVar[LearnedKind] = "probe"

    depth: int
    direction: Tensor
    bias: float

    @property
    def depths(self) -> tuple[int, ...]:
        """The one depth."""
        return (self.depth,)

    def acceptance(self, hidden: Tensor) -> float:
        """Return the probability for a state (1, hidden_size)."""
        return float(torch.sigmoid(hidden[-1].float() @ self.direction.to(hidden.device) + self.bias))

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by their names in a file: `direction` and `bias`."""
        return {"direction": self.direction, "bias": torch.tensor([self.bias], dtype=torch.float64)}


class StagedPass:
    """A chain of rows at slots `first_slot`, `first_slot` + 1, …, each run to a depth of its own.

    Early exit reads a row at an intermediate layer and starts the next one. The row's deeper layers are deferred until
    a later row needs their keys and values, and then run for every waiting row in one pass over the weights; nothing is
    run twice. A later row is never deeper than an earlier one: advancing the newest row to a layer brings the waiting
    ones along from wherever they stopped. What runs is yielded as passes over some of the layers.

    Source: AdaDecode 2.2, Algorithm 1; LayerSkip's verification is the case of one depth for all.
    """

    def __init__(self, runtime: Runtime, buffer: KVBuffer, first_slot: int) -> None:
        self.runtime, self.buffer, self.first_slot = runtime, buffer, first_slot
        self.depths: list[int] = []  # layers run, per row; not increasing
        self._hidden: list[Tensor] = []  # per row (1, hidden_size), after depths[row] layers

    @property
    def n_rows(self) -> int:
        """Rows added so far."""
        return len(self.depths)

    @property
    def newest(self) -> Tensor:
        """State (1, hidden_size) of the newest row, after as many layers as it has run."""
        return self._hidden[-1]

    def add(self, token_id: int) -> None:
        """Append a row of which no layer has run."""
        self._hidden.append(self.runtime.embed([token_id], self.first_slot + self.n_rows))
        self.depths.append(0)

    def advance(self, depth: int, with_logits: bool = False, drafts: bool = True) -> Generator[Pass, Tensor, Tensor]:
        """Run every row to at least `depth` layers; returns the logits (1, vocab) read from the newest row there.

        Args: with_logits: False: return logits of no row. drafts: see `Pass`.
        """
        logits = self.newest[:0]
        while self.depths[-1] < depth:
            # Rows that stand where the newest one stands: a run of rows at the end, which go on together.
            first = self.depths.index(self.depths[-1])
            until = min(depth, self.depths[first - 1]) if first else depth
            wanted = (self.n_rows - first - 1,) if with_logits and until == depth else ()
            logits = yield from self._run(first, until, wanted, drafts)
        return logits

    def finish(self) -> Generator[Pass, Tensor, Tensor]:
        """Run what is left of every row; returns the logits (rows, vocab) after all layers."""
        yield from self.advance(self.depths[0], drafts=False)  # where they all stand then
        return (yield from self._run(0, self.runtime.n_layers, None, drafts=False))

    def _run(
        self, first: int, until: int, wanted: Sequence[int] | None, drafts: bool
    ) -> Generator[Pass, Tensor, Tensor]:
        """Bring the rows from `first` on, which stand alike, to `until` layers."""
        hidden = self._hidden[first] if first == self.n_rows - 1 else torch.cat(self._hidden[first:])
        states: list[Tensor] = []
        rows = Rows([0] * hidden.shape[0], self.first_slot + first)
        span = (self.depths[first], until)
        logits = yield Pass(self.runtime, rows, self.buffer, wanted, {until: states}, drafts, hidden, span)
        self._hidden[first:] = torch.split(states[0], 1)
        self.depths[first:] = [until] * (self.n_rows - first)
        return logits


def n_parameters(learned: Heads | Probe) -> int:
    """Return the number of parameters in addition to the model's."""
    return sum(tensor.numel() for tensor in learned.tensors().values())


def learned_to_bytes(learned: Heads | Probe, record: LearnedRecord) -> bytes:
    """Return a file of heads or of a probe, with the record as metadata."""
    words = {"kind": record.kind, "fingerprint": record.fingerprint, "model": record.model, "task": record.task}
    values: dict[str, Any] = {"depths": list(record.depths), "settings": dict(record.settings)}
    if isinstance(learned, Heads):
        values["full"] = learned.full
    metadata = {"schema": SCHEMA, **words, **{name: json.dumps(value) for name, value in values.items()}}
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in learned.tensors().items()}, metadata)


def learned_from_bytes(kind: LearnedKind, data: bytes, runtime: Runtime) -> Heads | Probe:
    """Read heads, in the runtime's dtype, or a probe; on its device.

    Raises: InvalidInput: no such file, or weights for another model.
    """
    try:
        size = int.from_bytes(data[:HEADER_BYTES], "little")
        tensors = load(data)  # checks the header before it is read below
        metadata: dict[str, str] = json.loads(data[HEADER_BYTES : HEADER_BYTES + size]).get("__metadata__", {})
        depths, full = json.loads(metadata["depths"]), metadata.get("full") == "true"
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"the {kind} cannot be read as safetensors of swiftopt: train or export them again"
        ) from error
    if (metadata.get("schema"), metadata.get("kind")) != (SCHEMA, kind):
        raise InvalidInput(f"this file holds {metadata.get('kind', 'nothing known')}, not {kind}: name another one")
    if metadata.get("fingerprint") != runtime.info.fingerprint:
        raise InvalidInput(
            f"the {kind} were trained on {metadata.get('model')} ({metadata.get('fingerprint')}), but this model is"
            f" {runtime.info.fingerprint}: run `swiftopt {kind} train` for it"
        )
    for depth in depths:
        if not 0 < depth < runtime.n_layers:
            raise InvalidInput(f"the {kind} sit after layer {depth}, but this model has {runtime.n_layers}: train anew")
    width = int(runtime.config.get_text_config().hidden_size)
    if kind == "probe":
        direction = _tensor(tensors, "direction", (width,)).float().to(runtime.device)
        return Probe(depths[0], direction, float(_tensor(tensors, "bias", (1,))))
    shape = (runtime.vocab_size if full else width, width)
    found = {depth: _tensor(tensors, f"head.{depth}", shape) for depth in depths}
    return Heads({depth: tensor.to(runtime.device, runtime.dtype) for depth, tensor in found.items()}, full)


def _tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape:
        has = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
        raise InvalidInput(f"the tensor {name!r} {has}, but {shape} was expected: train or export it again")
    return found
