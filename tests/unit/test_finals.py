"""A set replaces the one in use by winning on several windows, never by one lucky score."""

from __future__ import annotations

import json

import pytest

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.types import Trial
from swiftopt.optimizer.challengers import FINAL_WINDOWS, FINALISTS, ChallengerTest, Finals, Incumbent, WindowStart

WINDOW = 8
SETS = [LayerSet(12, frozenset({i})) for i in range(1, 11)]
HELD = LayerSet(12)
INT4 = LayerSet(12, frozenset({3}), formats=(("mlp", "int4"),))


def place(number: int) -> WindowStart:
    """Return the windows of a prompt, which have no token in common."""
    return WindowStart("p", number * WINDOW)


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
    ("prompt_id", "position", "is_due"), [("p", 3, False), ("p", 4, True), ("q", 1, True), ("p", -1, True)]
)
def test_final_waits_until_half_of_the_window_is_new_text(prompt_id: str, position: int, is_due: bool) -> None:
    """An earlier position belongs to another text with the same id."""
    assert bool(entered(1.0).due(WindowStart(prompt_id, position), WINDOW)) == is_due


def test_a_window_holds_one_final() -> None:
    finals = entered(1.0)
    finals.settle(WindowStart("p", 8), {SETS[0]: 0.1})
    finals.enter({SETS[1]: 1.0}, WindowStart("p", 4), 0.0)
    assert finals.due(WindowStart("p", 9), WINDOW) == []
    assert finals.due(WindowStart("p", 12), WINDOW) == [SETS[0], SETS[1]]


def trial(layer_set: LayerSet, score: float, step: int, origin: str) -> Trial:
    return Trial(step, layer_set, origin, score, score, "p", 8 * step)


def test_winner_takes_over_the_score_of_the_set_it_beat_and_its_lead() -> None:
    """The winner's windows may have been easy."""
    contest = ChallengerTest(Incumbent(HELD))
    contest.judge(place(0), trial(HELD, 1.0, 0, "uniform"), [])
    contest.finals = entered(2.0)
    for number in range(1, FINAL_WINDOWS + 1):
        held = trial(HELD, 3.0, 2 * number, "in use")
        decided = contest.judge(place(number), held, [trial(SETS[0], 3.5, 2 * number + 1, "final")])
    mean = (1.0 + 3.0 * FINAL_WINDOWS) / (1 + FINAL_WINDOWS)
    assert decided is not None and decided.adopted
    assert contest.incumbent.layer_set == SETS[0] and contest.incumbent.score == pytest.approx(mean + 0.5)
    assert contest.n_at_gain == decided.step + 1


def test_contest_survives_json() -> None:
    contest = ChallengerTest(
        Incumbent(HELD, 2, 1.5, 0.75, [(3, 2)]), entered(1.0, 2.0), [SETS[4], INT4], place(2), 3, 5
    )
    contest.finals.settle(place(1), {SETS[0]: 0.1})
    assert ChallengerTest.from_json(json.loads(json.dumps(contest.to_json()))) == contest


def test_set_that_promises_most_is_taken_into_use_when_it_has_just_been_scored() -> None:
    """It has the mean score of all its windows; a set that was scored in an earlier pass must be scored again first."""
    contest = ChallengerTest(Incumbent(HELD, 1, 1.0, 1.0))
    held, other, again = (trial(own, 2.0, step, "move") for step, own in enumerate((HELD, SETS[0], SETS[1])))
    earlier = [trial(SETS[1], 4.0, 0, "move"), trial(SETS[0], 9.0, 1, "move")]
    assert contest.adopt_best(SETS[1], [held, other], earlier) is None and contest.incumbent.layer_set == HELD
    assert contest.adopt_best(HELD, [held, other], earlier) is None and contest.n_at_gain == 0
    decided = contest.adopt_best(SETS[1], [held, again], earlier)
    assert decided is not None and decided.adopted and decided.layer_set == SETS[1]
    assert (contest.incumbent.n, contest.incumbent.score, contest.n_at_gain) == (2, 3.0, 3)
