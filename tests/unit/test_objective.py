"""The value of windows: examples by hand, and laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import cheap_draft_costs, flat_costs
from hypothesis import given
from hypothesis import strategies as st

from swiftopt.core.costs import CostProfile, FormatCosts, expected_of, published_speedup
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Completion
from swiftopt.optimizer.evaluation import WindowScore, adaptive_speedup, objective, replay, rounds_by_start

CHAIN = SwiftSettings(dynamic_verification=False)


def test_matchness_is_the_share_of_argmax_hits() -> None:
    assert WindowScore((0, 3, 0, 1), (0.9,) * 4).matchness == 0.5


def test_replay_counts_a_perfect_confident_window_by_hand() -> None:
    """All ten positions are right and confident, so every round drafts N_D = 4 tokens and gains the bonus token."""
    score = WindowScore((0,) * 10, (0.99,) * 10)
    played = replay([score], SwiftSettings(max_draft_length=4, dynamic_verification=False))
    assert (played.tokens, played.draft_steps) == pytest.approx((10, 8)) and played.widths == pytest.approx({5: 2})


def test_replay_stops_after_the_first_unsure_token_which_stays() -> None:
    score = WindowScore((0, 0), (0.99, 0.1))
    played = replay([score], CHAIN)
    # From position 0: sure, unsure -> 2 steps, 3 tokens; from position 1: unsure -> 1 step, 2 tokens; half of each.
    assert (played.tokens, played.draft_steps, played.widths) == (2.5, 1.5, {3: 0.5, 2: 0.5})


def test_rounds_begin_where_the_last_one_ended() -> None:
    """From 0, 1 and 2: one round; from 3: a round of one token, then one from 0."""
    assert rounds_by_start([4, 5, 4, 1]) == [2 / 4, 1 / 4, 1 / 4, 1 / 4]


def test_replay_of_clustered_misses_is_what_rounds_in_turn_give() -> None:
    """The mean over all positions would be 2.4 tokens a round: few positions lie right before a miss."""
    misses = [0] * 12 + [1] * 4
    score = WindowScore(tuple(misses * 8), (0.99,) * 128)
    played = replay([score], SwiftSettings(max_draft_length=3, dynamic_verification=False))
    position, n_tokens, n_rounds = 0, 0, 0
    while n_rounds < 1000:
        accepted = next((i for i in range(3) if misses[(position + i) % 16]), 3)
        position, n_tokens, n_rounds = position + accepted + 1, n_tokens + accepted + 1, n_rounds + 1
    assert played.tokens / sum(played.widths.values()) == pytest.approx(n_tokens / n_rounds, rel=0.02)


def test_replay_credits_a_side_leaf_once_and_nothing_behind_it() -> None:
    score = WindowScore((4, 0), (0.6, 0.6))  # five candidates at confidence 0.6: rank 4 is the last of them
    played = replay([score], SwiftSettings())
    assert (played.tokens, played.draft_steps, played.widths) == (2, 1, {6: 1})
    missed = replay([WindowScore((5, 0), (0.6, 0.6))], SwiftSettings())
    assert missed.tokens == 1 / 2 + 2  # A round from 0 gives one token, and one from 1 follows it.


def test_replay_of_drafts_that_are_read_late_has_one_step_more_without_side_leaves() -> None:
    score = WindowScore((0, 0, 0, 4), (0.99, 0.1, 0.99, 0.6), reads_late=True)
    played = replay([score], CHAIN)
    # from 0: sure, unsure, sure; from 1: unsure, sure; from 2: sure, unsure (a miss), sure; from 3: unsure, sure
    # Of 4, 3, 2 and 1 tokens; from 1, 2 and 3 on a round from 0 follows.
    assert played.tokens == 4 + (3 + 2 + 1) / 4 and played.draft_steps == 3 + (2 + 3 + 2) / 4
    assert played.widths == {4: 1 + 1 / 4, 3: 2 / 4}
    branched = replay([score], SwiftSettings())
    # from 2 the unsure token's rank is among its five candidates; 0.99 offers one, 0.1 ten
    # Of 4, 3, 3 and 2 tokens; after 1 comes 0, and after 2 and 3 comes 1.
    assert branched.tokens == (2 * 4 + 3 * 3 + 3 + 2) / 4 and branched.draft_steps == (2 * 3 + 3 * 2 + 3 + 2) / 4
    assert branched.widths == {1 + 1 + 10 + 1: 2 / 4, 1 + 10 + 1: 3 / 4, 1 + 1 + 5 + 1: 1 / 4, 1 + 5 + 1: 1 / 4}
    longest = replay([score], SwiftSettings(max_draft_length=1))
    assert longest.draft_steps == 2.5 and longest.widths == {2: 2.5}


def test_adaptive_drafts_that_are_read_late_are_worth_less_where_confidence_tells_of_acceptance() -> None:
    costs, layer_set = cheap_draft_costs(0.3), LayerSet(4).filled("int4")
    for told, ranks in ((True, (0, 0, 1) * 40), (False, (0,) * 120)):
        at_once = WindowScore(ranks, tuple(0.2 if rank else 0.97 for rank in ranks))
        late = replace(at_once, reads_late=True)
        worths = [adaptive_speedup(score, layer_set, costs) for score in (at_once, late)]
        assert worths[1] < 0.98 * worths[0] if told else worths[1] == pytest.approx(worths[0], rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0.01, 1.0)), min_size=1, max_size=40))
def test_replay_never_accepts_more_than_it_drafts(window: list[tuple[int, float]]) -> None:
    score = WindowScore(tuple(rank for rank, _ in window), tuple(confidence for _, confidence in window))
    played = replay([score], SwiftSettings())
    rounds = sum(played.widths.values())
    assert rounds <= len(window) <= played.tokens <= rounds + played.draft_steps + 1e-9
    assert all(n_rows <= 1 + 10 * SwiftSettings().max_draft_length for n_rows in played.widths)


def test_expected_speedup_is_equation_6_when_rows_are_free() -> None:
    """SWIFT Eq. 6 with M = 4.34, alpha = 0.99, c = 0.55 gives 1.52 (the paper's Table 4)."""
    costs = flat_costs(n_layers=42)
    layer_set = LayerSet.uniform(42, 38)  # c = 1 - 38/84
    assert costs.draft_cost(layer_set) == pytest.approx(1 - 38 / 84)
    mean_length, acceptance = 4.34, 0.99
    steps = (mean_length - 1) / acceptance
    c = costs.draft_cost(layer_set)
    expected = mean_length * acceptance / ((mean_length - 1) * c + acceptance)
    assert costs.expected_speedup(layer_set, mean_length, steps, {1: 1}) == pytest.approx(expected)
    nearest = LayerSet.uniform(42, 36)  # r = 36/80
    assert published_speedup(nearest, mean_length, acceptance) == pytest.approx(1.52, abs=0.005)


def test_objective_prefers_the_set_that_saves_more_time_at_equal_matches() -> None:
    """One expensive MLP saves more time than two cheap attention blocks at the same matchness."""
    costs = flat_costs(attn_s=1.0, mlp_s=8.0)
    attention, mlp = LayerSet(4, frozenset({1, 2}), frozenset()), LayerSet(4, frozenset(), frozenset({1}))
    score = WindowScore((0,) * 8, (0.9,) * 8)
    assert objective(score, mlp, CHAIN, costs) > objective(score, attention, CHAIN, costs)
    by_match = SwiftSettings(objective="matchness")
    assert objective(score, mlp, by_match, costs) == objective(score, attention, by_match, costs) == 1.0


def test_verification_cost_is_linear_between_measured_widths() -> None:
    costs = CostProfile("f", "d", "float32", 256, 4, 1, 1, 1, 1, {1: 10.0, 8: 17.0, 16: 33.0})
    assert [costs.target_pass_s(n) for n in (1, 4, 8, 12, 16, 32)] == [10.0, 13.0, 17.0, 25.0, 33.0, 65.0]


def test_completion_that_ended_with_its_first_token_says_nothing_of_speed() -> None:
    costs = CostProfile("f", "d", "float32", 256, 4, 1, 1, 1, 1, {1: 10.0, 8: 17.0})
    ended = Completion((1,), "", "stop", "adaptive", first_tokens=1, layer_set=LayerSet(4))
    drafted = replace(ended, token_ids=(1,) * 9, drafted=3, verified_widths={4: 2}, estimated_cost=4.0)
    assert expected_of(costs, [drafted, ended]) == expected_of(costs, [drafted]) == 8 / 4.0


def test_rest_of_a_pass_is_that_of_most_of_its_layers() -> None:
    costs = CostProfile("f", "d", "float32", 256, 4, 1, 1, 1, 1, {1: 10.0}, {"int4": FormatCosts(0.5, 0.5, 0.5, 5.0)})
    own = LayerSet(4, formats=(("attn:0", "stored"), ("mlp:0", "stored"))).filled("int4")
    assert costs.draft_pass_s(own) == 5.0 + 0.5 + (1 + 3 * 0.5) + (1 + 3 * 0.5)


def test_expected_speedup_of_runs_with_several_sets_is_that_of_their_times_together() -> None:
    costs = flat_costs(n_layers=8)
    few, many = LayerSet.uniform(8, 2), LayerSet.uniform(8, 8)
    runs = [
        Completion(
            (1,) * 9, "", "length", "swift", first_tokens=1, drafted=n, verified_widths={4: 3}, layer_set=layer_set
        )
        for layer_set, n in ((few, 6), (many, 9), (few, 2))
    ]
    spent = [6 + 2, 9]
    times = [
        sum(spent[i] * costs.draft_cost(own) for i, own in enumerate((few, many))),
        9 * costs.verify_cost(4),
    ]
    assert expected_of(costs, runs) == pytest.approx(24 / sum(times))
    assert expected_of(costs, [*runs, replace(runs[0], layer_set=None)]) is None
    assert expected_of(None, runs) is None and expected_of(costs, []) is None
