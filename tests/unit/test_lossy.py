"""The lossy verifiers satisfy the inequality of their definition, on random tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftopt.decoding.draft import Draft, Walk
from swiftopt.decoding.draft_tree import DraftTree
from swiftopt.decoding.verify import Verifier
from swiftopt.papers.verifiers import JointRatio, KeepAll, Rollback, Typical, warp

VOCAB = 8
OWN = 5  # the token the target chooses wherever it is asked


class RandomTarget:
    """A target with a random distribution per node, which always draws `OWN`."""

    greedy = False

    def __init__(self, verifier: Verifier, draft: Draft, rows: Tensor, n_checked: int) -> None:
        self.verifier, self.draft, self.rows, self.n_checked = verifier, draft, rows, n_checked
        self.asked: list[tuple[int, tuple[int, ...]]] = []

    def choose(self, node: int, accepted: Sequence[int]) -> int:
        assert node < self.n_checked
        self.asked.append((node, tuple(accepted)))
        return OWN

    def walk(self) -> Walk:
        target: Any = self
        return self.verifier.verify(self.draft, target)

    def weights(self, nodes: Sequence[int]) -> Iterator[list[float]]:
        target: Any = self
        for numbers in self.verifier.weigh(self.draft, target, nodes):
            yield numbers.flatten().tolist()

    def raw_probs(self, n: int) -> Tensor:
        assert n <= self.n_checked
        return self.rows[:n]

    def probs(self, node: int) -> Tensor:
        raise AssertionError("judged by the model's own distribution")

    def draw(self, drawn: float) -> int:
        raise AssertionError("the target chooses, it is not drawn for")

    def accept(self, probability: float) -> bool:
        raise AssertionError("no chance in these verifiers")


def table(seed: int, n: int, sharpness: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharpness * torch.randn((n, VOCAB), generator=generator, dtype=torch.float64), dim=-1)


def drafted(seed: int, length: int, top_k: int, top_p: float) -> Draft:
    """Draw a chain of tokens from the warped draft table, with their log probabilities."""
    rows = warp(table(seed, length), top_k, top_p)
    tokens = [int(torch.multinomial(row, 1, generator=torch.Generator().manual_seed(seed))) for row in rows]
    logprobs = [math.log(float(row[token])) for row, token in zip(rows, tokens, strict=True)]
    return Draft(DraftTree.grow(0, [[token] for token in tokens]), logprobs=(0.0, *logprobs))


lengths, seeds = st.integers(0, 5), st.integers(0, 10_000)


@given(seeds, lengths, st.floats(0.01, 0.99), st.integers(1, VOCAB + 2), st.floats(0.2, 1.0), st.booleans())
@settings(max_examples=150, deadline=None)
def test_accepted_prefix_exceeds_the_ratio_and_no_longer_one_does(
    seed: int, length: int, threshold: float, top_k: int, top_p: float, answered: bool
) -> None:
    draft = drafted(seed, length, top_k, top_p)
    n_checked = length + 1 if answered else max(1, length)
    target = RandomTarget(JointRatio(threshold, top_k, top_p), draft, table(seed + 1, length + 1), n_checked)
    walked = target.walk()
    tokens = draft.tree.token_ids[1:]

    def ratio(n: int) -> float:
        product = 1.0
        for i in range(n):
            product *= float(warp(target.rows[i], top_k, top_p)[tokens[i]]) / math.exp(draft.logprobs[i + 1])
        return product

    kept = len(walked.path)
    assert kept == 0 or ratio(kept) > threshold * (1 - 1e-9)
    assert all(ratio(n) <= threshold * (1 + 1e-9) for n in range(kept + 1, length + 1))
    assert walked.path == tuple(range(1, kept + 1))
    own = (OWN,) if kept < n_checked else ()
    assert walked.token_ids == tokens[:kept] + own and len(walked.token_ids) > 0


def test_longer_prefix_is_tried_after_a_shorter_one_failed() -> None:
    rows = torch.full((3, VOCAB), 0.9 / (VOCAB - 1), dtype=torch.float64)
    rows[0, 1] = 0.1  # the first token alone: 0.1 / 0.9
    rows[1] = torch.tensor([0.1 / (VOCAB - 1)] * VOCAB)
    rows[1, 2] = 0.9  # both: 0.09 / 0.045, or 0.09 / 0.81
    tree = DraftTree.grow(0, [[1], [2]])
    draft = Draft(tree, logprobs=(0.0, math.log(0.9), math.log(0.05)))
    assert RandomTarget(JointRatio(0.5, VOCAB, 1.0), draft, rows, 3).walk().path == (1, 2)
    unlucky = Draft(tree, logprobs=(0.0, math.log(0.9), math.log(0.9)))
    assert RandomTarget(JointRatio(0.5, VOCAB, 1.0), unlucky, rows, 3).walk().path == ()


def test_threshold_one_accepts_no_token_even_where_the_target_is_surer_than_the_draft() -> None:
    draft = Draft(DraftTree.grow(0, [[1], [2]]), logprobs=(0.0, math.log(0.1), math.log(0.1)))
    rows = torch.zeros((3, VOCAB), dtype=torch.float64)
    rows[0, 1] = rows[1, 2] = rows[2, 3] = 1.0  # p / q is 10, then 100
    assert RandomTarget(JointRatio(1.0, VOCAB, 1.0), draft, rows, 3).walk().path == ()
    assert RandomTarget(JointRatio(0.99, VOCAB, 1.0), draft, rows, 3).walk().path == (1, 2)


def test_threshold_zero_keeps_all_that_the_target_does_not_rule_out() -> None:
    rows = table(3, 4)
    rows[2, 6] = 0.0
    draft = Draft(DraftTree.grow(0, [[1], [2], [6]]), logprobs=(0.0, 0.0, 0.0, 0.0))
    assert RandomTarget(JointRatio(0.0, VOCAB, 1.0), draft, rows, 4).walk().path == (1, 2)


def check_first_refusal(verifier: Verifier, seed: int, length: int, answered: bool, margins: list[float]) -> None:
    """Check that the block ends at the first token i with `margins[i]` <= 0."""
    draft = drafted(seed, length, VOCAB, 1.0)
    n_checked = length + 1 if answered else max(1, length)
    target = RandomTarget(verifier, draft, table(seed + 1, length + 1), n_checked)
    walked = target.walk()
    kept = next((i for i, margin in enumerate(margins) if margin <= 0.0), length)
    tokens = draft.tree.token_ids[1 : kept + 1]
    assert walked.path == tuple(range(1, kept + 1))
    assert walked.token_ids == tokens + ((OWN,) if kept < n_checked else ())
    assert target.asked == ([(kept, tokens)] if kept < n_checked else [])


@given(seeds, lengths, st.floats(0.01, 0.9), st.floats(0.01, 0.9), st.booleans())
@settings(max_examples=100, deadline=None)
def test_typical_keeps_what_exceeds_its_bound(
    seed: int, length: int, epsilon: float, delta: float, answered: bool
) -> None:
    tokens, margins = drafted(seed, length, VOCAB, 1.0).tree.token_ids[1:], []
    for token, row in zip(tokens, table(seed + 1, length + 1).tolist(), strict=False):
        entropy = -sum(p * math.log(p) for p in row)
        margins.append(row[token] - min(epsilon, delta * math.exp(-entropy)))
    check_first_refusal(Typical(epsilon, delta), seed, length, answered, margins)


@given(seeds, lengths, st.floats(0.0, 6.0), st.booleans())
@settings(max_examples=100, deadline=None)
def test_rollback_refuses_what_is_further_from_the_target_than_its_threshold(
    seed: int, length: int, threshold: float, answered: bool
) -> None:
    tokens = drafted(seed, length, VOCAB, 1.0).tree.token_ids[1:]
    rows = table(seed + 1, length + 1).tolist()
    margins = [threshold + math.log(row[token]) for token, row in zip(tokens, rows, strict=False)]
    check_first_refusal(Rollback(threshold), seed, length, answered, margins)


def test_impossible_token_is_refused_by_every_verifier_that_looks() -> None:
    rows = torch.zeros((2, VOCAB), dtype=torch.float64)
    rows[:, 1] = 1.0
    draft = Draft(DraftTree.grow(0, [[2]]), logprobs=(0.0, -3.0))
    for verifier in (JointRatio(0.0, 3, 0.9), Typical(0.09, 0.3), Rollback(50.0)):
        walked = RandomTarget(verifier, draft, rows, 2).walk()
        assert walked.path == () and walked.token_ids == (OWN,)
        assert verifier.lossy


def test_block_of_the_target_is_kept_whole_and_nothing_is_asked() -> None:
    target = RandomTarget(KeepAll(), Draft(DraftTree.grow(0, [[3], [4]]), n_checked=0), table(0, 1), 0)
    walked = target.walk()
    assert walked.path == (1, 2) and walked.token_ids == (3, 4) and not target.asked and KeepAll().lossy


@given(seeds, st.integers(1, VOCAB + 2), st.floats(0.0, 1.0))
@settings(max_examples=100, deadline=None)
def test_warped_is_the_smallest_set_of_most_probable_tokens(seed: int, top_k: int, top_p: float) -> None:
    probs = table(seed, 1)[0]
    warped = warp(probs, top_k, top_p)
    order = probs.argsort(descending=True).tolist()[:top_k]
    total, kept = sum(float(probs[t]) for t in order), []
    for token in order:
        if kept and sum(float(probs[t]) for t in kept) / total >= top_p - 1e-12:
            break
        kept.append(token)
    assert warped.dtype == torch.float64 and abs(float(warped.sum()) - 1.0) < 1e-12
    assert sorted(warped.nonzero().flatten().tolist()) == sorted(kept)
    share = sum(float(probs[t]) for t in kept)
    assert all(float(warped[t]) == pytest.approx(float(probs[t]) / share, abs=1e-12) for t in kept)
