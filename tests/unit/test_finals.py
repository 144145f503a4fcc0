"""A set replaces the one in use by winning on several windows, never by one lucky score."""

from __future__ import annotations

import json

import pytest

from swiftopt.core.types import LayerSet, Trial
from swiftopt.optimizer.challengers import FINAL_WINDOWS, FINALISTS, Finals, Incumbent, Place, Standing

WINDOW = 8
SETS = [LayerSet(12, frozenset({i})) for i in range(1, 11)]
HELD = LayerSet(12)
INT4 = LayerSet(12, frozenset({3}), formats=(("mlp", "int4"),))


def place(number: int) -> Place:
    """The windows of one prompt, without a common token."""
    return Place("p", number * WINDOW)


def entered(*ratings: float) -> Finals:
    finals = Finals()
    finals.enter(dict(zip(SETS, ratings, strict=False)), place(0), 0.0)
    return finals


def test_one_lucky_window_wins_nothing() -> None:
    finals = entered(9.0)
    assert finals.settle(place(1), {SETS[0]: 5.0}) is None
    assert finals.settle(place(2), {SETS[0]: -6.0}) is None
    assert finals.finalists == []


def test_winner_leads_over_as_many_windows_as_are_asked_for() -> None:
    finals = entered(1.0)
    won = [finals.settle(place(number + 1), {SETS[0]: 0.1}) for number in range(FINAL_WINDOWS)]
    assert won[:-1] == [None] * (FINAL_WINDOWS - 1)
    last = won[-1]
    assert last is not None and last.layer_set == SETS[0] and last.lead == pytest.approx(0.1)


def test_the_better_half_of_those_scored_goes_on() -> None:
    finals = entered(1.0, 1.0, 1.0, 1.0)
    finals.settle(place(1), {SETS[0]: 0.1, SETS[1]: 0.4, SETS[2]: 0.3, SETS[3]: 0.2})
    assert [own.layer_set for own in finals.finalists] == [SETS[1], SETS[2]]


def test_who_trails_the_set_in_use_is_out() -> None:
    finals = entered(1.0, 1.0)
    finals.settle(place(1), {SETS[0]: -0.1, SETS[1]: 0.0})
    assert finals.finalists == []


def test_only_so_many_wait_and_those_are_the_best() -> None:
    finals = entered(*map(float, range(1, 9)))
    assert [own.entry for own in finals.finalists] == [8.0, 7.0, 6.0, 5.0] and FINALISTS == 4
    finals.enter({SETS[9]: 6.5}, place(0), 0.0)
    assert [own.entry for own in finals.finalists] == [8.0, 7.0, 6.5, 6.0]


def test_newcomers_do_not_drive_out_who_has_won_already() -> None:
    finals = entered(1.0)
    finals.settle(place(1), {SETS[0]: 0.1})
    finals.enter({layer_set: 9.0 for layer_set in SETS[1:]}, place(1), 0.0)
    assert SETS[0] in [own.layer_set for own in finals.finalists]


def test_nobody_enters_below_the_bar_or_twice() -> None:
    finals = entered(1.0)
    finals.enter({SETS[0]: 2.0, SETS[1]: 0.5}, place(0), 0.5)
    assert [own.layer_set for own in finals.finalists] == [SETS[0]]


@pytest.mark.parametrize(
    ("later", "is_due"), [(Place("p", 3), False), (Place("p", 4), True), (Place("q", 1), True), (Place("p", -1), True)]
)
def test_final_waits_until_half_of_the_window_is_new_text(later: Place, is_due: bool) -> None:
    """A position before the last one is that of another text under the same name."""
    assert bool(entered(1.0).due(later, WINDOW)) == is_due


def test_a_window_holds_one_final() -> None:
    finals = entered(1.0)
    finals.settle(Place("p", 8), {SETS[0]: 0.1})
    finals.enter({SETS[1]: 1.0}, Place("p", 4), 0.0)
    assert finals.due(Place("p", 9), WINDOW) == []
    assert finals.due(Place("p", 12), WINDOW) == [SETS[0], SETS[1]]


def trial(layer_set: LayerSet, score: float, step: int, origin: str) -> Trial:
    return Trial(step, layer_set, origin, score, score, "p", 8 * step)


def test_winner_takes_over_the_score_of_the_set_it_beat_and_its_lead() -> None:
    """Its own windows may have been easy ones."""
    standing = Standing(Incumbent(HELD))
    standing.judge(place(0), trial(HELD, 1.0, 0, "uniform"), [])
    standing.finals = entered(2.0)
    for number in range(1, FINAL_WINDOWS + 1):
        held = trial(HELD, 3.0, 2 * number, "in use")
        decided = standing.judge(place(number), held, [trial(SETS[0], 3.5, 2 * number + 1, "final")])
    mean = (1.0 + 3.0 * FINAL_WINDOWS) / (1 + FINAL_WINDOWS)
    assert decided is not None and decided.adopted
    assert standing.incumbent.layer_set == SETS[0] and standing.incumbent.score == pytest.approx(mean + 0.5)
    assert standing.n_at_gain == decided.step + 1


def test_standing_survives_json() -> None:
    standing = Standing(Incumbent(HELD, 2, 1.5, 0.75, [(3, 2)]), entered(1.0, 2.0), [SETS[4], INT4], place(2), 3, 5)
    standing.finals.settle(place(1), {SETS[0]: 0.1})
    assert Standing.from_json(json.loads(json.dumps(standing.to_json()))) == standing


def test_set_that_promises_most_is_taken_into_use_when_it_has_just_been_scored() -> None:
    """With the mean of all its windows; one that an earlier pass scored must be scored again first."""
    standing = Standing(Incumbent(HELD, 1, 1.0, 1.0))
    held, other, again = (trial(own, 2.0, step, "move") for step, own in enumerate((HELD, SETS[0], SETS[1])))
    earlier = [trial(SETS[1], 4.0, 0, "move"), trial(SETS[0], 9.0, 1, "move")]
    assert standing.take_best(SETS[1], [held, other], earlier) is None and standing.incumbent.layer_set == HELD
    assert standing.take_best(HELD, [held, other], earlier) is None and standing.n_at_gain == 0
    decided = standing.take_best(SETS[1], [held, again], earlier)
    assert decided is not None and decided.adopted and decided.layer_set == SETS[1]
    assert (standing.incumbent.n, standing.incumbent.score, standing.n_at_gain) == (2, 3.0, 3)
