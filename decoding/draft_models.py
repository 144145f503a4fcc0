"""What a draft is read from: the target without some sub-layers, its first layers, or another model.

All three take nodes of a draft tree and give the logits after them; what differs is whose keys and values they use.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..core.types import LayerSet
from ..models.buffer import KVBuffer
from ..models.early_exit import StagedPass
from ..models.rows import Pass, Rows
from ..models.runtime import Runtime
from .context import Context
from .engine import PassGenerator
from .tree import ancestor_mask


class DraftPasses(ABC):
    """A draft model at work on one request.

    `staged` holds the rows of this round, where they are the target's own and verification only has to finish them;
    `hidden` (1, hidden_size) is the state that the latest logits were read from, where a probe may look at it.
    """

    staged: StagedPass | None = None
    hidden: Tensor | None = None

    @property
    def room(self) -> int:
        """How deep a draft under the last committed token can be; the loop itself keeps to the target's context."""
        return sys.maxsize

    @abstractmethod
    def restart(self) -> None:
        """Begin a new round: the next node is the root, the last committed token."""

    @abstractmethod
    def extend(self, token_ids: Sequence[int], parents: Sequence[int]) -> PassGenerator[Tensor]:
        """Add nodes under earlier ones (the root's parent is -1); return the logits (nodes, vocab) after them."""

    @abstractmethod
    def drop(self, n_nodes: int) -> None:
        """Take the newest nodes back; the next ones go where they were."""


class DraftModel(Protocol):
    """Something cheaper than the target that predicts its next tokens."""

    @property
    def layer_set(self) -> LayerSet | None:
        """The sub-layers of the target that it leaves out, if it is made of the target."""
        ...

    def begin(self, context: Context) -> DraftPasses:
        """Start on a request."""
        ...

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: it cannot draft for that target."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Memory that it takes per slot of a request, beside the target's."""
        ...


class _Nodes:
    """The tree of a round while it grows, and the rows of a pass over its newest nodes."""

    def __init__(self) -> None:
        self.parents: list[int] = []

    def drop(self, n_nodes: int) -> None:
        """Forget the newest nodes."""
        del self.parents[len(self.parents) - n_nodes :]

    def rows(
        self, token_ids: Sequence[int], parents: Sequence[int], root_slot: int, variants: tuple[LayerSet, ...]
    ) -> Rows:
        """Add nodes; node i goes to slot root_slot + i."""
        first = len(self.parents)
        self.parents += parents
        if all(parent == node - 1 for node, parent in enumerate(self.parents)):
            return Rows(token_ids, root_slot + first, variants=variants)
        depths = [0] * len(self.parents)
        for node, parent in enumerate(self.parents[1:], 1):
            depths[node] = depths[parent] + 1
        committed = torch.ones((len(token_ids), root_slot), dtype=torch.bool)
        visible = torch.cat((committed, ancestor_mask(self.parents)[first:]), dim=1)
        positions = [root_slot + depth for depth in depths[first:]]
        return Rows(token_ids, root_slot + first, positions, visible, variants)


class SkippedTarget:
    """The target without the sub-layers of `layer_set`, which may be changed between rounds (SWIFT, Self-SD).

    It reads the target's keys and values and writes its own behind them, where verification overwrites them. An empty
    layer set is the target itself.
    """

    slot_bytes = 0  # it writes to the target's slots

    def __init__(self, layer_set: LayerSet) -> None:
        self.layer_set: LayerSet | None = layer_set

    def begin(self, context: Context) -> DraftPasses:
        return _SkippedPasses(self, context)

    def check(self, runtime: Runtime) -> None:
        """Raises: LayerSetError: the set was made for another depth."""
        assert self.layer_set is not None
        runtime.check_layer_set(self.layer_set)
        runtime.copies.prepare(self.layer_set)


class _SkippedPasses(DraftPasses):
    def __init__(self, model: SkippedTarget, context: Context) -> None:
        self.model, self.context = model, context
        self.restart()

    def restart(self) -> None:
        self._nodes = _Nodes()
        assert self.model.layer_set is not None
        self._variants = () if self.model.layer_set.is_whole else (self.model.layer_set,)

    def extend(self, token_ids: Sequence[int], parents: Sequence[int]) -> PassGenerator[Tensor]:
        context = self.context
        rows = self._nodes.rows(token_ids, parents, context.root_slot, self._variants)
        return (yield Pass(context.runtime, rows, context.buffer, drafts=True))

    def drop(self, n_nodes: int) -> None:
        self._nodes.drop(n_nodes)


class EarlyExit:
    """The target's first `depth` layers, its own norm and head; verification runs the other layers only (LayerSkip).

    Chains only: a row's state is kept for the layers that are still to come.
    """

    layer_set: LayerSet | None = None
    slot_bytes = 0

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def begin(self, context: Context) -> DraftPasses:
        return _EarlyPasses(self.depth, context)

    def check(self, runtime: Runtime) -> None:
        runtime.check_depth(self.depth)


class _EarlyPasses(DraftPasses):
    def __init__(self, depth: int, context: Context) -> None:
        self.depth, self.context = depth, context

    def restart(self) -> None:
        self.staged = StagedPass(self.context.runtime, self.context.buffer, self.context.root_slot)

    def extend(self, token_ids: Sequence[int], parents: Sequence[int]) -> PassGenerator[Tensor]:
        assert self.staged is not None and len(token_ids) == 1 and parents[0] == self.staged.n_rows - 1
        self.staged.add(token_ids[0])
        logits = yield from self.staged.advance(self.depth, with_logits=True)
        self.hidden = self.staged.newest
        return logits

    def drop(self, n_nodes: int) -> None:
        assert n_nodes == 0, "an early exit drafts single tokens, and all of them stay"


class OtherModel:
    """A smaller model with the target's tokenizer and a key/value buffer of its own (Leviathan et al., Chen et al.)."""

    layer_set: LayerSet | None = None

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def slot_bytes(self) -> int:
        return self.runtime.slot_bytes

    def begin(self, context: Context) -> DraftPasses:
        return _OtherPasses(self.runtime, context)

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: their tokenizers differ."""
        self.runtime.check_same_tokenizer(runtime)


class _OtherPasses(DraftPasses):
    def __init__(self, runtime: Runtime, context: Context) -> None:
        self.runtime, self.context = runtime, context
        self.buffer: KVBuffer = runtime.new_buffer(context.buffer.capacity)
        self._held: list[int] = []  # the tokens whose keys and values lie at slots 0, 1, …
        self._n_same = 0  # of them, those known to be committed
        self._width = context.runtime.vocab_size
        self.restart()

    @property
    def room(self) -> int:
        return max(0, self.runtime.max_positions - self.context.root_slot)

    def restart(self) -> None:
        self._nodes = _Nodes()

    def extend(self, token_ids: Sequence[int], parents: Sequence[int]) -> PassGenerator[Tensor]:
        if not self._nodes.parents:
            self._nodes.parents.append(-1)
            first = self._fit((yield from self._catch_up()))
            if len(token_ids) == 1:
                return first
            return torch.cat((first, (yield from self.extend(token_ids[1:], parents[1:]))))
        root = self.context.root_slot
        rows = self._nodes.rows(token_ids, parents, root, ())
        if rows.visible is None:
            self._held[root + len(self._nodes.parents) - len(token_ids) :] = token_ids
        return self._fit((yield Pass(self.runtime, rows, self.buffer, drafts=True)))

    def drop(self, n_nodes: int) -> None:
        self._nodes.drop(n_nodes)
        del self._held[self.context.root_slot + len(self._nodes.parents) :]

    def _catch_up(self) -> PassGenerator[Tensor]:
        """Read the committed tokens that are new, the root last; return the logits (1, vocab) after it."""
        committed, root = self.context.token_ids, self.context.root_slot
        same = self._n_same
        while same < min(root, len(self._held)) and self._held[same] == committed[same]:
            same += 1
        self._held, self._n_same = list(committed), same
        last = self.runtime.vocab_size - 1  # a head padded further can give tokens that the draft model has no row for
        token_ids = [min(token_id, last) for token_id in committed[same:]]
        for each in self.runtime.prefill_passes(token_ids, self.buffer, same, load=self.context.load):
            logits = yield replace(each, drafts=True)
        return logits

    def _fit(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary: heads are padded to different widths in one family."""
        logits = logits.to(self.context.runtime.device)
        if logits.shape[-1] >= self._width:
            return logits[:, : self._width]
        return torch.nn.functional.pad(logits, (0, self._width - logits.shape[-1]), value=float("-inf"))
