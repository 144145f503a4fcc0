"""Who proposes the next candidate: ask/tell strategies by name."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from ...core.errors import SettingsError
from ...core.types import LayerSet
from .base import Prices, Proposal, Strategy, Study, StudyKind
from .guided import GuidedStrategy, Plan
from .interval import IntervalStrategy
from .process import Engine

__all__ = ["STRATEGIES", "Prices", "Proposal", "Recipe", "Strategy", "Study", "StudyKind", "make_strategy"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a name stands for: a plan, or random draws with an engine; `interval` None means the caller's.

    `patience`: candidates without a better one after which there is no use in going on, where it chooses the size.
    """

    engine: Engine | None = None
    interval: int | None = None
    plan: Plan | None = None
    patience: int | None = None

    @property
    def chooses_size(self) -> bool:
        """Whether it decides itself how many sub-layers are left out, where it is given prices."""
        return self.plan is not None


STRATEGIES: dict[str, Recipe] = {
    "random": Recipe(),
    "bayes": Recipe(engine="gp", interval=1),
    "swift": Recipe(engine="gp"),
    "tpe": Recipe(engine="tpe", interval=1),
    "local": Recipe(plan=Plan("similarity"), patience=100),
    "knapsack": Recipe(plan=Plan("knapsack", n_studies=2), patience=60),
    "clasp": Recipe(plan=Plan("clasp", n_studies=8, whole_layers=True), patience=100),
}


def make_strategy(
    name: str,
    base: LayerSet,
    n_skipped: int,
    seed: int,
    *,
    interval: int = 25,
    deterministic: bool = False,
    window: int = 32,
    prices: Prices | None = None,
) -> Strategy:
    """A strategy by name, over the sub-layers of `base`, whose formats every proposal keeps.

    Args:   interval: β, which only "swift" reads. window: tokens that score a candidate. prices: what lets some choose
            the size.
    Raises: SettingsError: the name is unknown, or a number is out of its range.
    """
    recipe = recipe_of(name)
    if recipe.plan is not None:
        return GuidedStrategy(base, n_skipped, seed, recipe.plan, window, prices)
    return IntervalStrategy(
        base,
        n_skipped,
        seed,
        engine=recipe.engine,
        interval=interval if recipe.interval is None else recipe.interval,
        deterministic=deterministic,
    )


def recipe_of(name: str) -> Recipe:
    """Raises: SettingsError: there is no strategy of that name."""
    if name not in STRATEGIES:
        nearest = get_close_matches(name, STRATEGIES, n=1, cutoff=0.0)[0]
        raise SettingsError(f"strategy {name!r} is unknown: use one of {', '.join(STRATEGIES)} (nearest: {nearest})")
    return STRATEGIES[name]
