"""Drafts of several sequences, which grow by one token each per pass (SpecTr, SpecInfer, MCSS)."""

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
    """Number and length of the drafted sequences."""

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
    """Drafts `sequences` continuations of `draft_length` tokens; equal prefixes are merged into one tree.

    With `replacement`, sequences are independent samples of the draft model (SpecTr, SpecInfer). Without, their first
    tokens are drawn without replacement, so there are fewer sequences if fewer tokens have a positive probability
    (MCSS). A greedy request gets the limit of both at temperature 0: one argmax chain, or an argmax chain after each of
    the most probable first tokens.

    If token ids are read late from the device, equal prefixes are merged only when they are known. Until then each
    sequence has its own nodes, and its tokens are tried under the nodes of all sequences with the same prefix.
    """

    model: DraftModel

    def __init__(self, model: DraftModel, settings: SequencesSettings, replacement: bool) -> None:
        self.model, self.replacement = model, replacement
        self.max_width, self.max_depth = settings.sequences, settings.draft_length

    def draft(self, room: int) -> PassGenerator[Draft]:
        import torch

        from ...models.transfers import uploaded

        context, reads_late, device = self.context, self.model.reads_late, self.context.runtime.device
        builder = _TreeBuilder(context.token_ids[-1], 1 if self.replacement and context.rule.greedy else self.max_width)
        offers, unread = dict[int, Offer](), [uploaded(builder.token_ids, device)] if reads_late else []
        # same_path[i, j]: sequence j has drafted the same tokens as newest node i; bool (newest nodes, sequences).
        same_path: Tensor | None = None
        if reads_late and self.replacement:
            same_path = torch.ones((1, len(builder.newest)), dtype=torch.bool, device=device)
        depth = min(room, self.max_depth, self.model.room)
        self.model.restart()
        for level in range(depth):
            nodes = list(dict.fromkeys(builder.newest))
            token_ids = unread[-1] if reads_late else [builder.token_ids[node] for node in nodes]
            logits = yield from self.model.extend(token_ids, [builder.parents[node] for node in nodes])
            nodes_and_logits = zip(nodes, logits, strict=True)
            scores = torch.stack([context.scores(builder.paths[node], row) for node, row in nodes_and_logits])
            draws_distinct = level == 0 and not self.replacement
            drawn_ids, probs = self._draw_tokens(scores, [nodes.index(node) for node in builder.newest], draws_distinct)
            children = builder.grow(drawn_ids[:, None].unbind() if reads_late else drawn_ids.tolist())
            for row, (node, node_probs) in enumerate(zip(nodes, probs, strict=True) if probs is not None else ()):
                tried, tried_mask = (children[node], None) if same_path is None else (builder.newest, same_path[row])
                offers[node] = Offer(tuple(tried), node_probs, self.replacement, tried_mask)
            if reads_late:
                unread.append(drawn_ids)
            if same_path is not None:
                same_path = same_path & (drawn_ids[:, None] == drawn_ids)
        tree = DraftTree(tuple(builder.token_ids), tuple(builder.parents), depth)
        if not reads_late:
            return Draft(tree, offers)
        tokens = torch.cat(unread).double()
        return Draft(tree, offers, unread=torch.stack((tokens, torch.zeros_like(tokens))))

    def _draw_tokens(
        self, scores: Tensor, node_indices: Sequence[int], draws_distinct: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the next token of each sequence, int64 (sequences,), and the nodes' distributions if sampled.

        Args: scores: (nodes, vocab). node_indices: index of each sequence's node. draws_distinct: draw without
              replacement.
        """
        from ...decoding.context import most_probable
        from ...models.transfers import uploaded

        rule, n_draws = self.context.rule, len(node_indices)
        probs = None if rule.greedy else scores.double().softmax(dim=-1)  # (nodes, vocab)
        if draws_distinct:
            distinct = most_probable(scores[0], n_draws) if probs is None else draw_distinct(rule, probs[0], n_draws)
            return distinct[0].long() if self.model.reads_late else drawable(distinct), probs
        indices = uploaded(node_indices, scores.device)
        if probs is None:
            return scores.max(dim=-1).indices[indices], None
        return rule.draw_drafts(probs[indices])[:, 0], probs


class _TreeBuilder:
    """A draft tree under construction: its nodes, each node's path of tokens, and each sequence's newest node."""

    def __init__(self, root: int, n_sequences: int) -> None:
        self.token_ids, self.parents, self.paths = [root], [-1], list[list[Any]]([[]])
        self.newest = [0] * n_sequences

    def grow(self, tokens: Drafted) -> dict[int, list[int]]:
        """Append one token to each sequence; return the new children by node. Sequences without a token end.

        Equal sequences share nodes, unless their token ids are not known yet.
        """
        previous, self.newest = self.newest, []
        node_of_token, children = dict[tuple[int, int], int](), {node: list[int]() for node in previous}
        for node, token in zip(previous, tokens, strict=False):
            token_id = token if isinstance(token, int) else UNKNOWN
            if token_id == UNKNOWN or (node, token_id) not in node_of_token:
                node_of_token[node, token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.parents.append(node)
                self.paths.append([*self.paths[node], token])
            self.newest.append(node_of_token[node, token_id])
            children[node].append(self.newest[-1])
        return children
