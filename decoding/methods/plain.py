"""Plain decoding: one row per pass of the target, one token from each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..draft import Draft, Drafter, Verifier
from ..tree import DraftTree
from .registry import Method, Resources, method

if TYPE_CHECKING:
    from ..engine import PassGenerator


class NoDrafter(Drafter):
    """Drafts nothing: the tree is its root."""

    def max_rows(self, room: int) -> int:
        return 1

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        return Draft(DraftTree.chain(self.context.token_ids[-1:]))


PLAIN = Method("plain", NoDrafter())


@method("plain", "plain decoding", "one token per pass")
def _plain(resources: Resources, settings: Any) -> tuple[Drafter, Verifier]:
    return PLAIN.drafter, PLAIN.verifier
