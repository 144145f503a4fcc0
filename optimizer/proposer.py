"""Who is tried next: a strategy with what it was promised, prices to choose the size by and looks at the model."""

from __future__ import annotations

from ..core.costs import CostProfile
from ..core.settings import SwiftSettings
from ..core.types import LayerSet
from ..decoding.context import Context
from .strategies import Prices, Strategy, make_strategy, recipe_of
from .structure import study, study_rows

PAIRED = 2  # candidates that are scored beside the set in use, where every pass scores that, too


def chooses_size(settings: SwiftSettings, costs: CostProfile | None) -> bool:
    """Whether the strategy itself chooses how many sub-layers are left out, which takes measured costs."""
    by_speed = settings.objective == "expected_speedup" and costs is not None
    return recipe_of(settings.strategy).chooses_size and by_speed


class Proposer:
    """Asks the settings' strategy for candidates around `base`, whose formats they keep.

    `chooses_size`: how many sub-layers are left out is the strategy's own choice, not that of `base`. `paired`: every
    pass scores the set in use too, and waits until half of its window is new text: such a strategy learns more from a
    pass than from a round.
    """

    def __init__(self, settings: SwiftSettings, costs: CostProfile | None, base: LayerSet, skip_ratio: float) -> None:
        recipe = recipe_of(settings.strategy)
        self.chooses_size = chooses_size(settings, costs)
        self._prices = Prices.of(costs, base) if self.chooses_size and costs is not None else None
        self.patience = settings.patience
        if self.chooses_size and recipe.patience is not None:
            self.patience = min(self.patience, recipe.patience)
        self.rows_run = 0.0  # by studies, in rows of the full model
        self.paired = recipe.chooses_size
        self._window, self._ratio = settings.context_window, skip_ratio
        plan = recipe.plan
        self.scratch_rows = 0 if plan is None else study_rows(plan.study, self._window, base.n_layers)
        self._saved = (1.0,) * len(base.bits()) if self._prices is None else self._prices.saved
        self.strategy: Strategy = make_strategy(
            settings.strategy,
            base,
            base.n_skipped,
            settings.seed,
            interval=settings.bayes_interval,
            deterministic=settings.deterministic,
            window=self._window,
            prices=self._prices,
        )

    def n_beside(self, n_finalists: int, batch: int) -> int:
        """Candidates that a pass has beside the set in use and so many finalists."""
        if self.paired:
            return max(1, max(batch, PAIRED) - n_finalists)
        return 0 if n_finalists else batch

    def proposed(self, context: Context, prompt_id: str, n: int) -> list[tuple[LayerSet, str]]:
        """The next candidates with their origins, after a look at the model where the strategy wants one."""
        kind = self.strategy.wants(prompt_id) if n else None
        if kind is not None:
            found = study(context, kind, self._window, self._saved, self._ratio)
            self.rows_run += found.rows
            self.strategy.study(prompt_id, found)
        proposals = [self.strategy.propose() for _ in range(n)]
        return [(proposal.layer_set, proposal.origin) for proposal in proposals]
