"""Beam search as a drafter: over a draft model for MTAD, over the target itself for MTJD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count, share
from ..draft import Draft, Drafter, draw_apart
from ..tree import DraftTree
from ..verify import JointRatio, KeepAll, Verifier, most_probable
from .registry import Resources, method

if TYPE_CHECKING:
    from torch import Tensor

    from ..draft_models import DraftModel
    from ..engine import PassGenerator


@dataclass(frozen=True, slots=True)
class BeamSettings(Settings):
    """MTJD (MTAD 3.1): beams over the target itself, each block kept whole."""

    beam_width: int = count(4)  # the paper's grid: 4, 8
    draft_length: int = count(4)  # its grid: 3, 4
    top_k: int = count(10)  # appendix F
    top_p: float = share(0.9)


@dataclass(frozen=True, slots=True)
class MtadSettings(BeamSettings):
    """MTAD 3.2: beams over the draft, the longest prefix whose joint ratio exceeds τ."""

    acceptance_threshold: float = share(0.5)  # τ; its grid: 0.1 to 0.9


@method("mtad", "MTAD", "MTAD 3.2", MtadSettings, drafts_with_model=True, lossy=True)
def _mtad(resources: Resources, settings: MtadSettings) -> tuple[Drafter, Verifier]:
    verifier = JointRatio(settings.acceptance_threshold, settings.top_k, settings.top_p)
    return BeamDrafter(resources.draft_model(), settings, sampled=True), verifier


@method("mtjd", "MTJD", "MTAD 3.1", BeamSettings, lossy=True)
def _mtjd(resources: Resources, settings: BeamSettings) -> tuple[Drafter, Verifier]:
    from ..draft_models import SkippedTarget

    return BeamDrafter(SkippedTarget(None), settings, sampled=True, keep=True), KeepAll()


@dataclass(frozen=True, slots=True)
class _Beam:
    """A sequence from the root on: its tokens, the log probability of each, and the nodes of those that were run."""

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def joint(self) -> float:
        return sum(self.logprobs)


class BeamDrafter(Drafter):
    """The best of `beam_width` beams of `draft_length` tokens, as a chain with the log probability of each token.

    Probabilities are those of the model itself after top-k and top-p of the drafter's own: MTAD's ratio compares them
    with the target's, warped alike, so neither temperature nor penalties enter. `sampled` draws the beams of a
    sampling request from their joint probabilities instead of taking the best (beam sampling, MTAD 2.1); beams drawn
    differ from one another. A beam goes on behind a stop token, where the loop cuts it.

    DEVIATION: top-k and top-p hold for each beam's next token, where MTAD 2.1 warps the beams' joint distribution: the
    ratio of target and draft compares tokens, so both must be warped token by token.

    `keep` is for a `model` that is the whole target (MTJD): the beam's keys and values are moved to where they belong
    and the draft needs no pass of the target any more. A block then has up to `room` + 1 tokens, at least one.
    """

    model: DraftModel

    def __init__(self, model: DraftModel, settings: BeamSettings, sampled: bool, keep: bool = False) -> None:
        self.model, self.settings, self.sampled, self.keep = model, settings, sampled, keep
        self.runs_target = keep

    def max_rows(self, room: int) -> int:
        length = self._length(room)
        return 1 + max((length - 1) * self.settings.beam_width, 0 if self.keep else length)

    def _length(self, room: int) -> int:
        return min(room + 1 if self.keep else room, self.settings.draft_length)

    def start(self) -> None:
        self.passes = self.model.begin(self.context)
        self.draws = self.sampled and not self.context.rule.greedy

    def draft(self, room: int) -> PassGenerator[Draft]:
        best = yield from self._search(min(self._length(room), self.passes.room))
        tree = DraftTree.chain(best.token_ids)
        if not self.keep:
            return Draft(tree, logprobs=best.logprobs)
        slot = self.context.root_slot
        for depth, node in enumerate(best.nodes):  # ascending, and never to a slot that is still to be read
            if node != depth:
                self.context.buffer.move(slot + node, slot + depth)
        return Draft(tree, logprobs=best.logprobs, n_checked=0, n_passes=tree.n_steps, n_drafted=0)

    def _search(self, length: int) -> PassGenerator[_Beam]:
        """Return the best beam; all beams of a level are run in one pass, those of the last level not at all."""
        self.passes.restart()
        beams, n_nodes = [_Beam((), (self.context.token_ids[-1],), (0.0,))], 0
        for _ in range(length):
            parents = [beam.nodes[-1] if beam.nodes else -1 for beam in beams]
            logits = yield from self.passes.extend([beam.token_ids[-1] for beam in beams], parents)
            beams = [replace(beam, nodes=(*beam.nodes, n_nodes + i)) for i, beam in enumerate(beams)]
            n_nodes += len(beams)
            beams = self._next(beams, logits)
        return max(beams, key=lambda beam: beam.joint)

    def _next(self, beams: list[_Beam], logits: Tensor) -> list[_Beam]:
        """Return the beams one token longer, given the logits (beams, vocab) after them."""
        probs = logits.double().softmax(dim=-1).cpu()
        values, tokens = most_probable(probs, self.settings.top_k, self.settings.top_p)  # (beams, n)
        joint = values.log() + values.new_tensor([[beam.joint] for beam in beams])
        grown = []
        for index in self._pick(joint.flatten()):
            beam, at = beams[index // joint.shape[1]], divmod(index, joint.shape[1])
            token_ids = (*beam.token_ids, int(tokens[at]))
            grown.append(_Beam(beam.nodes, token_ids, (*beam.logprobs, float(values[at].log()))))
        return grown

    def _pick(self, joint: Tensor) -> tuple[int, ...]:
        """Return which of the candidates become beams, given their joint log probabilities (candidates,)."""
        if self.draws:
            return draw_apart(self.context.rule, joint.softmax(dim=-1), self.settings.beam_width)
        values, order = joint.topk(min(self.settings.beam_width, joint.shape[0]))
        return tuple(order[values > float("-inf")].tolist())
