"""Verifiers that keep tokens the target might not have drawn: faster, or more likely text, but not the target's own.

All of them take chains, judge by the target's distribution as the model gives it (no temperature, no penalty), and end
with a token that the target chooses under the request's sampling, wherever it has an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .draft import Draft, Target, Walk

if TYPE_CHECKING:
    from torch import Tensor


def most_probable(probs: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Select the tokens of `probs` (…, vocab) that top-k, then top-p leave, most probable first.

    Returns: float64 (…, n), made to sum to 1, 0 for those that top-p drops; their token ids, int64 (…, n).
    """
    values, tokens = probs.double().topk(min(top_k, probs.shape[-1]), dim=-1)
    values = values / values.sum(dim=-1, keepdim=True)
    if top_p < 1.0:
        dropped = values.cumsum(dim=-1) - values >= top_p  # the more probable ones already reach it
        dropped[..., 0] = False
        values = values.masked_fill(dropped, 0.0)
        values = values / values.sum(dim=-1, keepdim=True)
    return values, tokens


def warp(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return `probs` after top-k, then top-p, made to sum to 1: float64 (…, vocab)."""
    values, tokens = most_probable(probs, top_k, top_p)
    return values.new_zeros(probs.shape).scatter_(-1, tokens, values)


class JointRatio:
    """MTAD: the longest prefix whose joint probability is more than `threshold` times what the draft gives it.

    A prefix may pass after a shorter one failed, and the empty one always does. Both sides are after top-k and top-p:
    the target's here, the draft's in `Draft.logprobs`.

    Source: MTAD 3.2, Algorithm 1. DEVIATION: its line 11 sets η ← j, the token; meant is η ← i, the length.
    """

    lossy = True

    def __init__(self, threshold: float, top_k: int, top_p: float) -> None:
        self.threshold, self.top_k, self.top_p = threshold, top_k, top_p

    def verify(self, draft: Draft, target: Target) -> Walk:
        assert draft.tree.is_chain and len(draft.logprobs) == draft.tree.n_nodes
        least = math.log(self.threshold) if self.threshold > 0.0 else -math.inf
        ratio, longest = 0.0, 0  # log target - log draft of the prefix
        for node in range(1, min(draft.tree.n_nodes, target.n_checked + 1)):
            probs = warp(target.raw_probs(node - 1), self.top_k, self.top_p)
            ratio += float(probs[draft.tree.token_ids[node]].log()) - draft.logprobs[node]
            if ratio > least:
                longest = node
            elif ratio == -math.inf:
                break  # the target rules a token out, and with it every longer prefix
        return _ended(draft, target, longest)


class KeepAll:
    """MTJD: every token of the draft is kept; the drafter searched with the target itself, so no pass is needed."""

    lossy = True

    def verify(self, draft: Draft, target: Target) -> Walk:
        assert draft.tree.is_chain and draft.tree.n_steps > 0
        return _ended(draft, target, draft.tree.n_steps)


class Typical:
    """Typical acceptance: a token is kept if its probability exceeds min(ε, δ · exp(-H)), H the entropy there in nats.

    Source: Medusa (arXiv:2401.10774) 2.3.1. DEVIATION: Medusa judges after temperature, and by equality with the
    argmax at temperature 0; here the criterion is one and the same at every temperature.
    """

    lossy = True

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta

    def verify(self, draft: Draft, target: Target) -> Walk:
        return _ended(draft, target, _n_kept(draft, target, self._keeps))

    def _keeps(self, token_id: int, probs: Tensor) -> bool:
        entropy = -float(probs.xlogy(probs).sum())
        return float(probs[token_id]) > min(self.epsilon, self.delta * math.exp(-entropy))


class Rollback:
    """BiLD's rollback: a token is refused where -log of its target probability exceeds `threshold` (nats).

    Source: Kim et al. (arXiv:2302.07863) 3.3, with the target's distribution against the draft's token.
    """

    lossy = True

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def verify(self, draft: Draft, target: Target) -> Walk:
        return _ended(draft, target, _n_kept(draft, target, self._keeps))

    def _keeps(self, token_id: int, probs: Tensor) -> bool:
        return -float(probs[token_id].log()) <= self.threshold


def _n_kept(draft: Draft, target: Target, keeps: Callable[[int, Tensor], bool]) -> int:
    """Return how many tokens of a chain come before the first that `keeps` refuses, given the target's distribution."""
    assert draft.tree.is_chain
    last = min(draft.tree.n_steps, target.n_checked)
    refused = (n for n in range(last) if not keeps(draft.tree.token_ids[n + 1], target.raw_probs(n)))
    return next(refused, last)


def _ended(draft: Draft, target: Target, n_kept: int) -> Walk:
    """Keep the first `n_kept` tokens of a chain, and the target's own after them if it has an answer there."""
    token_ids = draft.tree.token_ids[1 : n_kept + 1]
    if n_kept < target.n_checked:
        token_ids = (*token_ids, target.choose(n_kept, token_ids))
    return Walk(tuple(range(1, n_kept + 1)), token_ids)
