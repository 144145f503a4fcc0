"""Search that looks at the model first: sets that a study found, then moves around the best of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.types import LayerSet, Trial
from .base import Bits, Proposal, SearchProblem, Strategy, Study, StudyKind, draw
from .surrogate import Array, Posterior, ScoredSet, posterior

FAMILY = 8  # sets of each study that are tried before any move
REACH = 6  # moves between the best set scored and a candidate; of 3 the search ends where it began
SWAPPED = 12  # of the sub-layers that may change places, the most promising of each side
DOUBT = 1.0  # standard deviations by which a set must lead the one in use
SPREAD = 0.3  # of the posterior that moves are drawn from


class GuidedStrategy(Strategy):
    """Proposes the sets that a linear model of scores rates best: first among a study's sets, then among moves.

    A move skips one sub-layer more or fewer, or exchanges two. Given prices it chooses how many are skipped; without,
    it keeps to n_skipped. Its origins are "family" (a study's set), "move" and "random".

    Args: study: what it looks at in the model, on `n_studies` prompts. whole_layers: attention and MLP of a layer go
          together.
    """

    def __init__(
        self, problem: SearchProblem, study: StudyKind, n_studies: int = 1, whole_layers: bool = False
    ) -> None:
        super().__init__(problem)
        self._study, self._n_studies, self._prices = study, n_studies, problem.prices
        self._whole = whole_layers
        half = self.size // 2
        layers = [(i, half + i) for i in range(half)]
        self._units = layers if whole_layers else [*((i,) for i in range(self.size)), *layers]
        if problem.project is not None:  # the other moves of two neighbours that keep attention and MLP alternating
            self._units += [(half + i, i + 1) for i in range(half - 1)]
        self._studies: dict[str, Study] = {}
        self._trials: list[ScoredSet] = []
        self._fitted: Posterior | None = None

    def propose(self) -> Proposal:
        rng = self.next_step()
        bits, origin = next(self._ideas(rng), ((), ""))
        if not origin:
            n_skipped = self.n_skipped if self._prices is None else rng.randint(0, self.size)
            bits, origin = draw(self.size, n_skipped, rng), "random"
        return self.proposed(bits, origin, rng)

    def observe(self, trial: Trial) -> None:
        window = f"{trial.prompt_id}/{trial.position}"
        self._trials.append(ScoredSet(self.observed(trial), trial.score, window))
        self._fitted = None

    def wants(self, prompt_id: str) -> StudyKind | None:
        """Ask for a study of each new prompt's window, as many as were wanted."""
        again = self.size and prompt_id not in self._studies and len(self._studies) < self._n_studies
        return self._study if again else None

    def study(self, prompt_id: str, study: Study) -> None:
        """Take in a study: its sets to try, and how far each sub-layer turns the residual stream."""
        self._studies[prompt_id] = study
        self._fitted = None

    def best(self, in_use: LayerSet) -> LayerSet:
        """Rate sets by the model: one window says little of a set, all windows together much of its sub-layers."""
        scored = self._scored()
        if not scored:
            return in_use
        lead = self._model().lead(np.array(scored, dtype=float), np.array(in_use.bits(), dtype=float), DOUBT)
        best = int(lead.argmax())
        return self.problem.base.with_bits(scored[best]) if lead[best] > 0 else in_use

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
        model = self._model()
        family = [bits for bits in self._family(model.mean) if self._fits(bits)]
        if sum(bits in self.seen for bits in family) < FAMILY * max(1, len(self._studies)):
            yield from ((bits, "family") for bits in self._unseen(family, model.mean))
        drawn = model.draw(rng.getrandbits(32), SPREAD)
        yield from ((bits, "move") for bits in self._climbed(drawn, model.mean))

    def _fits(self, bits: Bits) -> bool:
        half = self.size // 2
        if self._whole and bits[:half] != bits[half:]:
            return False
        return self._prices is not None or sum(bits) == self.n_skipped

    def _family(self, added: Array) -> list[Bits]:
        """Return the sets of all studies; where those have none, the units that add least first, in every size."""
        found = dict.fromkeys(bits for study in self._studies.values() for bits in study.sets)
        if found:
            return list(found)
        nested = [np.zeros(self.size, dtype=int)]
        for unit in sorted(self._units, key=lambda unit: _sum(unit, added)):
            nested.append(nested[-1].copy())
            nested[-1][[*unit]] = 1
        return list(dict.fromkeys(tuple(map(int, row)) for row in nested[1:]))

    def _unseen(self, sets: Sequence[Bits], added: Array) -> list[Bits]:
        worth = self._worth(sets, added)
        return [sets[i] for i in np.argsort(-worth, kind="stable") if sets[i] not in self.seen]

    def _climbed(self, drawn: Array, mean: Array) -> list[Bits]:
        """Return the unseen sets met climbing from the best scored one, best first, by what was drawn."""
        scored = self._scored()
        if not scored:
            return []
        top = scored[int(self._worth(scored, mean).argmax())]
        value = float(self._worth([top], drawn)[0])
        looked: dict[Bits, float] = {}
        for _ in range(REACH):
            near = self._neighbours(top, drawn)
            if not near:
                break
            worth = self._worth(near, drawn)
            looked |= {bits: float(own) for bits, own in zip(near, worth, strict=True) if bits not in self.seen}
            best = int(worth.argmax())
            if not worth[best] > value:
                break
            top, value = near[best], float(worth[best])
        return sorted(looked, key=lambda bits: -looked[bits])

    def _scored(self) -> list[Bits]:
        return [bits for bits in dict.fromkeys(trial.bits for trial in self._trials) if self._fits(bits)]

    def _neighbours(self, bits: Bits, added: Array) -> list[Bits]:
        out = [unit for unit in self._units if all(bits[i] for i in unit)]
        kept = [unit for unit in self._units if not any(bits[i] for i in unit)]
        out.sort(key=lambda unit: -_sum(unit, added))
        kept.sort(key=lambda unit: _sum(unit, added))
        swaps = [[back, more] for back in out[:SWAPPED] for more in kept[:SWAPPED]]
        if self._prices is None:
            moves = [[back, more] for back, more in swaps if len(back) == len(more)]
        else:
            moves = [*swaps, *([unit] for unit in (*out, *kept))]
        flipped = [{i for unit in move for i in unit} for move in moves]
        near = [tuple(1 - bit if i in own else bit for i, bit in enumerate(bits)) for own in flipped]
        return near if self.problem.project is None else [each for each in near if self.problem.allows(each)]

    def _worth(self, sets: Sequence[Bits], added: Array) -> Array:
        """Return minus the loss, less what all have in common, of each set; (n,)."""
        return np.asarray(-np.array(sets, dtype=float).reshape(-1, self.size) @ added[: self.size])

    def _model(self) -> Posterior:
        """Return the model of all studies and trials, fitted anew when there is more of either."""
        if self._fitted is None:
            turns = np.ones(self.size)
            if self._studies:
                turns = np.mean([study.turns for study in self._studies.values()], axis=0)
                turns = turns / max(1e-12, float(turns.mean()))
            saved = np.zeros(self.size) if self._prices is None else np.array(self._prices.saved)
            self._fitted = posterior(turns, saved, self._trials, self.problem.window)
        return self._fitted


def _sum(unit: Sequence[int], added: Array) -> float:
    return float(added[[*unit]].sum())
