"""Jacobi decoding: a block of guesses is checked as a chain, and the same pass refines those that did not stand.

Source: Santilli et al. (arXiv:2305.10427), as a block that moves along with the text.
"""

from __future__ import annotations

from ..core.method_settings import JacobiSettings
from ..core.types import LayerSet
from .context import Context
from .draft import Draft, Drafting, Outcome
from .engine import PassGenerator
from .tree import DraftTree


class JacobiDrafter:
    """`window` guesses, each replaced by the target's argmax after the guesses before it, until they stand still.

    What stands still is the greedy output. The guesses are argmaxes of passes over committed tokens and guesses: they
    depend on no draw of the round that checks them, so that `TargetWalk` is exact at every temperature.
    """

    layer_set: LayerSet | None = None

    def __init__(self, settings: JacobiSettings) -> None:
        self.window = settings.window

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        return _Refining(self.window, context)

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        return 1 + min(room, self.window)


class _Refining:
    def __init__(self, window: int, context: Context) -> None:
        self.window, self.context = window, context
        self.guesses = [context.token_ids[-1]] * window

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        return Draft(DraftTree.grow(self.context.token_ids[-1], [(guess,) for guess in self.guesses[:room]]))

    def observe(self, outcome: Outcome) -> None:
        """Row i of the pass guesses the token i + 1 behind the root; those up to the new root are settled."""
        assert outcome.logits is not None
        settled = outcome.walk.token_ids
        refined = outcome.logits[len(settled) :].max(dim=-1).indices.tolist()
        last = refined[-1] if refined else settled[-1]
        self.guesses = refined + [last] * (self.window - len(refined))
