"""The parts of every method: a drafter offers a draft, the target checks it in one pass, a verifier says what is kept.

    Method = drafter (with its stop rule and branching) + verifier

A drafter begins once per request and is then asked for a draft per round. What it hands over may be a chain or a tree,
sampled or not, rows that were already run part of the depth, further rows that ride along in the target's pass, or a
piece of text that needs no check at all; the loop is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from .tree import DraftTree, Later, Riders

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.types import LayerSet, TokenSource
    from .context import Context
    from .draft_models import DraftModel
    from .engine import PassGenerator
    from .rule import TokenRule


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What was *sampled* under a node: `token_ids` in the order drawn, repeats included, and what they were drawn from.

    `probs`: float64 (vocab,), the draft's distribution after temperature, top-k and top-p. `replaced` says whether the
    draws were independent; if not, each was drawn from what the ones before it left of `probs`.
    """

    token_ids: tuple[int, ...]
    probs: Tensor
    replaced: bool = True

    @classmethod
    def drawn(cls, rule: TokenRule, scores: Tensor, n: int = 1, replaced: bool = True) -> Offer:
        """Draw `n` tokens by their processed scores (vocab,); without replacement fewer, where not so many can be."""
        probs = scores.double().softmax(dim=-1).cpu()
        tokens = tuple(rule.draw_draft(probs) for _ in range(n)) if replaced else draw_apart(rule, probs, n)
        return cls(tokens, probs, replaced)


def draw_apart(rule: TokenRule, probs: Tensor, n: int) -> tuple[int, ...]:
    """Draw up to `n` different indices of `probs` (any,), each from what is left; fewer where nothing is."""
    drawn: tuple[int, ...] = ()
    while len(drawn) < n and float(probs.sum()) > 0.0:
        drawn += (rule.draw_draft(probs),)
        probs = remaining(probs, drawn[-1])
    return drawn


def remaining(probs: Tensor, token_id: int) -> Tensor:
    """Return `probs` (any,) without one of them, made to sum to 1; all 0 where nothing is left."""
    left = probs.clone()
    left[token_id] = 0.0
    total = left.sum()
    return left / total if float(total) > 0.0 else left


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """One round's proposal.

    `offers[node]` says what the children of a node were sampled from; a node without one has children that were chosen
    without chance (a one-hot draft). `logprobs[node]` is the draft's log probability of a node's token, where a
    verifier asks for it. `staged` runs the rest of rows that were run part of the way, and returns the target's logits
    (n_checked, vocab). `n_checked` is how many of the tree's nodes, from the root on, the target gives logits for
    (None: all); 0 says that no pass is needed, for the drafter itself ran the target (`n_passes` times) and left keys
    and values in place. `sources` says where nodes' tokens come from, those of "draft" left out. With `later` the tree
    is a chain whose tokens are not known yet.
    """

    tree: DraftTree
    offers: Mapping[int, Offer] = field(default_factory=dict)
    logprobs: tuple[float, ...] = ()
    riders: Riders | None = None
    staged: PassGenerator[Tensor] | None = None
    n_checked: int | None = None
    n_passes: int = 1
    n_drafted: int | None = None  # draft steps that α counts; None: the tree's
    estimated: float | None = None  # what the round costs by measured costs of passes, in plain passes
    sources: Mapping[int, TokenSource] = field(default_factory=dict)
    later: Later | None = None

    @classmethod
    def of_later(cls, later: Later, estimated: float | None = None) -> Draft:
        """Return a chain whose tokens are still being computed."""
        return cls(DraftTree.chain([0] * len(later.token_ids)), estimated=estimated, later=later)

    def read(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Draft:
        """Return the draft with the tokens that `later` stands for."""
        return replace(self, tree=DraftTree.chain(token_ids), logprobs=tuple(logprobs), later=None)

    @property
    def n_steps(self) -> int:
        """Draft steps, as α counts them."""
        return self.tree.n_steps if self.n_drafted is None else self.n_drafted

    @property
    def n_rows(self) -> int:
        """Rows of the target's pass; 0 where the drafter made its own."""
        checked = self.tree.n_nodes if self.n_checked is None else self.n_checked
        return checked + (len(self.riders.token_ids) if self.riders is not None else 0)


@dataclass(frozen=True, slots=True)
class Walk:
    """`path`: accepted nodes without the root; `token_ids`: their tokens, then the target's own where it gave one."""

    path: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of a draft, for the drafter to learn from; `logits` (rows, vocab): the target's, read riders last."""

    draft: Draft
    walk: Walk
    logits: Tensor | None


class Drafter(ABC):
    """Proposes continuations.

    A method has one drafter, which holds its settings and what all requests share; each request drafts with a copy that
    `begin` makes.
    """

    model: DraftModel | None = None  # what it drafts with, if that is a model
    runs_target = False  # whether it runs the target itself, so that nobody sees what its tokens were drawn from
    max_depth: int = 0  # tokens that a draft is deep at most
    max_width: int = 1  # nodes of a draft at one depth, at most
    context: Context  # of the request, in a copy that `begin` made

    @property
    def layer_set(self) -> LayerSet | None:
        """The sub-layers that it leaves out of the target, if that is how it drafts."""
        return None if self.model is None else self.model.layer_set

    @property
    def slot_bytes(self) -> int:
        """Memory that drafting takes per slot of a request, beside the target's."""
        return 0 if self.model is None else self.model.slot_bytes

    def max_rows(self, room: int) -> int:
        """Return the most slots behind the committed ones that a round with `room` can write, root included."""
        return 1 + min(room, self.max_depth) * self.max_width

    def begin(self, context: Context) -> Self:
        """Return a copy that drafts for one request; called once, after its prefill."""
        own = copy(self)
        own.context = context
        own.start()
        return own

    def start(self) -> None:  # noqa: B027 - a hook
        """Set up what a request has for itself; most drafters have nothing."""

    @abstractmethod
    def draft(self, room: int) -> PassGenerator[Draft]:
        """Return a draft under the last committed token, at most `room` tokens deep; yield the passes it takes."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - a hook
        """Learn what became of the latest draft, whose tokens are not committed yet; most drafters learn nothing."""

    def state(self) -> dict[str, Any] | None:
        """Return what was learnt so far, as JSON values, between two rounds; None: such a drafter learns nothing."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - a hook
        """Go on from the `state` of a drafter of the same settings.

        Raises: KeyError, TypeError, ValueError: that is no such state.
        """
