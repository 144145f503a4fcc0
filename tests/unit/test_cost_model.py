"""Laws of the value of drafts: rates learn, chains have the best length, and probes become rarer."""

from __future__ import annotations

import itertools
import random

import pytest
from fakes import cheap_draft_costs, flat_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftopt.core.context_costs import deepened
from swiftopt.core.costs import CostProfile, FormatCosts
from swiftopt.core.layer_sets import LayerSet
from swiftopt.decoding.draft_worth import (
    MAX_OBSERVATIONS,
    Acceptance,
    DraftParticipation,
    PassCosts,
    Probing,
    Rate,
    Throughput,
    chain_worth,
)
from swiftopt.decoding.text_matches import Matches

N_LAYERS = flat_costs().n_layers
WHOLE = 2.0 * N_LAYERS


def prices(widths: dict[int, float] | None = None, share: float = 0.25) -> PassCosts:
    """Return prices of verification by width, in plain passes, with draft steps of `share`."""
    costs = cheap_draft_costs(share)
    passes = {n: WHOLE * cost for n, cost in (widths or {1: 1.0, 64: 1.0}).items()}
    own = CostProfile("f", "d", "t", 256, N_LAYERS, 1.0, 1.0, 0.0, 0.0, passes, costs.formats)
    return PassCosts(own, LayerSet(N_LAYERS).filled("int4"))


def test_prices_are_those_of_the_profile_in_plain_passes() -> None:
    own = prices({1: 1.0, 3: 1.2, 5: 2.0})
    assert own.draft(1) == pytest.approx(0.25) and own.draft(3) == pytest.approx(0.25 * 1.3)
    assert [own.verify(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.1, 1.2, 1.6, 2.4])
    assert PassCosts(flat_costs(), None).draft(1) == float("inf")


def test_sub_layers_that_layers_do_not_have_cost_nothing_and_save_nothing() -> None:
    int4 = FormatCosts(1.0, 1.0, 0.5, wider={1: 1.0, 2: 1.5})
    alone = CostProfile(
        "f", "d", "t", 256, 4, 2.0, 3.0, 1.0, 0.0, {1: 16.0}, {"int4": int4}, absent=("mlp:1", "attn:2")
    )
    assert (alone.n_parts("attn"), alone.n_parts("mlp")) == (3, 3)
    whole, formatted = LayerSet(4), LayerSet(4).filled("int4")
    assert alone.draft_pass_s(whole) == pytest.approx(3 * 2 + 3 * 3 + 1)
    assert alone.draft_pass_s(formatted) == pytest.approx(3 + 3 + 0.5)
    assert alone.draft_pass_s(LayerSet(4, frozenset({2}), frozenset({1}))) == alone.draft_pass_s(whole)
    assert alone.draft_pass_s(LayerSet(4, frozenset({1}), frozenset({2}))) == pytest.approx(16 - 2 - 3)
    deeper = deepened(alone, 1024, added_s=6.0, row_share=0.5)
    for layer_set in (whole, formatted):
        assert deeper.draft_pass_s(layer_set) == pytest.approx(alone.draft_pass_s(layer_set) + 6)


def test_prices_beside_other_sequences_are_those_of_the_rows_of_all() -> None:
    own = prices({1: 1.0, 3: 1.2, 5: 2.0})
    own.draft(1), own.verify(2)  # looked up alone first
    own.load = 3
    assert own.draft(1) == pytest.approx(0.25 * 1.3)
    assert [own.verify(n) for n in (1, 2)] == pytest.approx([1.2, 2.4])


@pytest.mark.parametrize(("load", "shared"), [(1, 1.0), (2, 0.9 / 1.1), (4, (2.5 / 3) / 1.5)])
def test_shared_part_of_a_draft_pass_is_what_it_costs_before_anybody_joins(load: int, shared: float) -> None:
    """Passes over 1, 2 and 4 rows cost 1, 1.1 and 1.5, so a further row costs 0.1 of two and 0.5 / 3 of four."""
    own = prices()
    own.load = load
    assert own.shared == pytest.approx(shared)


@given(st.floats(-2, 2), st.floats(0, 2), st.integers(1, 16))
def test_sequences_alike_draft_where_each_gains(gain: float, shared: float, load: int) -> None:
    """A single sequence drafts if it gains; several with the same gain do too, once they have learnt it."""
    if abs(gain) > 1e-9:
        assert DraftParticipation().pays(gain, shared, 1) == (gain > 0)
        assert DraftParticipation(max(0.0, gain + shared)).pays(gain, shared, load) == (gain > 0)


def test_a_pass_that_pays_for_others_is_joined_for_less() -> None:
    """Joining costs only the further rows; if no sequence gains, none starts the pass."""
    assert DraftParticipation(gain=1.0).pays(-0.2, 0.3, 4)
    assert not DraftParticipation(gain=1.0).pays(-0.4, 0.3, 4)
    joining = DraftParticipation(gain=1.0)
    assert not all(joining.pays(-0.2, 0.3, 4) for _ in range(50))


@given(st.lists(st.floats(0.01, 0.99), max_size=12), st.floats(0.0, 1.0), st.floats(1.0, 4.0))
@settings(max_examples=60, deadline=None)
def test_chain_is_as_long_as_is_worth_most(chances: list[float], step: float, rate: float) -> None:
    own = prices({1: 1.0, 4: 1.3, 8: 1.4, 16: 2.4})

    def worth(n: int) -> float:
        alive = list(itertools.accumulate(chances[:n], lambda a, b: a * b))
        return 1 + sum(alive) - rate * (n * step + own.verify(n + 1))

    n_steps, best = chain_worth(chances, step, rate, own)
    assert best == pytest.approx(max(map(worth, range(len(chances) + 1))))
    assert best == pytest.approx(worth(n_steps))


def test_rule_by_lambda_finds_the_best_fixed_length() -> None:
    """Chains of the best value at λ, with λ updated from their results, reach the best ratio of tokens to time."""
    own, chance, step = prices({1: 1.0, 8: 1.1, 64: 3.0}), 0.9, 0.3

    def ratio(n: int) -> float:
        tokens = sum(chance**i for i in range(n + 1))
        return tokens / (n * step + own.verify(n + 1))

    throughput = Throughput()
    for _ in range(300):
        n, _ = chain_worth([chance] * 24, step, throughput.rate, own)
        throughput.tokens = throughput.memory * throughput.tokens + sum(chance**i for i in range(n + 1))
        throughput.spent = throughput.memory * throughput.spent + n * step + own.verify(n + 1)
    assert throughput.rate == pytest.approx(max(map(ratio, range(25))), rel=0.01)


def test_rate_goes_from_its_prior_to_what_it_sees_and_can_change_its_mind() -> None:
    rate, rng = Rate(0.5), random.Random(0)
    assert rate.value == 0.5
    for _ in range(2000):
        rate.learn(rng.random() < 0.9)
    assert rate.value == pytest.approx(0.9, abs=0.05)
    for _ in range(int(4 * MAX_OBSERVATIONS)):
        rate.learn(False)
    assert rate.value < 0.1


def test_acceptance_is_learnt_by_confidence() -> None:
    acceptance = Acceptance()
    before = [acceptance.of(c) for c in (0.1, 0.6, 0.97, 1.0)]
    assert before == sorted(before)
    for _ in range(40):
        acceptance.learn(0.6, False)
    assert acceptance.of(0.6) < 0.1 and acceptance.of(0.97) == before[2]


def test_probes_get_rarer_until_drafting_pays_again() -> None:
    probing = Probing(first=4, last=16, wait=4)
    due = [n for n in range(58) if probing.due()]
    assert [b - a for a, b in itertools.pairwise([-1, *due])] == [4, 8, 16, 16]
    probing.paid()
    assert [probing.due() for _ in range(4)] == [False] * 3 + [True]
    probing.paid()
    assert [probing.due(load=8) for _ in range(32)] == [False] * 31 + [True]  # each of eight asks in every round


# --- earlier text


@given(st.lists(st.integers(0, 3), min_size=3, max_size=40), st.lists(st.integers(0, 3), max_size=6))
@settings(max_examples=80, deadline=None)
def test_cursor_always_points_behind_a_real_occurrence(text: list[int], drafted: list[int]) -> None:
    matches = Matches()
    matches.read(text[:3])
    matches.read(text)
    cursor, whole = matches.at_end(), list(text)
    for token_id in [*drafted, None]:
        if cursor.token_id is not None:
            n = min(cursor.length, 2)
            occurrences = [text[i] for i in range(n, len(text)) if text[i - n : i] == whole[-n:]]
            assert cursor.token_id in occurrences
        if token_id is not None:
            cursor.move(token_id)
            whole.append(token_id)


def test_cursor_follows_the_match_and_finds_another_where_it_ends() -> None:
    matches = Matches()
    matches.read([1, 2, 3, 4, 9, 7, 8, 5, 1, 2])
    cursor = matches.at_end()
    assert cursor.token_id == 3 and cursor.length == 2
    cursor.move(3)
    assert cursor.token_id == 4 and cursor.length == 3
    assert [guess.token_id for guess in cursor.guesses(3, 0.0)] == [4, 9, 7] and cursor.guesses(3, 1.0) == []
    assert cursor.token_id == 4  # to look ahead moves nothing
    cursor.move(7)  # not what came next there
    assert cursor.token_id is None
    cursor.move(8)
    assert cursor.token_id == 5 and cursor.length == 2
