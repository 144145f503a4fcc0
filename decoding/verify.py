"""Verification of a deterministic draft tree: exact at every temperature, because the draft is one-hot.

A token is drawn from the target (greedy: its argmax). If the draft offered that token, follow it; if not, emit *that
same token* and stop. The output is a sample of the target whatever the tree offers, as long as the tree does not
depend on the draws; so a tree may be pruned by confidence, and the token that stopped the drafting stays in it.

Source: Leviathan et al. (arXiv:2211.17192) with a one-hot draft distribution; Chen et al. (arXiv:2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .tree import DraftTree


@dataclass(frozen=True, slots=True)
class Walk:
    """`path`: accepted nodes, root excluded; `token_ids`: their tokens and, last, the target's own."""

    path: tuple[int, ...]
    token_ids: tuple[int, ...]


def walk(tree: DraftTree, choose: Callable[[int, tuple[int, ...]], int]) -> Walk:
    """Follow the target down the tree.

    Args:    choose: (node, tokens accepted so far) -> the target's token after that node; called once per visited
             node, in order, so that a seeded draw is spent on each emitted token and on no other.
    """
    node, path, token_ids = 0, (), ()  # type: int, tuple[int, ...], tuple[int, ...]
    while True:
        token_id = choose(node, token_ids)
        token_ids += (token_id,)
        child = tree.child(node, token_id)
        if child is None:
            return Walk(path, token_ids)
        path += (child,)
        node = child
