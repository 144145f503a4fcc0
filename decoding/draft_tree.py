"""The tree of a draft's tokens, and its conversion to the rows of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.layer_sets import LayerSet
    from ..models.rows import Rows

UNKNOWN = -1  # Placeholder for a token that has not been read from the device yet.


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in buffer order; `parents[0]` is -1. `n_steps`: number of draft passes, the length of the spine."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    n_steps: int

    @classmethod
    def grow(cls, root: int, candidates: Sequence[Sequence[int]]) -> DraftTree:
        """Build the tree of a draft: `candidates[i]` are the tokens offered at draft step i, the spine's own first."""
        spine = [step_candidates[0] for step_candidates in candidates]
        token_ids, parents = [root, *spine], list(range(-1, len(spine)))
        for step, step_candidates in enumerate(candidates):
            token_ids += step_candidates[1:]
            parents += [step] * (len(step_candidates) - 1)
        return cls(tuple(token_ids), tuple(parents), len(spine))

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """Build the tree of a draft without branches; the root first."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), len(token_ids) - 1)

    @property
    def n_nodes(self) -> int:
        """Number of nodes, root included: the rows that the target checks."""
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether the tree has no side leaves, so that slots equal positions."""
        return self.n_nodes == self.n_steps + 1

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes on the path from the root (excluded) to a node (included)."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def below(self, node: int) -> tuple[int, ...]:
        """Return the chain of first children below a node."""
        nodes: list[int] = []
        for child in range(node + 1, self.n_nodes):
            if self.parents[child] == node:
                nodes.append(child)
                node = child
        return tuple(nodes)

    def children(self, node: int) -> tuple[int, ...]:
        return tuple(child for child in range(node + 1, self.n_nodes) if self.parents[child] == node)

    def child(self, node: int, token_id: int) -> int | None:
        """Return the child of `node` with `token_id`; None if the draft has no such child."""
        return next((child for child in self.children(node) if self.token_ids[child] == token_id), None)

    def read(self, token_ids: Sequence[int]) -> DraftTree:
        """Return the tree with the now known tokens of its first nodes filled in.

        Children of a node that duplicates another one become children of that one.
        """
        token_ids = (*token_ids, *self.token_ids[len(token_ids) :])
        first_child: dict[tuple[int, int], int] = {}  # (parent, token) -> first child of the parent with that token.
        merged_nodes, parents = list[int](), list[int]()
        for node, (token_id, parent) in enumerate(zip(token_ids, self.parents, strict=True)):
            parents.append(merged_nodes[parent] if node else -1)
            merged_nodes.append(first_child.setdefault((parents[-1], token_id), node))
        return replace(self, token_ids=tuple(token_ids), parents=tuple(parents))


@dataclass(frozen=True, slots=True, eq=False)
class ExtraRows:
    """Extra rows in the target's pass besides the tree, for drafters that learn from them (Lookahead).

    They see the committed text, the root, and one another according to `visible`: bool, (n, n). `depths` are their
    positions relative to the root. Only the logits of the last `n_read` rows are needed.
    """

    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    visible: Tensor
    n_read: int


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Return a mask of the nodes that each node of a tree may attend to.

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
    extra_rows: ExtraRows | None = None,
    variants: tuple[LayerSet, ...] = (),
) -> Rows:
    """Return the rows of a pass over the newest nodes of a tree, followed by extra rows.

    Args: token_ids: those of the newest nodes; not a tensor if there are extra rows. parents: those of all nodes; node
          i goes to slot `root_slot` + i.
    """
    from ..models.rows import Rows

    first_new = len(parents) - len(token_ids)
    if extra_rows is None and list(parents) == list(range(-1, len(parents) - 1)):
        return Rows(token_ids, root_slot + first_new, variants=variants)
    import torch

    visible = ancestor_mask(parents)[first_new:]
    depths = (visible.sum(dim=1) - 1).tolist()
    if extra_rows is not None:
        extra_visible = torch.nn.functional.pad(extra_rows.visible, (len(parents), 0))
        extra_visible[:, 0] = True  # Every extra row attends to the root.
        visible = torch.cat((torch.nn.functional.pad(visible, (0, len(extra_visible))), extra_visible))
        token_ids, depths = (*token_ids, *extra_rows.token_ids), [*depths, *extra_rows.depths]
    return Rows(token_ids, root_slot + first_new, [root_slot + depth for depth in depths], visible, variants)
