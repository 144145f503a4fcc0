"""Beam search as a drafter: over a draft model for MTAD, over the target itself for MTJD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.types import LayerSet
from .context import Context
from .draft import Draft, Drafting, Outcome
from .engine import PassGenerator
from .lossy import most_probable
from .models import DraftModel
from .sequences import draw_apart
from .tree import DraftTree


@dataclass(frozen=True, slots=True)
class _Beam:
    """A sequence below the root: the pass's nodes that hold its tokens, and each token's log probability."""

    nodes: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def joint(self) -> float:
        return sum(self.logprobs)


class BeamDrafter:
    """The best of `width` beams of `draft_length` tokens, as a chain with the log probability of each token.

    Probabilities are those of the model itself after top-k and top-p of the drafter's own: MTAD's ratio compares them
    with the target's, warped alike, so neither temperature nor penalties enter. `sampled` draws the beams of a
    sampling request from their joint probabilities instead of taking the best (beam sampling, MTAD 2.1); beams drawn
    differ from one another. A beam goes on behind a stop token, where the loop cuts it.

    `keep` is for a `model` that is the whole target (MTJD): the beam's keys and values are moved to where they belong
    and the draft needs no pass of the target any more. A block then has up to `room` + 1 tokens, at least one.
    """

    def __init__(
        self,
        model: DraftModel,
        width: int,
        draft_length: int,
        top_k: int,
        top_p: float,
        sampled: bool,
        keep: bool = False,
    ) -> None:
        self.model, self.width, self.draft_length = model, width, draft_length
        self.top_k, self.top_p, self.sampled, self.keep = top_k, top_p, sampled, keep

    @property
    def layer_set(self) -> LayerSet | None:
        """See `Drafter`."""
        return None if self.keep else self.model.layer_set

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        return _Beams(self, context)

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        length = self.length(room)
        return 1 + max((length - 1) * self.width, 0 if self.keep else length)

    def length(self, room: int) -> int:
        """Tokens of a draft with `room`."""
        return min(room + 1 if self.keep else room, self.draft_length)


class _Beams:
    def __init__(self, drafter: BeamDrafter, context: Context) -> None:
        self.drafter, self.context = drafter, context
        self.passes = drafter.model.begin(context)
        self.sampled = drafter.sampled and not context.rule.greedy

    def draft(self, room: int) -> PassGenerator[Draft]:
        root = self.context.token_ids[-1]
        best = yield from self._search(root, min(self.drafter.length(room), self.passes.room))
        tree = DraftTree.grow(root, [(token_id,) for token_id in best.token_ids])
        logprobs = (0.0, *best.logprobs)
        if not self.drafter.keep:
            return Draft(tree, logprobs=logprobs)
        slot = self.context.root_slot
        for depth, node in enumerate(best.nodes, 1):  # ascending, and never to a slot that is still to be read
            if node != depth:
                self.context.buffer.move(slot + node, slot + depth)
        return Draft(tree, logprobs=logprobs, n_checked=0, n_passes=tree.n_steps, n_drafted=0)

    def observe(self, outcome: Outcome) -> None:
        pass

    def _search(self, root: int, length: int) -> PassGenerator[_Beam]:
        """The best beam; all of a level are run in one pass, those of the last level not at all."""
        self.passes.restart()
        beams, n_nodes = [_Beam()], 1
        for depth in range(length):
            if depth == 0:
                logits = yield from self.passes.extend((root,), (-1,))
            else:
                parents = [beam.nodes[-1] if depth > 1 else 0 for beam in beams]
                logits = yield from self.passes.extend([beam.token_ids[-1] for beam in beams], parents)
                beams = [
                    _Beam((*beam.nodes, n_nodes + i), beam.token_ids, beam.logprobs) for i, beam in enumerate(beams)
                ]
                n_nodes += len(beams)
            beams = self._next(beams, logits)
        return max(beams, key=lambda beam: beam.joint)

    def _next(self, beams: list[_Beam], logits: Tensor) -> list[_Beam]:
        """The beams one token longer, given the logits (beams, vocab) after them."""
        probs = torch.softmax(logits.double(), dim=-1).cpu()
        values, tokens = most_probable(probs, self.drafter.top_k, self.drafter.top_p)  # (beams, n)
        joint = values.log() + torch.tensor([[beam.joint] for beam in beams], dtype=torch.float64)
        grown = []
        for index in self._pick(joint.flatten()):
            beam, at = beams[index // joint.shape[1]], divmod(index, joint.shape[1])
            token_ids = (*beam.token_ids, int(tokens[at]))
            grown.append(_Beam(beam.nodes, token_ids, (*beam.logprobs, float(values[at].log()))))
        return grown

    def _pick(self, joint: Tensor) -> tuple[int, ...]:
        """Which of the candidates, given their joint log probabilities (candidates,), become beams."""
        if self.sampled:
            return draw_apart(self.context.rule, torch.softmax(joint, dim=-1), self.drafter.width)
        values, order = joint.topk(min(self.drafter.width, joint.shape[0]))
        return tuple(order[values > float("-inf")].tolist())
