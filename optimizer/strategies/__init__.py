"""Who proposes the next candidate: ask/tell strategies by name."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from ...core.errors import SettingsError
from .base import Proposal, Strategy
from .interval import IntervalStrategy
from .process import Engine

__all__ = ["STRATEGIES", "Proposal", "Recipe", "Strategy", "make_strategy"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a name stands for; `interval` None means the caller's."""

    engine: Engine | None
    interval: int | None


STRATEGIES: dict[str, Recipe] = {
    "random": Recipe(engine=None, interval=None),
    "bayes": Recipe(engine="gp", interval=1),
    "swift": Recipe(engine="gp", interval=None),
    "tpe": Recipe(engine="tpe", interval=1),
}


def make_strategy(
    name: str, n_layers: int, n_skipped: int, seed: int, *, interval: int = 25, deterministic: bool = False
) -> Strategy:
    """A strategy by name; `interval` is β, which only "swift" reads.

    Raises: SettingsError: the name is unknown, or a number is out of its range.
    """
    if name not in STRATEGIES:
        nearest = get_close_matches(name, STRATEGIES, n=1, cutoff=0.0)[0]
        raise SettingsError(f"strategy {name!r} is unknown: use one of {', '.join(STRATEGIES)} (nearest: {nearest})")
    recipe = STRATEGIES[name]
    return IntervalStrategy(
        n_layers,
        n_skipped,
        seed,
        engine=recipe.engine,
        interval=interval if recipe.interval is None else recipe.interval,
        deterministic=deterministic,
    )
