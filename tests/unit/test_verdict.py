"""The honest answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swiftopt.core.types import Prompt
from swiftopt.optimizer.verdict import (
    FIRST_ERROR,
    SECOND_ERROR,
    Timed,
    by_prompt,
    faster,
    hold_out,
    is_open,
    jackknife_interval,
    judge,
    speed_interval,
    speed_ratio,
)


def prompts(n: int) -> list[Prompt]:
    return [Prompt(str(i), "t", text="x") for i in range(n)]


@pytest.mark.parametrize(("n", "held"), [(1, 0), (2, 1), (7, 3), (8, 4), (20, 4), (25, 5), (80, 16), (1000, 16)])
def test_held_out_prompts_are_the_last_and_few(n: int, held: int) -> None:
    tuning, last = hold_out(prompts(n))
    assert len(last) == held and [*tuning, *last] == prompts(n)


def runs(speeds: list[float]) -> list[Timed]:
    return [Timed(100, 100 / speed) for speed in speeds]


def test_speed_ratio_is_total_tokens_over_total_time() -> None:
    assert speed_ratio([Timed(10, 1), Timed(90, 3)], [Timed(100, 5)]) == pytest.approx((100 / 4) / (100 / 5))


def test_verdict_is_use_only_when_the_whole_interval_is_above_one() -> None:
    plain = runs([10, 11, 9, 10])
    assert judge(runs([15, 16, 14, 15]), plain, 1.5).word == "use"
    mixed = judge(runs([15, 9, 8, 11]), plain, None)
    assert mixed.word == "plain" and mixed.interval is not None and mixed.interval[0] <= 1
    assert judge(runs([8, 9, 8, 8]), plain, None).word == "plain"


def test_verdict_is_unmeasured_when_nothing_was_held_out() -> None:
    verdict = judge([], [], None)
    assert verdict.word == "unmeasured" and verdict.ratio is None


def test_speed_interval_holds_the_ratio_and_repeats_itself() -> None:
    fast, slow = runs([12, 15, 11, 14, 13]), runs([10, 10, 9, 11, 10])
    low, high = speed_interval(fast, slow)
    assert low <= speed_ratio(fast, slow) <= high
    assert (low, high) == speed_interval(fast, slow)


def test_interval_of_a_mean_is_students() -> None:
    values = [1.0, 2.0, 4.0, 5.0]  # mean 3, variance 10 / 3
    found = jackknife_interval([[value, 1.0] for value in values], lambda sums: sums[..., 0] / sums[..., 1])
    margin = 3.182446 * math.sqrt(10 / 3 / 4)
    assert found == pytest.approx((3 - margin, 3 + margin), rel=1e-5)
    wide = jackknife_interval([[value, 1.0] for value in values], lambda sums: sums[..., 0] / sums[..., 1], 0.01)
    assert wide is not None and wide[1] == pytest.approx(3 + margin * 5.840909 / 3.182446, rel=1e-6)


def test_interval_of_two_prompts_is_twelve_times_their_half_difference() -> None:
    """Without one of them the ratio is the other's: 1.2 and 1.5 plain seconds for each tuned one."""
    found = speed_interval([Timed(10, 1.0), Timed(10, 1.0)], [Timed(10, 1.2), Timed(10, 1.5)])
    margin = 12.706205 * math.log(1.5 / 1.2) / 2
    assert found == pytest.approx((1.35 * math.exp(-margin), 1.35 * math.exp(margin)), rel=1e-6)


def test_interval_is_none_where_the_spread_is_not_known() -> None:
    assert speed_interval([Timed(10, 1.0)], [Timed(10, 2.0)]) is None
    assert speed_interval([Timed(10, 1.0), Timed(0, 1.0)], [Timed(10, 2.0), Timed(0, 2.0)]) is None
    assert speed_interval(runs([10, 10]), runs([10, 10])) == (1.0, 1.0)
    assert speed_interval([Timed(10, 1.0), Timed(10, 0.0)], [Timed(10, 1.0)] * 2) is not None  # too wide for a float


def measured(rng: np.random.Generator, n: int, gain: float, noise: float) -> list[list[Timed]]:
    """Return tuned runs, plain runs, and both again; one run in ten is disturbed."""
    tokens = np.round(100 * np.exp(0.3 * rng.standard_normal(n)))

    def timed(of: float) -> list[Timed]:
        slow = np.where(rng.random(n) < 0.1, rng.uniform(1.2, 3, n), 1) * np.exp(noise * rng.standard_normal(n))
        return [Timed(int(count), count / of * factor) for count, factor in zip(tokens, slow, strict=True)]

    return [timed(gain), timed(1.0), timed(gain), timed(1.0)]


def is_used(tuned: list[Timed], plain: list[Timed], tuned_again: list[Timed], plain_again: list[Timed]) -> bool:
    verdict = judge(tuned, plain, None, FIRST_ERROR)
    if is_open(verdict):
        verdict = judge(faster(tuned, tuned_again), faster(plain, plain_again), None, SECOND_ERROR)
    return verdict.word == "use"


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_no_gain_seldom_says_use_over_both_looks(n: int) -> None:
    """2.5 % would be right; with percentile intervals at 95 % in either look it was 34, 20, 16 and 7 %."""
    rng = np.random.default_rng(n)
    assert sum(is_used(*measured(rng, n, 1.0, 0.05)) for _ in range(1000)) < 40


def test_gain_of_a_third_is_seen_on_four_prompts() -> None:
    rng = np.random.default_rng(0)
    assert sum(is_used(*measured(rng, 4, 1.3, 0.05)) for _ in range(300)) > 240


@pytest.mark.parametrize("n", [2, 4, 8])
def test_interval_covers_the_ratio_of_uneven_prompts(n: int) -> None:
    rng = np.random.default_rng(n)
    found = [speed_interval(*measured(rng, n, 1.5, 0.4)[:2]) for _ in range(1000)]
    assert 925 <= sum(ends is not None and ends[0] <= 1.5 <= ends[1] for ends in found) <= 985


def test_few_prompts_are_the_reason_where_they_may_be() -> None:
    assert judge(runs([15, 12]), runs([10, 10]), None).reason == "2 held-out prompts are too few to tell: give more"
    assert judge(runs([8, 8.01]), runs([10, 10]), None).reason == "not reliably faster here"
    assert judge(runs([12, 9, 8, 11]), runs([10] * 4), None).reason == "not reliably faster here"
    assert judge(runs([15]), runs([10]), None).reason == "one held-out prompt is too few to tell: give more"


def test_a_second_look_undoes_one_slow_moment() -> None:
    """Drafting is 1.2 times as fast, but one plain run and one tuned run were disturbed, in different looks."""
    plain, tuned = runs([10, 10, 10, 2]), runs([12, 12, 1.5, 12])
    assert is_open(judge(tuned, plain, None))
    settled = judge(faster(tuned, runs([12, 3, 12, 12])), faster(plain, runs([10, 10, 4, 10])), None)
    assert settled.word == "use" and not is_open(settled) and settled.ratio == pytest.approx(1.2)


def test_a_clear_verdict_is_not_looked_at_again() -> None:
    plain = runs([10, 10, 10, 10])
    assert not is_open(judge(runs([8, 8.1, 8, 8.2]), plain, None)) and not is_open(judge([], [], None))


def test_turns_of_one_chat_are_no_evidence_of_others() -> None:
    chat, question = Prompt("c", "t", turns=("a", "b", "c")), Prompt("q", "t", text="x")
    assert by_prompt([chat, question], [Timed(n, n / 4) for n in (1, 2, 3, 4)]) == [Timed(6, 1.5), Timed(4, 1.0)]
    plain, tuned = runs([10, 10, 10]), runs([12, 12.1, 11.9])
    assert judge(tuned, plain, None).word == "use"
    alone = judge(by_prompt([chat], tuned), by_prompt([chat], plain), None)
    assert (alone.word, alone.n_prompts) == ("plain", 1)
