"""ParaDecode: tokens at different layers are advanced together, one layer of each per step over stacked weights.

A token is predicted as soon as the one before it passes an early layer, and starts at the bottom while that one goes
on above. The oldest token reaches the last layer first; the target's own token there either is the next one in flight,
which goes on, or the flight is dropped (token equality, exact at every temperature: the target's draw is kept).

Source: ParaDecode 2.2, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.types import LayerSet
from ..models.early_exit import Heads
from ..models.stacked import StackedLayers
from .context import Context
from .draft import Draft, Drafting, Outcome
from .engine import PassGenerator
from .tree import DraftTree


class PipelineDrafter:
    """Predictions by `heads` where a probability exceeds `threshold` (γ); with 0, at the first head for every token.

    DEVIATION: the head's most probable token is taken where the paper draws one; equality with the target's own token
    is what counts, and that is likelier so.
    """

    layer_set: LayerSet | None = None

    def __init__(self, heads: Heads, threshold: float, stacked: StackedLayers) -> None:
        self.heads, self.threshold, self.stacked = heads, threshold, stacked

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        return _Pipeline(self, context)

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        return 1 + min(room, -(-self.stacked.runtime.n_layers // self.heads.depths[0]))


@dataclass(slots=True)
class _Flight:
    """A token on its way up; `predicted` says that the one after it is in flight too."""

    token_id: int
    slot: int
    hidden: Tensor  # (1, hidden_size) after `depth` layers
    depth: int = 0
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class _Arrived:
    """The oldest token's state after all layers, as the pass that the target's token is read from."""

    context: Context
    hidden: Tensor

    def finish(self) -> Tensor:
        return self.context.runtime.logits(self.hidden)


class _Pipeline:
    def __init__(self, drafter: PipelineDrafter, context: Context) -> None:
        self.drafter, self.context = drafter, context
        self._flights: list[_Flight] = []  # oldest, deepest, first

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()  # what it runs is a part of the target's own layers
        context = self.context
        root, slot = context.token_ids[-1], context.root_slot
        if not self._flights or (self._flights[0].token_id, self._flights[0].slot) != (root, slot):
            self._flights = [self._start(root, slot)]
        while self._flights[0].depth < context.runtime.n_layers:
            self._predict(slot + room)
            self._step()
        oldest = self._flights.pop(0)
        tokens = [root, *(flight.token_id for flight in self._flights[:1])]
        return Draft(DraftTree.chain(tokens), staged=_Arrived(context, oldest.hidden), n_checked=1)

    def observe(self, outcome: Outcome) -> None:
        pass

    def _start(self, token_id: int, slot: int) -> _Flight:
        return _Flight(token_id, slot, self.context.runtime.embed([token_id], slot))

    def _predict(self, last_slot: int) -> None:
        """Start the token after the newest one, if that stands at a head that is sure, and has room behind it."""
        newest, heads = self._flights[-1], self.drafter.heads
        if newest.predicted or newest.depth not in heads.transforms or newest.slot >= last_slot:
            return
        rule, token_ids = self.context.rule, self.context.token_ids
        logits = heads.logits(self.context.runtime, newest.depth, newest.hidden)[0]
        ahead = [*token_ids, *(flight.token_id for flight in self._flights[1:])] if rule.processors else ()
        token_id, confidence = rule.confidence(rule.scores(ahead, logits))
        if confidence > self.drafter.threshold:
            newest.predicted = True
            self._flights.append(self._start(token_id, newest.slot + 1))

    def _step(self) -> None:
        """One layer up for everyone."""
        rising = self._flights[::-1]
        hidden = torch.cat([flight.hidden for flight in rising])
        layers, slots = [flight.depth for flight in rising], [flight.slot for flight in rising]
        moved = self.drafter.stacked.step(hidden, layers, slots, self.context.buffer)
        for row, flight in enumerate(rising):
            flight.hidden, flight.depth = moved[row : row + 1], flight.depth + 1
