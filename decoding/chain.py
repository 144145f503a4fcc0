"""Drafting token by token: from nothing (plain decoding), or a chain that a draft model extends until it is to stop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.settings import Branching, candidates_at
from ..core.types import LayerSet
from .context import Context
from .draft import Draft, Drafting, Offer, Outcome
from .engine import PassGenerator
from .models import DraftModel
from .stopping import StopRule
from .tree import DraftTree


class NoDrafter:
    """Plain decoding: the tree is its root."""

    layer_set: LayerSet | None = None

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        return _Nothing(context)

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        return 1


class _Nothing:
    def __init__(self, context: Context) -> None:
        self.context = context

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        return Draft(DraftTree((self.context.token_ids[-1],), (-1,), 0))

    def observe(self, outcome: Outcome) -> None:
        pass


class ChainDrafter:
    """A chain from `model`, ended by `stop`; with `branching`, side leaves where the draft is less sure (SWIFT 4.2).

    `sampled` draws the chain's tokens from the draft's distribution where the request samples, for a verifier that
    weighs the two distributions; otherwise each token is the draft's most probable one. Side leaves and draws exclude
    each other.
    """

    def __init__(
        self, model: DraftModel, stop: StopRule, branching: Branching | None = None, sampled: bool = False
    ) -> None:
        self.model, self.stop, self.branching, self.sampled = model, stop, branching, sampled

    @property
    def layer_set(self) -> LayerSet | None:
        """See `Drafter`."""
        return self.model.layer_set

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        return _Chain(self, context)

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        widest = max(k for _, k in self.branching) if self.branching else 1
        return 1 + min(room, self.stop.max_draft_length) * widest


class _Chain:
    def __init__(self, drafter: ChainDrafter, context: Context) -> None:
        self.drafter, self.context = drafter, context
        self.passes = drafter.model.begin(context)
        self.stopping = drafter.stop.begin()
        self.sampled = drafter.sampled and not context.rule.greedy

    def draft(self, room: int) -> PassGenerator[Draft]:
        root = self.context.token_ids[-1]
        spine, offered, offers = [root], [], {}  # type: list[int], list[tuple[int, ...]], dict[int, Offer]
        self.passes.restart()
        self.stopping.start()
        longest = min(room, self.drafter.stop.max_draft_length, self.passes.room)
        while len(offered) < longest:
            logits = (yield from self.passes.extend(spine[-1:], (len(spine) - 2,)))[0]
            tokens, confidence, offer = self._step(spine[1:], logits)
            unsure = self.stopping.unsure(confidence, self.passes.hidden)
            if unsure and not self.drafter.stop.keeps_last:
                break
            if offer is not None:
                offers[len(spine) - 1] = offer
            offered.append(tokens)
            spine.append(tokens[0])
            if unsure:
                break
        staged = self.passes.staged
        if staged is not None and staged.n_rows < len(spine):
            staged.add(spine[-1])
        return Draft(DraftTree.grow(root, offered), offers, staged=staged)

    def observe(self, outcome: Outcome) -> None:
        self.stopping.observe(outcome.draft.n_steps, min(len(outcome.walk.path), outcome.draft.n_steps))

    def _step(self, drafted: Sequence[int], logits: torch.Tensor) -> tuple[tuple[int, ...], float, Offer | None]:
        """The tokens offered at this step, the first one's probability, and what it was drawn from if it was."""
        rule, branching = self.context.rule, self.drafter.branching
        scores = rule.scores([*self.context.token_ids, *drafted] if rule.processors else (), logits)
        if self.sampled:
            probs = torch.softmax(scores.double(), dim=-1).cpu()
            token_id = rule.draw_draft(probs)
            # BiLD asks how sure the draft is, before it draws; the others how likely the drawn token was.
            own = float(probs[token_id] if self.drafter.stop.keeps_last else probs.max())
            return (token_id,), own, Offer((token_id,), probs)
        token_id, confidence = rule.confidence(scores)
        n = 1 if branching is None else candidates_at(branching, confidence)
        return rule.candidates(scores, token_id, n), confidence, None
