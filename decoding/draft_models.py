"""What a draft is read from: the target without some sub-layers, or another model."""

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
        self._shared = self  # by the copies of all requests, which take their layer set from here

    def check(self, runtime: Runtime) -> None:
        """Raises: LayerSetError: the set was made for another depth."""
        assert self.layer_set is not None
        runtime.check_layer_set(self.layer_set)
        runtime.copies.prepare(self.layer_set)

    def restart(self) -> None:
        super().restart()
        self.layer_set = layer_set = self._shared.layer_set
        self._variants = () if layer_set is None or layer_set.is_whole else (layer_set,)

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        rows = self._rows(token_ids, parents, self._variants)
        kind: PassKind = "check" if self.layer_set is None else "draft"  # the target itself does not let others wait
        return (yield Pass(self.context.runtime, rows, self.context.buffer, kind=kind))


class OtherModel(DraftModel):
    """A smaller model with the target's tokenizer and a key/value buffer of its own (Leviathan et al., Chen et al.)."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.slot_bytes = runtime, runtime.slot_bytes

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: their tokenizers differ."""
        self.runtime.check_same_tokenizer(runtime)

    def start(self) -> None:
        self._own = self.runtime.new_buffer(self.context.buffer.capacity)
        self._held: list[int] = []  # the tokens whose keys and values lie at slots 0, 1, …
        self._n_same = 0  # of them, those known to be committed
        self._unread: Callable[[], Any] | None = None  # gives the root and the tokens of a draft that is read late

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
        return super().reads_late and self.runtime.reads_late  # on one GPU, or from one to another

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
        """Read the committed tokens that are new, the root last; return the logits (1, vocab) after it."""
        if self._unread is not None:
            drafted, self._unread = self._unread()[:-1], None  # the last one was not run
            self._held[len(self._held) - len(drafted) :] = map(int, drafted)
        committed, root = self.context.token_ids, self.context.root_slot
        same = self._n_same
        while same < min(root, len(self._held)) and self._held[same] == committed[same]:
            same += 1
        self._held, self._n_same = list(committed), same
        unread = self._known(committed[same:])
        for pass_ in self.runtime.prefill_passes(unread, self.buffer, same, is_shared=self.context.load.is_shared):
            # A long text is read beside the others' rounds, up to its last pass.
            logits = yield replace(pass_, kind="draft") if pass_.wanted else pass_
        return logits

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """Return its last token in place of those that it has no row for, which a head padded further can give."""
        return [min(token_id, self.runtime.vocab_size - 1) for token_id in token_ids]

    def _fit(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary: heads are padded to different widths in one family."""
        logits, width = logits.to(self.context.runtime.device), self.context.runtime.vocab_size
        if logits.shape[-1] >= width:
            return logits[:, :width]
        return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
