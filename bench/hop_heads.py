"""Trees of heads that say several tokens ahead, at the last layer and before it (AdaDecode, appendix E).

A head of hop h reads a token's state and says the token h places behind it; hop 1 at the last layer is the model's own
head. The heads' first choices are a chain, and each place's second choice opens a side branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import torch
from torch import Tensor

from ..core.types import Prompt
from ..decoding.draft import Draft, Drafter, DraftTree, Outcome, tree_rows
from ..decoding.engine import PassGenerator
from ..decoding.methods.guesses import merged
from ..decoding.session import Session
from ..models.early_exit import Heads, StagedPass
from ..models.rows import Pass
from ..training.descent import Descent
from ..training.features import Features, features_of
from ..training.lessons import HeadLessons
from ..training.settings import HeadSettings, ignore

HOPS = 3
CHOICES = 2  # of a head, that are drafted


class HopDrafter(Drafter):
    """Drafts a tree from the state of the last token read; with `early`, from an earlier layer whose head is sure.

    The root's own pass stops at the first of the heads' layers before the last whose hop-1 head is surer than
    `threshold`; its tree reaches one token further than one of the last layer's, and the rest of that pass is run with
    the tree.

    DEVIATION: Medusa's tree has 64 nodes, for a GPU; this one has as many as rows are cheap on a CPU.

    Args: hops: `hops[h - 1]` are the heads of hop h, at the same layers, the last one included.
    """

    max_width = HOPS + 1

    def __init__(self, hops: Sequence[Heads], early: bool, threshold: float) -> None:
        self.hops, self.early, self.threshold, self.max_depth = tuple(hops), early, threshold, len(hops)

    def start(self) -> None:
        self._state: Tensor | None = None  # (1, hidden_size) after all layers, of the token before the root
        self._states: list[Tensor] = []  # (rows, hidden_size) of the latest target pass

    def draft(self, room: int) -> PassGenerator[Draft]:
        context = self.context
        root, depth, hidden, said = context.token_ids[-1], 0, None, list[Tensor]()
        if self.early and room:
            staged = StagedPass(context.runtime, context.buffer, context.root_slot)
            staged.add(root)
            for depth in self.hops[0].depths[:-1]:
                yield from staged.advance(depth)
                hidden = staged.newest
                logits = self.hops[0].logits(context.runtime, depth, hidden)[0]
                if context.rule.confidence(context.scores([], logits))[1] > self.threshold:
                    said = [logits, *self._later(depth, hidden)]
                    break
        if not said and self._state is not None:
            said = self._later(context.runtime.n_layers, self._state)
        choices = [logits.topk(CHOICES).indices.tolist() for logits in said]
        first, places = [own[0] for own in choices], range(len(choices))
        paths = [first, *([*first[:i], choices[i][1], *first[i + 1 :]] for i in places)] if first else []
        tree = merged(root, paths, room)
        return Draft(tree, staged=self._checked(tree, depth, hidden))

    def observe(self, outcome: Outcome) -> None:
        (states,) = self._states
        node = outcome.walk.path[-1] if outcome.walk.path else 0
        self._state = states[node : node + 1]

    def _later(self, depth: int, state: Tensor) -> list[Tensor]:
        """Return what hops after the first say of a state (1, hidden_size) after `depth` layers; logits (vocab,)."""
        return [heads.logits(self.context.runtime, depth, state)[0] for heads in self.hops[1:]]

    def _checked(self, tree: DraftTree, depth: int, hidden: Tensor | None) -> PassGenerator[Tensor]:
        """Return the target's logits of a tree whose root has run `depth` layers, and keep the rows' last states."""
        context = self.context
        runtime, n_layers = context.runtime, context.runtime.n_layers
        rows = tree_rows(tree.token_ids, tree.parents, context.root_slot)
        self._states = []
        if hidden is None:
            return (yield Pass(runtime, rows, context.buffer, capture={n_layers: self._states}))
        if tree.n_nodes > 1:
            later, below = tree_rows(tree.token_ids[1:], tree.parents, context.root_slot), list[Tensor]()
            yield Pass(runtime, later, context.buffer, (), {depth: below}, layers=(0, depth))
            hidden = torch.cat((hidden, *below))
        rest = (depth, n_layers)
        return (yield Pass(runtime, rows, context.buffer, None, {n_layers: self._states}, hidden=hidden, layers=rest))


@torch.no_grad()
def train_hops(
    session: Session, prompts: Sequence[Prompt], depths: Sequence[int], budget_s: float, settings: HeadSettings
) -> list[Heads]:
    """Train the heads of every hop at `depths` on the model's completions, for `budget_s` seconds altogether."""
    began, found = monotonic(), list[Heads]()
    texts = list[Features]()
    for prompt in prompts:
        if not texts or monotonic() - began < budget_s / 2:
            texts.append(features_of(session, prompt, depths))
    for hop in range(1, HOPS + 1):
        states = Features.joined([ahead(text, hop) for text in texts])
        lessons = HeadLessons(session.runtime, states, depths, full=False)
        left_s = (budget_s - (monotonic() - began)) / (HOPS + 1 - hop)
        descent = Descent(lessons.start(), settings, max(1.0, left_s))
        descent.run(states.n_rows, lessons.gradient, ignore)
        found.append(lessons.model(descent.weights))
    return found


def ahead(text: Features, hop: int) -> Features:
    """Return the states of a text beside what the last layer says `hop` - 1 places later."""
    n = max(0, text.n_rows - hop + 1)
    return Features({depth: hidden[:n] for depth, hidden in text.hidden.items()}, text.final[hop - 1 :])


def joined(hops: Sequence[Heads], early: bool) -> Heads:
    """Return what a tree drafter adds to the model, to count it: without `early` the last layer's later hops."""
    depths = hops[0].depths
    used = [(depth, hop) for hop in range(HOPS) for depth in depths if early or depth == depths[-1]]
    kept = [hops[hop].transforms[depth] for depth, hop in used if (depth, hop) != (depths[-1], 0)]
    return Heads(dict(enumerate(kept)))
