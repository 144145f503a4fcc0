"""Costs of experts: by the distinct experts of rows, learnt from passes, and of drafts with fewer experts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product

import pytest

from swiftopt.core.costs import CostProfile, ExpertCosts, ExpertCounts, FormatCosts, distinct_experts
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.observed_costs import ObservedCosts, PassTiming
from swiftopt.optimizer.proposer import savings_of
from swiftopt.optimizer.strategies.base import ExpertLevels, SearchProblem

N_LAYERS, N_EXPERTS, N_CHOSEN = 4, 16, 4
MIXTURES = (1, 2, 3)
EXPERT_S = 0.5
FIXED_S = 10.0
WIDTHS = (1, 2, 4, 8)


def pass_s(distinct: float) -> float:
    """Return the seconds of a pass: a fixed part, and a part for the distinct experts of each layer."""
    return FIXED_S + len(MIXTURES) * EXPERT_S * distinct


def uniform(n_rows: int) -> float:
    return distinct_experts(n_rows, N_CHOSEN, N_CHOSEN / N_EXPERTS)


PROFILE = CostProfile(
    *("f", "d", "bfloat16", 512, N_LAYERS),
    attn_s=1.0,
    mlp_s=3.0,
    head_s=1.0,
    fixed_s=0.0,
    pass_s={n: pass_s(uniform(n)) for n in WIDTHS},
    formats={"int4": FormatCosts(0.5, 1.5, 0.5, 0.0, {1: 1.0}, expert_s=0.2)},
    experts=ExpertCosts(N_EXPERTS, N_CHOSEN, MIXTURES, EXPERT_S, distinct={n: uniform(n) for n in WIDTHS}),
)


@pytest.mark.parametrize(("n_experts", "n_chosen", "n_rows"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (5, 3, 2), (3, 3, 2)])
def test_distinct_experts_of_uniform_rows_are_those_of_all_choices(n_experts: int, n_chosen: int, n_rows: int) -> None:
    """All choices of all rows are enumerated as equally likely."""
    choices = list(product(combinations(range(n_experts), n_chosen), repeat=n_rows))
    mean = sum(len(set().union(*rows)) for rows in choices) / len(choices)
    assert distinct_experts(n_rows, n_chosen, n_chosen / n_experts) == pytest.approx(mean)


def test_rows_that_take_the_same_experts_add_none_and_rows_that_share_none_add_all() -> None:
    assert [distinct_experts(n, 4, 1.0) for n in (1, 2, 9)] == [4, 4, 4]
    assert [distinct_experts(n, 4, 0.0) for n in (1, 2, 9)] == [4, 8, 36]


def decoded(overlap: float, n: int, rng: random.Random, expert_s: float = EXPERT_S) -> list[PassTiming]:
    """Observe passes over a text whose neighbouring tokens share this many experts, with 3 % of noise."""
    timings = []
    for _ in range(n):
        for n_rows in WIDTHS:
            repeated = sum(rng.random() < overlap for _ in range((n_rows - 1) * N_CHOSEN * len(MIXTURES)))
            mean = distinct_experts(n_rows, N_CHOSEN, overlap)
            distinct = mean if n_rows == 1 else min(n_rows * N_CHOSEN, max(N_CHOSEN, rng.gauss(mean, 1.0)))
            seconds = (FIXED_S + len(MIXTURES) * expert_s * distinct) * rng.gauss(1.0, 0.03)
            counts = ExpertCounts(distinct, (n_rows - 1) * N_CHOSEN * len(MIXTURES), repeated)
            timings.append(PassTiming(((n_rows, None),), 400, seconds, counts))
    return timings


@pytest.mark.parametrize("overlap", [0.25, 0.6, 0.9])
def test_the_price_of_rows_follows_the_overlap_of_neighbouring_tokens(overlap: float) -> None:
    """Drafts whose rows choose the experts of the row before cost little more than one row."""
    costs = ObservedCosts(PROFILE)
    costs.learn(decoded(overlap, 400, random.Random(3)))
    known = costs.at()
    for n_rows in WIDTHS:
        expected = pass_s(distinct_experts(n_rows, N_CHOSEN, overlap)) / pass_s(N_CHOSEN)
        assert known.verify_cost(n_rows) == pytest.approx(expected, rel=0.05)
    assert known.experts is not None and known.experts.overlap == pytest.approx(overlap, abs=0.03)
    assert known.experts.distinct[4] == pytest.approx(distinct_experts(4, N_CHOSEN, overlap), rel=0.05)


def test_a_prompt_alone_tells_what_the_rows_of_drafts_will_cost() -> None:
    """The rows of the prompt were not timed; a few plain passes have shown the machine's speed."""
    costs = ObservedCosts(PROFILE)
    costs.learn([PassTiming(((1, None),), 400, pass_s(N_CHOSEN), ExpertCounts(N_CHOSEN))] * 20)
    costs.learn([PassTiming((), 400, 0.0, ExpertCounts(N_EXPERTS, 12_000, 10_800))])
    costs.learn([PassTiming(((1, None),), 400, pass_s(N_CHOSEN), ExpertCounts(N_CHOSEN))] * 20)
    expected = pass_s(distinct_experts(4, N_CHOSEN, 0.9)) / pass_s(N_CHOSEN)
    assert costs.at().verify_cost(4) == pytest.approx(expected, rel=0.02)
    assert PROFILE.verify_cost(4) > 1.3 * expected


def test_seconds_of_an_expert_are_learnt_from_passes_with_more_and_fewer_of_them() -> None:
    found = []
    for true_s in (EXPERT_S, 1.5 * EXPERT_S):
        costs = ObservedCosts(PROFILE)
        costs.learn(decoded(0.6, 800, random.Random(5), true_s))
        (bucket,) = [bucket for bucket in costs._buckets.values() if bucket.n_passes]
        assert PROFILE.experts is not None
        # In plain passes: the profile's share of an expert in a pass, times what was learnt.
        found.append(bucket._layer_cost(PROFILE.experts))
    plain_s = [FIXED_S + len(MIXTURES) * true_s * N_CHOSEN for true_s in (EXPERT_S, 1.5 * EXPERT_S)]
    expected = [len(MIXTURES) * s / p for s, p in zip((EXPERT_S, 1.5 * EXPERT_S), plain_s, strict=True)]
    assert found == pytest.approx(expected, rel=0.15)


def test_models_without_mixtures_have_the_prices_that_they_had() -> None:
    dense, timings = replace(PROFILE, experts=None), decoded(0.9, 50, random.Random(1))
    with_counts, without = ObservedCosts(dense), ObservedCosts(dense)
    with_counts.learn(timings)
    without.learn([replace(timing, experts=None) for timing in timings])
    assert with_counts.at() == without.at()
    assert "experts" not in dense.to_json()


def test_a_profile_that_was_measured_before_experts_were_counted_keeps_its_prices() -> None:
    assert PROFILE.experts is not None
    older, timings = replace(PROFILE, experts=replace(PROFILE.experts, distinct={})), decoded(0.9, 50, random.Random(1))
    with_counts, without = ObservedCosts(older), ObservedCosts(older)
    with_counts.learn(timings)
    without.learn([replace(timing, experts=None) for timing in timings])
    assert with_counts.at() == without.at()


def test_profiles_are_read_as_they_were_written() -> None:
    assert CostProfile.from_json(PROFILE.to_json()) == PROFILE


def test_a_draft_saves_the_experts_that_it_does_not_take() -> None:
    whole = PROFILE.draft_pass_s(LayerSet(N_LAYERS, frozenset({1})))
    fewer = LayerSet(N_LAYERS, frozenset({1}), experts=(("mlp", 1), ("mlp:2", 2)))
    # Layer 0 has one MLP: its experts are none. Layers 1 and 3 drop three experts, layer 2 two.
    assert whole - PROFILE.draft_pass_s(fewer) == pytest.approx((3 + 2 + 3) * EXPERT_S)
    without = replace(fewer, skip_mlp=frozenset({3}))
    assert PROFILE.draft_pass_s(without) == pytest.approx(
        whole - (3 + 2) * EXPERT_S - PROFILE.part_s("mlp", 3, LayerSet(N_LAYERS))
    )
    int4 = LayerSet(N_LAYERS).filled("int4")
    saved = PROFILE.draft_pass_s(int4) - PROFILE.draft_pass_s(replace(int4, experts=(("mlp", 2),)))
    assert saved == pytest.approx(3 * 2 * 0.2)


LEVELS = ExpertLevels(layers=(1, 2), numbers=(2, 1))


def test_sets_and_their_bits_are_one_to_one() -> None:
    """Every skipped sub-layer with every number of experts is enumerated."""
    problem = SearchProblem(LayerSet(N_LAYERS), 0, 0, experts=LEVELS)
    seen = set()
    for bits in product((0, 1), repeat=8):
        layer_set = problem.set_of(bits)
        assert problem.set_of(problem.bits_of(layer_set)) == problem.set_of(problem.canonical(bits))
        assert problem.canonical(problem.canonical(bits)) == problem.canonical(bits)
        seen.add(problem.canonical(bits))
    # Two attentions kept or not; each MLP skipped, or with one of three numbers of experts.
    assert len(seen) == 2**2 * 4**2


def test_savings_of_experts_follow_those_of_sub_layers() -> None:
    savings = savings_of(PROFILE, LayerSet(N_LAYERS), searchable(N_LAYERS), LEVELS)
    plain_s = PROFILE.target_pass_s(1)
    assert savings[4:] == pytest.approx([2 * EXPERT_S / plain_s, EXPERT_S / plain_s] * 2)
    assert savings[:4] == savings_of(PROFILE, LayerSet(N_LAYERS), searchable(N_LAYERS))


def test_numbers_of_experts_are_halves_then_the_shared_ones() -> None:
    assert PROFILE.experts is not None
    eight = replace(PROFILE.experts, n_chosen=8, least=0, layers=(0, 1, 2, 3))
    assert ExpertLevels.of(eight, N_LAYERS) == ExpertLevels((1, 2), (4, 2, 1, 0))
    assert ExpertLevels.of(replace(PROFILE.experts, n_chosen=6), N_LAYERS) == ExpertLevels((1, 2), (3, 1))
    assert ExpertLevels.of(None, N_LAYERS) is None
