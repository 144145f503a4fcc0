"""The verifiers: which tokens of a draft are accepted, given the target's logits for it.

`TargetWalk` is exact for every deterministic draft: a token is drawn from the target (greedy: its argmax); if the
draft offered it, the walk follows it; if not, it emits *that same token* and stops. The tree must not depend on the
draws: it may be pruned by confidence, and the token that stopped the drafting stays in it (Leviathan et al.,
arXiv:2211.17192, with a one-hot draft distribution).

`ChainRatio`, `BlockRatio` and `SeveralRatio` are exact for *sampled* drafts: they compare the target's distribution
with the draft's, both after temperature, top-k, top-p and penalties. A rejected token is replaced by a draw from the
residual of the target's distribution. Nodes without an `Offer`, and all nodes of a greedy request, use the step above.

A node without logits of the target ends every walk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

from ..core.types import TokenLogprob
from .draft import Draft, Offer, Walk, exclude_tokens
from .draft_tree import DraftTree, tree_rows
from .logprobs import as_logprob, logprobs_of, token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.rows import Pass
    from .context import Context, Drafted
    from .work import Work

    Tries = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Generator[Tensor, None, Tensor]]

AT_ROOT = Walk((), ())
SeveralRule = Literal["with", "without"]


class Target:
    """The target's logits for a draft, the numbers read from them, and a verifier's random draws, in token order.

    All device reads of a round happen here. If the request `reads_late`, or its draft is still on the device,
    everything that the verifier may need is computed there and moved in one transfer. Otherwise only the argmaxes are,
    and the rest is computed on demand.

    Nodes 0 … `n_checked` - 1 have logits; `greedy`: tokens are argmaxes. `argmaxes` are those of all rows, if tokens
    are argmaxes or the draft needs them. `accepted` are the tokens from below the root to a node, inclusive (`above`).
    """

    def __init__(self, context: Context, draft: Draft, verifier: Verifier) -> None:
        self.context, self.rule, self.greedy = context, context.rule, context.rule.greedy
        self._draft, self._verifier = draft, verifier
        self.accept = self.rule.accept
        self.n_checked = draft.tree.n_nodes if draft.n_checked is None else draft.n_checked
        self.argmaxes: list[int] = []
        self.states: list[Tensor] = []  # The rows' states after the last layer, where the request keeps them.
        self._logits: Tensor | None = None  # Logits (rows, vocab); None if the draft needed no pass.
        self._reads_late = context.reads_late or draft.unread is not None
        self._choices: dict[int, int] = {}  # Tokens that the target itself chose after a node, by node, once read.
        self._weights: dict[int, Sequence[float]] = {}  # Numbers that `weights` yields for a node, by node, once read.
        self._probs: dict[int, Tensor] = {}  # Cache of `probs`, by node.
        self.backed: list[Tensor] = []  # Cache of `_acceptance_factors`: acceptance factors along the sampled chain.
        self._drawn: dict[int, Tensor] = {}  # Tokens (1,) that `peek` drew after a node, by node.
        self._logprobs: list[list[float]] = []  # Log probabilities per node; filled only if tokens are read late.

    def check(self) -> Work[Draft]:
        """Run the target's pass over the unchecked nodes of the draft, if any; return the draft with its tokens."""
        from .work import ReadPass

        draft, verifier, is_argmax = self._draft, self._verifier, self.rule.is_argmax
        if draft.n_checked == 0:
            return draft
        if draft.staged is not None:
            self._logits = yield from draft.staged
            return self._read()
        if self._reads_late:
            reads_best = is_argmax and self.context.logprobs is None and not verifier.weighed(draft, self)
        else:
            reads_best = is_argmax or draft.wants_argmaxes
        if not reads_best:
            self._logits = yield from self._pass().run()
            return self._read()
        self._logits, numbers = yield from ReadPass(self._pass(), draft.unread).run()
        n_rows = len(self._logits)
        self._take_argmaxes(numbers[:n_rows])
        return draft.read(numbers[n_rows:])

    def _pass(self) -> Pass:
        """Return the pass over the tree's rows, followed by the extra rows."""
        from ..models.rows import Pass

        draft, context = self._draft, self.context
        tree, extra_rows, rows_with_logits, checked_nodes = draft.tree, draft.extra_rows, None, slice(draft.n_checked)
        token_ids = tree.token_ids if draft.unread is None else draft.tokens(context.runtime.device)
        if extra_rows is not None:
            n_rows = tree.n_nodes + len(extra_rows.token_ids)
            rows_with_logits = [*range(tree.n_nodes), *range(n_rows - extra_rows.n_read, n_rows)]
        rows = tree_rows(token_ids[checked_nodes], tree.parents[checked_nodes], context.root_slot, extra_rows)
        capture = None if context.states is None else {context.runtime.n_layers: self.states}
        return Pass(context.runtime, rows, context.buffer, rows_with_logits, capture)

    def _read(self) -> Draft:
        """Transfer all numbers that the round needs from the device at once; return the draft with its tokens."""
        import torch

        from ..models.rows import best_of, read_together

        draft, verifier, is_argmax = self._draft, self._verifier, self.rule.is_argmax
        if self._logits is None or not (self._reads_late or is_argmax or draft.wants_argmaxes):
            return draft
        argmaxes = best_of(self._logits) if is_argmax or draft.wants_argmaxes else None
        nodes, choices = list(range(self.n_checked)), None
        node_groups = verifier.weighed(draft, self) if self._reads_late else []
        if self._reads_late and not is_argmax:
            sampled_nodes = _sampled_nodes(draft, self) if verifier.weighs_offers else ()
            nodes = [node for node in nodes if node not in sampled_nodes]
            scores = [self.context.noisy_scores(self.above(node), self._row(node), of_target=True) for node in nodes]
            choices = best_of(torch.stack(scores)) if scores else None
        # One (nodes, numbers) per group.
        weights = [torch.cat(list(verifier.weigh(draft, self, group)), dim=1) for group in node_groups]
        logprobs: list[Tensor] = []
        if self._reads_late:
            logprobs = self._logprobs_of_all(verifier.lossy, nodes, argmaxes if is_argmax else choices)
        argmax_ids, chosen_ids, draft_numbers, *group_numbers = read_together(
            argmaxes, choices, draft.unread, *weights, *logprobs
        )
        self._take_argmaxes(argmax_ids)
        self._choices |= zip(nodes, map(int, chosen_ids), strict=False)
        for group, numbers in zip(node_groups, group_numbers, strict=False):
            n_numbers = len(numbers) // len(group)
            self._weights |= {
                node: numbers[index * n_numbers : (index + 1) * n_numbers] for index, node in enumerate(group)
            }
        self._logprobs = group_numbers[len(weights) :]
        return draft.read(draft_numbers)

    def _take_argmaxes(self, numbers: Sequence[float]) -> None:
        self.argmaxes = list(map(int, numbers))
        if self.rule.is_argmax:
            self._choices = dict(enumerate(self.argmaxes[: self.n_checked]))

    def weights(self, nodes: Sequence[int]) -> Iterator[Sequence[float]]:
        """Yield the verifier's numbers for `nodes`, one per node at a time, from the transfer or computed now."""
        if nodes[0] in self._weights:
            yield from zip(*(self._weights[node] for node in nodes), strict=True)
        else:
            for numbers in self._verifier.weigh(self._draft, self, nodes):
                yield numbers.flatten().tolist()

    def choose(self, node: int, accepted: Sequence[int]) -> int:
        """Return the token that the target itself chooses after a node: the argmax or a draw."""
        if node in self._choices:
            return self._choices[node]
        return self.context.choose(accepted, self._row(node))

    @cached_property
    def _tokens(self) -> Drafted:
        """The tokens of all nodes of the draft; arbitrary values if the rule does not read them."""
        draft = self._draft
        if draft.unread is None or not self.rule.reads_text:
            return draft.tree.token_ids
        return self._uploaded

    @cached_property
    def _uploaded(self) -> Sequence[Tensor]:
        """The tokens of all nodes of the draft on the device of the logits: int64, (1,) each."""
        assert self._logits is not None
        return self._draft.tokens(self._logits.device)[:, None].unbind()

    def above(self, node: int) -> Drafted:
        """Return the tokens on the path from the root (excluded) to a node (included), before the draft is read."""
        return cast("Drafted", [self._tokens[node_above] for node_above in self._draft.tree.path(node)])

    def probs(self, node: int) -> Tensor:
        """Return the target's distribution after a node, processors applied: float64 (vocab,); one-hot if greedy."""
        if node not in self._probs:
            scores = self.context.scores(self.above(node), self._row(node), of_target=True)
            self._probs[node] = self.rule.probs(scores)
        return self._probs[node]

    def raw_probs(self, n: int) -> Tensor:
        """Return the target's distributions after the first `n` nodes without any processor: float64 (n, vocab)."""
        assert self._logits is not None and n <= self.n_checked
        return self._logits[:n].double().softmax(dim=-1)

    def peek(self, probs: Tensor, nodes: Sequence[int]) -> Tensor:
        """Return a token drawn after each of `nodes` from `probs` (nodes, vocab): int64 (nodes, 1), on the device.

        A walk commits at most one of them, by `draw`.
        """
        drawn_tokens = self.rule.peek(probs)
        self._drawn.update(zip(nodes, drawn_tokens, strict=True))
        return drawn_tokens

    def draw(self, token_id: float) -> int:
        """Commit to a token that `peek` drew: count it as the request's next draw."""
        self.rule.spend()
        return int(token_id)

    def logprobs(self, path: Sequence[int], token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities of tokens that were read from the root and then from the nodes of `path`."""
        n_top = self.context.logprobs
        if n_top is None:
            return ()
        # The last tokens may be cut off (stop string, length limit).
        rows = list(zip((0, *path), token_ids, strict=False))
        if not self._logprobs:
            return token_logprobs([self._row(node) for node, _ in rows], token_ids, n_top)
        return tuple(as_logprob(token_id, self._logprobs[node], n_top) for node, token_id in rows)

    def _logprobs_of_all(self, lossy: bool, nodes: Sequence[int], target_ids: Tensor | None) -> list[Tensor]:
        """Return `logprobs_of` every node and the tokens that may follow it, if requested and already known.

        An offered token may follow if it is weighed or the verifier is lossy, otherwise only as the target's own token.

        Args: target_ids: the target's tokens after `nodes`, int64 (nodes or more,).
        """
        import torch

        draft, n_top = self._draft, self.context.logprobs
        if n_top is None:
            return []
        chosen_ids = (
            self._drawn
            if target_ids is None
            else {**self._drawn, **dict(zip(nodes, target_ids[:, None], strict=False))}
        )
        if len(chosen_ids) < self.n_checked:
            return []  # Some tokens are drawn only when `verify` asks for them, so they are not known yet.
        logprobs: list[Tensor] = []
        for node in range(self.n_checked):
            offered_nodes = (
                draft.offers[node].nodes if node in self._drawn else draft.tree.children(node) if lossy else ()
            )
            next_ids = torch.cat([chosen_ids[node], *(self._uploaded[child] for child in offered_nodes)])
            logprobs.append(logprobs_of(self._row(node), next_ids, n_top))
        return logprobs

    def _row(self, node: int) -> Tensor:
        assert self._logits is not None and node < self.n_checked
        return self._logits[node]


def walk(
    tree: DraftTree, choose: Callable[[int, tuple[int, ...]], int], n_checked: int | None = None, start: Walk = AT_ROOT
) -> Walk:
    """Follow the target down the tree, from the end of `start`.

    Args:    choose: (node, tokens accepted so far) -> the target's token after that node; called once per visited
             node, in order, so that a seeded draw is spent on each emitted token and on no other.
             n_checked: nodes from this one on have no logits; the walk ends when it reaches one.
    """
    path, token_ids = start.path, start.token_ids
    node = path[-1] if path else 0
    while n_checked is None or node < n_checked:
        token_id = choose(node, token_ids)
        token_ids += (token_id,)
        child = tree.child(node, token_id)
        if child is None:
            break
        path += (child,)
        node = child
    return Walk(path, token_ids)


class Verifier(ABC):
    """Decides how much of a draft is accepted. `lossy`: the output is not the target's own distribution."""

    lossy = False
    weighs_offers = False  # Whether `weigh` draws the token after a node that has an offer.

    def weighed(self, draft: Draft, target: Target) -> list[list[int]]:
        """Return the nodes for which `verify` may call `Target.weights`, in groups that are computed together."""
        return []

    def weigh(self, draft: Draft, target: Target, nodes: Sequence[int]) -> Iterator[Tensor]:
        """Yield the numbers by which `verify` decides at nodes of one group, as tensors (nodes, 1) on the device.

        Only `Target` calls it, and waits for the numbers when it reads them.
        """
        yield from ()

    @abstractmethod
    def verify(self, draft: Draft, target: Target) -> Walk:
        """Return the accepted path, and the tokens to commit: at least one."""


class TargetWalk(Verifier):
    """The verifier of `walk`; the same seed gives the tokens of plain decoding."""

    def verify(self, draft: Draft, target: Target) -> Walk:
        return walk(draft.tree, target.choose, target.n_checked)


class SeveralRatio(Verifier):
    """Several sampled children per node; every draw of an `Offer` is a try, including repeats.

    `rule`: "with" for independent draws, tried one after another (SpecInfer, arXiv:2305.09781); "without" for draws
    without replacement (MCSS, arXiv:2401.06706). A token drawn from the target's residual is followed if it is also a
    child, because the subtree of a child does not depend on why it was reached. `tries` weighs the draws of nodes.
    """

    weighs_offers = True

    def __init__(self, rule: SeveralRule = "with", tries: Tries | None = None) -> None:
        self._independent = rule != "without"
        self._tries = tries or _weigh_one_by_one

    def weighed(self, draft: Draft, target: Target) -> list[list[int]]:
        nodes_by_tries = groupby(_sampled_nodes(draft, target), lambda node: len(draft.offers[node].nodes))
        return [list(nodes) for _, nodes in nodes_by_tries]

    def weigh(self, draft: Draft, target: Target, nodes: Sequence[int]) -> Iterator[Tensor]:
        """Yield the acceptance probability of each try (all nodes have the same number), then the token if all fail.

        A walk draws at most once, because rejected tokens have no remaining probability.
        """
        import torch

        from ..models.transfers import uploaded

        offers = [draft.offers[node] for node in nodes]
        target_probs = _stack([target.probs(node) for node in nodes])
        draft_probs = _stack([offer.probs for offer in offers])
        tried_masks = [offer.tried for offer in offers if offer.tried is not None]
        tokens = draft.tokens(draft_probs.device)[uploaded([offer.nodes for offer in offers], draft_probs.device)]
        is_replaced, is_tried = offers[0].replaced, torch.stack(tried_masks) if tried_masks else None
        residual_probs = yield from self._tries(tokens, draft_probs, target_probs, is_replaced, is_tried)
        yield target.peek(residual_probs, nodes)

    def verify(self, draft: Draft, target: Target) -> Walk:
        assert all(offer.replaced == self._independent or len(offer.nodes) == 1 for offer in draft.offers.values())
        return self._descend(draft, target)

    def _descend(self, draft: Draft, target: Target, start: Walk = AT_ROOT) -> Walk:
        """Walk down the tree; the rule gives the token to commit after a node whose children were sampled."""
        offers: Mapping[int, Offer] = {} if target.greedy else draft.offers

        def choose(node: int, accepted: tuple[int, ...]) -> int:
            if node not in offers:
                return target.choose(node, accepted)
            weights = target.weights([node])
            for child, [chance] in zip(offers[node].nodes, weights, strict=False):
                if chance > 0.0 and target.accept(chance):
                    return draft.tree.token_ids[child]
            [drawn_token] = next(weights)
            return target.draw(drawn_token)

        return walk(draft.tree, choose, target.n_checked, start)


class ChainRatio(SeveralRatio):
    """Speculative sampling, for at most one sampled child per node: x is kept with probability min(1, target / draft).

    Source: Leviathan et al. (arXiv:2211.17192), Algorithm 1; Chen et al. (arXiv:2302.01318).
    """


class BlockRatio(ChainRatio):
    """Block verification: the tokens of a sampled chain are weighed together; never accepts fewer than `ChainRatio`.

    Trees, and what follows the first node without an offer, are verified as by `ChainRatio`.
    Source: Sun et al. (arXiv:2403.10444), Algorithm 2.
    """

    def weighed(self, draft: Draft, target: Target) -> list[list[int]]:
        """Return the nodes of the sampled chain, then the nodes after it."""
        n_sampled = _sampled_chain_length(draft, target)
        nodes_behind = ([node for node in nodes if node >= n_sampled] for nodes in super().weighed(draft, target))
        return [nodes for nodes in (list(range(n_sampled)), *nodes_behind) if nodes]

    def weigh(self, draft: Draft, target: Target, nodes: Sequence[int]) -> Iterator[Tensor]:
        """Yield for each node the acceptance probability of the block up to the token after it, as the whole chain.

        Then the probability of the block that ends at the node, after a longer one was rejected, and the token drawn
        after it.
        """
        import torch

        if nodes[0] >= _sampled_chain_length(draft, target):
            yield from super().weigh(draft, target, nodes)
            return
        factors = torch.stack(_acceptance_factors(draft, target, nodes[-1] + 1)[nodes[0] :])  # Shape (nodes + 1, 1).
        yield factors[1:]
        scaled_target_probs = factors[:-1] * _stack([target.probs(node) for node in nodes])
        residual_mass, residual_total = _unnormalised_residual(
            scaled_target_probs, _stack([draft.offers[node].probs for node in nodes])
        )
        # At least `residual_total`, so the ratio below is at most 1.
        missing_mass = residual_total + (1.0 - factors[:-1])
        yield (residual_total / missing_mass).where(missing_mass > 0.0, 1.0)
        yield target.peek((residual_mass / residual_total).where(residual_total > 0.0, scaled_target_probs), nodes)

    def verify(self, draft: Draft, target: Target) -> Walk:
        n_sampled = _sampled_chain_length(draft, target)
        tokens = draft.tree.token_ids[1 : n_sampled + 1]
        if n_sampled == 0 or target.accept(next(target.weights([n_sampled - 1]))[0]):
            return self._descend(draft, target, Walk(tuple(range(1, n_sampled + 1)), tokens))
        for n_kept in range(n_sampled - 1, -1, -1):  # Find the longest block that is accepted by its own chance.
            weights = target.weights([n_kept])
            _, [chance] = next(weights), next(weights)
            if n_kept == 0 or target.accept(chance):
                break
        [drawn_token] = next(weights)
        return Walk(tuple(range(1, n_kept + 1)), (*tokens[:n_kept], target.draw(drawn_token)))


def _acceptance_factors(draft: Draft, target: Target, n_factors: int) -> list[Tensor]:
    """Return the block acceptance factors (1,), at most 1, of the first 0 … `n_factors` tokens of a chain."""
    factors = target.backed  # Cached from earlier calls; extended below.
    factors += [] if factors else [target.probs(0).new_ones(1)]
    tokens = draft.tokens(factors[0].device)
    for node in range(len(factors) - 1, n_factors):
        token = tokens[node + 1, None]
        target_prob, draft_prob = (probs.gather(0, token) for probs in (target.probs(node), draft.offers[node].probs))
        factors.append((factors[-1] * target_prob / draft_prob).clamp(max=1.0))
    return factors[: n_factors + 1]


def _stack(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows (vocab,) to (rows, vocab); a single row is not copied."""
    import torch

    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))


def _sampled_nodes(draft: Draft, target: Target) -> list[int]:
    """Return the nodes that have an offer and logits of the target, in order."""
    return [] if target.greedy else sorted(node for node in draft.offers if node < target.n_checked)


def _sampled_chain_length(draft: Draft, target: Target) -> int:
    """Return the number of leading tokens of a chain that were sampled and checked; 0 if not a chain."""
    nodes = _sampled_nodes(draft, target) if draft.tree.is_chain else []
    return next((index for index, node in enumerate(nodes) if node != index), len(nodes))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return max(0, target - draft), normalised, (…, vocab); the target's distribution if all of it is 0."""
    residual_mass, residual_total = _unnormalised_residual(target_probs, draft_probs)
    return (residual_mass / residual_total).where(residual_total > 0.0, target_probs)


def _unnormalised_residual(target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return max(0, target - draft), (…, vocab), and its sum, (…, 1)."""
    residual_mass = (target_probs - draft_probs).clamp_min(0.0)
    return residual_mass, residual_mass.sum(dim=-1, keepdim=True)


def _weigh_one_by_one(
    tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, is_replaced: bool, tried_mask: Tensor | None
) -> Generator[Tensor, None, Tensor]:
    """Yield the probability (n, 1) of each try of `tokens` (n, tries); return the distribution if all tries fail.

    Each probability is conditional on the rejection of all tries before it. All distributions are (n, vocab). Tries
    excluded by `tried_mask`, bool (n, tries), and draws of probability 0 have probability 0 and change nothing.
    """
    for index, token in enumerate(tokens[..., None].unbind(dim=1)):
        is_tried = None if tried_mask is None else tried_mask[:, index, None]
        chance = acceptance_chance(target_probs, draft_probs, token)
        yield chance if is_tried is None else chance * is_tried
        residual_probs = residual(target_probs, draft_probs)
        target_probs = residual_probs if is_tried is None else residual_probs.where(is_tried, target_probs)
        if not is_replaced:
            draft_probs = exclude_tokens(draft_probs, token)
    return target_probs


def acceptance_chance(wanted_probs: Tensor, draft_probs: Tensor, token: Tensor) -> Tensor:
    """Return the probability (n, 1), at most 1, with which to accept `token`.

    Accepted tokens then have probabilities `wanted_probs` (n, vocab), as far as `draft_probs` allows.
    """
    draft_prob = draft_probs.gather(1, token)
    return (wanted_probs.gather(1, token) / draft_prob).clamp(max=1.0).where(draft_prob > 0.0, 0.0)
