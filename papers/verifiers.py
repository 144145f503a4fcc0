"""The papers' verifiers: k-seq, for several draws of equal chances, and lossy ones.

The lossy ones accept tokens that the target might not have drawn, for speed or for likelier text. They take chains and
judge by the target's distribution as the model gives it (no temperature, no penalty).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from ..decoding.draft import Draft, Walk
from ..decoding.verify import Target, Verifier, chance_of, residual

if TYPE_CHECKING:
    from torch import Tensor

_BISECTIONS = 12  # any divisor at or above the smallest one is exact; a closer one accepts no more to speak of


def k_seq(
    tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, replaced: bool, tried: Tensor | None
) -> Generator[Tensor, None, Tensor]:
    """Do as `verify._one_by_one` for draws of one distribution that all have the same chance.

    Source: SpecTr (arXiv:2310.15141).
    """
    is_tried = tokens.new_ones(tokens.shape).bool() if tried is None else tried
    n_tries = is_tried.sum(dim=1, keepdim=True)
    accepted = draft_probs.minimum(target_probs / _divisor(target_probs, draft_probs, n_tries, tokens.shape[1]))
    for at, token in enumerate(tokens[..., None].unbind(dim=1)):
        yield chance_of(accepted, draft_probs, token) * is_tried[:, at, None]
    once = accepted.sum(dim=1, keepdim=True).clamp(max=1.0)  # the chance that one try is accepted
    gain = (_any_of(once, n_tries) / once).where(once > 0.0, n_tries)
    return residual(target_probs, accepted * gain)


def _any_of(chance: Tensor, n_tries: Tensor) -> Tensor:
    return 1.0 - (1.0 - chance) ** n_tries


def _divisor(target_probs: Tensor, draft_probs: Tensor, n_tries: Tensor, most: int) -> Tensor:
    """Return the smallest ρ in [1, n_tries], from above, that accepts no token more often than the target has it.

    Args:    n_tries: (n, 1), at most `most`.
    Returns: float64 (n, 1).
    """
    low, high = target_probs.new_ones(n_tries.shape), n_tries.to(target_probs.dtype)
    for _ in range(_BISECTIONS if most > 1 else 0):
        middle = (low + high) / 2
        once = draft_probs.minimum(target_probs / middle).sum(dim=1, keepdim=True).clamp(max=1.0)
        refused = _any_of(once, n_tries) > middle * once
        low, high = middle.where(refused, low), high.where(refused, middle)
    return high


class KeptPrefix(Verifier):
    """Base of the lossy verifiers: some tokens of a chain from its first on, then the target's own if it has one."""

    lossy = True

    def verify(self, draft: Draft, target: Target) -> Walk:
        assert draft.tree.is_chain
        n_kept = self.n_kept(draft, target)
        token_ids = draft.tree.token_ids[1 : n_kept + 1]
        if n_kept < target.n_checked:
            token_ids = (*token_ids, target.choose(n_kept, token_ids))
        return Walk(tuple(range(1, n_kept + 1)), token_ids)

    def n_kept(self, draft: Draft, target: Target) -> int:
        """Return how many of the draft's tokens are kept: those before the first whose weight is 0."""
        weights = self._weights(draft, target)
        return next((n for n, weight in enumerate(weights) if not weight), len(weights))

    def _weights(self, draft: Draft, target: Target) -> Sequence[float]:
        """Return a weight for each of the draft's tokens that the target has logits for."""
        return next((next(target.weights(nodes)) for nodes in self.weighed(draft, target)), ())

    def weighed(self, draft: Draft, target: Target) -> list[list[int]]:
        nodes = list(range(min(draft.tree.n_steps, target.n_checked)))
        return [nodes] if nodes else []

    def weigh(self, draft: Draft, target: Target, nodes: Sequence[int]) -> Iterator[Tensor]:
        probs = target.raw_probs(len(nodes))
        yield self.judge(draft.tokens(probs.device)[1 : len(probs) + 1, None], probs)[:, None]

    @abstractmethod
    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        """Return a weight for each of `tokens` (n, 1) where the target's distributions are `probs` (n, vocab): (n,)."""


class KeepAll(Verifier):
    """MTJD: every token of the draft is kept; the drafter searched with the target itself, so no pass is needed."""

    lossy = True

    def verify(self, draft: Draft, target: Target) -> Walk:
        return Walk(tuple(range(1, draft.tree.n_nodes)), draft.tree.token_ids[1:])


class Typical(KeptPrefix):
    """Typical acceptance: a token is kept if its probability exceeds min(ε, δ · exp(-H)), H the entropy there in nats.

    Source: Medusa (arXiv:2401.10774) 2.3.1. DEVIATION: Medusa judges after temperature, and by equality with the
    argmax at temperature 0; here the criterion is one and the same at every temperature.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta

    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        least = (self.delta * probs.xlogy(probs).sum(dim=-1).exp()).clamp(max=self.epsilon)
        return probs.gather(-1, tokens)[:, 0] > least


class Rollback(KeptPrefix):
    """BiLD's rollback: a token is refused where -log of its target probability exceeds `threshold` (nats).

    Source: Kim et al. (arXiv:2302.07863) 3.3, with the target's distribution against the draft's token.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        return -probs.gather(-1, tokens)[:, 0].log() <= self.threshold


class JointRatio(KeptPrefix):
    """MTAD: the longest prefix whose joint probability is more than `threshold` times what the draft gives it.

    A prefix may pass after a shorter one failed, and the empty one always does. Both sides are after top-k and top-p:
    the target's here, the draft's in `Draft.logprobs`.

    Source: MTAD 3.2, Algorithm 1. DEVIATION: its line 11 sets η ← j, the token; meant is η ← i, the length.
    """

    def __init__(self, threshold: float, top_k: int, top_p: float) -> None:
        self.threshold, self.top_k, self.top_p = threshold, top_k, top_p

    def n_kept(self, draft: Draft, target: Target) -> int:
        assert len(draft.logprobs) == draft.tree.n_nodes
        least = math.log(self.threshold) if self.threshold > 0.0 else -math.inf
        ratio, longest = 0.0, 0  # log target - log draft of the prefix
        for node, logprob in enumerate(self._weights(draft, target), 1):
            ratio += logprob - draft.logprobs[node]
            if ratio > least:
                longest = node
            elif ratio == -math.inf:
                break  # the target rules a token out, and with it every longer prefix
        return longest

    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        return warp(probs, self.top_k, self.top_p).gather(-1, tokens)[:, 0].log()


def truncate(probs: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
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
    values, tokens = truncate(probs, top_k, top_p)
    return values.new_zeros(probs.shape).scatter_(-1, tokens, values)
