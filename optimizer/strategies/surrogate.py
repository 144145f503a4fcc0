"""A linear-Gaussian model of what each sub-layer adds to a draft's loss when it is left out, fitted to trials.

The loss of a layer set is −log of its score. What a sub-layer adds may be negative: a shorter pass is worth time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .base import Bits

Array = NDArray[np.float64]

MAX_POINTS = 300  # trials that a fit reads; 4 ms on one core
FLOOR = 0.03  # a score is read as at least this

# Before any trial. A sub-layer left out costs HARM for each mean turn of the residual stream, and saves GAIN for each
# plain pass: the slope of (1 + 2.5 √m) / (2.5 c + 1.2), about the speed of a draft of matchness m and cost c.
HARM = 0.03
GAIN = 0.9
ALONE = 0.05  # standard deviation of what each one adds, beside TOGETHER of all
TOGETHER = 0.02
OFFSET = 1.0  # of what all sets have in common
# Of the noise: fitted to 330 scores of Qwen2.5-Coder-1.5B on HumanEval, and what unseen sets came to over 32 windows.
WINDOW = 0.1  # what a window adds to every set
BY_WINDOW = 0.02  # what it adds to each sub-layer
TOKEN = 0.8  # a score's own, of one token


class ScoredSet(NamedTuple):
    """A trial's set, its score and its window."""

    bits: Bits
    score: float
    window: str


class Posterior(NamedTuple):
    """A normal distribution over what each sub-layer adds to the loss, and the constant behind them: (size + 1)."""

    mean: Array
    covariance: Array

    def draw(self, seed: int, spread: float) -> Array:
        """Draw additions, `spread` times as far from the mean."""
        size = len(self.mean)
        normal = np.random.default_rng(seed).standard_normal(size)
        root = np.linalg.cholesky(self.covariance + 1e-9 * np.eye(size))
        return np.asarray(self.mean + spread * (root @ normal))

    def lead(self, rows: Array, over: Array, doubt: float) -> Array:
        """Return how much less each of `rows` (n, size) loses than `over`, less `doubt` standard deviations; (n,)."""
        change = rows - over
        variance = np.einsum("ij,jk,ik->i", change, self.covariance[:-1, :-1], change)
        return np.asarray(-change @ self.mean[:-1] - doubt * np.sqrt(np.maximum(0.0, variance)))


def posterior(turns: Array, saved: Array, points: Sequence[ScoredSet], n_tokens: int) -> Posterior:
    """Fit what each sub-layer adds to `points`.

    Args: turns: how far each turns the residual stream, of mean 1. saved: plain passes that leaving it out saves.
          n_tokens: of a window.
    """
    points = points[-MAX_POINTS:]
    mean = np.append(HARM * turns - GAIN * saved, 0.0)
    together = np.append(TOGETHER * turns, 0.0)
    covariance = np.outer(together, together) + np.diag(np.append(ALONE * (0.5 + 0.5 * turns), OFFSET) ** 2)
    if not points:
        return Posterior(mean, covariance)
    rows = np.array([(*point.bits, 1) for point in points], dtype=float)
    windows = np.array([point.window for point in points])
    loss = np.array([-log(max(FLOOR, point.score)) for point in points])
    noise = (windows[:, None] == windows[None]) * (WINDOW**2 + BY_WINDOW**2 * (rows[:, :-1] @ rows[:, :-1].T))
    noise += np.diag(np.full(len(points), TOKEN**2 / n_tokens))
    reach = covariance @ rows.T  # (size + 1, points)
    gain = np.linalg.solve(rows @ reach + noise, reach.T).T
    return Posterior(mean + gain @ (loss - rows @ mean), covariance - gain @ reach.T)
