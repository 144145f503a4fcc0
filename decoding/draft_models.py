"""Draft models: the target without some of its sub-layers, or a separate smaller model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.types import LayerSet
from ..models.buffer import KVBuffer
from ..models.rows import Pass, PassKind, fetched
from ..models.runtime import Runtime
from .draft import Draft, DraftModel
from .draft_tree import UNKNOWN
from .work import PassGenerator


class SkippedTarget(DraftModel):
    """The target without the sub-layers of `layer_set`, which may be changed between rounds (SWIFT, Self-SD).

    It reads the target's keys and values and writes its own behind them, where verification overwrites them. An empty
    layer set, or None, is the target itself.
    """

    def __init__(self, layer_set: LayerSet | None) -> None:
        self.layer_set = layer_set
        self._shared = self  # Prototype whose layer set all per-request copies follow.

    def check(self, runtime: Runtime) -> None:
        """Raises: LayerSetError: the layer set was made for a model with another number of layers."""
        assert self.layer_set is not None
        runtime.check_layer_set(self.layer_set)
        runtime.copies.prepare(self.layer_set)

    def restart(self) -> None:
        super().restart()
        self.layer_set = layer_set = self._shared.layer_set
        self._variants = () if layer_set is None or layer_set.is_whole else (layer_set,)

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        rows = self._rows(token_ids, parents, self._variants)
        # Draft passes are run before waiting target passes. A draft by the whole target gets no such priority.
        kind: PassKind = "check" if self.layer_set is None else "draft"
        return (yield Pass(self.context.runtime, rows, self.context.buffer, kind=kind))


class OtherModel(DraftModel):
    """A smaller model with the target's tokenizer and a key/value buffer of its own (Leviathan et al., Chen et al.)."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.slot_bytes = runtime, runtime.slot_bytes

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: the draft model and the target have different tokenizers."""
        self.runtime.check_same_tokenizer(runtime)

    def start(self) -> None:
        self._own = self.runtime.new_buffer(self.context.buffer.capacity)
        self._held: list[int] = []  # Tokens whose keys and values are in slots 0, 1, …
        self._n_same = 0  # Number of leading `_held` tokens known to be committed.
        self._unread: Callable[[], Any] | None = None  # Reads the root and the tokens of a draft still on its device.

    @property
    def buffer(self) -> KVBuffer:
        if self._own.capacity < self.context.buffer.capacity:
            shorter, self._own = self._own, self.runtime.new_buffer(self.context.buffer.capacity)
            self._own.copy_from(shorter, shorter.capacity)
        return self._own

    @property
    def room(self) -> int:
        return max(0, self.runtime.max_positions - self.context.root_slot)

    @property
    def reads_late(self) -> bool:
        return super().reads_late and self.runtime.reads_late  # True only if both models are on GPUs.

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        if not self.parents:
            self.parents.append(-1)
            first = self._fit((yield from self._catch_up()))
            if len(token_ids) == 1:
                return first
            return torch.cat((first, (yield from self.extend(token_ids[1:], parents[1:]))))
        tokens_here = token_ids.to(self.runtime.device) if isinstance(token_ids, Tensor) else self._known(token_ids)
        rows = self._rows(tokens_here, parents)
        if rows.visible is None:
            held = [UNKNOWN] * len(token_ids) if isinstance(token_ids, Tensor) else token_ids
            self._held[rows.first_slot :] = held
        return self._fit((yield Pass(self.runtime, rows, self.buffer, kind="draft")))

    def draft_ahead(self, *args: Any, **kwargs: Any) -> PassGenerator[Draft]:
        draft = yield from super().draft_ahead(*args, **kwargs)
        assert draft.unread is not None
        self._unread = fetched(draft.unread[0])
        return draft

    def drop(self, n_nodes: int) -> None:
        super().drop(n_nodes)
        del self._held[self.context.root_slot + len(self.parents) :]

    def _catch_up(self) -> PassGenerator[Tensor]:
        """Run the draft model over new committed tokens; return the logits (1, vocab) after the last one, the root."""
        if self._unread is not None:
            drafted, self._unread = self._unread()[:-1], None  # The last drafted token was never an input of a pass.
            self._held[len(self._held) - len(drafted) :] = map(int, drafted)
        committed, root = self.context.token_ids, self.context.root_slot
        same = self._n_same
        while same < min(root, len(self._held)) and self._held[same] == committed[same]:
            same += 1
        self._held, self._n_same = list(committed), same
        unread = self._known(committed[same:])
        for pass_ in self.runtime.prefill_passes(unread, self.buffer, same, is_shared=self.context.load.is_shared):
            # The earlier passes of a long text run together with other requests' target passes; only the last one runs
            # as a draft pass.
            logits = yield replace(pass_, kind="draft") if pass_.wanted else pass_
        return logits

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """Clamp token ids to the draft model's vocabulary: a target with a more padded head can produce larger ones."""
        return [min(token_id, self.runtime.vocab_size - 1) for token_id in token_ids]

    def _fit(self, logits: Tensor) -> Tensor:
        """Return logits cut or padded to the target's width: output heads are padded differently within a family."""
        logits, width = logits.to(self.context.runtime.device), self.context.runtime.vocab_size
        if logits.shape[-1] >= width:
            return logits[:, :width]
        return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
