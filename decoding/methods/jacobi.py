"""Jacobi decoding: a block of guesses is checked as a chain, and the same pass refines those that were refused.

Source: Santilli et al. (arXiv:2305.10427), as a block that moves along with the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count
from ..draft import Draft, Drafter, Outcome, Verifier
from ..tree import DraftTree
from ..verify import TargetWalk
from .registry import Resources, method

if TYPE_CHECKING:
    from ..engine import PassGenerator


@dataclass(frozen=True, slots=True)
class JacobiSettings(Settings):
    """Parallel (Jacobi) decoding (arXiv:2305.10427): guesses refined together."""

    window: int = count(8)


@method("jacobi", "Jacobi decoding", "arXiv:2305.10427", JacobiSettings)
def _jacobi(resources: Resources, settings: JacobiSettings) -> tuple[Drafter, Verifier]:
    return JacobiDrafter(settings), TargetWalk()


class JacobiDrafter(Drafter):
    """`window` guesses, each replaced by the target's argmax after the guesses before it, until they no longer change.

    A fixed point is the greedy output. The guesses are argmaxes of passes over committed tokens and guesses: they
    depend on no draw of the round that checks them, so that `TargetWalk` is exact at every temperature.
    """

    def __init__(self, settings: JacobiSettings) -> None:
        self.window = settings.window

    def max_rows(self, room: int) -> int:
        return 1 + min(room, self.window)

    def start(self) -> None:
        self.guesses = [self.context.token_ids[-1]] * self.window

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        return Draft(DraftTree.chain([self.context.token_ids[-1], *self.guesses[:room]]))

    def observe(self, outcome: Outcome) -> None:
        """Take row i of the pass as the guess i + 1 behind the root; those up to the new root are settled."""
        assert outcome.logits is not None
        settled = outcome.walk.token_ids
        refined = outcome.logits[len(settled) :].max(dim=-1).indices.tolist()
        last = refined[-1] if refined else settled[-1]
        self.guesses = refined + [last] * (self.window - len(refined))
