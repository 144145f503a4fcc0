"""Draft models: the target without some of its sub-layers, or a separate smaller model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.layer_sets import LayerSet
from ..models.buffer import KVBuffer
from ..models.coded_slots import SlotCoding
from ..models.rows import Pass, PassKind
from ..models.runtime import Runtime
from ..models.transfers import fetched
from .draft import Draft, DraftModel
from .draft_tree import UNKNOWN
from .work import PassGenerator


class SkippedTarget(DraftModel):
    """The target without the sub-layers of `layer_set`, which may change between rounds (SWIFT, Self-SD).

    It reads the target's keys and values and writes its own after them; verification overwrites these. An empty
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

    def coding(self, runtime: Runtime, capacity: int) -> SlotCoding | None:
        if self._shared.layer_set is None or runtime.native is None:
            return None
        return runtime.native.slot_coding(capacity)

    def restart(self) -> None:
        super().restart()
        self.layer_set = layer_set = self._shared.layer_set
        self._variants = () if layer_set is None or layer_set.is_whole else (layer_set,)
        self._reads_coded: bool | None = None  # Unknown before the first pass: a round may not use the model.

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        rows = self._rows(token_ids, parents, self._variants)
        # Draft passes are run before waiting target passes. A draft by the whole target gets no such priority.
        kind: PassKind = "check" if self.layer_set is None else "draft"
        buffer = self.context.buffer
        if self._reads_coded is None:
            # Slots before the root are committed and final.
            self._reads_coded = bool(self._variants) and buffer.code(self.context.root_slot)
        return (yield Pass(self.context.runtime, rows, buffer, kind=kind, reads_coded=self._reads_coded))


class OtherModel(DraftModel):
    """A smaller model with the target's tokenizer and its own key/value buffer (Leviathan et al., Chen et al.)."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.slot_bytes = runtime, runtime.slot_bytes

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: the draft model and the target have different tokenizers."""
        self.runtime.check_same_tokenizer(runtime)

    def start(self) -> None:
        self._draft_buffer = self.runtime.new_buffer(self.context.buffer.capacity)
        self._cached_ids: list[int] = []  # Tokens whose keys and values are in slots 0, 1, …
        self._n_committed = 0  # Number of leading `_cached_ids` tokens known to be committed.
        # Reads the root and the tokens of a draft still on its device.
        self._read_draft: Callable[[], Any] | None = None

    @property
    def buffer(self) -> KVBuffer:
        if self._draft_buffer.capacity < self.context.buffer.capacity:
            old_buffer, self._draft_buffer = self._draft_buffer, self.runtime.new_buffer(self.context.buffer.capacity)
            self._draft_buffer.copy_from(old_buffer, old_buffer.capacity)
        return self._draft_buffer

    @property
    def room(self) -> int:
        return max(0, self.runtime.max_positions - self.context.root_slot)

    @property
    def reads_late(self) -> bool:
        return super().reads_late and self.runtime.reads_late  # True only if both models are on GPUs.

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        if not self.parents:
            self.parents.append(-1)
            root_logits = self._fit_width((yield from self._catch_up()))
            if len(token_ids) == 1:
                return root_logits
            return torch.cat((root_logits, (yield from self.extend(token_ids[1:], parents[1:]))))
        input_ids = token_ids.to(self.runtime.device) if isinstance(token_ids, Tensor) else self._clamp_ids(token_ids)
        rows = self._rows(input_ids, parents)
        if rows.visible is None:
            new_ids = [UNKNOWN] * len(token_ids) if isinstance(token_ids, Tensor) else token_ids
            self._cached_ids[rows.first_slot :] = new_ids
        return self._fit_width((yield Pass(self.runtime, rows, self.buffer, kind="draft")))

    def draft_ahead(self, *args: Any, **kwargs: Any) -> PassGenerator[Draft]:
        draft = yield from super().draft_ahead(*args, **kwargs)
        assert draft.unread is not None
        self._read_draft = fetched(draft.unread[0])
        return draft

    def drop(self, n_nodes: int) -> None:
        super().drop(n_nodes)
        del self._cached_ids[self.context.root_slot + len(self.parents) :]

    def _catch_up(self) -> PassGenerator[Tensor]:
        """Run the draft model over new committed tokens; return the logits (1, vocab) after the last one, the root."""
        if self._read_draft is not None:
            # The last drafted token was never an input of a pass.
            drafted_ids, self._read_draft = (
                self._read_draft()[:-1],
                None,
            )
            self._cached_ids[len(self._cached_ids) - len(drafted_ids) :] = map(int, drafted_ids)
        committed_ids, root_slot = self.context.token_ids, self.context.root_slot
        n_same = self._n_committed
        while n_same < min(root_slot, len(self._cached_ids)) and self._cached_ids[n_same] == committed_ids[n_same]:
            n_same += 1
        self._cached_ids, self._n_committed = list(committed_ids), n_same
        unread_ids = self._clamp_ids(committed_ids[n_same:])
        for pass_ in self.runtime.prefill_passes(
            unread_ids, self.buffer, n_same, is_shared=self.context.load.is_shared
        ):
            # The earlier passes of a long text run together with other requests' target passes; only the last one runs
            # as a draft pass.
            logits = yield replace(pass_, kind="draft") if pass_.wanted else pass_
        return logits

    def _clamp_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Clamp token ids to the draft model's vocabulary: a target with a more padded head can produce larger ones."""
        return [min(token_id, self.runtime.vocab_size - 1) for token_id in token_ids]

    def _fit_width(self, logits: Tensor) -> Tensor:
        """Return logits cut or padded to the target's width: output heads are padded differently within a family."""
        logits, width = logits.to(self.context.runtime.device), self.context.runtime.vocab_size
        if logits.shape[-1] >= width:
            return logits[:, :width]
        return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
