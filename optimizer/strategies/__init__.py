"""The search strategies by name. A strategy is a file with its class and a row here; help and checks read the row.

Rows import their class when it is made: the front doors read this table, and do not pay for numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.errors import look_up
from ...core.types import LayerSet
from .base import Proposal, SearchProblem, Strategy, Study, StudyKind, SubLayerPrices

__all__ = [
    "MOST",
    "SIZE_CHOOSING",
    "STRATEGIES",
    "Proposal",
    "Strategy",
    "StrategyInfo",
    "Study",
    "StudyKind",
    "SubLayerPrices",
    "make_strategy",
    "recipe_of",
]


MOST = 96  # candidates that a strategy which chooses the size scores, however long the stream is


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """One strategy: `help` says how it proposes, `make` builds it.

    `study`: what it looks at in the model; such a strategy chooses how many sub-layers are skipped, given prices, and
    stops after `patience` candidates without a better one. `suggests`: a process beside the run suggests candidates,
    which `deterministic` waits for.
    """

    help: str
    make: Callable[[SearchProblem], Strategy]
    study: StudyKind | None = None
    patience: int | None = None
    suggests: bool = False

    @property
    def chooses_size(self) -> bool:
        """Whether it decides itself how many sub-layers are skipped, where it is given prices."""
        return self.study is not None


def _drawn(problem: SearchProblem, **how: Any) -> Strategy:
    from .interval import IntervalStrategy

    return IntervalStrategy(problem, **how)


def _guided(problem: SearchProblem, study: StudyKind, **how: Any) -> Strategy:
    from .guided import GuidedStrategy

    return GuidedStrategy(problem, study, **how)


def _by_study(help: str, study: StudyKind, patience: int, **how: Any) -> StrategyInfo:
    return StrategyInfo(help, partial(_guided, study=study, **how), study, patience)


STRATEGIES: dict[str, StrategyInfo] = {
    "random": StrategyInfo("uniform draws", _drawn),
    "bayes": StrategyInfo("a Gaussian process at every step", partial(_drawn, engine="gp", interval=1), suggests=True),
    "swift": StrategyInfo(
        "draws, and a Gaussian process at every β-th step", partial(_drawn, engine="gp"), suggests=True
    ),
    "published": StrategyInfo(
        "the same over the cube of all sub-layers, as SWIFT's code", partial(_drawn, engine="cube"), suggests=True
    ),
    "tpe": StrategyInfo(
        "a tree-structured Parzen estimator at every step", partial(_drawn, engine="tpe", interval=1), suggests=True
    ),
    "local": _by_study("moves from the best set known", "similarity", 100),
    "knapsack": _by_study("a dynamic program over measured costs, then moves", "knapsack", 60, n_studies=2),
    "clasp": _by_study("the same with whole layers", "clasp", 100, n_studies=8, whole_layers=True),
}
SIZE_CHOOSING = tuple(name for name, recipe in STRATEGIES.items() if recipe.chooses_size)


def make_strategy(name: str, base: LayerSet, n_skipped: int, seed: int, **how: Any) -> Strategy:
    """Build a strategy by name; the arguments are those of `SearchProblem`.

    Raises: SettingsError: the name is unknown, or a number is out of its range.
    """
    return recipe_of(name).make(SearchProblem(base, n_skipped, seed, **how))


def recipe_of(name: str) -> StrategyInfo:
    """Find a strategy's row.

    Raises: SettingsError: there is no strategy of that name.
    """
    return look_up("strategy", name, STRATEGIES)
