"""Exact verifiers for drafts that were *sampled*: they weigh the target's distribution against the draft's.

Both are taken after temperature, top-k, top-p and penalties. A refused token is made up for by a draw from what the
target has left, so that the output is the target's whatever the draft. Nodes without an `Offer`, and all nodes of a
greedy request, take the step of `verify.walk`. A node that the target has no answer for ends the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from .draft import Draft, Offer, Target, Walk

if TYPE_CHECKING:
    from torch import Tensor

SeveralRule = Literal["with", "without", "k-seq"]
Decide = Callable[[Offer, "Tensor", Target], int]

_BISECTIONS = 24  # any divisor at or above the smallest one is exact; a closer one accepts no more to speak of


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return max(0, target - draft) made to sum to 1, (vocab,); the target's own where nothing is left of it."""
    left = (target_probs - draft_probs).clamp_min(0.0)
    total = left.sum()
    return left / total if float(total) > 0.0 else target_probs


class ChainRatio:
    """Speculative sampling, for at most one sampled child per node: x is kept with probability min(1, target / draft).

    Source: Leviathan et al. (arXiv:2211.17192), Algorithm 1; Chen et al. (arXiv:2302.01318).
    """

    lossy = False

    def verify(self, draft: Draft, target: Target) -> Walk:
        return _descend(draft, target, _single)


class BlockRatio:
    """Block verification: the tokens of a sampled chain are weighed together; never accepts fewer than `ChainRatio`.

    Trees, and what follows the first node without an offer, are verified as by `ChainRatio`.
    Source: Sun et al. (arXiv:2403.10444), Algorithm 2.
    """

    lossy = False

    def verify(self, draft: Draft, target: Target) -> Walk:
        n = 0 if target.greedy or not draft.tree.is_chain else _n_sampled(draft, target.n_checked)
        tokens = draft.tree.token_ids[1 : n + 1]
        target_probs = [target.probs(node, tokens[:node]) for node in range(n)]
        draft_probs = [draft.offers[node].probs for node in range(n)]
        weights = [1.0]  # how far the target backs the first i tokens; at most 1
        for token_id, wanted, offered in zip(tokens, target_probs, draft_probs, strict=True):
            weights.append(min(1.0, weights[-1] * float(wanted[token_id]) / float(offered[token_id])))
        for kept in range(n, 0, -1):  # the longest block whose own chance comes up
            if kept == n:
                chance = weights[n]
            else:
                left = float((weights[kept] * target_probs[kept] - draft_probs[kept]).clamp_min(0.0).sum())
                missing = left + (1.0 - weights[kept])  # never below `left`
                chance = left / missing if missing > 0.0 else 1.0
            if target.accept(chance):
                break
        else:
            kept = 0
        path = tuple(range(1, kept + 1))
        if kept == n:
            return _descend(draft, target, _single, n, path, tokens)
        left_probs = (weights[kept] * target_probs[kept] - draft_probs[kept]).clamp_min(0.0)
        token_id = target.draw(left_probs if float(left_probs.sum()) > 0.0 else target_probs[kept])
        return Walk(path, (*tokens[:kept], token_id))


class SeveralRatio:
    """Several sampled children per node; every draw of an `Offer` is a try, repeats included.

    `rule`: "with" for independent draws, tried one after another (SpecInfer, arXiv:2305.09781); "without" for draws
    that exclude each other (MCSS, arXiv:2401.06706); "k-seq" for independent draws that all have the same chance
    (SpecTr, arXiv:2310.15141). A token that the target draws from what it has left is followed where it is a child
    too (with "k-seq" it can be): what hangs below a child does not depend on why the child was reached.
    """

    lossy = False

    def __init__(self, rule: SeveralRule) -> None:
        self.rule = rule
        self._decide = _RULES[rule]

    def verify(self, draft: Draft, target: Target) -> Walk:
        independent = self.rule != "without"
        assert all(o.replaced == independent or len(o.token_ids) == 1 for o in draft.offers.values())
        return _descend(draft, target, self._decide)


def _n_sampled(draft: Draft, n_checked: int) -> int:
    """Return how many tokens of a chain, from its first on, were sampled and have an answer of the target."""
    limit = min(n_checked, draft.tree.n_nodes - 1)
    return next((node for node in range(limit) if node not in draft.offers), limit)


def _descend(
    draft: Draft,
    target: Target,
    decide: Decide,
    node: int = 0,
    path: tuple[int, ...] = (),
    token_ids: tuple[int, ...] = (),
) -> Walk:
    """Walk from `node` down the tree; `decide` gives the token to commit after a node whose children were sampled."""
    offers: Mapping[int, Offer] = {} if target.greedy else draft.offers
    while node < target.n_checked:
        if node in offers:
            token_id = decide(offers[node], target.probs(node, token_ids), target)
        else:
            token_id = target.choose(node, token_ids)
        token_ids += (token_id,)
        child = draft.tree.child(node, token_id)
        if child is None:
            break
        path += (child,)
        node = child
    return Walk(path, token_ids)


def _accepted(token_id: int, target_probs: Tensor, draft_probs: Tensor, target: Target) -> bool:
    return target.accept(min(1.0, float(target_probs[token_id]) / float(draft_probs[token_id])))


def _single(offer: Offer, target_probs: Tensor, target: Target) -> int:
    assert len(offer.token_ids) == 1
    return _with(offer, target_probs, target)


def _with(offer: Offer, target_probs: Tensor, target: Target) -> int:
    for token_id in offer.token_ids:
        if _accepted(token_id, target_probs, offer.probs, target):
            return token_id
        target_probs = residual(target_probs, offer.probs)
    return target.draw(target_probs)


def _without(offer: Offer, target_probs: Tensor, target: Target) -> int:
    draft_probs = offer.probs
    for token_id in offer.token_ids:
        if _accepted(token_id, target_probs, draft_probs, target):
            return token_id
        target_probs = residual(target_probs, draft_probs)
        draft_probs = remaining(draft_probs, token_id)
    return target.draw(target_probs)


def _k_seq(offer: Offer, target_probs: Tensor, target: Target) -> int:
    n_tries = len(offer.token_ids)
    accepted = offer.probs.minimum(target_probs / _divisor(target_probs, offer.probs, n_tries))
    for token_id in offer.token_ids:
        if target.accept(float(accepted[token_id]) / float(offer.probs[token_id])):
            return token_id
    once = min(1.0, float(accepted.sum()))  # the chance that one try is accepted
    gain = _any_of(once, n_tries) / once if once > 0.0 else float(n_tries)
    return target.draw(residual(target_probs, accepted * gain))


def remaining(draft_probs: Tensor, *token_ids: int) -> Tensor:
    """Return `draft_probs` (vocab,) without some tokens, made to sum to 1; all 0 where nothing is left."""
    left = draft_probs.clone()
    left[list(token_ids)] = 0.0
    total = left.sum()
    return left / total if float(total) > 0.0 else left


def _any_of(chance: float, n_tries: int) -> float:
    return 1.0 - float((1.0 - chance) ** n_tries)


def _divisor(target_probs: Tensor, draft_probs: Tensor, n_tries: int) -> float:
    """Return the smallest ρ in [1, n_tries], from above, that accepts no token more often than the target has it."""
    shared = (target_probs > 0.0) & (draft_probs > 0.0)
    wanted, offered = target_probs[shared], draft_probs[shared]
    low, high = 1.0, float(n_tries)
    for _ in range(_BISECTIONS if n_tries > 1 else 0):
        middle = (low + high) / 2
        once = min(1.0, float(offered.minimum(wanted / middle).sum()))
        if _any_of(once, n_tries) > middle * once:
            low = middle
        else:
            high = middle
    return high


_RULES: Mapping[str, Decide] = {"with": _with, "without": _without, "k-seq": _k_seq}
