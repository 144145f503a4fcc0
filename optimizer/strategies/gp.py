"""Points to try next by a Gaussian process over the scores so far (bayesian-optimization 3.4).

`suggest` proposes layer sets of one size and runs in the suggestion process; `next_point` serves Self-SD's search, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import AcquisitionFunction, UpperConfidenceBound
from numpy.typing import ArrayLike, NDArray

from .base import Bits

Array = NDArray[np.float64]
Value = Callable[[Array], Array]  # (n, size) points to (n,) bounds

# Measured with these limits on one core at 300 points: 0.4 s per suggestion in 56 dimensions (30 layers), 2.3 s in 156
# (80 layers); fitting the process is most of it.
MAX_POINTS = 300
N_RESTARTS = 1  # further starts of the length scale's fit
N_RANDOM = 300  # random layer sets, the best of which are climbed from
N_CLIMBS = 3  # climbs: from the best set seen and from the best random ones
N_NEIGHBOURS = 1024  # exchanges looked at per step of a climb; all of them up to 64 searchable sub-layers
MAX_CLIMB_STEPS = 64

KAPPA = 2.5  # weight of the uncertainty, as in SWIFT's code
# Share of the scores' variance that is noise. A score comes from one window of text; with less than this the process
# chases lucky windows: best true score of 100 pure steps 0.95 of the optimum at 0.3, 0.89 at 0.05 (56 dimensions).
NOISE = 0.3


class LayerSetUcb(UpperConfidenceBound):
    """Upper confidence bound whose maximum is looked for among layer sets of one size, by exchanges.

    DEVIATION: SWIFT maximises it over the continuous cube, skips the largest coordinates, and registers the continuous
    point. Here the suggestion and every registered point are layer sets, so that a score belongs to the set that was
    run. On a separable objective (56 dimensions, 28 suggestions) this reached 1.00 of the optimum instead of 0.98, in a
    tenth of the time: a numeric gradient in the cube costs 57 predictions per step.
    """

    def __init__(self, n_skipped: int) -> None:
        super().__init__(kappa=KAPPA)
        self._n_skipped = n_skipped

    def suggest(
        self,
        gp: Any,
        target_space: Any,
        n_random: int = N_RANDOM,
        n_smart: int = N_CLIMBS,
        fit_gp: bool = True,
        random_state: Any = None,
    ) -> Array:
        """Return the layer set with the highest bound that is not registered yet, as a 0/1 vector."""
        if fit_gp:
            self._fit_gp(gp, target_space)
        rng = np.random.default_rng(random_state.randint(2**32, dtype=np.uint32))
        known = {row.tobytes() for row in target_space.params}

        def value(rows: Array) -> Array:
            bounds = self.base_acq(*gp.predict(rows, return_std=True))
            return np.array(
                [-np.inf if row.tobytes() in known else bound for row, bound in zip(rows, bounds, strict=True)]
            )

        drawn = rng.permuted(np.tile(_of_size(target_space.dim, self._n_skipped), (n_random, 1)), axis=1)
        drawn = drawn[np.argsort(-value(drawn), kind="stable")]
        starts = [*self._best_seen(target_space), *drawn][:n_smart]
        tops = [climb(start, value, rng) for start in starts]
        return max(tops, key=lambda top: top[1])[0]

    def _best_seen(self, target_space: Any) -> list[Array]:
        fitting = np.flatnonzero(target_space.params.sum(axis=1) == self._n_skipped)
        return [target_space.params[max(fitting, key=lambda i: target_space.target[i])]] if len(fitting) else []


def suggest(points: Sequence[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Return the layer set of `n_skipped` sub-layers with the highest bound on its score, given at least one point."""
    mean = sum(score for _, score in points) / len(points)
    scores = {bits: mean for bits in pending} | dict(points)  # sets still being scored must not be suggested again
    ucb = LayerSetUcb(n_skipped)
    suggestion = next_point(scores.items(), ucb, seed, alpha=NOISE, n_restarts_optimizer=N_RESTARTS)
    return tuple(round(float(bit)) for bit in suggestion)


def next_point(
    points: Iterable[tuple[ArrayLike, float]], acquisition: AcquisitionFunction, seed: int, **process: Any
) -> Array:
    """Return the point of the unit cube that `acquisition` prefers, given some points and their values.

    Args: process: settings of scikit-learn's Gaussian process.
    """
    known = [(np.asarray(point, dtype=float), value) for point, value in points]
    names = [f"x{i:04}" for i in range(len(known[0][0]))]
    optimizer = BayesianOptimization(
        f=None,
        pbounds=dict.fromkeys(names, (0.0, 1.0)),
        acquisition_function=acquisition,
        random_state=seed,
        allow_duplicate_points=True,
        verbose=0,
    )
    optimizer.set_gp_params(**process)
    for point, value in known:
        # The space's own `register`: the optimizer's lists every earlier point each time for a log that is off.
        optimizer.space.register(point, value)
    suggestion = optimizer.suggest()
    return np.array([suggestion[name] for name in names])


def climb(start: Array, value: Value, rng: np.random.Generator) -> tuple[Array, float]:
    """Exchange one skipped sub-layer for a kept one, the best exchange each time, until none is better.

    Returns: the set and its bound.
    """
    top, top_value = start, float(value(start[None])[0])
    for _ in range(MAX_CLIMB_STEPS):
        rows = exchanges(top, rng)
        if not len(rows):
            break
        values = value(rows)
        best = int(values.argmax())
        if not values[best] > top_value:
            break
        top, top_value = rows[best], float(values[best])
    return top, top_value


def exchanges(row: Array, rng: np.random.Generator) -> Array:
    """Return the layer sets one exchange away, shape (n, size): all, or a sample where there are too many."""
    skipped, kept = np.flatnonzero(row == 1), np.flatnonzero(row == 0)
    pairs = np.array([(out, into) for out in skipped for into in kept], dtype=int).reshape(-1, 2)
    if len(pairs) > N_NEIGHBOURS:
        pairs = pairs[rng.choice(len(pairs), N_NEIGHBOURS, replace=False)]
    rows = np.tile(row, (len(pairs), 1))
    each = np.arange(len(pairs))
    rows[each, pairs[:, 0]] = 0.0
    rows[each, pairs[:, 1]] = 1.0
    return rows


def _of_size(size: int, n_skipped: int) -> Array:
    return np.concatenate([np.ones(n_skipped), np.zeros(size - n_skipped)])
