"""Search guided by a study of the model: first the sets that the study found, then moves around the best ones.

Sets are rated by a linear-Gaussian model of what each sub-layer adds to a draft's loss when it is skipped, fitted to
trials. The loss of a layer set is -log of its score; what a sub-layer adds may be negative, as a shorter pass saves
time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.types import LayerSet, Trial
from .base import Bits, Proposal, SearchProblem, Strategy, StrategyInfo, Study, StudyKind, draw

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[float64]

FAMILY = 8  # Sets per study that are scored before the search tries moves.
REACH = 6  # Maximum moves from the best scored set to a candidate; with 3 the search stopped too early.
SWAPPED = 12  # Only this many of the best skipped and of the best kept sub-layers are exchanged.
DOUBT = 1.0  # Standard deviations by which a set must beat the set in use to replace it.
SPREAD = 0.3  # Factor on the posterior's standard deviation when moves are sampled.

MAX_POINTS = 300  # Maximum trials used in a fit; 300 take 4 ms on one core.
FLOOR = 0.03  # Minimum score in a fit, so that its logarithm stays bounded.

# Prior of a sub-layer's loss: HARM times its relative turn of the residual stream, minus GAIN times the plain passes
# that skipping it saves. GAIN approximates how fast the logarithm of (1 + 2.5 √m) / (2.5 c + 1.2), the approximate
# speed of a draft of matchness m and cost c, falls with c.
HARM = 0.03
GAIN = 0.9
ALONE = 0.05  # Prior deviation of each sub-layer's own effect; TOGETHER is that of the effect shared by all.
TOGETHER = 0.02
OFFSET = 1.0  # Prior standard deviation of the constant term.
# Standard deviations of the noise, fitted to 330 scores of Qwen2.5-Coder-1.5B on HumanEval and to scores of unseen sets
# over 32 windows.
WINDOW = 0.1  # Noise that a window adds to every set scored on it.
BY_WINDOW = 0.02  # Noise that a window adds per skipped sub-layer.
TOKEN = 0.8  # Noise of a single score over one token; divided by the root of the window's length.


class GuidedStrategy(Strategy):
    """Proposes the sets that a linear model of scores rates best: first among a study's sets, then among moves.

    A move skips one sub-layer more or fewer, or exchanges two. Given savings it chooses how many are skipped; without,
    it keeps to n_skipped. Its origins are "family" (a study's set), "move" and "random".

    Args: study: what it looks at in the model, on `n_studies` prompts. whole_layers: attention and MLP of a layer go
          together.
    """

    def __init__(
        self, problem: SearchProblem, study: StudyKind, n_studies: int = 1, whole_layers: bool = False
    ) -> None:
        super().__init__(problem)
        self._study, self._n_studies, self._savings = study, n_studies, problem.savings
        self._whole = whole_layers
        half = self.size // 2
        layers = [(i, half + i) for i in range(half)]
        self._units = layers if whole_layers else [*((i,) for i in range(self.size)), *layers]
        if problem.project is not None:
            # Also move each MLP together with the next layer's attention: attention and MLP then still alternate.
            self._units += [(half + i, i + 1) for i in range(half - 1)]
        self._studies: dict[str, Study] = {}
        self._trials: list[ScoredSet] = []
        self._fitted: Posterior | None = None

    def propose(self) -> Proposal:
        rng = self.next_step()
        bits, origin = next(self._ideas(rng), ((), ""))
        if not origin:
            n_skipped = self.n_skipped if self._savings is None else rng.randint(0, self.size)
            bits, origin = draw(self.size, n_skipped, rng), "random"
        return self.proposed(bits, origin, rng)

    def observe(self, trial: Trial) -> None:
        window = f"{trial.prompt_id}/{trial.position}"
        self._trials.append(ScoredSet(self.observed(trial), trial.score, window))
        self._fitted = None

    def wants(self, prompt_id: str) -> StudyKind | None:
        """Ask for a study of each new prompt's window, up to `n_studies`."""
        again = self.size and prompt_id not in self._studies and len(self._studies) < self._n_studies
        return self._study if again else None

    def study(self, prompt_id: str, study: Study) -> None:
        """Receive a study: sets to try, and how far each sub-layer rotates the residual stream."""
        self._studies[prompt_id] = study
        self._fitted = None

    def best(self, in_use: LayerSet) -> LayerSet:
        """Rate sets by the fitted model, because all windows together say more than the windows of one set."""
        scored = self._scored()
        if not scored:
            return in_use
        lead = self._model().lead(scored, in_use.bits(), DOUBT)
        best = int(lead.argmax())
        return self.problem.base.with_bits(scored[best]) if lead[best] > 0 else in_use

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
        self._fitted = None

    def _ideas(self, rng: random.Random) -> Iterator[tuple[Bits, str]]:
        """Yield sets not seen yet with their origins, the most promising first."""
        if not self.size:
            return
        model = self._model()
        family = [bits for bits in self._family(model.mean) if self._fits(bits)]
        if sum(bits in self.seen for bits in family) < FAMILY * max(1, len(self._studies)):
            order = (-worth(family, model.mean)).argsort(kind="stable")
            yield from ((family[i], "family") for i in order if family[i] not in self.seen)
        drawn = model.draw(rng.getrandbits(32), SPREAD)
        yield from ((bits, "move") for bits in self._climbed(drawn, model.mean))

    def _fits(self, bits: Bits) -> bool:
        half = self.size // 2
        if self._whole and bits[:half] != bits[half:]:
            return False
        return self._savings is not None or sum(bits) == self.n_skipped

    def _family(self, added: Array) -> list[Bits]:
        """Return the sets of all studies; where those have none, the units that add least first, in every size."""
        sets_of_studies = dict.fromkeys(bits for study in self._studies.values() for bits in study.sets)
        if sets_of_studies:
            return list(sets_of_studies)
        skipped: set[int] = set()
        for unit in sorted(self._units, key=lambda unit: _sum(unit, added)):
            skipped.update(unit)
            sets_of_studies[tuple(int(i in skipped) for i in range(self.size))] = None
        return list(sets_of_studies)

    def _climbed(self, drawn: Array, mean: Array) -> list[Bits]:
        """Return unseen sets met while hill-climbing from the best scored set, best first, by the sampled model."""
        scored = self._scored()
        if not scored:
            return []
        top = scored[int(worth(scored, mean).argmax())]
        value = float(worth([top], drawn)[0])
        looked: dict[Bits, float] = {}
        for _ in range(REACH):
            near = self._neighbours(top, drawn)
            if not near:
                break
            worths = worth(near, drawn)
            looked |= {
                bits: float(set_worth) for bits, set_worth in zip(near, worths, strict=True) if bits not in self.seen
            }
            best = int(worths.argmax())
            if not worths[best] > value:
                break
            top, value = near[best], float(worths[best])
        return sorted(looked, key=lambda bits: -looked[bits])

    def _scored(self) -> list[Bits]:
        return [bits for bits in dict.fromkeys(trial.bits for trial in self._trials) if self._fits(bits)]

    def _neighbours(self, bits: Bits, added: Array) -> list[Bits]:
        out = [unit for unit in self._units if all(bits[i] for i in unit)]
        kept = [unit for unit in self._units if not any(bits[i] for i in unit)]
        out.sort(key=lambda unit: -_sum(unit, added))
        kept.sort(key=lambda unit: _sum(unit, added))
        swaps = [[back, more] for back in out[:SWAPPED] for more in kept[:SWAPPED]]
        if self._savings is None:
            moves = [[back, more] for back, more in swaps if len(back) == len(more)]
        else:
            moves = [*swaps, *([unit] for unit in (*out, *kept))]
        flipped = [{i for unit in move for i in unit} for move in moves]
        near = [tuple(1 - bit if i in flips else bit for i, bit in enumerate(bits)) for flips in flipped]
        return [neighbour for neighbour in near if self.problem.projected(neighbour) == neighbour]

    def _model(self) -> Posterior:
        """Return the model fitted to all studies and trials; refitted after each new one."""
        import numpy as np

        if self._fitted is None:
            turns = np.ones(self.size)
            if self._studies:
                turns = np.mean([study.turns for study in self._studies.values()], axis=0)
                turns = turns / max(1e-12, float(turns.mean()))
            saved = np.zeros(self.size) if self._savings is None else np.array(self._savings)
            self._fitted = posterior(turns, saved, self._trials, self.problem.window)
        return self._fitted


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
        """Sample the coefficients with deviations from the mean scaled by `spread`."""
        import numpy as np

        size = len(self.mean)
        normal = np.random.default_rng(seed).standard_normal(size)
        root = np.linalg.cholesky(self.covariance + 1e-9 * np.eye(size))
        return np.asarray(self.mean + spread * (root @ normal))

    def lead(self, rows: ArrayLike, over: ArrayLike, doubt: float) -> Array:
        """Return how much less each of `rows` (n, size) loses than `over`, less `doubt` standard deviations; (n,)."""
        import numpy as np

        change = np.asarray(rows, dtype=float) - np.asarray(over, dtype=float)
        variance = np.einsum("ij,jk,ik->i", change, self.covariance[:-1, :-1], change)
        return np.asarray(-change @ self.mean[:-1] - doubt * np.sqrt(np.maximum(0.0, variance)))


def posterior(turns: Array, saved: Array, points: Sequence[ScoredSet], n_tokens: int) -> Posterior:
    """Fit what each sub-layer adds to `points`.

    Args: turns: how far each turns the residual stream, of mean 1. saved: plain passes that skipping it saves.
          n_tokens: of a window.
    """
    import numpy as np

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
    reach = covariance @ rows.T  # Shape (size + 1, points).
    gain = np.linalg.solve(rows @ reach + noise, reach.T).T
    return Posterior(mean + gain @ (loss - rows @ mean), covariance - gain @ reach.T)


def worth(sets: Sequence[Bits], added: Array) -> Array:
    """Return minus the predicted loss of each set, without the constant term: (n,); `added` as `Posterior.mean`."""
    import numpy as np

    return np.asarray(-np.array(sets, dtype=float).reshape(-1, len(added) - 1) @ added[:-1])


def _sum(unit: Sequence[int], added: Array) -> float:
    return float(sum(added[i] for i in unit))


def _by_study(help: str, study: StudyKind, patience: int, **options: Any) -> StrategyInfo:
    return StrategyInfo(help, partial(GuidedStrategy, study=study, **options), study, patience)


STRATEGIES = {
    "local": _by_study("moves from the best set known", "similarity", 100),
    "knapsack": _by_study("a dynamic program over measured costs, then moves", "knapsack", 60, n_studies=2),
    "clasp": _by_study("the same with whole layers", "clasp", 100, n_studies=8, whole_layers=True),
}
