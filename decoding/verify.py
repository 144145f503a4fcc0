"""The target's answer to a draft, and the verifier that is exact for every draft made without chance.

A token is drawn from the target (greedy: its argmax). If the draft offered that token, follow it; if not, emit *that
same token* and stop. The output is a sample of the target whatever the tree offers, as long as the tree does not
depend on the draws; so a tree may be pruned by confidence, and the token that stopped the drafting stays in it.

Source: Leviathan et al. (arXiv:2211.17192) with a one-hot draft distribution; Chen et al. (arXiv:2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..core.types import TokenLogprob
from .draft import Draft, Target, Walk
from .tree import DraftTree

if TYPE_CHECKING:
    from torch import Tensor

    from .context import Context


def walk(tree: DraftTree, choose: Callable[[int, tuple[int, ...]], int], n_checked: int | None = None) -> Walk:
    """Follow the target down the tree.

    Args:    choose: (node, tokens accepted so far) -> the target's token after that node; called once per visited
             node, in order, so that a seeded draw is spent on each emitted token and on no other.
             n_checked: nodes from here on have no answer of the target: the walk ends when it reaches one.
    """
    node, path, token_ids = 0, (), ()  # type: int, tuple[int, ...], tuple[int, ...]
    while n_checked is None or node < n_checked:
        token_id = choose(node, token_ids)
        token_ids += (token_id,)
        child = tree.child(node, token_id)
        if child is None:
            break
        path += (child,)
        node = child
    return Walk(path, token_ids)


class TargetWalk:
    """The verifier of `walk`; the same seed gives the tokens of plain decoding."""

    lossy = False

    def verify(self, draft: Draft, target: Target) -> Walk:
        return walk(draft.tree, target.choose, target.n_checked)


class PassTarget:
    """A `Target` on the logits (rows, vocab) of one pass; None: the round needed no pass, and nothing can be asked."""

    def __init__(self, context: Context, draft: Draft, logits: Tensor | None) -> None:
        self.context, self.rule = context, context.rule
        self.greedy = self.rule.greedy
        self.n_checked = draft.tree.n_nodes if draft.n_checked is None else draft.n_checked
        self._logits = logits
        self._choices: list[int] | None = None
        if self.rule.is_argmax and logits is not None:
            # max, not argmax: the same first best index, and on a CPU in bfloat16 4 to 7 times faster
            self._choices = logits[: self.n_checked].max(dim=-1).indices.tolist()

    def choose(self, node: int, accepted: Sequence[int]) -> int:
        if self._choices is not None:
            return self._choices[node]
        return self.rule.choose([*self.context.token_ids, *accepted], self._row(node))

    def probs(self, node: int, accepted: Sequence[int]) -> Tensor:
        return self.rule.probs([*self.context.token_ids, *accepted], self._row(node)).cpu()

    def raw_probs(self, node: int) -> Tensor:
        return self._row(node).double().softmax(dim=-1).cpu()

    def logprobs(self, path: Sequence[int], token_ids: Sequence[int], n_top: int) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities of tokens that were read from the root and then from the nodes of `path`."""
        pairs = zip((0, *path), token_ids, strict=False)
        return tuple(token_logprob(self._row(node), token_id, n_top) for node, token_id in pairs)

    def draw(self, probs: Tensor) -> int:
        return self.rule.draw(probs)

    def accept(self, probability: float) -> bool:
        return self.rule.accept(probability)

    def _row(self, node: int) -> Tensor:
        assert self._logits is not None and node < self.n_checked
        return self._logits[node]


def token_logprob(logits: Tensor, token_id: int, n_top: int) -> TokenLogprob:
    """Return a token's log probability and those of the `n_top` likeliest ones, by the model's own logits (vocab,).

    It takes one row, so that no bit depends on how many others there are.
    """
    scores = logits.float().log_softmax(dim=-1)
    values, tokens = scores.topk(min(n_top, scores.shape[-1]))
    return TokenLogprob(token_id, float(scores[token_id]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
