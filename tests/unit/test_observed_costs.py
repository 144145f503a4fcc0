"""Laws of costs that follow decoding: they converge to the times of passes, whatever the profile was."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from swiftopt.core.context_costs import SlotCopies, deepened
from swiftopt.core.costs import CostProfile, FormatCosts
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.observed_costs import MAX_BASE_WEIGHT, MIN_REFINED_PASSES, ObservedCosts, PassTiming

N_LAYERS = 4
DRAFT = LayerSet(N_LAYERS).filled("int4")
SKIPS = LayerSet(N_LAYERS, frozenset({1}), frozenset({2}))
INT4 = FormatCosts(0.25, 0.25, 0.25, 0.25, {1: 1.0, 4: 1.2})
PROFILE = CostProfile("f", "d", "bfloat16", 512, N_LAYERS, 1, 1, 1, 1, {1: 10.0, 4: 12.0, 8: 16.0}, {"int4": INT4})


def passes(
    plain_s: float, others: dict[tuple[int, LayerSet | None], float], n: int = 200, at: int = 400
) -> list[PassTiming]:
    """Observe `n` rounds of a plain pass and a pass of each other kind, with costs in plain passes."""
    timings = []
    for _ in range(n):
        timings.append(PassTiming(((1, None),), at, plain_s))
        timings += [PassTiming((part,), at, plain_s * cost) for part, cost in others.items()]
    return timings


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 2.0, 5.9, 30.0])
@pytest.mark.parametrize("quality", ["disturbed", "quiet"])
def test_costs_converge_to_measured_passes_from_any_profile(factor: float, quality: str) -> None:
    costs = ObservedCosts(replace(PROFILE, quality=quality))
    checks = {(4, None): 1.3 * factor, (1, DRAFT): 0.3 * factor}
    costs.learn(passes(0.05, checks, n=1500))
    (known,) = costs.refined()
    assert known.target_pass_s(1) == pytest.approx(0.05, rel=0.01)
    assert known.verify_cost(4) == pytest.approx(max(1.0, 1.3 * factor), rel=0.1), "more rows cannot cost less"
    assert known.draft_cost(DRAFT) == pytest.approx(0.3 * factor, rel=0.1)
    assert known.quality == "refined" and "passes of decoding" in known.remark


def test_disturbed_profile_is_replaced_sooner_than_a_quiet_one() -> None:
    errors = {}
    for quality in ("disturbed", "quiet"):
        costs = ObservedCosts(replace(PROFILE, quality=quality))  # type: ignore[arg-type]
        costs.learn(passes(10.0, {(4, None): 2.4}, n=20))
        errors[quality] = abs(costs.at().verify_cost(4) - 2.4)
    assert errors["disturbed"] < 0.5 * errors["quiet"]


def test_ratios_do_not_depend_on_the_machines_momentary_speed() -> None:
    """The machine's speed drifts by a factor of four within some hundred passes, for all kinds alike."""
    rng, timings, slowness = random.Random(1), list[PassTiming](), 1.0
    for _ in range(2000):
        slowness = min(2.0, max(0.5, slowness * rng.uniform(0.97, 1.03)))
        noise = [rng.uniform(0.9, 1.1) for _ in range(3)]
        timings.append(PassTiming(((1, None),), 400, 10 * slowness * noise[0]))
        timings.append(PassTiming(((4, None),), 400, 18 * slowness * noise[1]))
        timings.append(PassTiming(((1, DRAFT),), 400, 4 * slowness * noise[2]))
    costs = ObservedCosts(PROFILE)
    costs.learn(timings)
    assert costs.at().verify_cost(4) == pytest.approx(1.8, rel=0.07)
    assert costs.at().draft_cost(DRAFT) == pytest.approx(0.4, rel=0.07)


def test_single_interrupted_pass_changes_little() -> None:
    costs = ObservedCosts(PROFILE)
    costs.learn(passes(10.0, {(4, None): 1.2}, n=100))
    costs.learn([PassTiming(((4, None),), 400, 1e6), PassTiming(((1, None),), 400, 1e6)])
    known = costs.refined()[0]
    assert known.verify_cost(4) == pytest.approx(1.2, rel=0.02) and known.target_pass_s(1) == pytest.approx(
        10, rel=0.06
    )


def test_width_between_measured_ones_updates_both() -> None:
    costs = ObservedCosts(PROFILE)
    costs.learn(passes(10.0, {(6, None): 2.8}, n=1500))
    assert costs.at().verify_cost(6) == pytest.approx(2.8, rel=0.1)


def test_jointly_timed_passes_update_their_parts_by_share() -> None:
    """Three drafts and a check together take twice their time; in the end, the price of each has doubled."""
    costs = ObservedCosts(PROFILE)
    parts = [(1, DRAFT), (1, DRAFT), (1, DRAFT), (4, None)]
    expected = 3 * PROFILE.draft_cost(DRAFT) + PROFILE.verify_cost(4)
    for _ in range(3000):
        costs.learn([PassTiming(((1, None),), 400, 10.0), PassTiming(parts, 400, 20 * expected)])
    known = costs.at()
    assert 3 * known.draft_cost(DRAFT) + known.verify_cost(4) == pytest.approx(2 * expected, rel=0.02)


def test_drafts_with_stored_weights_update_parts_and_not_passes() -> None:
    costs = ObservedCosts(PROFILE)
    before = PROFILE.draft_cost(SKIPS)
    costs.learn(passes(10.0, {(1, SKIPS): 2 * before}, n=1500))
    assert costs.at().draft_cost(SKIPS) == pytest.approx(2 * before, rel=0.1)
    assert costs.at().verify_cost(4) == pytest.approx(PROFILE.verify_cost(4), rel=1e-9)


def test_context_length_has_its_own_costs_or_those_of_the_nearest() -> None:
    costs = ObservedCosts(PROFILE)
    costs.learn(passes(10.0, {(4, None): 1.2}, at=400))
    costs.learn(passes(30.0, {(4, None): 2.0}, at=3000, n=1500))
    assert costs.at(4096).verify_cost(4) == pytest.approx(2.0, rel=0.1)
    assert costs.at(4096).target_pass_s(1) == pytest.approx(30, rel=0.01)
    assert costs.at(512).verify_cost(4) == pytest.approx(1.2, rel=0.02)
    assert costs.at() is costs.at(4096), "the usual context is the one of most passes"
    assert costs.at(100_000) is costs.at(4096), "the nearest that is known"
    assert sorted(known.context_bucket for known in costs.refined()) == [512, 4096]


def deep_pass_s(n_rows: int, share: float) -> float:
    """Return seconds of passes whose attention takes 30 s for the first row and a share of that per other row."""
    return PROFILE.target_pass_s(n_rows) + 30.0 * (1 + share * (n_rows - 1))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 2.0])
def test_few_passes_determine_the_cost_of_rows_in_a_long_context(share: float) -> None:
    """Passes of one width also determine other widths; in the next context, the first plain passes suffice."""
    costs = ObservedCosts(PROFILE)
    for at, n in ((16_000, 12), (30_000, 1)):
        for _ in range(n):
            timings = [PassTiming(((n_rows, None),), at, deep_pass_s(n_rows, share)) for n_rows in (1, 1, 1, 4)]
            costs.learn(timings)
        known = costs.at(at)
        for n_rows in (2, 4, 8):
            expected = deep_pass_s(n_rows, share) / deep_pass_s(1, share)
            assert known.verify_cost(n_rows) == pytest.approx(expected, rel=0.1 if n > 1 else 0.15), (at, n_rows)
    assert costs.at(512) == PROFILE


def test_drafts_in_a_long_context_include_reading_its_keys() -> None:
    deep = deepened(PROFILE, 16384, 30.0, 0.5)
    whole = PROFILE.draft_pass_s(DRAFT)
    assert deep.draft_pass_s(DRAFT) == pytest.approx(whole + 30.0)
    assert deep.draft_cost(DRAFT, 4) * 40 == pytest.approx(1.2 * whole + 30.0 * (1 + 0.5 * 3))
    assert deep.draft_pass_s(SKIPS) == pytest.approx(PROFILE.draft_pass_s(SKIPS) + 30.0 * 3 / 4), "one attention less"
    assert deep.target_pass_s(8) == pytest.approx(16 + 30.0 * 4.5) and deep.context_bucket == 16384


COPIES = SlotCopies(least=4096, share=0.25)


def test_drafts_in_a_long_context_read_4_bit_copies_of_its_slots() -> None:
    """Copies of 16,384 slots have the bytes of 4,096; the 512 slots of the shorter context were read in full."""
    added_s = 30.0 * (4096 - 512) / (16384 - 512)
    profile = replace(PROFILE, formats={"int4": INT4, "mtp:int4": INT4})
    deep, without = (deepened(profile, 16384, 30.0, 0.5, copies) for copies in (COPIES, None))
    assert deep.pass_s == without.pass_s
    assert deep.draft_pass_s(DRAFT) == pytest.approx(profile.draft_pass_s(DRAFT) + added_s)
    assert deep.draft_pass_s(SKIPS) == pytest.approx(profile.draft_pass_s(SKIPS) + added_s * 3 / 4)
    wider = 1.2 * profile.draft_pass_s(DRAFT) + added_s * (1 + 0.5 * 3)
    assert deep.draft_cost(DRAFT, 4) * 40 == pytest.approx(wider)
    assert deep.formats["mtp:int4"] == without.formats["mtp:int4"], "its layer has slots of its own"
    assert deepened(profile, 4096, 30.0, 0.5, COPIES) == deepened(profile, 4096, 30.0, 0.5), "nobody copies so few"


def test_copied_slots_add_cost_only_beyond_a_few() -> None:
    last_whole, first_copied = (replace(PROFILE, context_bucket=n) for n in (4096, 8192))
    assert deepened(last_whole, 8192, 30.0, 0.5, COPIES).draft_pass_s(DRAFT) == PROFILE.draft_pass_s(DRAFT)
    longer = deepened(first_copied, 32768, 30.0, 0.5, COPIES)
    assert longer.draft_pass_s(DRAFT) == pytest.approx(PROFILE.draft_pass_s(DRAFT) + 30.0 * COPIES.share)


def test_first_costs_of_drafts_in_a_long_context_assume_copies() -> None:
    """Only plain passes were observed there: a draft costs the share of their time that it reads of their bytes."""
    prices = {}
    for copies in (COPIES, None):
        costs = ObservedCosts(PROFILE, copies=copies)
        costs.learn(PassTiming(((1, None),), at, PROFILE.target_pass_s(1) + 30.0) for at in (30_000,) * 4)
        known = costs.at(30_000)
        assert known.target_pass_s(1) == pytest.approx(40.0)
        prices[copies] = known.draft_cost(DRAFT)
    whole = PROFILE.draft_pass_s(DRAFT)
    share = (0.25 * 32768 - 512) / (32768 - 512)
    assert prices[COPIES] == pytest.approx((whole + 30.0 * share) / 40.0)
    assert prices[None] == pytest.approx((whole + 30.0) / 40.0)


def test_passes_in_one_context_also_replace_a_disturbed_profile_of_another() -> None:
    """Nearly all passes are short; the first long ones must not be priced by the disturbed profile."""
    costs = ObservedCosts(replace(PROFILE, quality="disturbed"))
    costs.learn(passes(10.0, {(4, None): 5.9 * 1.2}, at=100, n=1500))
    assert costs.at(512).verify_cost(4) == pytest.approx(5.9 * 1.2, rel=0.1)
    costs.learn(passes(11.0, {(4, None): 5.9 * 1.2}, at=400, n=3))
    assert costs.at(512).verify_cost(4) == pytest.approx(5.9 * 1.2, rel=0.1)
    quiet = ObservedCosts(PROFILE)
    quiet.learn(passes(10.0, {(4, None): 5.9 * 1.2}, at=100, n=1500))
    assert quiet.at(512).verify_cost(4) == PROFILE.verify_cost(4), "a quiet measurement stands for its own context"


def test_costs_are_the_same_object_until_passes_have_changed_them() -> None:
    costs = ObservedCosts(PROFILE)
    assert costs.at() is costs.at() and costs.at() == PROFILE and costs.refined() == []
    costs.learn(passes(10.0, {(4, None): 1.2}, n=40))
    assert costs.at() is costs.at() != PROFILE


def test_profile_is_refined_after_enough_passes() -> None:
    costs = ObservedCosts(PROFILE)
    costs.learn(passes(10.0, {(4, None): 1.2}, n=MAX_BASE_WEIGHT))
    assert costs.at().quality == "quiet" and costs.refined() == []
    costs.learn(passes(10.0, {(4, None): 1.2}, n=MIN_REFINED_PASSES))
    assert [known.quality for known in costs.refined()] == ["refined"]


def test_passes_in_an_unmeasured_format_change_nothing() -> None:
    costs = ObservedCosts(PROFILE)
    costs.learn(passes(10.0, {(1, LayerSet(N_LAYERS).filled("int8")): 0.5}, n=3))
    assert costs.at().formats.keys() == {"int4"}


Change = Callable[[CostProfile], CostProfile]


@pytest.mark.parametrize(
    ("stored", "new", "is_replaced"),
    [
        ("quiet", "disturbed", False),
        ("refined", "disturbed", False),
        ("refined", "quiet", False),
        ("disturbed", "disturbed", True),
        ("disturbed", "quiet", True),
        ("quiet", "refined", True),
        ("refined", "refined", True),
    ],
)
def test_profile_does_not_replace_a_better_one_of_the_same_software(stored: str, new: str, is_replaced: bool) -> None:
    before, after = replace(PROFILE, quality=stored), replace(PROFILE, quality=new)
    assert after.may_replace(before) == is_replaced
    assert replace(after, software="torch 9").may_replace(before), "other software takes other times"
