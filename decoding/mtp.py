"""The multi-token-prediction layer of the target's checkpoint as a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from ..models.buffer import KVBuffer
from ..models.mtp import MTP_COSTS, MtpRuntime, cost_name, format_of_costs
from ..models.runtime import PREFILL_ROWS, Runtime
from .draft import DraftModel

if TYPE_CHECKING:
    from ..core.costs import CostProfile
    from .work import PassGenerator


class MtpLayer(DraftModel):
    """Drafts a chain: first from the target's last states, then from the layer's own output.

    The layer's row of a position reads the target's state there and the next token. A round's first pass has such rows
    of all positions whose states have become known since the last one, the root's predecessor at last; it overwrites
    what earlier drafts left in the buffer. So rejected tokens leave no trace, and rounds without such a draft no gap.

    Slot i of its buffer holds the i-th position that the request has read itself: what another request had read before
    has no states any more, and the layer does not see it.

    Args: name: format of the layer's weights and of its copy of the head; None: as stored.
    """

    reads_states = True
    checks_guesses = False

    def __init__(self, layer: MtpRuntime, name: str | None) -> None:
        self.layer, self.name, self.cost_name = layer, name, cost_name(name)
        self.slot_bytes = layer.slot_bytes + int(layer.config.hidden_size) * layer.dtype.itemsize

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: it is another model's layer."""
        if self.layer.target is not runtime:
            raise InvalidInput("the multi-token-prediction layer is another model's: load it with the target")
        self.layer.prepare(self.name)

    def start(self) -> None:
        self._buffer: KVBuffer | None = None
        self._first = 0  # Position of the buffer's first slot.
        self._state: Tensor  # What the layer gave for the newest node, (1, hidden_size), before its norm.

    @property
    def buffer(self) -> KVBuffer:
        capacity = self.context.buffer.capacity - self._first
        if self._buffer is None or self._buffer.capacity < capacity:
            old_buffer, self._buffer = self._buffer, self.layer.new_buffer(capacity)
            if old_buffer is not None:
                self._buffer.copy_from(old_buffer, old_buffer.capacity)
        return self._buffer

    @property
    def n_behind(self) -> int:
        return 0 if self.parents else sum(map(len, self.context.states or ())) - 1

    @property
    def room(self) -> int:
        return max(0, self.layer.max_positions - self.context.root_slot)

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        """Run the root, or the one token after the chain so far; return its logits (1, vocab)."""
        if len(token_ids) != 1:
            raise ValueError("each row of a multi-token-prediction layer reads the output of the row before it")
        is_root = not self.parents
        self.parents += parents
        if is_root:
            token_ids, states, position = yield from self._catch_up()
        else:
            # Normed here and not below: no row reads the state of a draft's last token.
            states, position = self.layer.normed(self._state), self.context.root_slot + len(self.parents) - 2
        pass_, out = self.layer.pass_over(token_ids, states, self.buffer, position - self._first, self.name)
        logits = yield pass_
        self._state = out[0][-1:]
        return logits

    def _catch_up(self) -> PassGenerator[tuple[Sequence[int], Tensor, int]]:
        """Run new positions but for the last ones; return those, as next tokens, states and their first position."""
        context = self.context
        assert context.states
        states = torch.cat(context.states) if len(context.states) > 1 else context.states[0]
        context.states.clear()
        position = context.root_slot - len(states)
        if self._buffer is None:
            self._first = position
        while len(states) > PREFILL_ROWS:
            next_ids = context.token_ids[position + 1 : position + 1 + PREFILL_ROWS]
            normed = context.runtime.normed(states[:PREFILL_ROWS])
            yield self.layer.pass_over(next_ids, normed, self.buffer, position - self._first, self.name, kind="beside")[
                0
            ]
            states, position = states[PREFILL_ROWS:], position + PREFILL_ROWS
        return context.token_ids[position + 1 :], context.runtime.normed(states), position


def measured_layer(runtime: Runtime, costs: CostProfile) -> MtpLayer | None:
    """Return a runtime's multi-token-prediction layer in the cheapest format that was measured; None: it has none."""
    layer = runtime.mtp
    names = [name for name in costs.formats if name.startswith(MTP_COSTS)]
    if not isinstance(layer, MtpRuntime) or not names:
        return None
    model = MtpLayer(layer, format_of_costs(min(names, key=costs.format_cost)))
    model.check(runtime)
    return model
