"""The suggestion process, `python -m swiftopt.optimizer.suggestions`: suggests the next layer set from the scores.

It reads requests from standard input and writes answers to standard output, one JSON object per line. A request has the
name of an `engine` (`gp`, `cube` or `tpe`), a `seed`, `n_skipped`, all `scores` so far (pairs of a 0/1 string and a
score), and the sets that are being scored (`pending`, 0/1 strings). The answer is `{"bits": [0, 1, …]}` or
`{"error": "…"}`, and depends only on the request. Self-SD's search also uses `next_point`.
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

P = TypeVar("P")  # A layer set, or any point of a search space.
Array = NDArray[np.float64]
Value = Callable[[Array], Array]  # Maps points (n, size) to upper confidence bounds (n,).

NICENESS = 10  # Added to the process's nice value, so that decoding gets the CPU first.

# With these limits a suggestion takes 0.08 s on one core in 56 dimensions (30 layers), 0.04 s in 156 (80 layers).
# Spread over the interval of β = 25 steps, that is at most a tenth of a random step's cost. Quality on a noisy
# objective (56 dimensions, 300 steps, 12 seeds): within 2 % of 300 points and three climbs over all exchanges.
MAX_POINTS = 200
N_RESTARTS = 0  # Additional starts for fitting the kernel's length scale.
N_RANDOM = 100  # Random layer sets; climbs start from the best of them if no set was scored yet.
N_CLIMBS = 1  # Climbs per suggestion: from the best scored set first, then from random ones.
N_NEIGHBOURS = 256  # Maximum exchanges evaluated per step of a climb.
MAX_CLIMB_STEPS = 64

LIBRARY_NOISE, PUBLISHED_NOISE = 1e-6, 1e-2  # `alpha` in bayesian-optimization and in SWIFT's code (set_gp_params).
KAPPA = 2.5  # Weight of the standard deviation in the upper confidence bound, as in SWIFT's code.
# Assumed share of noise in the scores' variance. A score comes from one window of text; if less noise is assumed, the
# search follows lucky windows. After 100 noise-free steps in 56 dimensions the best true score was 0.95 of the optimum
# with 0.3, and 0.89 with 0.05.
NOISE = 0.3

# A suggestion of Optuna's sampler takes 0.2 s on one core at 300 points and 0.6 s at 1000 in 56 dimensions (30 layers),
# 1.5 s at 1000 points in 156 dimensions (80 layers). Its default settings found better sets than `multivariate=False`
# at equal cost (0.91 of the optimum against 0.88, in 150 steps).
MAX_TPE_POINTS = 1000


# Engines. Each imports its library inside its function, because the import takes seconds. Arguments: scored sets (at
# least one), sets that are being scored, number of sub-layers to skip, seed.


def gp(scores: Iterable[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Return the layer set of `n_skipped` sub-layers with the highest upper confidence bound of a Gaussian process.

    DEVIATION: SWIFT maximises the bound over the continuous cube, skips the largest coordinates, and registers the
    continuous point. Here the bound is maximised over layer sets by exchanges, so that a score belongs to the set that
    was run. On a separable objective (56 dimensions, 28 suggestions) this reached 1.00 of the optimum instead of 0.98,
    in a tenth of the time: a numeric gradient in the cube costs 57 predictions per step.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    points = points_of(scores, MAX_POINTS)
    mean = sum(score for _, score in points) / len(points)
    # Pending sets count with the mean score, so that they are not suggested again.
    score_of_set = {bits: mean for bits in pending} | dict(points)
    known_rows, known_scores = np.array(list(score_of_set), dtype=float), np.array(list(score_of_set.values()))
    known_bytes = {row.tobytes() for row in known_rows}
    random_state = np.random.RandomState(seed)
    # The settings are those of bayesian-optimization, except for alpha and n_restarts_optimizer.
    gaussian_process = GaussianProcessRegressor(
        Matern(nu=2.5), normalize_y=True, random_state=random_state, alpha=NOISE, n_restarts_optimizer=N_RESTARTS
    ).fit(known_rows, known_scores)
    generator = np.random.default_rng(random_state.randint(2**32, dtype=np.uint32))

    def upper_bound(candidates: Array) -> Array:
        """Return the upper confidence bounds; minus infinity for sets already scored or pending."""
        expected, deviation = gaussian_process.predict(candidates, return_std=True)
        return np.where([row.tobytes() in known_bytes for row in candidates], -np.inf, expected + KAPPA * deviation)

    example_row = np.repeat([1.0, 0.0], [n_skipped, known_rows.shape[1] - n_skipped])
    random_rows = generator.permuted(np.tile(example_row, (N_RANDOM, 1)), axis=1)
    random_rows = random_rows[np.argsort(-upper_bound(random_rows), kind="stable")]
    allowed_indices = [index for index in range(len(known_rows)) if known_rows[index].sum() == n_skipped]
    start_rows = [known_rows[max(allowed_indices, key=lambda index: known_scores[index])]] if allowed_indices else []
    climbed = [climb(start_row, upper_bound, generator) for start_row in [*start_rows, *random_rows][:N_CLIMBS]]
    best_row = max(climbed, key=lambda row_and_bound: row_and_bound[1])[0]
    return tuple(map(int, best_row))


def climb(start: Array, value: Value, rng: np.random.Generator) -> tuple[Array, float]:
    """Climb to a layer set with a locally highest bound: apply the best exchange until none improves the bound.

    An exchange skips a sub-layer that was kept, and keeps one that was skipped.

    Returns: the set and its bound.
    """
    best_row, best_value = start, float(value(start[None])[0])
    for _ in range(MAX_CLIMB_STEPS):
        rows = exchanges(best_row, rng)
        if not len(rows):
            break
        values = value(rows)
        best_index = int(values.argmax())
        if not values[best_index] > best_value:
            break
        best_row, best_value = rows[best_index], float(values[best_index])
    return best_row, best_value


def exchanges(row: Array, rng: np.random.Generator) -> Array:
    """Return the layer sets one exchange away, shape (n, size); a random sample if more than `N_NEIGHBOURS`."""
    pairs = np.stack(np.meshgrid(np.flatnonzero(row == 1), np.flatnonzero(row == 0), indexing="ij"), -1).reshape(-1, 2)
    if len(pairs) > N_NEIGHBOURS:
        pairs = pairs[rng.choice(len(pairs), N_NEIGHBOURS, replace=False)]
    rows = np.tile(row, (len(pairs), 1))
    row_numbers = np.arange(len(pairs))[:, None]
    rows[row_numbers, pairs] = [0.0, 1.0]
    return rows


def cube(scores: Iterable[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Skip the `n_skipped` largest coordinates of the point with the highest bound, as SWIFT's code does (Eq. 2).

    DEVIATION: the process is fitted to the 0/1 sets that were run; the published code registers the continuous points.
    `pending` is not used, because this engine is asked for one candidate at a time.
    """
    point = next_point(scores, seed, PUBLISHED_NOISE, max_points=None)
    chosen_indices = set(np.argsort(-point, kind="stable")[:n_skipped].tolist())
    return tuple(int(index in chosen_indices) for index in range(len(point)))


def next_point(
    scores: Iterable[tuple[tuple[float, ...], float]],
    seed: int,
    noise: float = LIBRARY_NOISE,
    max_points: int | None = MAX_POINTS,
) -> Array:
    """Return the point of the unit cube with the highest upper confidence bound, as bayesian-optimization 3.4 does.

    The library's class `BayesianOptimization` returns the same point, but takes twice as long: it and scikit-learn
    check coordinates and settings at each of thousands of predictions.

    Args: noise: the library's `alpha`. max_points: maximum number of scored points to use; None: all.
    """
    from bayes_opt.acquisition import UpperConfidenceBound
    from bayes_opt.target_space import TargetSpace
    from sklearn import config_context
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    points = points_of(scores, max_points)
    names = [f"x{i:04}" for i in range(len(points[0][0]))]
    random_state = np.random.RandomState(seed)
    space = TargetSpace(None, dict.fromkeys(names, (0.0, 1.0)), random_state=random_state, allow_duplicate_points=True)
    for point, value in points:
        space.register(np.asarray(point, dtype=float), value)
    gaussian_process = GaussianProcessRegressor(
        Matern(nu=2.5), alpha=noise, normalize_y=True, n_restarts_optimizer=5, random_state=random_state
    )
    with config_context(assume_finite=True, skip_parameter_validation=True):
        suggestion = UpperConfidenceBound(kappa=KAPPA).suggest(gaussian_process, space, random_state=random_state)
    return np.asarray(suggestion, dtype=np.float64)


def tpe(scores: Iterable[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Return a layer set suggested by Optuna's tree-structured Parzen estimator.

    `pending` is not used: the estimator draws at random, so two suggestions differ anyway.
    """
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution

    points = points_of(scores, MAX_TPE_POINTS)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = [f"sub_layer_{i:04}" for i in range(len(points[0][0]))]
    space: dict[str, BaseDistribution] = {name: CategoricalDistribution((0, 1)) for name in names}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for bits, score in points:
        # These are the sets that were scored, after `repair`, not the estimator's original suggestions.
        params = dict(zip(names, bits, strict=True))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=score))
    trial = study.ask(space)
    return repair([int(trial.params[name]) for name in names], n_skipped, random.Random(seed))


def repair(bits: Sequence[int], n_skipped: int, rng: random.Random) -> Bits:
    """Return `bits` with `n_skipped` ones: flips as few bits as possible, chosen at random."""
    surplus = sum(bits) - n_skipped
    flippable = [index for index, bit in enumerate(bits) if bit == int(surplus > 0)]
    flipped_indices = set(rng.sample(flippable, abs(surplus)))
    return tuple(1 - bit if index in flipped_indices else bit for index, bit in enumerate(bits))


def points_of(scores: Iterable[tuple[P, float]], limit: int | None) -> list[tuple[P, float]]:
    """Return at most `limit` sets with their mean scores: the latest ones (two thirds), after the best older ones.

    Scores of one set come from several windows of text, so their mean is the better estimate, and
    bayesian-optimization accepts each point only once. The order is that of the sets' latest scores.
    """
    by_set: dict[P, list[float]] = {}
    for bits, score in scores:
        by_set[bits] = [*by_set.pop(bits, []), score]
    points = [(bits, sum(set_scores) / len(set_scores)) for bits, set_scores in by_set.items()]
    if limit is None or len(points) <= limit:
        return points
    n_latest = limit * 2 // 3
    older_points, latest_points = points[:-n_latest], points[-n_latest:]
    best_points = sorted(older_points, key=lambda point: point[1], reverse=True)[: limit - n_latest]
    return best_points + latest_points


ENGINES = {"gp": gp, "cube": cube, "tpe": tpe}


def suggest(request: Mapping[str, Any]) -> Bits:
    """Return the layer set that a request's engine suggests, as bits."""
    scores = [(_parse_bits(text), score) for text, score in request["scores"]]
    pending = [_parse_bits(text) for text in request["pending"]]
    return ENGINES[request["engine"]](scores, pending, request["n_skipped"], request["seed"])


def _parse_bits(text: str) -> Bits:
    return tuple(map(int, text))


def main() -> None:
    """Answer requests until the standard input ends."""
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # Hide scikit-learn's warnings about fits that end at a bound.
    # Disable garbage collection until the first answer, because it takes a sixth of the libraries' loading time.
    gc.disable()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Redirect what libraries print to stderr, because stdout carries the answers.
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"bits": suggest(json.loads(line))}
        except Exception as error:
            # The parent process logs the error and continues without a suggestion.
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        gc.enable()


if __name__ == "__main__":
    main()
