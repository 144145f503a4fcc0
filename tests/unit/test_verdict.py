"""The verdict on drafting: its interval, its looks and its error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from swiftopt.bench.verdicts import Machine, Prompts, Stream, simulate
from swiftopt.decoding.work import exhaust
from swiftopt.optimizer.verdict import (
    ERROR_RATE,
    MAX_RUNS,
    InterimTest,
    JudgedTurns,
    Timed,
    TimedTurn,
    hold_out,
    is_open,
    jackknife_interval,
    judge,
    plan_interim_tests,
    run_interim_tests,
    speed_interval,
    speed_ratio,
)


@pytest.mark.parametrize(
    ("n", "held"), [(1, 0), (2, 1), (7, 3), (8, 4), (15, 7), (16, 8), (20, 8), (45, 9), (80, 16), (1000, 16)]
)
def test_held_out_prompts_are_the_last_half_or_eight_of_sixteen(n: int, held: int) -> None:
    tuning, last = hold_out(range(n))
    assert len(last) == held and [*tuning, *last] == [*range(n)]


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
    """The leave-one-out ratios are 1.2 and 1.5 plain seconds per tuned second."""
    found = speed_interval([Timed(10, 1.0), Timed(10, 1.0)], [Timed(10, 1.2), Timed(10, 1.5)])
    margin = 12.706205 * math.log(1.5 / 1.2) / 2
    assert found == pytest.approx((1.35 * math.exp(-margin), 1.35 * math.exp(margin)), rel=1e-6)


def test_interval_is_none_where_the_spread_is_not_known() -> None:
    assert speed_interval([Timed(10, 1.0)], [Timed(10, 2.0)]) is None
    assert speed_interval([Timed(10, 1.0), Timed(0, 1.0)], [Timed(10, 2.0), Timed(0, 2.0)]) is None
    assert speed_interval(runs([10, 10]), runs([10, 10])) == (1.0, 1.0)
    assert speed_interval([Timed(10, 1.0), Timed(10, 0.0)], [Timed(10, 1.0)] * 2) is not None  # too wide for a float


DISTURBED = Machine(0.05, disturbed=True)


@pytest.mark.parametrize("n", [4, 6, 8, 32])
def test_no_gain_seldom_says_use_over_all_looks(n: int) -> None:
    """The nominal share is 2.5 %."""
    assert simulate(Stream(n), DISTURBED, 1.0, 800, seed=n).use < 0.04


@pytest.mark.parametrize("stream", [Stream(16), Stream(16, unscored=4)])
def test_gain_of_a_third_is_told_from_none_at_a_spread_of_15_per_cent_on_sixteen_prompts(stream: Stream) -> None:
    n = 2500
    assert simulate(stream, Machine(0.15), 1.3, 300).use >= 0.9
    assert simulate(stream, Machine(0.15), 1.0, n, seed=1).use <= 0.029 + 2 * math.sqrt(0.029 * 0.971 / n)


def test_gain_of_a_third_is_seen_on_four_held_out_prompts_where_runs_differ_by_5_per_cent() -> None:
    assert simulate(Stream(8), DISTURBED, 1.3, 300).use > 0.8


@pytest.mark.parametrize("n", [2, 4, 8])
def test_interval_covers_the_ratio_of_uneven_prompts(n: int) -> None:
    rng, [look, *_] = np.random.default_rng(n), plan_interim_tests(n)
    found = []
    for _ in range(1000):
        [*turns] = exhaust(Prompts(rng, Machine(0.4), 1.5, n).measure(look))
        found.append(speed_interval([turn.tuned for _, [turn] in turns], [turn.plain for _, [turn] in turns]))
    assert 925 <= sum(ends is not None and ends[0] <= 1.5 <= ends[1] for ends in found) <= 985


def test_few_prompts_are_the_reason_where_they_may_be() -> None:
    assert judge(runs([15, 12]), runs([10, 10]), None).reason == "2 held-out prompts are too few to tell: give more"
    assert judge(runs([8, 8.01]), runs([10, 10]), None).reason == "not reliably faster here"
    assert judge(runs([12, 9, 8, 11] * 2), runs([10] * 8), None).reason == "not reliably faster here"
    assert judge(runs([15]), runs([10]), None).reason == "one held-out prompt is too few to tell: give more"


# looks


@pytest.mark.parametrize(("n_held_out", "n_more"), [(1, 0), (1, 1), (2, 0), (4, 4), (8, 0), (8, 3), (8, 8), (16, 16)])
def test_looks_go_on_with_other_prompts_then_repeat_and_spend_one_error_together(n_held_out: int, n_more: int) -> None:
    looks = plan_interim_tests(n_held_out, n_more)
    assert sum(look.error for look in looks) == pytest.approx(ERROR_RATE)
    assert max(looks, key=lambda look: look.error) is looks[-1]
    timed = [(run, number) for look in looks for run in look.runs for number in look.prompts]
    assert timed == sorted(set(timed)) and len(timed) <= max(MAX_RUNS, n_held_out + n_more)
    assert looks[0].prompts == range(n_held_out)
    assert {number for _, number in timed} == {*range(n_held_out + n_more)}


def test_nothing_held_out_has_no_look_and_no_verdict() -> None:
    assert plan_interim_tests(0) == []
    assert exhaust(run_interim_tests([], lambda look: measured(look, []))).verdict.word == "unmeasured"


def measured(look: InterimTest, timings: list[list[list[TimedTurn]]]) -> Any:
    """Return timings by run, prompt and turn for a look."""
    yield look
    return [(number, timings[run][number]) for run in look.runs for number in look.prompts]


def turns(plain: list[float], tuned: list[float]) -> list[list[TimedTurn]]:
    """Return timed prompts of one turn with these speeds."""
    return [[TimedTurn(*pair)] for pair in zip(runs(plain), runs(tuned), strict=True)]


def decided(looks: list[InterimTest], timings: list[list[list[TimedTurn]]]) -> tuple[JudgedTurns, list[InterimTest]]:
    made = list[InterimTest]()
    return exhaust(run_interim_tests(looks, lambda look: measured(look, timings)), made.append), made


def test_later_look_undoes_slow_moments() -> None:
    """Drafting is 1.2 times as fast, but a plain run and a tuned run were disturbed in different rounds."""
    slow = turns([10, 10, 10, 2], [12, 12, 1.5, 12]), turns([10, 10, 4, 10], [12, 3, 12, 12])
    judged, made = decided(plan_interim_tests(4), [*slow, turns([10] * 4, [12.1] * 4), turns([10] * 4, [12] * 4)])
    assert judged.verdict.word == "use" and judged.verdict.ratio == pytest.approx(1.2, rel=0.01)
    assert len(made) > 1 and len(judged.turns) == 4


@pytest.mark.parametrize(("tuned", "word"), [(8.0, "plain"), (30.0, "use")])
def test_clear_verdict_is_not_looked_at_again(tuned: float, word: str) -> None:
    judged, made = decided(plan_interim_tests(8, 8), [turns([10.0, 10.1] * 4, [tuned] * 8)])
    assert judged.verdict.word == word and len(made) == 1 and judged.verdict.n_prompts == 8


def test_other_prompts_come_before_any_runs_again() -> None:
    speeds = [12, 9, 14, 10, 13, 9, 12, 11]
    judged, made = decided(
        plan_interim_tests(8, 4), [turns([10.0] * 12, [*speeds, 14, 15, 13, 14]), turns([10.0] * 12, [13] * 12)]
    )
    assert [(look.prompts, look.runs) for look in made[:2]] == [(range(8), range(1)), (range(8, 12), range(1))]
    assert judged.verdict.n_prompts == 12


def test_turns_of_one_chat_are_no_evidence_of_others() -> None:
    three = [turn for [turn] in turns([10, 10, 10], [12, 12.1, 11.9])]
    alone, made = decided(plan_interim_tests(1), [[three]])
    assert (alone.verdict.word, alone.verdict.n_prompts, len(alone.turns)) == ("plain", 1, 3) and len(made) == 1
    apart, _ = decided(plan_interim_tests(3), [[[turn] for turn in three]] * 4)
    assert apart.verdict.word == "use" and apart.verdict.n_prompts == 3


def test_interval_that_is_not_known_is_open() -> None:
    assert is_open(judge(runs([15]), runs([10]), None)) and not is_open(judge(runs([8, 8.1]), runs([10, 10]), None))
