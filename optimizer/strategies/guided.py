"""Search guided by a study of the model: first the sets that the study found, then moves around the best ones.

Sets are rated by a linear-Gaussian model, fitted to the trials: each skipped sub-layer adds its effect to the draft's
loss. The loss of a layer set is -log of its score. An effect may be negative, because a shorter pass saves time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.layer_sets import LayerSet, SubLayer
from ...core.types import Trial
from .base import Bits, ExpertLevels, Proposal, SearchProblem, Strategy, StrategyInfo, Study, StudyKind

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[float64]

SETS_PER_STUDY = 8  # Sets per study that are scored before the search tries moves.
MAX_MOVES = 6  # Maximum moves from the best scored set to a candidate; with 3 the search stopped too early.
MAX_SWAPPED = 12  # Exchanges are limited to this many skipped and this many kept units, those with the best effects.
LEAD_DEVIATIONS = 1.0  # Standard deviations by which a set must beat the set in use to replace it.
SAMPLE_SPREAD = 0.3  # Factor on the posterior's standard deviation when moves are sampled.

MAX_POINTS = 300  # Maximum trials used in a fit; 300 take 4 ms on one core.
MIN_SCORE = 0.03  # Minimum score in a fit, so that its logarithm stays bounded.

# Prior mean of a sub-layer's effect: TURN_HARM times its relative turn of the residual stream, minus SAVING_GAIN times
# the plain passes that skipping it saves. A draft of matchness m and cost c has a speed of about
# (1 + 2.5 √m) / (2.5 c + 1.2); SAVING_GAIN approximates how fast the logarithm of this falls with c.
TURN_HARM = 0.03
SAVING_GAIN = 0.9
OWN_DEVIATION = 0.05  # Prior standard deviation of each sub-layer's own effect.
SHARED_DEVIATION = 0.02  # Prior standard deviation of the part of the effect that all sub-layers share.
# Prior turn of the residual stream by the first halving of a token's experts, as a share of its MLP's turn. A token's
# first experts have the largest weights, so each further halving turns the stream twice as far.
FIRST_HALVING_TURN = 0.1
CONSTANT_DEVIATION = 1.0  # Prior standard deviation of the constant term.
# Standard deviations of the noise, fitted to 330 scores of Qwen2.5-Coder-1.5B on HumanEval and to scores of unseen sets
# over 32 windows.
WINDOW_NOISE = 0.1  # Noise that a window adds to every set scored on it.
SUB_LAYER_NOISE = 0.02  # Noise that a window adds per skipped sub-layer.
TOKEN_NOISE = 0.8  # Noise of a single score over one token; divided by the root of the window's length.


class GuidedStrategy(Strategy):
    """Proposes the sets that a linear model of the scores rates best: first those of a study, then those of moves.

    A move skips one unit more or fewer, or exchanges two; a unit is a sub-layer, a layer, or a number of experts. With
    savings, the strategy chooses the number of skipped sub-layers; without, candidates skip exactly `n_skipped`.
    Origins are "family" (a set of a study), "move" and "random".

    Args: study: kind of the studies, run on `n_studies` prompts. whole_layers: skip both sub-layers of a layer or none.
    """

    def __init__(
        self, problem: SearchProblem, study: StudyKind, n_studies: int = 1, whole_layers: bool = False
    ) -> None:
        super().__init__(problem)
        self._study, self._n_studies, self._savings = study, n_studies, problem.savings
        self._n_bits = len(problem.bits_of(problem.base))
        self._whole_layers = whole_layers = whole_layers or problem.whole_layers
        bit_of = {sub_layer: bit for bit, sub_layer in enumerate(problem.searched)}
        n_layers = problem.base.n_layers
        pairs: list[tuple[SubLayer, SubLayer]] = [(("attn", layer), ("mlp", layer)) for layer in range(n_layers)]
        # A layer may have only one searchable sub-layer.
        layers = [tuple(bit_of[sub_layer] for sub_layer in pair if sub_layer in bit_of) for pair in pairs]
        self._layers = [layer for layer in layers if layer]
        singles: list[tuple[int, ...]] = [] if whole_layers else [(i,) for i in range(self.size)]
        # Bits that a move flips together.
        self._units = list(dict.fromkeys((*singles, *self._layers)))
        self._units += expert_units(problem.experts, self.size)
        if problem.project is not None and not whole_layers:
            # Also move each MLP together with the next layer's attention: attention and MLP then still alternate.
            pairs = [(("mlp", layer), ("attn", layer + 1)) for layer in range(n_layers)]
            self._units += [
                tuple(bit_of[sub_layer] for sub_layer in pair) for pair in pairs if bit_of.keys() >= {*pair}
            ]
        self._studies: dict[str, Study] = {}
        self._trials: list[ScoredSet] = []
        self._cached_model: Posterior | None = None

    def propose(self) -> Proposal:
        rng = self.next_step()
        bits, origin = next(self._rank_candidates(rng), ((), ""))
        if not origin:
            n_skipped = self.n_skipped if self._savings is None else rng.randint(0, self.size)
            bits, origin = self._padded(self.problem.draw(n_skipped, rng)), "random"
        return self.claim_unseen(bits, origin, rng)

    def observe(self, trial: Trial) -> None:
        window = f"{trial.prompt_id}/{trial.position}"
        self._trials.append(ScoredSet(self.mark_seen(trial), trial.score, window))
        self._cached_model = None

    def wants(self, prompt_id: str) -> StudyKind | None:
        """Request a study of each new prompt's window, for the first `n_studies` prompts."""
        is_due = self.size and prompt_id not in self._studies and len(self._studies) < self._n_studies
        return self._study if is_due else None

    def study(self, prompt_id: str, study: Study) -> None:
        """Receive a study: sets to try, and how far each sub-layer turns the residual stream."""
        self._studies[prompt_id] = study
        self._cached_model = None

    def best(self, in_use: LayerSet) -> LayerSet:
        """Return the scored set with the best rating by the fitted model; `in_use` if none is probably better.

        The model uses the trials of all sets, which say more than the few windows of one set.
        """
        scored_sets = self._scored_sets()
        if not scored_sets:
            return in_use
        leads = self._model().lead(scored_sets, self.problem.bits_of(in_use), LEAD_DEVIATIONS)
        best_index = int(leads.argmax())
        return self.problem.set_of(scored_sets[best_index]) if leads[best_index] > 0 else in_use

    def state(self) -> dict[str, Any]:
        """Return the position and the studies."""
        return {
            **super().state(),
            "studies": {prompt_id: study.to_json() for prompt_id, study in self._studies.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        super().restore(state)
        self._studies = {prompt_id: Study.from_json(study) for prompt_id, study in state["studies"].items()}
        self._cached_model = None

    def _rank_candidates(self, rng: random.Random) -> Iterator[tuple[Bits, str]]:
        """Yield unseen sets with their origins, the most promising first."""
        if not self.size:
            return
        model = self._model()
        study_sets = [bits for bits in self._study_sets(model.mean) if self._is_allowed(bits)]
        if sum(bits in self.seen for bits in study_sets) < SETS_PER_STUDY * max(1, len(self._studies)):
            order = (-worth(study_sets, model.mean)).argsort(kind="stable")
            yield from ((study_sets[index], "family") for index in order if study_sets[index] not in self.seen)
        sampled_effects = model.draw(rng.getrandbits(32), SAMPLE_SPREAD)
        yield from ((bits, "move") for bits in self._climb(sampled_effects, model.mean))

    def _is_allowed(self, bits: Bits) -> bool:
        if self._whole_layers and any(len({bits[index] for index in layer}) > 1 for layer in self._layers):
            return False
        return self._savings is not None or sum(bits) == self.n_skipped

    def _study_sets(self, effects: Array) -> list[Bits]:
        """Return the sets of all studies.

        If these have none, return nested sets that skip one more unit each, in the order of the units' `effects`.
        """
        study_sets = dict.fromkeys(self._padded(bits) for study in self._studies.values() for bits in study.sets)
        if study_sets:
            return [*self._expert_sets(), *study_sets]
        sets: dict[Bits, None] = {}
        skipped: set[int] = set()
        for unit in sorted(self._units, key=lambda unit: _added_loss(unit, effects)):
            skipped.update(unit)
            bits = tuple(int(index in skipped) for index in range(self._n_bits))
            sets[self.problem.canonical(bits)] = None
        return [*self._expert_sets(), *sets]

    def _padded(self, bits: Bits) -> Bits:
        """Return `bits` with expert bits; if they lack these, a token takes as many experts as in the model."""
        return bits + (0,) * (self._n_bits - len(bits))

    def _expert_sets(self) -> list[Bits]:
        """Return the sets that skip nothing and take the same number of experts in all layers, for each number."""
        levels = self.problem.experts
        if levels is None:
            return []
        n, n_layers = len(levels.numbers), len(levels.layers)
        rows = [tuple(int(level <= chosen) for level in range(n)) * n_layers for chosen in range(n)]
        return [(0,) * self.size + row for row in rows]

    def _climb(self, sampled_effects: Array, mean_effects: Array) -> list[Bits]:
        """Climb from the best scored set by the sampled effects; return the unseen sets on the way, best first."""
        scored_sets = self._scored_sets()
        if not scored_sets:
            return []
        current_set = scored_sets[int(worth(scored_sets, mean_effects).argmax())]
        current_worth = float(worth([current_set], sampled_effects)[0])
        worth_of_unseen: dict[Bits, float] = {}
        for _ in range(MAX_MOVES):
            neighbours = self._neighbours(current_set, sampled_effects)
            if not neighbours:
                break
            worths = worth(neighbours, sampled_effects)
            worth_of_unseen |= {
                bits: float(set_worth)
                for bits, set_worth in zip(neighbours, worths, strict=True)
                if bits not in self.seen
            }
            best_index = int(worths.argmax())
            if not worths[best_index] > current_worth:
                break
            current_set, current_worth = neighbours[best_index], float(worths[best_index])
        return sorted(worth_of_unseen, key=lambda bits: -worth_of_unseen[bits])

    def _scored_sets(self) -> list[Bits]:
        return [bits for bits in dict.fromkeys(trial.bits for trial in self._trials) if self._is_allowed(bits)]

    def _neighbours(self, bits: Bits, effects: Array) -> list[Bits]:
        """Return the allowed sets one move away."""
        skipped_units = [unit for unit in self._units if all(bits[index] for index in unit)]
        kept_units = [unit for unit in self._units if not any(bits[index] for index in unit)]
        skipped_units.sort(key=lambda unit: -_added_loss(unit, effects))
        kept_units.sort(key=lambda unit: _added_loss(unit, effects))
        swaps = [
            [restored_unit, skipped_unit]
            for restored_unit in skipped_units[:MAX_SWAPPED]
            for skipped_unit in kept_units[:MAX_SWAPPED]
        ]
        if self._savings is None:
            moves = [
                [restored_unit, skipped_unit]
                for restored_unit, skipped_unit in swaps
                if len(restored_unit) == len(skipped_unit)
            ]
        else:
            moves = [*swaps, *([unit] for unit in (*skipped_units, *kept_units))]
        flipped_bits = [{index for unit in move for index in unit} for move in moves]
        neighbour_sets = [
            tuple(1 - bit if index in flips else bit for index, bit in enumerate(bits)) for flips in flipped_bits
        ]
        neighbour_sets = list(dict.fromkeys(map(self.problem.canonical, neighbour_sets)))
        return [
            neighbour
            for neighbour in neighbour_sets
            if neighbour != bits and self.problem.project_bits(neighbour) == neighbour
        ]

    def _model(self) -> Posterior:
        """Return the model fitted to all studies and trials; it is refitted after each new one."""
        import numpy as np

        if self._cached_model is None:
            turns = np.ones(self.size)
            if self._studies:
                turns = np.mean([study.turns for study in self._studies.values()], axis=0)
                turns = turns / max(1e-12, float(turns.mean()))
            if self.problem.experts is not None:
                mlp_turns = turns[self.size // 2 :].tolist()
                turns = np.append(turns, np.array(expert_turns(self.problem.experts, mlp_turns)))
            savings = np.zeros(self._n_bits) if self._savings is None else np.array(self._savings)
            self._cached_model = posterior(turns, savings, self._trials, self.problem.window)
        return self._cached_model


def expert_units(levels: ExpertLevels | None, first: int) -> list[tuple[int, ...]]:
    """Return the expert bits that a move flips together: each bit, and for each number its bits in all layers.

    Args: first: index of the first expert bit.
    """
    if levels is None:
        return []
    n_bits, n = len(levels.layers) * len(levels.numbers), len(levels.numbers)
    all_layers = [tuple(range(first + level, first + n_bits, n)) for level in range(n)]
    return [*((first + index,) for index in range(n_bits)), *all_layers]


def expert_turns(levels: ExpertLevels, mlp_turns: Sequence[float]) -> list[float]:
    """Return how far the experts that each bit drops turn the residual stream, as a share of their MLP's turn.

    Args: mlp_turns: of the inner layers' MLPs.
    """
    shares = [FIRST_HALVING_TURN * 2**level for level in range(len(levels.numbers))]
    return [share * mlp_turns[layer - 1] for layer in levels.layers for share in shares]


class ScoredSet(NamedTuple):
    """A trial's set, its score and its window."""

    bits: Bits
    score: float
    window: str


class Posterior(NamedTuple):
    """A normal distribution over the effects of the bits and, last, the constant term: shape (size + 1)."""

    mean: Array
    covariance: Array

    def draw(self, seed: int, spread: float) -> Array:
        """Return a sample of the effects; its deviations from the mean are scaled by `spread`."""
        import numpy as np

        size = len(self.mean)
        normal_draws = np.random.default_rng(seed).standard_normal(size)
        cholesky_factor = np.linalg.cholesky(self.covariance + 1e-9 * np.eye(size))
        return np.asarray(self.mean + spread * (cholesky_factor @ normal_draws))

    def lead(self, set_rows: ArrayLike, base_row: ArrayLike, n_deviations: float) -> Array:
        """Return a lower bound on how much lower each set's loss is than the base's: shape (n,).

        Args: set_rows: bits of the sets, (n, size). base_row: bits of the base. n_deviations: the bound's distance from
              the mean, in standard deviations.
        """
        import numpy as np

        change = np.asarray(set_rows, dtype=float) - np.asarray(base_row, dtype=float)
        variance = np.einsum("ij,jk,ik->i", change, self.covariance[:-1, :-1], change)
        return np.asarray(-change @ self.mean[:-1] - n_deviations * np.sqrt(np.maximum(0.0, variance)))


def posterior(turns: Array, savings: Array, scored_sets: Sequence[ScoredSet], n_tokens: int) -> Posterior:
    """Return the posterior of the effects, given the scores of `scored_sets`.

    Args: turns: how far each bit's sub-layer turns the residual stream, with mean 1. savings: plain passes that each
          bit saves. n_tokens: tokens of a window.
    """
    import numpy as np

    scored_sets = scored_sets[-MAX_POINTS:]
    prior_mean = np.append(TURN_HARM * turns - SAVING_GAIN * savings, 0.0)
    shared_effect = np.append(SHARED_DEVIATION * turns, 0.0)
    prior_covariance = np.outer(shared_effect, shared_effect) + np.diag(
        np.append(OWN_DEVIATION * (0.5 + 0.5 * turns), CONSTANT_DEVIATION) ** 2
    )
    if not scored_sets:
        return Posterior(prior_mean, prior_covariance)
    rows = np.array([(*scored_set.bits, 1) for scored_set in scored_sets], dtype=float)
    window_names = np.array([scored_set.window for scored_set in scored_sets])
    loss = np.array([-log(max(MIN_SCORE, scored_set.score)) for scored_set in scored_sets])
    noise = (window_names[:, None] == window_names[None]) * (
        WINDOW_NOISE**2 + SUB_LAYER_NOISE**2 * (rows[:, :-1] @ rows[:, :-1].T)
    )
    noise += np.diag(np.full(len(scored_sets), TOKEN_NOISE**2 / n_tokens))
    cross_covariance = prior_covariance @ rows.T  # Shape (size + 1, points).
    kalman_gain = np.linalg.solve(rows @ cross_covariance + noise, cross_covariance.T).T
    return Posterior(
        prior_mean + kalman_gain @ (loss - rows @ prior_mean), prior_covariance - kalman_gain @ cross_covariance.T
    )


def worth(sets: Sequence[Bits], effects: Array) -> Array:
    """Return minus the predicted loss of each set, without the constant term: (n,). `effects`: see `Posterior`."""
    import numpy as np

    return np.asarray(-np.array(sets, dtype=float).reshape(-1, len(effects) - 1) @ effects[:-1])


def _added_loss(unit: Sequence[int], effects: Array) -> float:
    return float(sum(effects[index] for index in unit))


def _study_strategy(help: str, study: StudyKind, patience: int, **options: Any) -> StrategyInfo:
    return StrategyInfo(help, partial(GuidedStrategy, study=study, **options), study, patience)


STRATEGIES = {
    "local": _study_strategy("moves from the best set known", "similarity", 100),
    "knapsack": _study_strategy("a dynamic program over measured costs, then moves", "knapsack", 60, n_studies=2),
    "clasp": _study_strategy("the same with whole layers", "clasp", 100, n_studies=8, whole_layers=True),
}
