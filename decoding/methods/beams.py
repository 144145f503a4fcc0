"""Beam search as a drafter: over a draft model for MTAD, over the target itself for MTJD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count, share
from ..draft import Draft, Drafter, DraftModel, DraftTree, draw_apart
from ..verify import JointRatio, KeepAll, Verifier, most_probable
from . import Resources, method

if TYPE_CHECKING:
    from torch import Tensor

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
    return BeamDrafter(resources.draft_model(), settings), verifier


@method("mtjd", "MTJD", "MTAD 3.1", BeamSettings, lossy=True)
def _mtjd(resources: Resources, settings: BeamSettings) -> tuple[Drafter, Verifier]:
    from ..draft_models import SkippedTarget

    return BeamDrafter(SkippedTarget(None), settings, runs_target=True), KeepAll()


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
    with the target's, warped alike, so neither temperature nor penalties enter. Where the request samples, beams are
    drawn from their joint probabilities, each one once (beam sampling, MTAD 2.1); otherwise the best ones are taken. A
    beam goes on behind a stop token, where the loop cuts it.

    DEVIATION: top-k and top-p hold for each beam's next token, where MTAD 2.1 warps the beams' joint distribution: the
    ratio of target and draft compares tokens, so both must be warped token by token.

    With `runs_target` the `model` is the whole target (MTJD): the beam's keys and values are moved to their slots,
    and the draft needs no further pass. A block then has up to `room` + 1 tokens, at least one.
    """

    model: DraftModel

    def __init__(self, model: DraftModel, settings: BeamSettings, runs_target: bool = False) -> None:
        self.model, self.settings, self.runs_target = model, settings, runs_target

    def max_rows(self, room: int) -> int:
        length = self._length(room)
        return 1 + max((length - 1) * self.settings.beam_width, 0 if self.runs_target else length)

    def _length(self, room: int) -> int:
        return min(room + 1 if self.runs_target else room, self.settings.draft_length)

    def draft(self, room: int) -> PassGenerator[Draft]:
        best = yield from self._search(min(self._length(room), self.model.room))
        tree = DraftTree.chain(best.token_ids)
        if not self.runs_target:
            return Draft(tree, logprobs=best.logprobs)
        slot = self.context.root_slot
        for depth, node in enumerate(best.nodes):  # ascending, and never to a slot that is still to be read
            if node != depth:
                self.context.buffer.move(slot + node, slot + depth)
        return Draft(tree, logprobs=best.logprobs, n_checked=0, n_passes=tree.n_steps)

    def _search(self, length: int) -> PassGenerator[_Beam]:
        """Return the best beam; all beams of a level are run in one pass, those of the last level not at all."""
        self.model.restart()
        beams, n_nodes = [_Beam((), (self.context.token_ids[-1],), (0.0,))], 0
        for _ in range(length):
            parents = [beam.nodes[-1] if beam.nodes else -1 for beam in beams]
            logits = yield from self.model.extend([beam.token_ids[-1] for beam in beams], parents)
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
        if not self.context.rule.greedy:
            return draw_apart(self.context.rule, joint.softmax(dim=-1), self.settings.beam_width)
        values, order = joint.topk(min(self.settings.beam_width, joint.shape[0]))
        return tuple(order[values > float("-inf")].tolist())
