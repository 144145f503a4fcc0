"""The honest answer."""

from __future__ import annotations

import pytest

from swiftopt.core.types import Prompt
from swiftopt.optimizer.verdict import (
    Timed,
    bootstrap_interval,
    by_prompt,
    faster,
    hold_out,
    is_open,
    judge,
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


def test_bootstrap_interval_holds_the_ratio_and_repeats_itself() -> None:
    fast, slow = runs([12, 15, 11, 14, 13]), runs([10, 10, 9, 11, 10])
    low, high = bootstrap_interval(fast, slow)
    assert low <= speed_ratio(fast, slow) <= high
    assert (low, high) == bootstrap_interval(fast, slow)


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
