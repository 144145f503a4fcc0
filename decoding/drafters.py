"""Who proposes the next tokens: nobody (plain decoding), or the model itself with sub-layers left out."""

from __future__ import annotations

from typing import Protocol

from ..core.settings import SwiftSettings
from ..core.types import LayerSet
from ..models.runtime import Rows
from .context import Context
from .tree import DraftTree


class Drafter(Protocol):
    """Proposes a tree of continuations of the committed text."""

    name: str
    layer_set: LayerSet | None

    def draft(self, context: Context, room: int) -> DraftTree:
        """A tree under the last committed token, with at most `room` draft steps."""
        ...

    def max_nodes(self, room: int) -> int:
        """Most rows a draft with at most `room` steps can have, root included."""
        ...


class NoDrafter:
    """Plain decoding: the tree is its root."""

    name = "plain"
    layer_set: LayerSet | None = None

    def draft(self, context: Context, room: int) -> DraftTree:
        return DraftTree((context.token_ids[-1],), (-1,), 0)

    def max_nodes(self, room: int) -> int:
        return 1


class SkipDrafter:
    """SWIFT's draft: the target without some sub-layers, stopped early, each position with its top candidates.

    The draft reads the target's keys and values and writes its own behind them, where verification overwrites them.
    Source: SWIFT 4.2, Eq. 5.
    """

    name = "swift"

    def __init__(self, layer_set: LayerSet, settings: SwiftSettings) -> None:
        self.layer_set: LayerSet | None = layer_set
        self.settings = settings

    def draft(self, context: Context, room: int) -> DraftTree:
        assert self.layer_set is not None
        runtime, rule, settings = context.runtime, context.rule, self.settings
        variants = (self.layer_set,)
        root = context.token_ids[-1]
        spine = [root]
        offered: list[tuple[int, ...]] = []
        while len(offered) < room:
            rows = Rows(spine[-1:], context.root_slot + len(offered), variants=variants)
            logits = runtime.forward(rows, context.buffer)[0]
            scores = rule.scores([*context.token_ids, *spine[1:]] if rule.processors else (), logits)
            token_id, confidence = rule.confidence(scores)
            offered.append(rule.candidates(scores, token_id, settings.candidates_at(confidence)))
            spine.append(token_id)
            if settings.stops_after(confidence, len(offered)):
                break
        return DraftTree.grow(root, offered)

    def max_nodes(self, room: int) -> int:
        widest = max(k for _, k in self.settings.branching) if self.settings.dynamic_verification else 1
        return 1 + min(room, self.settings.max_draft_length) * widest
