"""The papers' verifiers: k-SEQ, which is exact for several sampled tokens, and lossy verifiers.

Lossy verifiers accept tokens that the target might not have drawn, for speed or for likelier text. They check chains
only, against the target's distribution without temperature and penalties.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from ..decoding.draft import Draft, Walk
from ..decoding.verify import Target, Verifier, acceptance_chance, residual

if TYPE_CHECKING:
    from torch import Tensor

_BISECTIONS = 12  # Every divisor from the smallest valid one up is exact; more steps barely raise the acceptance.


def k_seq(
    tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, replaced: bool, tried_mask: Tensor | None
) -> Generator[Tensor, None, Tensor]:
    """Weigh the drafted tokens of a node by k-SEQ: all tries have the same acceptance rule.

    Args, yields and return value are those of `verify._weigh_one_by_one`.

    Source: SpecTr (arXiv:2310.15141).
    """
    is_tried = tokens.new_ones(tokens.shape).bool() if tried_mask is None else tried_mask
    n_tries = is_tried.sum(dim=1, keepdim=True)
    accepted_probs = draft_probs.minimum(
        target_probs / _find_divisor(target_probs, draft_probs, n_tries, tokens.shape[1])
    )
    for index, token in enumerate(tokens[..., None].unbind(dim=1)):
        yield acceptance_chance(accepted_probs, draft_probs, token) * is_tried[:, index, None]
    one_try = accepted_probs.sum(dim=1, keepdim=True).clamp(max=1.0)  # Probability that a given try is accepted.
    gain = (_any_accepted(one_try, n_tries) / one_try).where(one_try > 0.0, n_tries)
    return residual(target_probs, accepted_probs * gain)


def _any_accepted(one_try: Tensor, n_tries: Tensor) -> Tensor:
    """Return the probability that any of `n_tries` tries is accepted, each with probability `one_try`."""
    return 1.0 - (1.0 - one_try) ** n_tries


def _find_divisor(target_probs: Tensor, draft_probs: Tensor, n_tries: Tensor, max_tries: int) -> Tensor:
    """Return an upper bound on the smallest ρ in [1, n_tries] with which k-SEQ is exact, found by bisection.

    Args:    target_probs, draft_probs: (n, vocab). n_tries: (n, 1), at most `max_tries`.
    Returns: float64 (n, 1).
    """
    lower, upper = target_probs.new_ones(n_tries.shape), n_tries.to(target_probs.dtype)
    for _ in range(_BISECTIONS if max_tries > 1 else 0):
        middle = (lower + upper) / 2
        one_try = draft_probs.minimum(target_probs / middle).sum(dim=1, keepdim=True).clamp(max=1.0)
        is_too_low = _any_accepted(one_try, n_tries) > middle * one_try
        lower, upper = middle.where(is_too_low, lower), upper.where(is_too_low, middle)
    return upper


class PrefixVerifier(Verifier):
    """Base of lossy verifiers: accepts a prefix of the chain, then adds the target's token if it has logits there."""

    lossy = True

    def verify(self, draft: Draft, target: Target) -> Walk:
        assert draft.tree.is_chain
        n_accepted = self.n_accepted(draft, target)
        token_ids = draft.tree.token_ids[1 : n_accepted + 1]
        if n_accepted < target.n_checked:
            token_ids = (*token_ids, target.choose(n_accepted, token_ids))
        return Walk(tuple(range(1, n_accepted + 1)), token_ids)

    def n_accepted(self, draft: Draft, target: Target) -> int:
        """Return the number of accepted draft tokens: all before the first one with weight 0."""
        weights = self._weights(draft, target)
        return next((n_before for n_before, weight in enumerate(weights) if not weight), len(weights))

    def _weights(self, draft: Draft, target: Target) -> Sequence[float]:
        """Return the weight of each draft token for which the target has logits."""
        return next((next(target.weights(nodes)) for nodes in self.weighed(draft, target)), ())

    def weighed(self, draft: Draft, target: Target) -> list[list[int]]:
        nodes = list(range(min(draft.tree.n_steps, target.n_checked)))
        return [nodes] if nodes else []

    def weigh(self, draft: Draft, target: Target, nodes: Sequence[int]) -> Iterator[Tensor]:
        probs = target.raw_probs(len(nodes))
        yield self.judge(draft.tokens(probs.device)[1 : len(probs) + 1, None], probs)[:, None]

    @abstractmethod
    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        """Return weights (n,) of `tokens` (n, 1), given the target's distributions `probs` (n, vocab)."""


class KeepAll(Verifier):
    """Accepts every token without a pass (MTJD): the drafter searched with the target itself."""

    lossy = True

    def verify(self, draft: Draft, target: Target) -> Walk:
        return Walk(tuple(range(1, draft.tree.n_nodes)), draft.tree.token_ids[1:])


class Typical(PrefixVerifier):
    """Typical acceptance: a token is accepted if its target probability exceeds min(ε, δ · exp(-H)).

    H is the entropy of the target's distribution at this position, in nats.

    Source: Medusa (arXiv:2401.10774) 2.3.1. DEVIATION: Medusa applies the temperature first, and compares with the
    argmax at temperature 0; here the criterion is the same at every temperature.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta

    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        min_prob = (self.delta * probs.xlogy(probs).sum(dim=-1).exp()).clamp(max=self.epsilon)
        return probs.gather(-1, tokens)[:, 0] > min_prob


class Rollback(PrefixVerifier):
    """BiLD's rollback: a token is refused if -log of its target probability exceeds `threshold` (nats).

    Source: Kim et al. (arXiv:2302.07863) 3.3, with the distance between the target's distribution and the draft's token
    as cross-entropy.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        return -probs.gather(-1, tokens)[:, 0].log() <= self.threshold


class JointRatio(PrefixVerifier):
    """MTAD: accepts the longest prefix with min(1, p / q) > `threshold` (τ), p and q its joint probabilities.

    p is the target's and q the draft's, both after top-k and top-p: p is warped here, q in `Draft.logprobs`. A prefix
    may pass although a shorter one failed. With τ = 1 none does, which is multinomial sampling (appendix C.2).

    Source: MTAD 3.2; Algorithm 1 in appendix B. DEVIATION: its line 6 sets η ← -1 and its line 11 η ← j, the token; η
    is the accepted length, so it must be 0 at first and then i.
    """

    def __init__(self, threshold: float, top_k: int, top_p: float) -> None:
        self.threshold, self.top_k, self.top_p = threshold, top_k, top_p

    def n_accepted(self, draft: Draft, target: Target) -> int:
        assert len(draft.logprobs) == draft.tree.n_nodes
        log_threshold = math.log(self.threshold) if self.threshold > 0.0 else -math.inf
        log_ratio, n_accepted = 0.0, 0  # `log_ratio`: log p - log q of the prefix.
        for node, logprob in enumerate(self._weights(draft, target), 1):
            log_ratio += logprob - draft.logprobs[node]
            if min(0.0, log_ratio) > log_threshold:
                n_accepted = node
            elif log_ratio == -math.inf:
                break  # The target gives a token probability 0, so every longer prefix fails too.
        return n_accepted

    def judge(self, tokens: Tensor, probs: Tensor) -> Tensor:
        return warp(probs, self.top_k, self.top_p).gather(-1, tokens)[:, 0].log()


def truncate(probs: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the top-k tokens of `probs` (…, vocab), truncated by top-p, most probable first.

    Returns: renormalised probabilities, float64 (…, n), 0 for tokens that top-p drops; token ids, int64 (…, n).
    """
    top_probs, tokens = probs.double().topk(min(top_k, probs.shape[-1]), dim=-1)
    top_probs = top_probs / top_probs.sum(dim=-1, keepdim=True)
    if top_p < 1.0:
        # Drop a token if the probabilities of the tokens before it already sum to top_p.
        is_dropped = top_probs.cumsum(dim=-1) - top_probs >= top_p
        is_dropped[..., 0] = False
        top_probs = top_probs.masked_fill(is_dropped, 0.0)
        top_probs = top_probs / top_probs.sum(dim=-1, keepdim=True)
    return top_probs, tokens


def warp(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return `probs` truncated by top-k, then top-p, and renormalised: float64 (…, vocab)."""
    top_probs, tokens = truncate(probs, top_k, top_p)
    return top_probs.new_zeros(probs.shape).scatter_(-1, tokens, top_probs)
