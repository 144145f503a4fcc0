"""The loss of each sub-layer is estimated from few scores on different windows."""

from __future__ import annotations

import random

import numpy as np

from swiftopt.optimizer.strategies.guided import Posterior, ScoredSet, posterior

SIZE = 20
RNG = random.Random(3)
TRUE = np.array([-0.05 + 0.15 * RNG.random() for _ in range(SIZE)])  # some of them are worth leaving out
TURNS = np.array([RNG.uniform(0.6, 1.4) for _ in range(SIZE)])
TURNS = TURNS / TURNS.mean()
SAVED = np.full(SIZE, 0.04)


def scored(n: int, spread: float = 0.0) -> list[ScoredSet]:
    """Return scores, two per window; losses are sums over sub-layers, each of which varies by `spread` by window."""
    rng, found = random.Random(1), []
    for number in range(n):
        added = TRUE + np.random.default_rng(number // 2).uniform(-spread, spread, SIZE)
        bits = tuple(rng.randint(0, 1) for _ in range(SIZE))
        found.append(ScoredSet(bits, float(np.exp(0.2 - np.dot(bits, added))), str(number // 2)))
    return found


def fitted(n: int, spread: float = 0.0) -> Posterior:
    return posterior(TURNS, SAVED, scored(n, spread), 32)


def error(n: int) -> float:
    return float(np.abs(fitted(n).mean[:SIZE] - TRUE).mean())


def test_estimates_come_nearer_to_the_truth_with_every_dozen_of_scores() -> None:
    assert error(100) < error(12) < error(0) and error(100) < 0.02


def test_windows_on_which_a_sub_layer_does_other_harm_do_not_hide_which_one_hurts() -> None:
    assert np.corrcoef(fitted(200, 0.05).mean[:SIZE], TRUE)[0, 1] > 0.9


def test_two_sets_on_one_window_tell_more_of_their_difference_than_on_two() -> None:
    """The part of a window is common to all sets."""
    one, two = tuple(int(i < 4) for i in range(SIZE)), tuple(int(i < 5) for i in range(SIZE))

    def doubt(*windows: str) -> float:
        """Return the variance of the fifth sub-layer's loss after both sets were scored a few times."""
        pairs = zip((one, two) * 8, [f"{n // 2}{window}" for n, window in enumerate(windows * 8)], strict=True)
        found = posterior(np.ones(SIZE), SAVED, [ScoredSet(bits, 1.2, window) for bits, window in pairs], 32)
        return float(found.covariance[4, 4])

    assert doubt("", "") < 0.95 * doubt("a", "b")


def test_what_turns_the_stream_far_or_saves_little_is_taken_to_add_most_before_any_score() -> None:
    by_turn = posterior(TURNS, SAVED, [], 32).mean[:SIZE]
    assert np.argsort(by_turn).tolist() == np.argsort(TURNS).tolist()
    by_price = posterior(np.ones(SIZE), TURNS, [], 32).mean[:SIZE]
    assert np.argsort(by_price).tolist() == np.argsort(-TURNS).tolist()


def test_draws_differ_by_seed_and_spread_with_the_doubt() -> None:
    few, many = fitted(4), fitted(200)
    assert few.draw(1, 0.5).tolist() == few.draw(1, 0.5).tolist() != few.draw(2, 0.5).tolist()
    assert np.abs(few.draw(1, 1.0) - few.mean).mean() > np.abs(many.draw(1, 1.0) - many.mean).mean()
    assert few.draw(1, 0.0).tolist() == few.mean.tolist()


def test_a_lead_counts_less_the_less_is_known_of_what_is_between_two_sets() -> None:
    rows, none = np.eye(SIZE), np.zeros(SIZE)
    few, many = fitted(4), fitted(200)
    assert np.allclose(many.lead(rows, none, 0.0), -many.mean[:SIZE])
    lost = [each.lead(rows, none, 0.0) - each.lead(rows, none, 1.0) for each in (few, many)]
    assert lost[0].mean() > 2 * lost[1].mean() and (lost[1] > 0).all()
    assert many.lead(rows[:1], rows[0], 1.0).tolist() == [0.0]


def test_scores_weigh_by_the_tokens_of_a_window_and_of_none_are_read_as_low() -> None:
    points = scored(12)
    short, long = (posterior(TURNS, SAVED, points, n).covariance.trace() for n in (8, 128))
    assert short > long
    assert np.isfinite(posterior(TURNS, SAVED, [ScoredSet((0,) * SIZE, 0.0, "w")], 32).mean).all()
