"""Detection of shifts to another kind of text, and the layer sets of similar text."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import KnownSet, nearest, pack_state, unit, unpack_state
from swiftopt.core.types import Completion
from swiftopt.optimizer.shift import FAR_PROMPTS, SERVED_ALARM, SERVED_N_LEARN, AcceptanceChart, ShiftWatch


def texts(mean: float, spread: float, n: int, seed: int) -> list[tuple[int, int]]:
    """Return accepted and drafted tokens of texts whose rates vary by `spread`."""
    draws = random.Random(seed)
    rates = [min(1.0, max(0.0, draws.gauss(mean, spread))) for _ in range(n)]
    return [(sum(draws.random() < rate for _ in range(80)), 80) for rate in rates]


def alarm_at(chart: AcceptanceChart, counts: list[tuple[int, int]]) -> int | None:
    return next((i for i, (accepted, drafted) in enumerate(counts, 1) if chart.add(accepted, drafted)), None)


@pytest.mark.parametrize("after", [0.55, 0.98])
def test_lasting_change_of_acceptance_is_noticed_within_a_few_texts(after: float) -> None:
    for seed in range(20):
        chart = AcceptanceChart()
        assert alarm_at(chart, texts(0.8, 0.03, 8, seed)) is None
        found = alarm_at(chart, texts(after, 0.01, 12, seed))
        assert found is not None and found <= (5 if after < 0.8 else 10)


def test_texts_of_one_kind_seldom_raise_an_alarm() -> None:
    alarms = sum(alarm_at(AcceptanceChart(), texts(0.8, 0.06, 50, seed)) is not None for seed in range(40))
    assert alarms <= 8  # 2,000 texts: about three are to be expected


def test_served_texts_of_one_kind_seldom_raise_an_alarm_and_a_fall_is_noticed_within_twenty() -> None:
    """Their drafts copy text too, so rates vary by 0.2 between texts, as observed on HumanEval."""

    def alarm(chart: AcceptanceChart, counts: list[tuple[int, int]]) -> int | None:
        told = (i for i, own in enumerate(counts, 1) if chart.add(*own, SERVED_ALARM, SERVED_N_LEARN))
        return next(told, None)

    quiet = noticed = 0
    for seed in range(100):
        chart = AcceptanceChart()
        if alarm(chart, texts(0.75, 0.2, 40, seed)) is None:
            quiet += 1
            noticed += alarm(chart, texts(0.35, 0.2, 20, seed + 1000)) is not None
    assert quiet >= 95 and noticed >= 0.9 * quiet


def test_one_odd_text_is_no_shift() -> None:
    chart = AcceptanceChart()
    assert alarm_at(chart, [(64, 80)] * 6 + [(8, 80)] + [(64, 80)] * 20) is None


def test_short_texts_count_for_little() -> None:
    chart = AcceptanceChart()
    assert alarm_at(chart, [(64, 80)] * 6 + [(1, 3)] * 3) is None


def test_nearest_sets_come_first_once_each_and_other_sizes_never() -> None:
    sets = [LayerSet.uniform(8, n) for n in range(1, 5)]
    known = [
        KnownSet(sets[0], unit([1, 0, 0])),
        KnownSet(sets[1], unit([0, 1, 0])),
        KnownSet(sets[2], unit([1, 1, 0])),
        KnownSet(sets[1], unit([0, 9, 1])),
        KnownSet(sets[3], unit([1, 0])),
    ]
    assert nearest(known, unit([0, 5, 0]), 9) == [sets[1], sets[2], sets[0]]
    assert nearest(known, unit([0, 5, 0]), 1) == [sets[1]]
    assert nearest([], unit([1, 0]), 3) == []


def test_state_survives_packing_and_odd_bytes_are_refused() -> None:
    state = unpack_state(pack_state(unit([3.0, -4.0, 0.0])))
    assert state == pytest.approx((0.6, -0.8, 0.0), abs=1e-7) and unpack_state(pack_state(state)) == state
    assert unit([0.0, 0.0]) == (0.0, 0.0)
    with pytest.raises(ValueError, match="four bytes"):
        unpack_state(b"123")


def completion(accepted: int, drafted: int) -> Completion:
    return Completion((1, 2), "", "length", "swift", drafted=drafted, accepted=accepted)


def test_watch_remembers_the_set_of_the_text_that_is_over() -> None:
    prose, code = LayerSet.uniform(8, 4), LayerSet.uniform(8, 2)
    watch = ShiftWatch((KnownSet(code, unit([0.1, 1.0])),))
    for _ in range(6):
        watch.add_prompt([5.0, 0.0], settled=True)
        assert not watch.add(completion(90, 100))
    watch.add_prompt([0.0, 3.0], settled=False)
    assert not watch.add(completion(30, 100))  # drafted with several sets
    reason = ""
    for _ in range(3):
        watch.add_prompt([0.0, 3.0], settled=True)
        reason = reason or watch.add(completion(40, 100))
    assert reason.startswith("acceptance fell from 0.90") and reason.endswith("to 0.40")
    assert watch.restart(prose) == [code]
    assert [own for own, _ in watch.former_sets] == [prose]
    again = replace(ShiftWatch.from_json(json.loads(json.dumps(watch.to_json()))), known=watch.known)
    assert again == watch and again.state == pytest.approx((0.0, 1.0))
    watch.add_prompt([4.0, 0.1], settled=True)
    assert watch.restart(code) == [prose, code]


def test_completion_without_a_draft_says_nothing() -> None:
    watch = ShiftWatch()
    watch.add_prompt([1.0], settled=True)
    assert watch.add(completion(0, 0)) == "" and watch.chart.n == 0


def test_less_of_a_change_will_do_where_prompts_lie_elsewhere() -> None:
    def alarms(state: list[float]) -> int | None:
        watch = ShiftWatch()
        for i in range(6):
            watch.add_prompt([5.0, 0.1 * (i % 2)], settled=True)
            assert not watch.add(completion(90, 100))
        for number in range(1, 20):
            watch.add_prompt(state, settled=True)
            if watch.add(completion(76, 100)):
                return number
        return None

    near, far = alarms([5.0, 0.05]), alarms([1.0, 4.0])
    assert far is not None and far <= 2 and (near is None or near > far)


def prompts(centre: list[float], spread: float, n: int, draws: random.Random) -> list[list[float]]:
    """Return states around a centre."""
    return [[draws.gauss(value, spread) for value in centre] for _ in range(n)]


def shift_at(watch: ShiftWatch, states: list[list[float]]) -> int | None:
    """Return the number of prompts until a shift is detected without a change of acceptance."""
    for number, state in enumerate(states, 1):
        watch.add_prompt(state, settled=True)
        if watch.add(completion(90, 100)):
            return number
    return None


def test_several_prompts_elsewhere_in_a_row_are_a_shift_though_acceptance_holds() -> None:
    draws = random.Random(1)
    prose, code = [4.0] * 20 + [0.0] * 20, [3.0] * 20 + [3.0] * 20  # a cosine of 0.71
    for settled in (True, False):  # a search that still goes on would mix the two
        watch = ShiftWatch()
        for state in prompts(prose, 1.0, 10, draws):
            watch.add_prompt(state, settled)
            assert not watch.add(completion(90, 100))
        news = prompts(code, 1.0, FAR_PROMPTS, draws)
        for number, state in enumerate(news, 1):
            watch.add_prompt(state, settled)
            reason = watch.add(completion(90, 100))
            assert bool(reason) == (number == FAR_PROMPTS)
        assert reason == f"{FAR_PROMPTS} prompts in a row have hidden states far from the earlier ones"
        watch.restart(LayerSet.uniform(8, 2))
        assert watch.state == pytest.approx(unit([sum(own) for own in zip(*map(unit, news), strict=True)]), abs=1e-6)
        assert shift_at(watch, prompts(code, 1.0, 30, draws)) is None


def test_a_prompt_of_the_old_kind_between_ends_the_row() -> None:
    draws = random.Random(2)
    prose, code = [4.0] * 20 + [0.0] * 20, [3.0] * 40
    watch = ShiftWatch()
    assert shift_at(watch, prompts(prose, 1.0, 10, draws)) is None
    for _ in range(5):
        mixed = prompts(code, 1.0, FAR_PROMPTS - 1, draws) + prompts(prose, 1.0, 1, draws)
        assert shift_at(watch, mixed) is None


def test_later_turns_of_a_chat_are_no_prompts_elsewhere() -> None:
    draws = random.Random(4)
    prose, code = [4.0] * 20 + [0.0] * 20, [3.0] * 40
    watch = ShiftWatch()
    for first in prompts(prose, 1.0, 10, draws):
        watch.add_prompt(first, settled=True)
        assert not watch.add(completion(90, 100))
        for later in prompts(code, 1.0, FAR_PROMPTS + 1, draws):
            watch.add_prompt(later, settled=True, is_later_turn=True)
            assert not watch.add(completion(90, 100))
    assert watch.chart.n == 10 * (FAR_PROMPTS + 2)


def test_prompts_of_one_kind_seldom_lie_elsewhere() -> None:
    for spread in (0.5, 2.0, 6.0):
        draws = random.Random(3)
        found = [shift_at(ShiftWatch(), prompts([4.0] * 40, spread, 100, draws)) for _ in range(20)]
        assert found == [None] * 20, spread


def test_completion_counts_by_its_own_prompt_where_others_were_read_since() -> None:
    """Drafts of concurrent requests with several sets, or from before a shift, say nothing about the set in use."""
    watch = ShiftWatch()
    before_end = watch.add_prompt([5.0, 0.0], settled=False)
    after_end = watch.add_prompt([5.0, 0.0], settled=True)
    assert not watch.add(completion(20, 100), before_end) and watch.chart.n == 0
    assert not watch.add(completion(90, 100), after_end) and watch.chart.n == 1
    read_before = watch.add_prompt([5.0, 0.0], settled=True)
    watch.restart(LayerSet.uniform(8, 2))
    after_shift = watch.add_prompt([0.0, 5.0], settled=True)
    assert not watch.add(completion(20, 100), read_before) and watch.chart.n == 0
    assert not watch.add(completion(90, 100), after_shift) and watch.chart.n == 1


def test_prompt_elsewhere_that_was_read_last_makes_no_other_completion_more_suspicious() -> None:
    watch = ShiftWatch()
    for _ in range(6):
        assert not watch.add(completion(90, 100), watch.add_prompt([5.0, 0.1], settled=True))
    near, far = watch.add_prompt([5.0, 0.0], settled=True), watch.add_prompt([1.0, 4.0], settled=True)
    assert (near.is_far, far.is_far) == (False, True)
    assert not watch.add(completion(76, 100), near)
