"""The parts of every method: a drafter proposes a tree of tokens, the target checks it in one pass, a verifier accepts.

    Method = drafter (with its stop rule and branching) + verifier

A draft may be a chain or a tree, sampled or not, rows that were already run through part of the depth, or text that
needs no verification; extra rows may be added to the target's pass. A tree is a spine that was drafted step by step,
with side leaves, in the order root (the last committed token), spine 1, spine 2, …, side leaves. So accepting a
prefix of the spine moves no keys and values, and accepting a side leaf moves one row.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from .draft_tree import UNKNOWN, DraftTree, ExtraRows, tree_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core.layer_sets import LayerSet
    from ..core.types import TokenSource
    from ..models.buffer import KVBuffer
    from ..models.coded_slots import SlotCoding
    from ..models.rows import Rows
    from ..models.runtime import Runtime
    from .context import Context, TokenRule
    from .work import PassGenerator


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """The tokens *sampled* below a node: the `nodes` of the draws, in order, and their distribution.

    A node is repeated if its token was drawn again. `probs`: float64 (vocab,), the draft's distribution after
    temperature, top-k and top-p. `replaced`: the draws were independent; otherwise each was drawn from `probs` without
    the tokens drawn before it. `tried`, bool (draws,), on its device: which of them are draws under this node, namely
    those of sequences that pass through it (None: all).
    """

    nodes: tuple[int, ...]
    probs: Tensor
    replaced: bool = True
    tried: Tensor | None = None


def draw_distinct(rule: TokenRule, probs: Tensor, n: int) -> Tensor:
    """Draw `n` different tokens from `probs` (vocab,), without replacement and without waiting for the device.

    Returns: float64 (2, n): the tokens, and the logarithms of their remaining probabilities; -inf if none remained.
    """
    import torch

    draws: list[Tensor] = []
    for _ in range(n):
        probs = exclude_tokens(probs, draws[-1][0].long()) if draws else probs
        token = rule.draw_drafts(probs)
        draws.append(torch.stack((token.double(), probs.gather(-1, token).log())))
    return torch.cat(draws, dim=1)


def drawable(draws: Tensor) -> Tensor:
    """Drop tokens that `draw_distinct` could not really draw, for lack of probability: int64 (up to n,)."""
    return draws[0, draws[1] > -math.inf].long()


def exclude_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """Set `tokens` (…, 1) to 0 in `probs` (…, any), then normalise; all 0 if the rest has no probability."""
    remaining_probs = probs.scatter(-1, tokens, 0.0)
    total = remaining_probs.sum(dim=-1, keepdim=True)
    return remaining_probs / total.where(total > 0.0, 1.0)


def offers_of(tree: DraftTree, drawn_from: Sequence[Tensor]) -> dict[int, Offer]:
    """Return the offers of a spine whose first steps were drawn from these distributions without replacement."""
    child_nodes = (tree.children(node) for node in range(len(drawn_from)))
    return {
        node_index: Offer(nodes, drawn_from[node_index], len(nodes) == 1)
        for node_index, nodes in enumerate(child_nodes)
    }


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """One round's proposal.

    `offers[node]` is the distribution from which the children of a node were sampled; children of a node without an
    offer were chosen deterministically (a one-hot draft). `logprobs[node]` is the draft's log probability of a node's
    token, if a verifier needs it. `staged` runs the remaining layers of rows that were run through part of the depth,
    and returns the target's logits (n_checked, vocab). `n_checked` is the number of nodes, from the root on, for which
    the target gives logits (None: all). 0 means that no pass is needed, because the drafter itself ran the target
    (`n_passes` times) and left keys and values in place. `estimated` is the round's cost by measured costs, in plain
    passes. `sources` gives the sources of nodes' tokens, except "draft". `wants_argmaxes`: the drafter learns from the
    target's most probable token after each row. `unread`, float64 (2, nodes): tokens of the first nodes (at least root
    and spine) that may still be on the device and unknown to the tree, and the logarithm of each one's confidence.
    """

    tree: DraftTree
    offers: Mapping[int, Offer] = field(default_factory=dict)
    logprobs: tuple[float, ...] = ()
    extra_rows: ExtraRows | None = None
    staged: PassGenerator[Tensor] | None = None
    n_checked: int | None = None
    n_passes: int = 1
    estimated: float | None = None
    sources: Mapping[int, TokenSource] = field(default_factory=dict)
    wants_argmaxes: bool = False
    unread: Tensor | None = None

    @classmethod
    def of_unread(
        cls,
        unread: Tensor,
        leaf_ids: Sequence[Sequence[int]],
        staged: PassGenerator[Tensor] | None = None,
        drawn_from: Sequence[Tensor] = (),
    ) -> Draft:
        """Return the draft of a spine still on its device, with the side leaves `leaf_ids` of its first steps.

        `drawn_from` are the distributions that each step's tokens were drawn from, without replacement.
        """
        candidates = [(UNKNOWN, *leaves) for leaves in (*leaf_ids, *[()] * (unread.shape[1] - 1 - len(leaf_ids)))]
        tree = DraftTree.grow(UNKNOWN, candidates)
        return cls(tree, offers_of(tree, drawn_from), staged=staged, unread=unread)

    def tokens(self, device: torch.device) -> Tensor:
        """Return the tokens of all nodes, int64 (nodes,), on a device."""
        import torch

        from ..models.transfers import uploaded

        if self.unread is None:
            return uploaded(self.tree.token_ids, device)
        spine_ids, leaf_ids = self.unread[0].long(), self.tree.token_ids[self.unread.shape[1] :]
        return torch.cat((spine_ids, uploaded(leaf_ids, device))) if leaf_ids else spine_ids

    def read(self, numbers: Sequence[float]) -> Draft:
        """Return the draft with the tokens read from `unread`, row by row; unchanged if nothing was unread."""
        if self.unread is None:
            return self
        n_tokens = len(numbers) // 2
        tree = self.tree.read([int(token_id) for token_id in numbers[:n_tokens]])
        return replace(self, tree=tree, logprobs=tuple(numbers[n_tokens:]), unread=None)

    @property
    def n_steps(self) -> int:
        """Draft steps that count for α; 0 if the target itself drafted."""
        return 0 if self.n_checked == 0 else self.tree.n_steps

    @property
    def n_rows(self) -> int:
        """Rows of the target's pass; 0 if the drafter ran its own passes of the target."""
        n_checked_nodes = self.tree.n_nodes if self.n_checked is None else self.n_checked
        return n_checked_nodes + (0 if self.extra_rows is None else len(self.extra_rows.token_ids))


@dataclass(frozen=True, slots=True)
class Walk:
    """`path`: accepted nodes without the root; `token_ids`: their tokens, then the target's next token, if any."""

    path: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A verified draft, for the drafter to learn from; `argmaxes` as in `Target`, those of extra rows last."""

    draft: Draft
    walk: Walk
    argmaxes: Sequence[int]


class StagedRows(Protocol):
    """Draft rows that have already passed some of the target's layers."""

    @property
    def n_rows(self) -> int: ...

    def add(self, token_id: int | Tensor) -> None:
        """Add a row for a token: an int, or int64 () on the device."""

    def finish(self) -> PassGenerator[Tensor]:
        """Run the remaining layers of all rows; return the target's logits (rows, vocab)."""


class AcceptanceProbe(Protocol):
    """Predicts whether the target accepts the token that is read from a state."""

    def acceptance(self, hidden: Tensor) -> Tensor:
        """Return the probability for a state (1, hidden_size), of any device: float32 ()."""


class DraftModel(ABC):
    """A model cheaper than the target that predicts its next tokens; each request drafts with a copy.

    `layer_set`: the target's sub-layers that it skips, if it is made of the target. `slot_bytes`: memory per slot of a
    request in addition to the target's. `reads_states`: it drafts from the target's last states. `cost_name`: name of
    its costs in a profile; None: the costs of its layer set. `checks_guesses`: one pass may run several nodes, each
    below the previous one. In a copy made by `begin`, `context` is the request's, and `parents` are those of the
    round's nodes so far. `staged` are the round's rows if verification only has to finish them. `hidden`
    (1, hidden_size) is the state behind the latest logits, if a probe may see it.
    """

    layer_set: LayerSet | None = None
    slot_bytes: int = 0
    reads_states = False
    cost_name: str | None = None
    checks_guesses = True
    context: Context
    parents: list[int]
    staged: StagedRows | None = None
    hidden: Tensor | None = None

    @abstractmethod
    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: it cannot draft for that target."""

    def coding(self, runtime: Runtime, capacity: int) -> SlotCoding | None:
        """Return how its passes read slots of the target's buffer in coded form; None: uncoded."""
        return None

    def begin(self, context: Context) -> Self:
        """Return a copy that drafts for one request."""
        request_copy = copy(self)
        request_copy.context = context
        request_copy.start()
        return request_copy

    def start(self) -> None:  # noqa: B027 - a hook
        """Set up the draft model's per-request state."""

    @property
    def buffer(self) -> KVBuffer:
        """The key/value buffer: the target's, which is replaced when it grows, or the draft model's own."""
        return self.context.buffer

    @property
    def n_behind(self) -> int:
        """Rows of committed tokens that the next pass runs besides its own."""
        return 0

    @property
    def room(self) -> int:
        """Maximum depth of a draft within the draft model's context; the loop checks the target's context."""
        return sys.maxsize

    def restart(self) -> None:
        """Start a new round: the next node is the root, the last committed token."""
        self.parents = []

    @property
    def reads_late(self) -> bool:
        """Whether drafted tokens may stay on the device during a round, to save synchronisation."""
        return self.context.reads_late

    @abstractmethod
    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        """Run new nodes below earlier ones (the root's parent is -1); return their logits (nodes, vocab)."""

    def draft_ahead(
        self,
        max_steps: int,
        n_candidates: int,
        on_candidates: Callable[[tuple[int, ...], float], int],
        should_continue: Callable[[], bool],
        draws: bool = False,
        probe: AcceptanceProbe | None = None,
    ) -> PassGenerator[Draft]:
        """Draft up to `max_steps` steps under the root, each read while the next one runs: the device never waits.

        When a step's confidence is read, the next step is already running. Its token stays in the draft, because
        dropping it would waste a draft pass per round. So the last step is still on the device, has no side leaves, and
        is read together with the target's tokens.

        Args: n_candidates: candidates read per step; 0: no step is read. on_candidates: gets a step's candidates and
              the probability of the first one, and returns how many to offer. should_continue: called before every
              step. draws: tokens are drawn from the model's distribution; with several candidates, the probability is
              that of the model's most probable token. probe: gives the probability instead.
        """
        import torch

        from ..models.transfers import fetched, uploaded
        from .context import likeliest, most_probable, possible_candidates

        context, leaf_ids = self.context, list[tuple[int, ...]]()
        steps = [uploaded([context.token_ids[-1:], [0.0]], context.runtime.device, torch.float64)]
        tokens = [steps[0][0].long()]  # The root token and the drafted tokens.
        read_step: Callable[[], Any] | None = None  # Reads the latest step from the device.
        drawn_from: list[Tensor] = []
        while len(steps) <= max_steps and should_continue():
            logits = yield from self.extend(tokens[-1], (len(tokens) - 2,))
            if draws:
                scores = context.scores(tokens[1:], logits[0])
                drawn_from.append(scores.double().softmax(dim=-1))
                distinct_draws = draw_distinct(context.rule, drawn_from[-1], max(1, n_candidates))
                token, log_confidence = (
                    distinct_draws[0, :1],
                    likeliest(scores[None])[1] if n_candidates > 1 else distinct_draws[1, :1],
                )
            else:
                scores = context.noisy_scores(tokens[1:], logits[0])
                token, log_confidence = likeliest(scores[None])
            if probe is not None and self.hidden is not None:
                log_confidence = probe.acceptance(self.hidden)[None].double().log()
            steps.append(torch.stack((token, log_confidence)))
            tokens.append(token.long())
            if n_candidates:
                top_tokens = distinct_draws if draws else most_probable(scores, n_candidates)
                read_previous, read_step = read_step, fetched(torch.cat((steps[-1], top_tokens), dim=1))
                if read_previous is not None:
                    (token_id, *other_ids), (logprob, *other_scores) = read_previous()
                    candidates = possible_candidates(int(token_id), other_ids, other_scores, n_candidates)
                    leaf_ids.append(candidates[1 : on_candidates(candidates, math.exp(logprob))])
        staged = self.rest(len(steps), tokens[-1][0])
        return Draft.of_unread(torch.cat(steps, dim=1), leaf_ids, staged, drawn_from)

    def rest(self, n_nodes: int, last: int | Tensor) -> PassGenerator[Tensor] | None:
        """Return the remaining work to verify a chain of `n_nodes` rows that ends with `last`; None: a whole pass."""
        if self.staged is None:
            return None
        if self.staged.n_rows < n_nodes:
            self.staged.add(last)
        return self.staged.finish()

    def move(self, nodes: Tensor, to: int) -> None:
        """Copy the keys and values of nodes, int64 (n,), to the nodes from `to` on."""
        root_slot = self.context.root_slot
        self.buffer.move(nodes + root_slot, root_slot + to)

    def drop(self, n_nodes: int) -> None:
        """Remove the newest nodes; the next ones reuse their slots."""
        del self.parents[len(self.parents) - n_nodes :]

    def _rows(
        self, token_ids: Sequence[int] | Tensor, parents: Sequence[int], variants: tuple[LayerSet, ...] = ()
    ) -> Rows:
        self.parents += parents
        return tree_rows(token_ids, self.parents, self.context.root_slot, variants=variants)


class Drafter(ABC):
    """Proposes continuations.

    A method has one drafter, with its settings and the state shared by all requests; each request drafts with a copy,
    whose `context` is the request's.

    A drafter that `runs_target` itself has no log probabilities of its tokens. A path has at most `max_depth` tokens,
    and a depth at most `max_width` nodes.
    """

    model: DraftModel | None = None
    runs_target = False
    max_depth: int = 0
    max_width: int = 1
    context: Context

    @property
    def layer_set(self) -> LayerSet | None:
        """The layer set of the draft; None if the draft is not made by skipping the target's sub-layers."""
        return None if self.model is None else self.model.layer_set

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot that drafting needs in addition to the target's buffer."""
        return 0 if self.model is None else self.model.slot_bytes

    def coding(self, runtime: Runtime, capacity: int) -> SlotCoding | None:
        """Return how drafts read coded slots of a target's buffer of `capacity` slots; None: uncoded."""
        return None if self.model is None else self.model.coding(runtime, capacity)

    @property
    def reads_states(self) -> bool:
        """Whether requests keep the target's last states for a draft model (`Context.states`)."""
        return self.model is not None and self.model.reads_states

    def max_rows(self, room: int) -> int:
        """Return the maximum number of slots that a round writes after the committed ones, root included."""
        return 1 + min(room, self.max_depth) * self.max_width

    def attach(self, runtime: Runtime) -> None:  # noqa: B027 - a hook
        """Take the shared parts for drafting from the target; called before each request gets its buffer."""

    def begin(self, context: Context) -> Self:
        """Return a copy that drafts for one request; called once, after its prefill."""
        request_copy = copy(self)
        request_copy.context = context
        if request_copy.model is not None:
            request_copy.model = request_copy.model.begin(context)
        request_copy.start()
        return request_copy

    def start(self) -> None:  # noqa: B027 - a hook
        """Set up the drafter's per-request state; most drafters have none."""

    @abstractmethod
    def draft(self, room: int) -> PassGenerator[Draft]:
        """Return a draft of at most `room` tokens in depth after the last committed token; yield its passes."""

    def guesses_behind(self, token_ids: Sequence[int], room: int) -> Sequence[tuple[int, TokenSource]]:
        """Return up to `room` tokens, with their sources, that earlier text predicts after these; none by default.

        They extend a draft that the drafter did not make: tokens forced by a grammar.
        """
        return ()

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - a hook
        """Learn from the latest draft's outcome, before its tokens are committed; most drafters learn nothing."""

    def state(self) -> dict[str, Any] | None:
        """Return the learnt state as JSON values; call it between rounds. None: the drafter learns nothing."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - a hook
        """Restore the `state` of a drafter with the same settings.

        Raises: KeyError, TypeError, ValueError: the state is invalid.
        """
