"""The ratio verifiers are exact: over all draws of draft and target, the output distribution is the target's.

Every draw of the drafter, of acceptance tests and of residuals branches. A run of drafter and verifier is replayed for
each sequence of outcomes, so that nothing is sampled, and only rounding errors remain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Context, TokenRule
from swiftopt.decoding.draft import Draft, Drafter, DraftModel, Offer, Walk
from swiftopt.decoding.draft_tree import DraftTree, ancestor_mask
from swiftopt.decoding.engine import alone
from swiftopt.decoding.methods.chains import ChainDrafter, StopRule
from swiftopt.decoding.verify import BlockRatio, ChainRatio, SeveralRatio, Verifier
from swiftopt.decoding.work import PassGenerator
from swiftopt.papers.methods.sequences import SequencesDrafter, SequencesSettings
from swiftopt.papers.verifiers import k_seq

VOCAB = 3
Path = tuple[int, ...]
Result = TypeVar("Result")


@cache
def table(path: Path, salt: int, zeros: bool) -> Tensor:
    """Return a conditional distribution per prefix; with `zeros` a token is impossible after some prefixes."""
    mixed = sum((i + 2) * (t + 1) for i, t in enumerate(path))
    weights = torch.tensor([1.0 + (7 * mixed + salt * t) % 5 for t in range(VOCAB)], dtype=torch.float64)
    if zeros and mixed % 3 == 2:
        weights[(mixed + salt) % VOCAB] = 0.0
    return weights / weights.sum()


AT_ONCE, TOGETHER, LATE = "step by step", "read together", "drafted and read together"


def target_table(path: Path) -> Tensor:
    return table(path, 3, zeros=len(path) == 1)


def draft_table(path: Path) -> Tensor:
    return table(path, 4, zeros=True)


class Branches:
    """The draws of a run: those of `script`, then the first possible ones; `others` are the alternative scripts."""

    def __init__(self, script: Path) -> None:
        self.script, self.taken, self.weight = script, (), 1.0
        self.others: list[Path] = []

    def pick(self, probs: Sequence[float]) -> int:
        possible = [i for i, p in enumerate(probs) if p > 0.0]
        at = len(self.taken)
        if at < len(self.script):
            choice = self.script[at]
        else:
            choice = possible[0]
            self.others += [(*self.taken, i) for i in possible[1:]]
        self.taken += (choice,)
        self.weight *= probs[choice] / sum(probs)
        return choice


def all_runs(program: Callable[[Branches], Result]) -> Iterator[tuple[Result, float]]:
    """Return every result of a program with its probability."""
    pending: list[Path] = [()]
    while pending:
        branches = Branches(pending.pop())
        result = program(branches)
        pending += branches.others
        yield result, branches.weight


class BranchingRule(TokenRule):
    """A rule whose draws for drafts branch."""

    def __init__(self, branches: Branches, sampling: Sampling) -> None:
        plain = TokenRule.of(sampling, None)
        super().__init__(sampling, plain.processors)
        self.branches = branches

    def draw_drafts(self, probs: Tensor) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        drawn = [self.branches.pick(row) if any(row) else 0 for row in rows]  # of nothing: whatever it is
        return torch.tensor(drawn).view(*probs.shape[:-1], 1)


class TableModel(DraftModel):
    """A draft model with the distributions of `draft_table`, which numbers nodes in the order of adding."""

    def check(self, runtime: Any) -> None: ...

    def restart(self) -> None:
        self.paths: list[Path] = []

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        yield from ()
        first = len(self.paths)
        for token_id, parent in zip(token_ids, parents, strict=True):
            self.paths.append(() if parent < 0 else (*self.paths[parent], int(token_id)))
        return torch.stack([draft_table(path).log() for path in self.paths[first:]])


class TableTarget:
    """A target with the distributions of `target_table`, whose draws branch.

    A draw branches only when it is used, because unused draws have no effect.
    """

    greedy = False

    def __init__(self, branches: Branches, n_checked: int, draft: Draft, verifier: Verifier) -> None:
        self.branches, self.n_checked, self.draft, self.verifier = branches, n_checked, draft, verifier
        self.rows: list[list[float]] = []
        self.backed: list[Tensor] = []

    def walk(self) -> Walk:
        target: Any = self
        return self.verifier.verify(self.draft, target)

    def weights(self, nodes: Sequence[int]) -> Iterator[Sequence[float]]:
        target: Any = self
        for numbers in self.verifier.weigh(self.draft, target, nodes):
            yield numbers.flatten().tolist()

    def choose(self, node: int, accepted: Path) -> int:
        assert accepted == self.above(node)
        return self.branches.pick(self.probs(node).tolist())

    def above(self, node: int) -> Path:
        return tuple(self.draft.tree.token_ids[each] for each in self.draft.tree.path(node))

    def probs(self, node: int) -> Tensor:
        assert node < self.n_checked
        return target_table(self.above(node))

    def raw_probs(self, n: int) -> Tensor:
        raise AssertionError("an exact verifier has no business with the unprocessed distribution")

    def peek(self, probs: Tensor, nodes: Sequence[int]) -> Tensor:
        assert len(nodes) == len(probs)
        self.rows += probs.tolist()
        return torch.arange(len(self.rows) - len(nodes), len(self.rows))[:, None]

    def draw(self, drawn: float) -> int:
        row = self.rows[int(drawn)]
        return self.branches.pick(row) if any(row) else 0  # of nothing: whatever it is

    def accept(self, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        return self.branches.pick([probability, 1.0 - probability]) == 0


class ReadTarget(TableTarget):
    """A target that weighs a whole draft at once, whose tokens may still be unread."""

    def __init__(self, branches: Branches, n_checked: int, draft: Draft, verifier: Verifier) -> None:
        read = draft if draft.unread is None else draft.read(draft.unread.flatten().tolist())
        super().__init__(branches, n_checked, read, verifier)
        self.read: dict[int, tuple[float, ...]] = {}
        target: Any = self
        for nodes in verifier.weighed(draft, target):
            columns = [numbers.flatten().tolist() for numbers in verifier.weigh(draft, target, nodes)]
            self.read |= zip(nodes, zip(*columns, strict=True), strict=True)

    def weights(self, nodes: Sequence[int]) -> Iterator[Sequence[float]]:
        yield from zip(*(self.read[node] for node in nodes), strict=True)


def offered(drafter: Drafter, branches: Branches, depth: int, sampling: Sampling, late: bool = False) -> Draft:
    runtime: Any = SimpleNamespace(reads_late=late, device=torch.device("cpu"))
    buffer: Any = None
    context = Context(runtime, buffer, BranchingRule(branches, sampling), [0], 1)
    return alone(drafter.begin(context).draft(depth))


def outcomes(
    drafter: Drafter,
    verifier: Verifier,
    depth: int,
    n_checked: int | None = None,
    tamper: Callable[[Draft], Draft] = lambda draft: draft,
    way: str = AT_ONCE,
) -> list[tuple[Walk, float]]:
    def program(branches: Branches) -> Walk:
        draft = tamper(offered(drafter, branches, depth, Sampling(temperature=1.0), late=way == LATE))
        checked = draft.tree.n_nodes if n_checked is None else n_checked
        return (TableTarget if way == AT_ONCE else ReadTarget)(branches, checked, draft, verifier).walk()

    return list(all_runs(program))


def likelihood(tokens: Path, start: int = 0) -> float:
    product = 1.0
    for depth in range(start, len(tokens)):
        product *= float(target_table(tokens[:depth])[tokens[depth]])
    return product


def worst_error(found: list[tuple[Walk, float]], length: int) -> float:
    """Continue each outcome with the target to a common length; return the largest error of the joint distribution."""
    joint = dict.fromkeys(itertools.product(range(VOCAB), repeat=length), 0.0)
    for walked, weight in found:
        assert 0 < len(walked.token_ids) <= length
        for rest in itertools.product(range(VOCAB), repeat=length - len(walked.token_ids)):
            full = walked.token_ids + rest
            joint[full] += weight * likelihood(full, len(walked.token_ids))
    return max(abs(weight - likelihood(full)) for full, weight in joint.items())


def mean_accepted(found: list[tuple[Walk, float]]) -> float:
    return sum(weight * len(walked.path) for walked, weight in found)


def chain(length: int) -> ChainDrafter:
    return ChainDrafter(TableModel(), StopRule(length), sampled=True)


def sequences(n: int, length: int, replacement: bool) -> SequencesDrafter:
    return SequencesDrafter(TableModel(), SequencesSettings(n, length), replacement)


def branching(n: int) -> ChainDrafter:
    """SWIFT's drafts: `n` candidates if the draft is unsure, otherwise one less, and an early stop."""
    return ChainDrafter(TableModel(), StopRule(2, 0.45), branching=((0.5, n), (1.0, n - 1)), sampled=True)


CASES: dict[str, tuple[Drafter, Verifier, int]] = {
    "chain": (chain(3), ChainRatio(), 3),
    "block": (chain(3), BlockRatio(), 3),
    "with": (sequences(2, 2, True), SeveralRatio("with"), 2),
    "without": (sequences(2, 2, False), SeveralRatio("without"), 2),
    "k-seq": (sequences(2, 2, True), SeveralRatio(tries=k_seq), 2),
    "with, 3 tries": (sequences(3, 1, True), SeveralRatio("with"), 1),
    "without, support runs out": (sequences(4, 1, False), SeveralRatio("without"), 1),
    "k-seq, 4 tries": (sequences(4, 1, True), SeveralRatio(tries=k_seq), 1),
    "k-seq, one sequence": (sequences(1, 3, True), SeveralRatio(tries=k_seq), 3),
    "branches by confidence": (branching(2), SeveralRatio("without"), 2),
    "branches, support runs out": (branching(4), SeveralRatio("without"), 2),
    "unsure draft stops early": (ChainDrafter(TableModel(), StopRule(3, 0.45), sampled=True), ChainRatio(), 3),
    "unsure draft stops early, block": (ChainDrafter(TableModel(), StopRule(3, 0.45), sampled=True), BlockRatio(), 3),
}


@pytest.mark.parametrize("way", [AT_ONCE, TOGETHER, LATE])
@pytest.mark.parametrize("case", CASES)
def test_output_is_distributed_as_the_target(case: str, way: str) -> None:
    drafter, verifier, depth = CASES[case]
    found = outcomes(drafter, verifier, depth, way=way)
    assert abs(sum(weight for _, weight in found) - 1.0) < 1e-12
    assert worst_error(found, depth + 1) < 1e-12
    assert mean_accepted(found) > 0.1  # not by refusing everything


@pytest.mark.parametrize("way", [AT_ONCE, TOGETHER, LATE])
@pytest.mark.parametrize("case", ["chain", "block"])
@pytest.mark.parametrize("n_checked", [1, 2, 3])
def test_output_is_exact_if_the_target_reads_only_some_nodes(case: str, n_checked: int, way: str) -> None:
    drafter, verifier, depth = CASES[case]
    found = outcomes(drafter, verifier, depth, n_checked, way=way)
    assert worst_error(found, depth + 1) < 1e-12
    assert max(len(walked.token_ids) for walked, _ in found) == n_checked


def test_some_chosen_and_some_sampled_nodes_are_exact_together() -> None:
    """In a chain whose second token is fixed, one node is chosen and the other sampled."""

    def fix(draft: Draft) -> Draft:
        tree = DraftTree((0, draft.tree.token_ids[1], 1, 2), (-1, 0, 1, 2), 3)
        third = Offer((3,), torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
        return replace(draft, tree=tree, offers={0: draft.offers[0], 2: third})

    for verifier in (ChainRatio(), BlockRatio()):
        assert worst_error(outcomes(chain(1), verifier, 1, tamper=fix), 4) < 1e-12


def test_block_verification_never_accepts_fewer_tokens() -> None:
    gains = []
    for length in (1, 2, 3):
        one, block = (mean_accepted(outcomes(chain(length), v, length)) for v in (ChainRatio(), BlockRatio()))
        gains.append(block - one)
    assert abs(gains[0]) < 1e-12 and min(gains) > -1e-12 and gains[2] > 1e-3


@pytest.mark.parametrize("verifier", [SeveralRatio(), SeveralRatio(tries=k_seq)], ids=["with", "k-seq"])
def test_more_candidates_accept_more_tokens(verifier: Verifier) -> None:
    few, many = (mean_accepted(outcomes(sequences(n, 1, True), verifier, 1)) for n in (1, 3))
    assert many > few + 0.01


def distinct(draft: Draft) -> Draft:
    """A typical mistake: repeated candidates are dropped."""
    offers = {n: replace(o, nodes=tuple(dict.fromkeys(o.nodes))) for n, o in draft.offers.items()}
    return replace(draft, offers=offers)


def as_independent(draft: Draft) -> Draft:
    """A typical mistake: draws without replacement are treated as independent."""
    return replace(draft, offers={n: replace(o, replaced=True) for n, o in draft.offers.items()})


class PlainRedraw(TableTarget):
    """A typical mistake: the target is drawn from instead of the residual."""

    def draw(self, drawn: float) -> int:
        return self.branches.pick(target_table(()).tolist())


def test_enumeration_detects_a_wrong_rule() -> None:
    many = sequences(3, 1, True)
    assert worst_error(outcomes(many, SeveralRatio(tries=k_seq), 1, tamper=distinct), 2) > 0.001
    apart = sequences(3, 1, False)
    assert worst_error(outcomes(apart, SeveralRatio("with"), 1, tamper=as_independent), 2) > 0.001

    def redrawn(branches: Branches) -> Walk:
        draft = offered(chain(1), branches, 1, Sampling(temperature=1.0))
        return PlainRedraw(branches, 1, draft, ChainRatio()).walk()

    assert worst_error(list(all_runs(redrawn)), 1) > 0.01


@pytest.mark.parametrize("replacement", [True, False])
def test_sequences_with_a_common_prefix_share_its_nodes(replacement: bool) -> None:
    def program(branches: Branches) -> Draft:
        return offered(sequences(3, 2, replacement), branches, 2, Sampling(temperature=1.0))

    shapes = set()
    for draft, _ in all_runs(program):
        tree = draft.tree
        shapes.add(tree.n_nodes)
        depths = (ancestor_mask(tree.parents).sum(1) - 1).tolist()
        assert len({(tree.parents[n], tree.token_ids[n]) for n in range(tree.n_nodes)}) == tree.n_nodes
        assert tree.is_chain == (tree.parents == tuple(range(-1, tree.n_nodes - 1)))
        assert sorted(draft.offers) == [n for n, depth in enumerate(depths) if depth < 2]
        for node, offer in draft.offers.items():
            assert tree.children(node) == tuple(dict.fromkeys(offer.nodes))
            assert replacement or len(tree.children(node)) == len(offer.nodes)
        drawn = len(draft.offers[0].nodes)
        assert sum(len(o.nodes) for n, o in draft.offers.items() if tree.parents[n] == 0) == drawn
    assert (min(shapes) == 3) == replacement  # three equal sequences: root and two tokens


def test_greedy_request_gets_deterministic_sequences() -> None:
    def drafted(replacement: bool) -> Draft:
        (draft, weight), *others = all_runs(lambda b: offered(sequences(2, 2, replacement), b, 2, Sampling()))
        assert weight == 1.0 and not others and not draft.offers
        return draft

    def best(path: Path, n: int = 1) -> list[int]:
        return draft_table(path).topk(n).indices.tolist()

    first, second = best((), 2)
    assert drafted(True).tree == DraftTree((0, first, *best((first,))), (-1, 0, 1), 2)
    assert drafted(False).tree == DraftTree((0, first, second, *best((first,)), *best((second,))), (-1, 0, 0, 1, 2), 2)


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**61])
def test_draws_of_draft_target_and_acceptance_are_independent(seed: int) -> None:
    """Equal or correlated streams would bias every rule above: 200 draws, |correlation| < 0.35 (false alarm 3e-6)."""
    rule = TokenRule.of(Sampling(temperature=1.0, seed=seed), None)
    even = torch.full((1000,), 1e-3, dtype=torch.float64)

    def drawn() -> tuple[int, int, bool]:
        token_id = int(rule.peek(even))
        rule.spend()
        return token_id, int(rule.draw_drafts(even)), rule.accept(0.5)

    draws = [drawn() for _ in range(200)]
    correlation = torch.corrcoef(torch.tensor(draws, dtype=torch.float64).T) - torch.eye(3)
    assert float(correlation.abs().max()) < 0.35
