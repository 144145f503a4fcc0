"""One pass over candidates: how many share it, and the trials that come of it."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.costs import CostProfile
from ..core.settings import SwiftSettings
from ..core.types import LayerSet, Trial
from ..decoding.context import Context
from ..decoding.engine import PassGenerator
from .evaluation import WindowScore, score_window
from .finals import Place
from .objective import objective

LARGEST_BATCH = 8  # candidates per pass
SEARCH_SHARE = 0.03  # of the seconds of a stream's decoding that its search may take
FEWEST, MOST = 36, 96  # candidates that a search may score however short the stream is, or however long
USUAL_SPEEDUP = 3.0  # of the decoding that a search is weighed against
BATCH_GAIN = 0.95  # a larger batch must cut the seconds per candidate at least to this share


def candidates_per_pass(costs: CostProfile | None, window: int) -> int:
    """How many candidates one pass should score: as many as make each cheaper, by the measured cost of rows.

    Only widths that were measured count: beyond them a line through the last two promises savings that a processor
    already busy does not give (SmolLM2-135M on 2 cores: 8 candidates, 256 rows, cost 8 times one).
    """
    best = 1
    if costs is not None:
        for n in (2, 4, LARGEST_BATCH):
            cheaper = costs.target_pass_s(n * window) / n < BATCH_GAIN * costs.target_pass_s(best * window) / best
            if n * window <= max(costs.pass_s) and cheaper:
                best = n
    return best


def affordable(costs: CostProfile | None, layer_set: LayerSet, window: int, n_tokens: int) -> int:
    """How many candidates a search over a stream of `n_tokens` to come may score, by measured costs.

    A candidate is a draft pass over a window like that of `layer_set`, and half of one for the set in use beside it.
    """
    if costs is None:
        return FEWEST
    candidate = 1.5 * costs.draft_cost(layer_set, window)
    return max(FEWEST, min(MOST, int(SEARCH_SHARE * n_tokens / USUAL_SPEEDUP / candidate)))


def scored(
    context: Context,
    sets: Sequence[tuple[LayerSet, str]],
    place: Place,
    settings: SwiftSettings,
    costs: CostProfile | None,
    first_step: int,
) -> PassGenerator[tuple[list[Trial], list[WindowScore]]]:
    """Trials from `first_step` on, of layer sets with their origins on the latest window; their seconds are 0.

    Beside them what each set predicted there.
    """
    scores = yield from score_window(context, [layer_set for layer_set, _ in sets], settings.context_window)
    trials = [
        Trial(
            step=first_step + i,
            layer_set=layer_set,
            origin=origin,
            matchness=score.matchness,
            score=objective(score, layer_set, settings, costs),
            prompt_id=place.prompt_id,
            position=place.position,
            seed=settings.seed,
        )
        for i, ((layer_set, origin), score) in enumerate(zip(sets, scores, strict=True))
    ]
    return trials, scores
