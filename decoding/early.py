"""AdaDecode: a token is predicted at the first intermediate layer whose head is sure, the layers behind it deferred.

The deferred layers of all early tokens are run together with the next token that needs them, and at the end with the
token that no head was sure of; that pass is the verification, and nothing is run twice.

Source: AdaDecode (arXiv:2506.03700) 2.2, Algorithm 1, appendix D.
"""

from __future__ import annotations

import torch

from ..core.types import LayerSet
from ..models.early_exit import Heads, StagedPass
from .context import Context
from .draft import Draft, Drafting, Offer, Outcome
from .engine import PassGenerator
from .tree import DraftTree


class EarlyDrafter:
    """Early predictions by `heads`, at most `max_early` in a row, each where a probability exceeds `threshold` (γ).

    DEVIATION: the paper draws a token and leaves the model if *its* probability exceeds γ; which distribution a token
    comes from then depends on the token, and the output is biased (enumerated: 0.90 comes out as 0.98). Here the head's
    largest probability decides, then the token is drawn. Greedy decoding is the same either way.
    """

    layer_set: LayerSet | None = None

    def __init__(self, heads: Heads, threshold: float, max_early: int) -> None:
        self.heads, self.threshold, self.max_early = heads, threshold, max_early

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        return _Early(self, context)

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        return 1 + min(room, self.max_early)


class _Early:
    def __init__(self, drafter: EarlyDrafter, context: Context) -> None:
        self.drafter, self.context = drafter, context

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()  # what it runs is a part of the target's own layers
        context = self.context
        staged = StagedPass(context.runtime, context.buffer, context.root_slot)
        tokens, offers = [context.token_ids[-1]], {}  # type: list[int], dict[int, Offer]
        staged.add(tokens[0])
        while len(tokens) <= min(room, self.drafter.max_early):
            early = self._predict(staged, tokens[1:])
            if early is None:
                break
            token_id, offer = early
            if offer is not None:
                offers[len(tokens) - 1] = offer
            tokens.append(token_id)
            staged.add(token_id)
        return Draft(DraftTree.chain(tokens), offers, staged=staged)

    def observe(self, outcome: Outcome) -> None:
        pass

    def _predict(self, staged: StagedPass, drafted: list[int]) -> tuple[int, Offer | None] | None:
        """The token after the newest row, by the first head that is sure, and what it was drawn from if it was."""
        context, heads = self.context, self.drafter.heads
        rule = context.rule
        for depth in heads.depths:
            logits = heads.logits(context.runtime, depth, staged.advance(depth))[0]
            scores = rule.scores([*context.token_ids, *drafted] if rule.processors else (), logits)
            token_id, confidence = rule.confidence(scores)
            if confidence > self.drafter.threshold:
                if rule.greedy:
                    return token_id, None
                probs = torch.softmax(scores.double(), dim=-1).cpu()
                token_id = rule.draw_draft(probs)
                return token_id, Offer((token_id,), probs)
        return None
