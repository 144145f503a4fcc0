"""The draft tree: a spine that was drafted step by step, and side leaves that hang from it.

Order: the root (the last committed token), spine 1, spine 2, …, then the side leaves. Accepting a prefix of the spine
then needs no move of keys and values at all, and accepting a side leaf moves one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.types import LayerSet
    from ..models.rows import Rows


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in buffer order; `parents[0]` is -1. `n_steps` draft passes made it: the length of the spine."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    n_steps: int

    @classmethod
    def grow(cls, root: int, candidates: Sequence[Sequence[int]]) -> DraftTree:
        """Build the tree of a draft: `candidates[i]` are the tokens offered at draft step i, the spine's own first."""
        spine = [offered[0] for offered in candidates]
        token_ids, parents = [root, *spine], list(range(-1, len(spine)))
        for step, offered in enumerate(candidates):
            token_ids += offered[1:]
            parents += [step] * (len(offered) - 1)
        return cls(tuple(token_ids), tuple(parents), len(spine))

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """Build the tree of a draft without branches; the root first."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), len(token_ids) - 1)

    @property
    def n_nodes(self) -> int:
        """Rows that the target checks, root included."""
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether there are no side leaves, so that slots are positions."""
        return self.n_nodes == self.n_steps + 1

    def below(self, node: int) -> tuple[int, ...]:
        """Return the nodes below one: its first child, the first child of that, and so on."""
        found: list[int] = []
        for other in range(node + 1, self.n_nodes):
            if self.parents[other] == node:
                found.append(other)
                node = other
        return tuple(found)

    def child(self, node: int, token_id: int) -> int | None:
        """Return the node that continues `node` with `token_id`, None where the draft did not offer it."""
        for other in range(node + 1, self.n_nodes):
            if self.parents[other] == node and self.token_ids[other] == token_id:
                return other
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Riders:
    """Rows beside the tree in the target's pass, for a drafter that learns from them (Lookahead).

    They see the committed text, the root, and one another as `visible` says: bool, (n, n). `depths` are their positions
    relative to the root. Logits are wanted of the last `n_read` of them only.
    """

    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    visible: Tensor
    n_read: int


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """What a chain will be, on a device that has not computed it yet: (nodes,) each, the root first.

    Whoever reads a token waits for the device, which waits for the next pass meanwhile; so a round reads once, when its
    last pass was asked for.
    """

    token_ids: Tensor
    logprobs: Tensor


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Return which nodes each node of a tree may attend to.

    Args:    parents: parent index per node, parents first, -1 for the root.
    Returns: bool, (n_nodes, n_nodes); row i is True at i and at its ancestors.
    Raises:  ShapeError: a parent does not come before its child.
    """
    import torch

    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ShapeError(f"node {node} lists parent {parent}, which does not come before it")
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def tree_rows(
    token_ids: Sequence[int] | Tensor,
    parents: Sequence[int],
    root_slot: int,
    riders: Riders | None = None,
    variants: tuple[LayerSet, ...] = (),
) -> Rows:
    """Return the rows of a pass over the newest nodes of a tree, and over riders behind them.

    Args: token_ids: of the newest nodes; a tensor of a chain's only.
          parents: of all nodes so far; node i goes to slot `root_slot` + i.
    """
    from ..models.rows import Rows

    first = len(parents) - len(token_ids)
    if riders is None and list(parents) == list(range(-1, len(parents) - 1)):
        return Rows(token_ids, root_slot + first, variants=variants)
    import torch

    visible = ancestor_mask(parents)[first:]
    depths = (visible.sum(dim=1) - 1).tolist()
    if riders is not None:
        beside = torch.nn.functional.pad(riders.visible, (len(parents), 0))
        beside[:, 0] = True  # the root
        visible = torch.cat((torch.nn.functional.pad(visible, (0, len(beside))), beside))
        token_ids, depths = (*token_ids, *riders.token_ids), [*depths, *riders.depths]
    return Rows(token_ids, root_slot + first, [root_slot + depth for depth in depths], visible, variants)
