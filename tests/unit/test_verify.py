"""The verifier is exact: its output distribution is the target's, whatever the draft offers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftopt.core.errors import ShapeError
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import TokenRule
from swiftopt.decoding.draft import Walk
from swiftopt.decoding.draft_tree import DraftTree, ancestor_mask
from swiftopt.decoding.verify import walk

VOCAB = 3
Path = tuple[int, ...]


def target_probs(path: Path) -> list[float]:
    """Return a distribution over three tokens for every prefix; some have a token of probability zero."""
    weights = [1.0 + (7 * sum((i + 2) * (t + 1) for i, t in enumerate(path)) + 3 * token) % 5 for token in range(VOCAB)]
    if len(path) == 1:
        weights[path[0]] = 0.0
    return [weight / sum(weights) for weight in weights]


def outcomes(tree: DraftTree) -> Iterator[tuple[Walk, float]]:
    """Enumerate every outcome of the walk with its probability."""

    def explore(chosen: Path) -> Iterator[tuple[Walk, float]]:
        needed: list[Path] = []

        def choose(node: int, accepted: Path) -> int:
            if len(accepted) < len(chosen):
                return chosen[len(accepted)]
            needed.append(accepted)
            return 0

        walked = walk(tree, choose)
        if not needed:
            weight = 1.0
            for depth, token in enumerate(walked.token_ids):
                weight *= target_probs(walked.token_ids[:depth])[token]
            yield walked, weight
            return
        for token in range(VOCAB):
            yield from explore((*chosen, token))

    yield from explore(())


TREES = [
    DraftTree.grow(0, []),
    DraftTree.grow(0, [[1]]),
    DraftTree.grow(0, [[1], [2]]),
    DraftTree.grow(0, [[1, 0], [2, 0, 1]]),
    DraftTree.grow(0, [[2, 1, 0], [0], [1, 2]]),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.n_steps}steps-{tree.n_nodes}nodes")
def test_walk_reproduces_the_target_distribution_exactly(tree: DraftTree) -> None:
    """Outcomes are continued with the target to a common length; their distribution is the target's to 1e-12."""
    length = tree.n_steps + 1
    joint: dict[Path, float] = {}
    for walked, weight in outcomes(tree):
        for rest in itertools.product(range(VOCAB), repeat=length - len(walked.token_ids)):
            full = walked.token_ids + rest
            tail = 1.0
            for depth in range(len(walked.token_ids), length):
                tail *= target_probs(full[:depth])[full[depth]]
            joint[full] = joint.get(full, 0.0) + weight * tail
    for full in itertools.product(range(VOCAB), repeat=length):
        expected = 1.0
        for depth in range(length):
            expected *= target_probs(full[:depth])[full[depth]]
        assert abs(joint.get(full, 0.0) - expected) < 1e-12


def test_resampling_after_a_miss_would_be_biased() -> None:
    """The enumeration detects a verifier that draws again instead of emitting the drawn token."""
    tree = DraftTree.grow(0, [[1]])
    probs = target_probs(())
    redrawn = [0.0] * VOCAB
    for token in range(VOCAB):
        if token == 1:
            redrawn[1] += probs[1]
        else:
            for again in range(VOCAB):
                redrawn[again] += probs[token] * probs[again]
    assert max(abs(a - b) for a, b in zip(redrawn, probs, strict=True)) > 0.01
    first: list[float] = [0.0] * VOCAB
    for walked, weight in outcomes(tree):
        first[walked.token_ids[0]] += weight
    assert max(abs(a - b) for a, b in zip(first, probs, strict=True)) < 1e-12


def test_walk_draws_once_per_emitted_token() -> None:
    calls: list[int] = []

    def choose(node: int, accepted: Path) -> int:
        calls.append(node)
        return 1

    walked = walk(DraftTree.grow(0, [[1], [1], [2]]), choose)
    assert len(calls) == len(walked.token_ids) == 3
    assert walked.path == (1, 2)


def test_token_zero_is_a_token_like_any_other() -> None:
    walked = walk(DraftTree.grow(5, [[3, 0]]), lambda node, accepted: 0)
    assert walked == Walk(path=(2,), token_ids=(0, 0))


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True), max_size=6))
@settings(max_examples=60, deadline=None)
def test_tree_is_spine_first_and_its_mask_holds_ancestors_only(candidates: list[list[int]]) -> None:
    tree = DraftTree.grow(99, candidates)
    assert tree.parents[: tree.n_steps + 1] == tuple(range(-1, tree.n_steps))
    mask = ancestor_mask(tree.parents)
    for node in range(tree.n_nodes):
        line, at = {node}, tree.parents[node]
        while at >= 0:
            line.add(at)
            at = tree.parents[at]
        assert set(mask[node].nonzero().flatten().tolist()) == line


def test_path_is_found_in_a_chain_of_any_length() -> None:
    assert DraftTree.chain(range(5000)).path(4999) == tuple(range(1, 5000))


def test_ancestor_mask_refuses_a_parent_after_its_child() -> None:
    with pytest.raises(ShapeError, match="node 1 lists parent 2"):
        ancestor_mask([-1, 2, 0])


def test_draw_inverts_the_cumulative_distribution() -> None:
    """10,000 seeded draws of four outcomes: chi-square, 3 degrees, below 21.1 (false alarm 1e-4, seed fixed)."""
    rule = TokenRule.of(Sampling(temperature=1.0, seed=11), None)
    probs = torch.tensor([0.5, 0.0, 0.2, 0.25, 0.05], dtype=torch.float64)
    counts = torch.zeros(5)
    for _ in range(10_000):
        counts[int(rule.peek(probs))] += 1
        rule.spend()
    assert counts[1] == 0
    kept = probs > 0
    assert float((((counts - 10_000 * probs) ** 2)[kept] / (10_000 * probs[kept])).sum()) < 21.1
