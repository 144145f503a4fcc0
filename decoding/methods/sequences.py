"""Several sequences drafted side by side, a level of all of them per pass (SpecTr, SpecInfer, MCSS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count
from ..draft import Draft, Drafter, DraftModel, DraftTree, Offer
from ..verify import SeveralRatio, Verifier
from . import Resources, method

if TYPE_CHECKING:
    from torch import Tensor

    from ..engine import PassGenerator


@dataclass(frozen=True, slots=True)
class SequencesSettings(Settings):
    """How many sequences are drafted, and how long."""

    sequences: int = count(4)
    draft_length: int = count(4)


@method("spectr", "SpecTr (k-SEQ)", "arXiv:2310.15141", SequencesSettings, drafts_with_model=True)
def _spectr(resources: Resources, settings: SequencesSettings) -> tuple[Drafter, Verifier]:
    return SequencesDrafter(resources.draft_model(), settings, replacement=True), SeveralRatio("k-seq")


@method("specinfer", "SpecInfer", "arXiv:2305.09781", SequencesSettings, drafts_with_model=True)
def _specinfer(resources: Resources, settings: SequencesSettings) -> tuple[Drafter, Verifier]:
    return SequencesDrafter(resources.draft_model(), settings, replacement=True), SeveralRatio("with")


@method("mcss", "MCSS", "arXiv:2401.06706", SequencesSettings, drafts_with_model=True)
def _mcss(resources: Resources, settings: SequencesSettings) -> tuple[Drafter, Verifier]:
    return SequencesDrafter(resources.draft_model(), settings, replacement=False), SeveralRatio("without")


class SequencesDrafter(Drafter):
    """`sequences` continuations of `draft_length` tokens each, equal beginnings merged into one tree.

    With `replacement` they are independent samples of the draft (SpecTr, SpecInfer). Without, draws under one node
    exclude each other: the sequences differ from their first token on, fewer of them where fewer tokens have any
    probability (MCSS). A greedy request gets the limit of both: the argmax chain, or one from each of the most
    probable first tokens, chosen without chance.
    """

    model: DraftModel

    def __init__(self, model: DraftModel, settings: SequencesSettings, replacement: bool) -> None:
        self.model, self.replacement = model, replacement
        self.max_width, self.max_depth = settings.sequences, settings.draft_length

    def draft(self, room: int) -> PassGenerator[Draft]:
        # Node numbers are slots: a level of the tree is a pass, and the last one is not run by the draft model at all.
        token_ids, parents, offers = [self.context.token_ids[-1]], [-1], dict[int, Offer]()
        paths: list[tuple[int, ...]] = [()]  # by node, the tokens from below the root to it
        depth = min(room, self.max_depth, self.model.room)
        level = {0: self.max_width}  # the newest nodes, and how many sequences pass through each
        self.model.restart()
        for _ in range(depth):
            logits = yield from self.model.extend([token_ids[n] for n in level], [parents[n] for n in level])
            following: dict[int, int] = {}
            for (node, n_through), row in zip(level.items(), logits, strict=True):
                drawn, offer = self._draw(paths[node], row, n_through)
                if offer is not None:
                    offers[node] = offer
                for token_id in dict.fromkeys(drawn):
                    following[len(token_ids)] = drawn.count(token_id)
                    token_ids.append(token_id)
                    parents.append(node)
                    paths.append((*paths[node], token_id))
            level = following
        return Draft(DraftTree(tuple(token_ids), tuple(parents), depth), offers)

    def _draw(self, path: Sequence[int], logits: Tensor, n: int) -> tuple[tuple[int, ...], Offer | None]:
        """Return the next token of each of `n` sequences, and what they were drawn from if they were."""
        rule, scores = self.context.rule, self.context.scores(path, logits)
        if not rule.greedy:
            offer = Offer.drawn(rule, scores, n, self.replacement)
            return offer.token_ids, offer
        token_id, _ = rule.confidence(scores)
        return (token_id,) * n if self.replacement else rule.candidates(scores, token_id, n), None
