"""The suggestion process, `python -m swiftopt.optimizer.suggestions`: which layer set to try next, by earlier scores.

One JSON object per line goes each way. A request names the `engine`, one of the functions `gp`, `cube` and `tpe`, and
holds its `seed`, `n_skipped`, all `scores` so far (pairs of a 0/1 string and a score) and the sets being scored
(`pending`: 0/1 strings); the answer is `{"bits": [0, 1, …]}` or `{"error": "…"}`. It depends on the request alone.
Self-SD's search uses `next_point`, too.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .strategies.base import Bits

P = TypeVar("P")  # a layer set, or any point of a search
Array = NDArray[np.float64]
Value = Callable[[Array], Array]  # (n, size) points to (n,) bounds

NICENESS = 10  # added to the priority value of the process: decoding goes first

# Measured with these limits on one core: 0.08 s per suggestion in 56 dimensions (30 layers), 0.04 s in 156 (80 layers).
# Spread over β = 25 steps that is a tenth or less of what a random step costs. On a noisy objective (56 dimensions, 300
# steps, 12 seeds) the best set found was within 2 % of what 300 points and three climbs over all exchanges found.
MAX_POINTS = 200
N_RESTARTS = 0  # further starts of the length scale's fit
N_RANDOM = 100  # random layer sets, which are climbed from where no set was seen, or is better
N_CLIMBS = 1  # climbs: from the best set seen, then from the best random ones
N_NEIGHBOURS = 256  # exchanges looked at per step of a climb
MAX_CLIMB_STEPS = 64

LIBRARY_NOISE, PUBLISHED_NOISE = 1e-6, 1e-2  # `alpha` of bayesian-optimization, and of SWIFT's code (set_gp_params)
KAPPA = 2.5  # weight of the uncertainty, as in SWIFT's code
# Share of the scores' variance that is noise. A score comes from one window of text; with less than this the process
# chases lucky windows: best true score of 100 pure steps 0.95 of the optimum at 0.3, 0.89 at 0.05 (56 dimensions).
NOISE = 0.3

# Measured on one core: 0.2 s per suggestion at 300 points and 0.6 s at 1000 in 56 dimensions (30 layers), 1.5 s at 1000
# in 156 (80 layers). Optuna's default, sub-layers jointly, found better sets than `multivariate=False` at equal cost
# (0.91 against 0.88 of the optimum in 150 steps).
MAX_TPE_POINTS = 1000


# The engines. Each loads its own library, which takes seconds, inside its function. Arguments: the scored sets, one at
# least; the sets that are being scored; how many sub-layers to skip; a seed.


def gp(scores: Iterable[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Return the layer set of `n_skipped` sub-layers with the highest upper confidence bound of a Gaussian process.

    DEVIATION: SWIFT maximises it over the continuous cube, skips the largest coordinates, and registers the continuous
    point. Here it is maximised over layer sets, by exchanges, so that a score belongs to the set that was run. On a
    separable objective (56 dimensions, 28 suggestions) this reached 1.00 of the optimum instead of 0.98, in a tenth of
    the time: a numeric gradient in the cube costs 57 predictions per step.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    points = points_of(scores, MAX_POINTS)
    mean = sum(score for _, score in points) / len(points)
    value_of = {bits: mean for bits in pending} | dict(points)  # sets still being scored must not be suggested again
    rows, values = np.array(list(value_of), dtype=float), np.array(list(value_of.values()))
    taken = {row.tobytes() for row in rows}
    draws = np.random.RandomState(seed)
    process = GaussianProcessRegressor(  # as bayesian-optimization's, but for the last two
        Matern(nu=2.5), normalize_y=True, random_state=draws, alpha=NOISE, n_restarts_optimizer=N_RESTARTS
    ).fit(rows, values)
    rng = np.random.default_rng(draws.randint(2**32, dtype=np.uint32))

    def bound(candidates: Array) -> Array:
        """Return the upper confidence bounds; of known sets minus infinity."""
        expected, deviation = process.predict(candidates, return_std=True)
        return np.where([row.tobytes() in taken for row in candidates], -np.inf, expected + KAPPA * deviation)

    some = np.repeat([1.0, 0.0], [n_skipped, rows.shape[1] - n_skipped])
    drawn = rng.permuted(np.tile(some, (N_RANDOM, 1)), axis=1)
    drawn = drawn[np.argsort(-bound(drawn), kind="stable")]
    fitting = [i for i in range(len(rows)) if rows[i].sum() == n_skipped]
    seen = [rows[max(fitting, key=lambda i: values[i])]] if fitting else []
    tops = [climb(start, bound, rng) for start in [*seen, *drawn][:N_CLIMBS]]
    best = max(tops, key=lambda top: top[1])[0]
    return tuple(map(int, best))


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
    pairs = np.stack(np.meshgrid(np.flatnonzero(row == 1), np.flatnonzero(row == 0), indexing="ij"), -1).reshape(-1, 2)
    if len(pairs) > N_NEIGHBOURS:
        pairs = pairs[rng.choice(len(pairs), N_NEIGHBOURS, replace=False)]
    rows = np.tile(row, (len(pairs), 1))
    row_numbers = np.arange(len(pairs))[:, None]
    rows[row_numbers, pairs] = [0.0, 1.0]
    return rows


def cube(scores: Iterable[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Return the `n_skipped` largest coordinates of the point with the highest bound, as SWIFT's code does (Eq. 2).

    DEVIATION: the points that the process knows are the 0/1 sets that were run, where the published code registers the
    continuous point that it was given. `pending` is not used, for it is asked for one candidate at a time.
    """
    point = next_point(scores, seed, PUBLISHED_NOISE, most=None)
    chosen = set(np.argsort(-point, kind="stable")[:n_skipped].tolist())
    return tuple(int(i in chosen) for i in range(len(point)))


def next_point(
    scores: Iterable[tuple[tuple[float, ...], float]],
    seed: int,
    noise: float = LIBRARY_NOISE,
    most: int | None = MAX_POINTS,
) -> Array:
    """Return the point of the unit cube with the highest upper confidence bound (bayesian-optimization 3.4).

    `noise` is the library's `alpha`, and `most` how many scored points it sees (None: all). Its `BayesianOptimization`
    does the same, to the bit, in twice the time: for each of thousands of predictions it goes through the coordinates,
    which may be no numbers elsewhere, and scikit-learn through the settings.
    """
    from bayes_opt.acquisition import UpperConfidenceBound
    from bayes_opt.target_space import TargetSpace
    from sklearn import config_context
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    points = points_of(scores, most)
    names = [f"x{i:04}" for i in range(len(points[0][0]))]
    draws = np.random.RandomState(seed)
    space = TargetSpace(None, dict.fromkeys(names, (0.0, 1.0)), random_state=draws, allow_duplicate_points=True)
    for point, value in points:
        space.register(np.asarray(point, dtype=float), value)
    process = GaussianProcessRegressor(
        Matern(nu=2.5), alpha=noise, normalize_y=True, n_restarts_optimizer=5, random_state=draws
    )
    with config_context(assume_finite=True, skip_parameter_validation=True):
        suggestion = UpperConfidenceBound(kappa=KAPPA).suggest(process, space, random_state=draws)
    return np.asarray(suggestion, dtype=np.float64)


def tpe(scores: Iterable[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Return a layer set drawn from where good scores are dense, by Optuna's tree-structured Parzen estimator.

    `pending` is not used: the estimator draws, so two suggestions differ anyway.
    """
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution

    points = points_of(scores, MAX_TPE_POINTS)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = [f"sub_layer_{i:04}" for i in range(len(points[0][0]))]
    space: dict[str, BaseDistribution] = {name: CategoricalDistribution((0, 1)) for name in names}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for bits, score in points:
        # What was run, which is the repaired suggestion, so the study learns from the sets that were scored.
        params = dict(zip(names, bits, strict=True))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=score))
    trial = study.ask(space)
    return repaired([int(trial.params[name]) for name in names], n_skipped, random.Random(seed))


def repaired(bits: Sequence[int], n_skipped: int, rng: random.Random) -> Bits:
    """Flip as few of the bits, at random, as give `n_skipped` sub-layers."""
    surplus = sum(bits) - n_skipped
    flippable = [i for i, bit in enumerate(bits) if bit == int(surplus > 0)]
    flipped = set(rng.sample(flippable, abs(surplus)))
    return tuple(1 - bit if i in flipped else bit for i, bit in enumerate(bits))


def points_of(scores: Iterable[tuple[P, float]], limit: int | None) -> list[tuple[P, float]]:
    """Return at most `limit` sets with their mean scores: the best of the older ones, then the latest (two thirds).

    A set scored twice saw two windows of text; its mean is the better estimate, and bayesian-optimization takes no
    point twice. Its latest score gives its place in the order.
    """
    by_set: dict[P, list[float]] = {}
    for bits, score in scores:
        by_set[bits] = [*by_set.pop(bits, []), score]
    points = [(bits, sum(set_scores) / len(set_scores)) for bits, set_scores in by_set.items()]
    if limit is None or len(points) <= limit:
        return points
    n_latest = limit * 2 // 3
    older, latest = points[:-n_latest], points[-n_latest:]
    best = sorted(older, key=lambda point: point[1], reverse=True)[: limit - n_latest]
    return best + latest


ENGINES = {"gp": gp, "cube": cube, "tpe": tpe}


def answer(request: Mapping[str, Any]) -> Bits:
    """Suggest a layer set."""
    scores = [(_bits(text), score) for text, score in request["scores"]]
    pending = [_bits(text) for text in request["pending"]]
    return ENGINES[request["engine"]](scores, pending, request["n_skipped"], request["seed"])


def _bits(text: str) -> Bits:
    return tuple(map(int, text))


def main() -> None:
    """Answer requests until the standard input ends."""
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # scikit-learn warns of each fit that ends at a bound; nobody reads it here
    gc.disable()  # until the libraries are loaded, which stay: to walk them again and again takes a sixth of the time
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up between two answers
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"bits": answer(json.loads(line))}
        except Exception as error:  # whatever it is, the other side logs it and goes on without
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        gc.enable()


if __name__ == "__main__":
    main()
