"""Search that looks at the model first: sets that a study found, then moves around the best of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.types import LayerSet, Trial
from .base import Bits, Proposal, SearchProblem, Strategy, Study, StudyKind, draw
from .surrogate import SCORES, Array, Posterior, ScoredSet, SpeedCurve, damage_of, features, fitted_curve, posterior

FAMILY = 8  # sets of each study that are tried before any move
REACH = 3  # moves between the set in use and a candidate
SWAPPED = 12  # of the sub-layers that may change places, the most promising of each side
SPREAD = 0.5  # of the posterior that a move's damages are drawn from


class GuidedStrategy(Strategy):
    """Proposes the sets that a linear model of damage rates best: first among a study's sets, then among moves.

    A move skips one sub-layer more or fewer, or exchanges two. Given prices it chooses how many are skipped, by the
    speed that damage and cost give; without, it keeps to n_skipped and maximises the score alone. Its origins are
    "family" (a study's set), "move" and "random".

    Args: study: what it looks at in the model, on `n_studies` prompts. whole_layers: attention and MLP of a layer go
          together.
    """

    def __init__(
        self, problem: SearchProblem, study: StudyKind, n_studies: int = 1, whole_layers: bool = False
    ) -> None:
        super().__init__(problem)
        self._study, self._n_studies, self._prices = study, n_studies, problem.prices
        half = self.size // 2
        layers = [(i, half + i) for i in range(half)]
        self._units = layers if whole_layers else [*((i,) for i in range(self.size)), *layers]
        if problem.project is not None:  # the other moves of two neighbours that keep attention and MLP alternating
            self._units += [(half + i, i + 1) for i in range(half - 1)]
        self._studies: dict[str, Study] = {}
        self._trials: list[tuple[Bits, float, float, str]] = []  # bits, matchness, score, window
        self._in_use: Bits | None = None
        self._fitted: tuple[Posterior, SpeedCurve] | None = None

    def propose(self) -> Proposal:
        rng = self.next_step()
        bits, origin = next(self._ideas(rng), ((), ""))
        if not origin:
            n_skipped = self.n_skipped if self._prices is None else rng.randint(0, self.size)
            bits, origin = draw(self.size, n_skipped, rng), "random"
        return self.proposed(bits, origin, rng)

    def observe(self, trial: Trial) -> None:
        bits = self.observed(trial)
        self._trials.append((bits, trial.matchness, trial.score, f"{trial.prompt_id}/{trial.position}"))
        self._in_use = bits if trial.adopted else self._in_use
        self._fitted = None

    def wants(self, prompt_id: str) -> StudyKind | None:
        """Ask for a study of each new prompt's window, as many as were wanted."""
        again = self.size and prompt_id not in self._studies and len(self._studies) < self._n_studies
        return self._study if again else None

    def study(self, prompt_id: str, study: Study) -> None:
        """Take in a study: its sets to try, and how far each sub-layer turns the residual stream."""
        self._studies[prompt_id] = study
        self._fitted = None

    def rate(self, layer_sets: Sequence[LayerSet]) -> list[float] | None:
        """Rate sets by the model: one window says little of a set, all windows together much of its sub-layers."""
        damage, curve = self._model()
        rows = np.array([layer_set.bits() for layer_set in layer_sets], dtype=float)
        return [float(worth) for worth in self._worth(rows, damage.mean, curve)]

    def state(self) -> dict[str, Any]:
        """Return the position and the studies."""
        return {**super().state(), "studies": {own: study.to_json() for own, study in self._studies.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().restore(state)
        self._studies = {own: Study.from_json(study) for own, study in state["studies"].items()}
        self._fitted = None

    def _ideas(self, rng: random.Random) -> Iterator[tuple[Bits, str]]:
        """Yield sets not seen yet with their origins, the most promising first."""
        if not self.size:
            return
        damage, curve = self._model()
        family = [bits for bits in self._family(damage.mean) if self._fits(bits)]
        if sum(bits in self.seen for bits in family) < FAMILY * max(1, len(self._studies)):
            yield from ((bits, "family") for bits in self._unseen(family, damage.mean, curve))
        drawn = damage.draw(rng.getrandbits(32), SPREAD)
        yield from ((bits, "move") for bits in self._climbed(drawn, damage.mean, curve))

    def _fits(self, bits: Bits) -> bool:
        return self._prices is not None or sum(bits) == self.n_skipped

    def _family(self, damage: Array) -> list[Bits]:
        """Return the sets of all studies; where those have none, the cheapest damage first, in every size."""
        found = dict.fromkeys(bits for study in self._studies.values() for bits in study.sets)
        if found:
            return list(found)
        nested = [np.zeros(self.size, dtype=int)]
        for unit in sorted(self._units, key=lambda unit: self._price(unit, damage)):
            nested.append(nested[-1].copy())
            nested[-1][[*unit]] = 1
        return list(dict.fromkeys(tuple(map(int, row)) for row in nested[1:]))

    def _price(self, unit: Sequence[int], damage: Array) -> float:
        """Return the damage per saved cost of skipping the unit."""
        harm = damage[[*unit]].sum() + (damage[self.size + unit[0]] if len(unit) > 1 else 0.0)
        saved = float(len(unit)) if self._prices is None else sum(self._prices.saved[i] for i in unit)
        return float((harm + 1e-9) / (saved + 1e-9))

    def _unseen(self, sets: Sequence[Bits], damage: Array, curve: SpeedCurve) -> list[Bits]:
        worth = self._worth(np.array(sets, dtype=float).reshape(-1, self.size), damage, curve)
        return [sets[i] for i in np.argsort(-worth, kind="stable") if sets[i] not in self.seen]

    def _climbed(self, drawn: Array, mean: Array, curve: SpeedCurve) -> list[Bits]:
        """Return the unseen sets met climbing from the best known one, best first, by the drawn damages."""
        top = self._start(mean, curve)
        if top is None:
            return []
        value = float(self._worth(np.array([top], dtype=float), drawn, curve)[0])
        looked: dict[Bits, float] = {}
        for _ in range(REACH):
            near = self._neighbours(top, drawn)
            if not near:
                break
            worth = self._worth(np.array(near, dtype=float), drawn, curve)
            looked |= {bits: float(own) for bits, own in zip(near, worth, strict=True) if bits not in self.seen}
            best = int(worth.argmax())
            if not worth[best] > value:
                break
            top, value = near[best], float(worth[best])
        return sorted(looked, key=lambda bits: -looked[bits])

    def _start(self, damage: Array, curve: SpeedCurve) -> Bits | None:
        """Return by turns the set in use and the one that the model rates best of those scored."""
        if self._in_use is not None and self._fits(self._in_use) and self.step % 2:
            return self._in_use
        scored = [bits for bits in dict.fromkeys(bits for bits, *_ in self._trials) if self._fits(bits)]
        if not scored:
            return None
        return scored[int(self._worth(np.array(scored, dtype=float), damage, curve).argmax())]

    def _neighbours(self, bits: Bits, damage: Array) -> list[Bits]:
        out = [unit for unit in self._units if all(bits[i] for i in unit)]
        kept = [unit for unit in self._units if not any(bits[i] for i in unit)]
        out.sort(key=lambda unit: -self._price(unit, damage))
        kept.sort(key=lambda unit: self._price(unit, damage))
        swaps = [[back, more] for back in out[:SWAPPED] for more in kept[:SWAPPED]]
        if self._prices is None:
            moves = [[back, more] for back, more in swaps if len(back) == len(more)]
        else:
            moves = [*swaps, *([unit] for unit in (*out, *kept))]
        flipped = [{i for unit in move for i in unit} for move in moves]
        near = [tuple(1 - bit if i in own else bit for i, bit in enumerate(bits)) for own in flipped]
        return near if self.problem.project is None else [each for each in near if self.problem.allows(each)]

    def _worth(self, rows: Array, damage: Array, curve: SpeedCurve) -> Array:
        """Return what is maximised: speed, or without prices minus the damage; (n,) for sets (n, size)."""
        harm = features(rows) @ damage
        if self._prices is None:
            return -harm
        costs = self._prices.whole - rows @ np.array(self._prices.saved)
        return np.asarray(curve.speed(np.exp(-np.maximum(harm, 0.0)), costs))

    def _model(self) -> tuple[Posterior, SpeedCurve]:
        """Return the model of all studies and trials, fitted anew when there is more of either."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> tuple[Posterior, SpeedCurve]:
        turns = np.ones(self.size)
        if self._studies:
            turns = np.mean([study.turns for study in self._studies.values()], axis=0)
            turns = turns / max(1e-12, float(turns.mean()))
        scores = [score for _, _, score, _ in self._trials]
        if self._prices is None:
            mean, spread = (float(np.mean(scores)), max(1e-6, float(np.std(scores)))) if scores else (0.0, 1.0)
            points = [ScoredSet(bits, (mean - score) / spread, 0.3, window) for bits, _, score, window in self._trials]
            return posterior(turns, points, SCORES), SpeedCurve()
        tried = [ScoredSet(bits, *damage_of(m, self.problem.window), window) for bits, m, _, window in self._trials]
        saved = np.array(self._prices.saved)
        costs = [self._prices.whole - float(np.dot(bits, saved)) for bits, *_ in self._trials]
        return posterior(turns, tried), fitted_curve([m for _, m, *_ in self._trials], costs, scores)
