"""A linear-Gaussian surrogate of a draft's quality, fitted to trials, and of the speed that a quality gives.

The damage of a layer set is −log matchness: each skipped sub-layer adds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Bits

Array = NDArray[np.float64]

MAX_POINTS = 300  # trials that a fit reads; 4 ms on one core
FLOOR = 0.03  # matchness is read as at least this
MISFIT = 0.3  # of a point's own damage: what is not additive grows with it
HARDNESS = 0.5  # standard deviation of a window's, which damage is multiplied by: 0.5 on HumanEval, SmolLM2-135M

ROUNDS = (1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 16.0)  # draft steps per verification
CHECKS = (1.0, 1.2, 1.5, 2.0, 2.7, 3.5)  # a verification's cost in plain passes
POWERS = (0.25, 0.5, 1.0, 1.5)


@dataclass(frozen=True, slots=True)
class ScoredSet:
    """A trial's set: its damage (−log matchness, or how far the score is below the mean), that variance, its window."""

    bits: Bits
    damage: float
    variance: float
    window: str


@dataclass(frozen=True, slots=True)
class Posterior:
    """A normal distribution over the damage of each of `features`, truncated at `floor`."""

    mean: Array
    covariance: Array
    floor: Array

    def draw(self, seed: int, spread: float) -> Array:
        """Draw damages, `spread` times as far from the mean; none below the floor."""
        size = len(self.mean)
        normal = np.random.default_rng(seed).standard_normal(size)
        root = np.linalg.cholesky(self.covariance + 1e-9 * np.eye(size))
        return np.maximum(self.mean + spread * (root @ normal), self.floor)


def damage_of(matchness: float, n_tokens: int) -> tuple[float, float]:
    """Return the damage that a matchness over so many tokens means, and its variance."""
    share = min(1.0, max(FLOOR, matchness))
    damage = -log(share)
    return damage, 0.01 + (1.0 - share + 0.02) / (share * n_tokens) + (MISFIT * damage) ** 2


@dataclass(frozen=True, slots=True)
class Prior:
    """The distribution of a sub-layer's damage before any trial: its mean, and the standard deviations of what all
    sub-layers share (`together`) and of each `alone`, in units of how far it turns the residual stream.

    `whole`: share of both damages that is spared where a layer's attention and MLP are skipped together. `offset`: the
    standard deviation of what all sets have in common; `hardness`: of a window, a factor of all damage there. `floor`:
    the least damage of a sub-layer.
    """

    mean: float
    together: float
    alone: float
    whole: float = 0.3
    offset: float = 0.0
    hardness: float = HARDNESS
    floor: float = 0.0


MATCHNESS = Prior(0.06, 0.06, 0.06)
# Of scores of one size, in units of their spread, where only differences count.
SCORES = Prior(0.3, 0.3, 0.6, whole=0.0, offset=3.0, hardness=0.0, floor=float("-inf"))


def features(rows: Array) -> Array:
    """Return the terms of each set's damage, (n, size + size / 2): skipped sub-layers, then skipped whole layers."""
    half = rows.shape[1] // 2
    return np.hstack((rows, rows[:, :half] * rows[:, half:]))


def posterior(turns: Array, points: Sequence[ScoredSet], prior: Prior = MATCHNESS) -> Posterior:
    """Fit the damage of each of `features` to `points`; `turns`: (size,), of mean 1."""
    points = points[-MAX_POINTS:]
    half = len(turns) // 2
    both = turns[:half] + turns[half:]
    mean = np.hstack((prior.mean * turns, -prior.whole * prior.mean * both))
    together = prior.together * np.hstack((turns, -prior.whole * both))
    alone = prior.alone * np.hstack((0.25 + turns, 0.25 + 0.5 * both))
    floor = np.hstack((np.full(len(turns), prior.floor), np.full(half, -np.inf)))
    covariance = np.outer(together, together) + np.diag(alone**2)
    if not points:
        return Posterior(mean, covariance, floor)
    rows = features(np.array([point.bits for point in points], dtype=float).reshape(-1, len(turns)))
    windows = np.array([point.window for point in points])
    reach = covariance @ rows.T  # (features, points)
    damage = np.array([point.damage for point in points])
    hard = prior.hardness * (damage + 0.02)
    shared = np.outer(hard, hard) * (windows[:, None] == windows[None]) + prior.offset**2
    noise = shared + np.diag([point.variance for point in points])
    gain = np.linalg.solve(rows @ reach + noise, reach.T).T
    rest = damage - rows @ mean
    return Posterior(np.maximum(mean + gain @ rest, floor), covariance - gain @ reach.T, floor)


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """Speedup of a draft of matchness m and cost c: (1 + steps · m^power) / (steps · c + check).

    A round is `steps` draft steps and one verification, which costs `check` plain passes. The defaults are between what
    SmolLM2-135M (1.5, 1.2, 0.5) and larger models on code come to.
    """

    steps: float = 2.5
    check: float = 1.2
    power: float = 0.5

    def speed(self, matchness: Any, cost: Any) -> Any:
        """Return the speed of one draft, or of many in arrays."""
        return (1.0 + self.steps * matchness**self.power) / (self.steps * cost + self.check)


# Pseudo-trials (matchness, cost) that hold the curve at its defaults.
PSEUDO = tuple((m, c) for m in (0.4, 0.6, 0.8, 0.95) for c in (0.6, 0.9))


def fitted_curve(matchness: Sequence[float], costs: Sequence[float], scores: Sequence[float]) -> SpeedCurve:
    """Return the curve of a grid that fits the logarithms of trials' scores best; a few trials move it little."""
    m = np.maximum([*matchness, *(m for m, _ in PSEUDO)], FLOOR)
    c = np.array([*costs, *(c for _, c in PSEUDO)])
    usual = [SpeedCurve().speed(*each) for each in PSEUDO]
    wanted = np.log(np.maximum([*scores, *usual], 1e-3))

    def error(curve: SpeedCurve) -> float:
        return float(np.square(np.log(curve.speed(m, c)) - wanted).sum())

    return min((SpeedCurve(*values) for values in product(ROUNDS, CHECKS, POWERS)), key=error)
