"""Search that looks at the model first: sets that a study found, then moves around the best of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.types import LayerSet, Trial
from .base import Prices, Proposal, Study, StudyKind, with_bits
from .damage import SCORES, Array, Belief, Pace, Point, belief, features, matched, pace_of
from .interval import MAX_REDRAWS, checked_bits, checked_size, draw, exchanged
from .process import Bits

SWAPPED = 12  # of the sub-layers that may change places, the most promising of each side
SPREAD = 0.5  # of the belief that a move's damages are drawn from


@dataclass(frozen=True, slots=True)
class Plan:
    """How a strategy searches: what it studies, on how many prompts, and how it goes on from there.

    `family`: sets of each study that are tried before any move. `whole_layers`: attention and MLP of a layer go
    together. `reach`: moves between the set in use and a candidate.
    """

    study: StudyKind
    n_studies: int = 1
    family: int = 8
    whole_layers: bool = False
    reach: int = 3


class GuidedStrategy:
    """Proposes what a linear model of damage holds best: first among a study's sets, then among moves.

    A move leaves out one sub-layer more or less, or exchanges two. Given prices it chooses how many are left out, by
    the speed that damage and cost come to; without, it keeps to n_skipped and maximises the score alone.
    """

    def __init__(
        self, base: LayerSet, n_skipped: int, seed: int, plan: Plan, window: int, prices: Prices | None
    ) -> None:
        self._base, self._seed, self._plan, self._window, self._prices = base, seed, plan, window, prices
        self._size = len(base.bits())
        half = self._size // 2
        layers = [(i, half + i) for i in range(half)]
        self._units = layers if plan.whole_layers else [*((i,) for i in range(self._size)), *layers]
        self._step = 0
        self._studies: dict[str, Study] = {}
        self._seen: set[Bits] = set()
        self._trials: list[tuple[Bits, float, float, str]] = []  # bits, matchness, score, window
        self._held: Bits | None = None  # the set in use
        self._fitted: tuple[Belief, Pace] | None = None
        self.set_n_skipped(n_skipped)

    def set_n_skipped(self, n_skipped: int) -> None:
        """See `Strategy`; it counts only without prices."""
        self._n_skipped = checked_size(self._base, n_skipped)

    def wants(self, prompt_id: str) -> StudyKind | None:
        """See `Strategy`."""
        again = self._size and prompt_id not in self._studies and len(self._studies) < self._plan.n_studies
        return self._plan.study if again else None

    def study(self, prompt_id: str, study: Study) -> None:
        """See `Strategy`."""
        self._studies[prompt_id] = study
        self._fitted = None

    def propose(self) -> Proposal:
        """See `Strategy`."""
        self._step += 1
        rng = random.Random(f"{self._seed}/{self._step}")
        bits, origin = next(self._ideas(rng), ((), ""))
        if not origin:
            size = self._n_skipped if self._prices is None else rng.randint(0, self._size)
            bits, origin = draw(self._size, size, rng), "random"
            for _ in range(MAX_REDRAWS):
                if bits not in self._seen:
                    break
                bits = exchanged(bits, rng)
        self._seen.add(bits)
        return Proposal(with_bits(self._base, bits), origin)

    def observe(self, trial: Trial) -> None:
        """See `Strategy`."""
        bits = checked_bits(self._base, trial)
        self._seen.add(bits)
        window = f"{trial.prompt_id}/{trial.position}"
        self._trials.append((bits, trial.matchness, trial.score, window))
        self._held = bits if trial.adopted else self._held
        self._fitted = None

    def rate(self, layer_sets: Sequence[LayerSet]) -> list[float] | None:
        """See `Strategy`; one window says little of a set, all windows together say much of its sub-layers."""
        damage, pace = self._model()
        rows = np.array([layer_set.bits() for layer_set in layer_sets], dtype=float)
        return [float(worth) for worth in self._worth(rows, damage.mean, pace)]

    def state(self) -> dict[str, Any]:
        """See `Strategy`."""
        studies = {prompt_id: study.to_json() for prompt_id, study in self._studies.items()}
        return {"step": self._step, "n_skipped": self._n_skipped, "studies": studies}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Strategy`."""
        self._step = state["step"]
        self.set_n_skipped(state["n_skipped"])
        self._studies = {prompt_id: Study.from_json(values) for prompt_id, values in state["studies"].items()}
        self._fitted = None

    def close(self) -> None:
        """See `Strategy`; it holds nothing."""

    def _ideas(self, rng: random.Random) -> Iterator[tuple[Bits, str]]:
        """Sets not seen yet, the most promising first."""
        if not self._size:
            return
        damage, pace = self._model()
        family = [bits for bits in self._family(damage.mean) if self._fits(bits)]
        if sum(bits in self._seen for bits in family) < self._plan.family * max(1, len(self._studies)):
            yield from ((bits, "family") for bits in self._unseen(family, damage.mean, pace))
        drawn = damage.draw(rng.getrandbits(32), SPREAD)
        yield from ((bits, "move") for bits in self._climbed(drawn, damage.mean, pace))

    def _fits(self, bits: Bits) -> bool:
        return self._prices is not None or sum(bits) == self._n_skipped

    def _family(self, damage: Array) -> list[Bits]:
        """The sets of all studies; where those have none, the cheapest damage first, in every size."""
        found = dict.fromkeys(bits for study in self._studies.values() for bits in study.sets)
        if found:
            return list(found)
        nested = [np.zeros(self._size, dtype=int)]
        for unit in sorted(self._units, key=lambda unit: self._price(unit, damage)):
            nested.append(nested[-1].copy())
            nested[-1][[*unit]] = 1
        return list(dict.fromkeys(tuple(map(int, row)) for row in nested[1:]))

    def _price(self, unit: Sequence[int], damage: Array) -> float:
        """Damage for what leaving the unit out saves."""
        harm = damage[[*unit]].sum() + (damage[self._size + unit[0]] if len(unit) > 1 else 0.0)
        saved = float(len(unit)) if self._prices is None else sum(self._prices.saved[i] for i in unit)
        return float((harm + 1e-9) / (saved + 1e-9))

    def _unseen(self, sets: Sequence[Bits], damage: Array, pace: Pace) -> list[Bits]:
        worth = self._worth(np.array(sets, dtype=float).reshape(-1, self._size), damage, pace)
        return [sets[i] for i in np.argsort(-worth, kind="stable") if sets[i] not in self._seen]

    def _climbed(self, drawn: Array, mean: Array, pace: Pace) -> list[Bits]:
        """Sets on the way up from the best known one, best first, as the drawn damages have it."""
        top = self._start(mean, pace)
        if top is None:
            return []
        value = float(self._worth(np.array([top], dtype=float), drawn, pace)[0])
        looked: dict[Bits, float] = {}
        for _ in range(self._plan.reach):
            near = self._neighbours(top, drawn)
            if not near:
                break
            worth = self._worth(np.array(near, dtype=float), drawn, pace)
            looked |= {bits: float(own) for bits, own in zip(near, worth, strict=True) if bits not in self._seen}
            best = int(worth.argmax())
            if not worth[best] > value:
                break
            top, value = near[best], float(worth[best])
        return sorted(looked, key=lambda bits: -looked[bits])

    def _start(self, damage: Array, pace: Pace) -> Bits | None:
        """The set in use and the one that the model holds best of those scored, by turns."""
        if self._held is not None and self._fits(self._held) and self._step % 2:
            return self._held
        scored = [bits for bits in dict.fromkeys(bits for bits, *_ in self._trials) if self._fits(bits)]
        if not scored:
            return None
        return scored[int(self._worth(np.array(scored, dtype=float), damage, pace).argmax())]

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
        return [tuple(1 - bit if i in own else bit for i, bit in enumerate(bits)) for own in flipped]

    def _worth(self, rows: Array, damage: Array, pace: Pace) -> Array:
        """What is maximised: speed, or without prices the damage left undone; (n,) for sets (n, size)."""
        harm = features(rows) @ damage
        if self._prices is None:
            return -harm
        costs = self._prices.whole - rows @ np.array(self._prices.saved)
        return np.asarray(pace.speed(np.exp(-np.maximum(harm, 0.0)), costs))

    def _model(self) -> tuple[Belief, Pace]:
        """What the studies and the trials say; fitted anew when there is more of either."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> tuple[Belief, Pace]:
        turns = np.ones(self._size)
        if self._studies:
            turns = np.mean([study.turns for study in self._studies.values()], axis=0)
            turns = turns / max(1e-12, float(turns.mean()))
        if self._prices is None:
            scores = np.array([score for _, _, score, _ in self._trials])
            spread = max(1e-6, float(scores.std())) if len(scores) else 1.0
            points = [
                Point(bits, (float(scores.mean()) - score) / spread, 0.3, window)
                for bits, _, score, window in self._trials
            ]
            return belief(turns, points, SCORES), Pace()
        tried = [Point(bits, *matched(m, self._window), window) for bits, m, _, window in self._trials]
        saved = np.array(self._prices.saved)
        costs = [self._prices.whole - float(np.dot(bits, saved)) for bits, *_ in self._trials]
        pace = pace_of([m for _, m, *_ in self._trials], costs, [score for _, _, score, _ in self._trials])
        return belief(turns, tried), pace
