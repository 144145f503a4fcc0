"""When SWIFT's drafts end and how they branch: searched by measured time, on windows that are scored already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.costs import CostProfile
from ..core.settings import Branching, SwiftSettings
from ..core.types import LayerSet
from .evaluation import WindowScore
from .objective import replay_all

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

N_TRIALS = 48  # settings that are replayed; no pass of the model is needed for any
FEWEST_WINDOWS = 2  # below it the settings stay as they are
GAIN = 1.01  # by which other settings must be better than those in use
MOST_WINDOWS = 12  # of the set in use, the latest, that are kept for it
WIDTHS = (1, 2, 3, 5, 10)  # candidates that the least certain position offers


def branching_of(widest: int) -> Branching:
    """Candidates by confidence in the paper's proportions; its own are those of 10."""
    return ((0.5, widest), (0.8, math.ceil(widest / 2)), (0.95, math.ceil(widest * 0.3)), (1.0, 1))


def expected(scores: Sequence[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile) -> float:
    """The expected speedup of rounds replayed over all the windows."""
    played = replay_all(scores, settings)
    return costs.expected_speedup(layer_set, played.tokens, played.draft_steps, played.widths)


def search_drafting(
    scores: Sequence[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile, longest: int
) -> tuple[SwiftSettings, float, float]:
    """The settings with the stop threshold, draft length and branching that promise most, and what they and those given
    promise; the given ones where nothing is better by a hundredth.

    Args: scores: what the layer set predicted over some windows. longest: draft steps per round at most.
    """
    import optuna  # takes most of a second

    held = expected(scores, layer_set, settings, costs)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=settings.seed))

    def told(trial: BaseTrial) -> float:
        return expected(scores, layer_set, _settings_of(trial, settings, longest), costs)

    study.optimize(told, n_trials=N_TRIALS)
    best = _settings_of(study.best_trial, settings, longest)
    if study.best_value < held * GAIN:
        return settings, held, held
    return best, study.best_value, held


def _settings_of(trial: BaseTrial, settings: SwiftSettings, longest: int) -> SwiftSettings:
    """Settings as Optuna proposes them, or as a finished trial had them."""
    return replace(
        settings,
        stop_threshold=round(trial.suggest_float("stop_threshold", 0.05, 0.95), 2),
        max_draft_length=trial.suggest_int("max_draft_length", 1, longest),
        branching=branching_of(int(trial.suggest_categorical("widest", WIDTHS) or 1)),
    )
