"""A chain of rows of which each has been run to a depth of its own; what is left is run for all of them at once.

Early exit reads a row at an intermediate layer and starts the next one; the row's deeper layers are deferred until a
later row needs their keys and values, and then run for every waiting row in one pass over the weights (AdaDecode 2.2,
Algorithm 1; LayerSkip's verification is the case of one depth for all). Nothing is run twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .buffer import KVBuffer

if TYPE_CHECKING:
    from .runtime import Runtime


class StagedPass:
    """Rows at slots `first_slot`, `first_slot` + 1, …, all layers of the full model.

    A later row is never deeper than an earlier one, so that every row finds the keys and values it needs: advancing the
    newest row to a layer brings the waiting ones along from wherever they stopped.
    """

    def __init__(self, runtime: Runtime, buffer: KVBuffer, first_slot: int) -> None:
        self.runtime, self.buffer, self.first_slot = runtime, buffer, first_slot
        self.depths: list[int] = []  # layers run, per row; not increasing
        self._hidden: list[Tensor] = []  # per row (1, hidden_size), after depths[row] layers

    @property
    def n_rows(self) -> int:
        """Rows added so far."""
        return len(self.depths)

    def add(self, token_id: int) -> None:
        """Append a row, no layer of it run yet."""
        self._hidden.append(self.runtime.embed([token_id], self.first_slot + self.n_rows))
        self.depths.append(0)

    @torch.inference_mode()
    def advance(self, depth: int) -> Tensor:
        """Run every row to at least `depth` layers; returns the newest row's state (1, hidden_size)."""
        while self.depths[-1] < depth:
            # Rows that stand where the newest one stands: a run of rows at the end, which go on together.
            at = self.depths[-1]
            first = next(row for row, own in enumerate(self.depths) if own == at)
            until = min(depth, self.depths[first - 1]) if first else depth
            hidden = self._hidden[first] if first == self.n_rows - 1 else torch.cat(self._hidden[first:])
            hidden = self.runtime.run_layers(hidden, self.first_slot + first, self.buffer, at, until)
            self._hidden[first:] = torch.split(hidden, 1)
            self.depths[first:] = [until] * (self.n_rows - first)
        return self._hidden[-1]

    @torch.inference_mode()
    def finish(self) -> Tensor:
        """Run what is left of every row; returns the logits (rows, vocab) after all layers."""
        self.advance(self.runtime.n_layers)
        return self.runtime.logits(torch.cat(self._hidden))
