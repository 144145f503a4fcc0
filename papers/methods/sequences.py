"""Drafting of several sequences in parallel, one token of each per pass (SpecTr, SpecInfer, MCSS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.serialization import Settings, count
from ...decoding.draft import Draft, Drafter, DraftModel, Offer, draw_distinct, drawable
from ...decoding.draft_tree import UNKNOWN, DraftTree
from ...decoding.methods import Resources, method
from ...decoding.verify import SeveralRatio, Verifier
from ..verifiers import k_seq

if TYPE_CHECKING:
    from torch import Tensor

    from ...decoding.context import Drafted
    from ...decoding.work import PassGenerator


@dataclass(frozen=True, slots=True)
class SequencesSettings(Settings):
    """How many sequences are drafted, and how long."""

    sequences: int = count(4, most=256)
    draft_length: int = count(4, most=32)


@method("spectr", "SpecTr (k-SEQ)", "arXiv:2310.15141", SequencesSettings, drafts_with_model=True)
def _spectr(resources: Resources, settings: SequencesSettings) -> tuple[Drafter, Verifier]:
    return SequencesDrafter(resources.draft_model(), settings, replacement=True), SeveralRatio(tries=k_seq)


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

    If token ids are read late from the device, equal prefixes are merged only once they are known. Until then each
    sequence has its own nodes, and its tokens are tried under the nodes of all sequences with the same prefix.
    """

    model: DraftModel

    def __init__(self, model: DraftModel, settings: SequencesSettings, replacement: bool) -> None:
        self.model, self.replacement = model, replacement
        self.max_width, self.max_depth = settings.sequences, settings.draft_length

    def draft(self, room: int) -> PassGenerator[Draft]:
        import torch

        from ...models.rows import uploaded

        context, late, device = self.context, self.model.reads_late, self.context.runtime.device
        grown = _Growth(context.token_ids[-1], 1 if self.replacement and context.rule.greedy else self.max_width)
        offers, unread = dict[int, Offer](), [uploaded(grown.token_ids, device)] if late else []
        # same[i, j]: sequence j has drafted the same tokens as newest node i; bool (newest nodes, sequences).
        same: Tensor | None = None
        if late and self.replacement:
            same = torch.ones((1, len(grown.newest)), dtype=torch.bool, device=device)
        depth = min(room, self.max_depth, self.model.room)
        self.model.restart()
        for level in range(depth):
            nodes = list(dict.fromkeys(grown.newest))
            token_ids = unread[-1] if late else [grown.token_ids[node] for node in nodes]
            logits = yield from self.model.extend(token_ids, [grown.parents[node] for node in nodes])
            scored = zip(nodes, logits, strict=True)
            scores = torch.stack([context.scores(grown.paths[node], row) for node, row in scored])
            apart = level == 0 and not self.replacement
            drawn, probs = self._draw(scores, [nodes.index(node) for node in grown.newest], apart)
            following = grown.grow(drawn[:, None].unbind() if late else drawn.tolist())
            for row, (node, of_node) in enumerate(zip(nodes, probs, strict=True) if probs is not None else ()):
                tokens_after, tried = (following[node], None) if same is None else (grown.newest, same[row])
                offers[node] = Offer(tuple(tokens_after), of_node, self.replacement, tried)
            if late:
                unread.append(drawn)
            if same is not None:
                same = same & (drawn[:, None] == drawn)
        tree = DraftTree(tuple(grown.token_ids), tuple(grown.parents), depth)
        if not late:
            return Draft(tree, offers)
        tokens = torch.cat(unread).double()
        return Draft(tree, offers, unread=torch.stack((tokens, torch.zeros_like(tokens))))

    def _draw(self, scores: Tensor, of: Sequence[int], apart: bool) -> tuple[Tensor, Tensor | None]:
        """Return the next token of each sequence, int64 (sequences,), and the nodes' distributions when sampling.

        Args: scores: (nodes, vocab). of: index of each sequence's node. apart: draw distinct tokens.
        """
        from ...decoding.context import most_probable
        from ...models.rows import uploaded

        rule, n = self.context.rule, len(of)
        probs = None if rule.greedy else scores.double().softmax(dim=-1)  # (nodes, vocab)
        if apart:
            tokens_drawn = most_probable(scores[0], n) if probs is None else draw_distinct(rule, probs[0], n)
            return tokens_drawn[0].long() if self.model.reads_late else drawable(tokens_drawn), probs
        index = uploaded(of, scores.device)
        if probs is None:
            return scores.max(dim=-1).indices[index], None
        return rule.draw_drafts(probs[index])[:, 0], probs


class _Growth:
    """A draft tree under construction: its nodes, each node's path of tokens, and each sequence's newest node."""

    def __init__(self, root: int, n_sequences: int) -> None:
        self.token_ids, self.parents, self.paths = [root], [-1], list[list[Any]]([[]])
        self.newest = [0] * n_sequences

    def grow(self, tokens: Drafted) -> dict[int, list[int]]:
        """Append one token to each sequence and return each node's children; sequences without a token end.

        Equal sequences share nodes, unless their token ids are not known yet.
        """
        before, self.newest = self.newest, []
        nodes, following = dict[tuple[int, int], int](), {node: list[int]() for node in before}
        for node, token in zip(before, tokens, strict=False):
            token_id = token if isinstance(token, int) else UNKNOWN
            if token_id == UNKNOWN or (node, token_id) not in nodes:
                nodes[node, token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.parents.append(node)
                self.paths.append([*self.paths[node], token])
            self.newest.append(nodes[node, token_id])
            following[node].append(self.newest[-1])
        return following
