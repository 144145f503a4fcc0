"""Damage that adds up is found from few trials, and prices are weighed by what trials came to."""

from __future__ import annotations

import random

import numpy as np
import pytest

from swiftopt.optimizer.strategies.surrogate import (
    ScoredSet,
    SpeedCurve,
    damage_of,
    features,
    fitted_curve,
    posterior,
)

SIZE = 20
RNG = random.Random(3)
TRUE = np.array([0.01 + 0.1 * RNG.random() for _ in range(SIZE)])
TURNS = np.array([RNG.uniform(0.6, 1.4) for _ in range(SIZE)]) * TRUE / TRUE.mean()
TURNS = TURNS / TURNS.mean()


def drawn(rng: random.Random) -> tuple[int, ...]:
    """A set in which no layer is left out whole."""
    kinds = [rng.choice("amk") for _ in range(SIZE // 2)]
    return (*(int(kind == "a") for kind in kinds), *(int(kind == "m") for kind in kinds))


def points(n: int, hardness: float = 0.0) -> list[ScoredSet]:
    """Trials, two to a window, whose damage is the sum of that of its sub-layers, times how hard the window is."""
    rng, found = random.Random(1), []
    for number in range(n):
        window = random.Random(f"window/{number // 2}").uniform(1 - hardness, 1 + hardness)
        bits = drawn(rng)
        matchness = float(np.exp(-window * np.dot(bits, TRUE)))
        found.append(ScoredSet(bits, *damage_of(matchness, 32), str(number // 2)))
    return found


def error(n: int, hardness: float = 0.0) -> float:
    return float(np.abs(posterior(TURNS, points(n, hardness)).mean[:SIZE] - TRUE).mean())


def test_belief_comes_nearer_to_the_truth_with_every_dozen_of_trials() -> None:
    assert error(100) < error(12) < error(0) and error(100) < 0.01


def test_hard_and_easy_windows_do_not_hide_which_sub_layer_hurts() -> None:
    mean = posterior(TURNS, points(100, 0.4)).mean[:SIZE]
    assert np.corrcoef(mean, TRUE)[0, 1] > 0.9


def test_what_turns_the_stream_far_is_believed_to_hurt_before_any_trial() -> None:
    mean = posterior(TURNS, []).mean[:SIZE]
    assert np.argsort(mean).tolist() == np.argsort(TURNS).tolist()


def test_leaving_out_a_whole_layer_is_found_to_hurt_less_than_its_parts() -> None:
    """Layers whose parts do all of their damage alone: left out together they do no more."""
    rng, half = random.Random(2), SIZE // 2
    trials = []
    for number in range(150):
        bits = tuple(int(rng.random() < 0.3) for _ in range(SIZE))
        damage = sum(0.08 * max(bits[i], bits[half + i]) for i in range(half))
        trials.append(ScoredSet(bits, *damage_of(float(np.exp(-damage)), 32), str(number)))
    mean = posterior(np.ones(SIZE), trials).mean
    assert mean[SIZE:].max() < 0
    whole = features(np.array([[1.0] * SIZE])) @ mean
    assert whole[0] == pytest.approx(0.08 * half, rel=0.25)


def test_draws_differ_by_seed_spread_with_the_doubt_and_have_no_negative_damage() -> None:
    few, many = posterior(TURNS, points(4)), posterior(TURNS, points(200))
    assert few.draw(1, 0.5).tolist() == few.draw(1, 0.5).tolist() != few.draw(2, 0.5).tolist()
    assert np.abs(few.draw(1, 1.0) - few.mean).mean() > np.abs(many.draw(1, 1.0) - many.mean).mean()
    assert few.draw(1, 5.0)[:SIZE].min() >= 0
    assert few.draw(1, 0.0).tolist() == few.mean.tolist()


def test_damage_of_a_poor_match_is_less_sure() -> None:
    assert damage_of(1.0, 32)[0] == 0 < damage_of(0.5, 32)[0] < damage_of(0.0, 32)[0] < 4
    assert damage_of(0.9, 32)[1] < damage_of(0.5, 32)[1] and damage_of(0.9, 32)[1] < damage_of(0.9, 8)[1]


@pytest.mark.parametrize("true", [SpeedCurve(1.5, 1.0, 0.5), SpeedCurve(6.0, 1.5, 1.0), SpeedCurve(16.0, 2.7, 1.5)])
def test_pace_is_found_from_trials_and_hardly_moved_by_a_few(true: SpeedCurve) -> None:
    rng = random.Random(0)
    seen = [(rng.uniform(0.3, 1.0), rng.uniform(0.3, 1.0)) for _ in range(60)]
    scores = [true.speed(m, c) for m, c in seen]
    found = fitted_curve([m for m, _ in seen], [c for _, c in seen], scores)
    assert np.mean([abs(found.speed(m, c) / true.speed(m, c) - 1) for m, c in seen]) < 0.06
    m, c = seen[0]
    assert fitted_curve([], [], []) == SpeedCurve()
    assert fitted_curve([m], [c], [SpeedCurve().speed(m, c) * 1.05]) == SpeedCurve()
