"""The method that a search finds layer sets for, and the search of when SWIFT's drafts end and how they branch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.costs import CostProfile
from ..core.formats import STORED
from ..core.settings import Branching, SwiftSettings
from ..core.types import Completion, LayerSet, n_skipped_for
from ..decoding.draft_models import SkippedTarget
from ..decoding.methods import Method, swift
from ..decoding.methods.adaptive import AdaptiveDrafter, AdaptiveSettings, adaptive
from .evaluation import WindowScore, replay_all

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

# The search's layer set names the format of every part.
ADAPTIVE = AdaptiveSettings(draft_format=STORED)

N_TRIALS = 48  # settings that are replayed; no pass of the model is needed for any
FEWEST_WINDOWS = 2  # below it the settings stay as they are
GAIN = 1.01  # by which other settings must be better than those in use
MOST_WINDOWS = 12  # of the set in use, the latest, that are kept for it
WIDTHS = (1, 2, 3, 5, 10)  # candidates that the least certain position offers


def drafting_with(draft: SkippedTarget, settings: SwiftSettings, costs: CostProfile | None) -> Method:
    """Build the method of `settings`, drafting with `draft`; without costs there is nothing to adapt by."""
    if settings.method == "adaptive" and costs is not None:
        return adaptive(draft, costs, ADAPTIVE)
    return swift(draft, settings)


def learnt_by(method: Method) -> dict[str, Any] | None:
    """Return what a method's drafts have learnt in use, as JSON values; None: they learn nothing."""
    return method.drafter.state() if isinstance(method.drafter, AdaptiveDrafter) else None


def learn_again(method: Method, learnt: Mapping[str, Any] | None) -> None:
    """Go on from what `learnt_by` said of a method of the same settings.

    Raises: KeyError, TypeError, ValueError: that is no such state.
    """
    if isinstance(method.drafter, AdaptiveDrafter) and learnt is not None:
        method.drafter.restore(learnt)


def starting_set(n_layers: int, settings: SwiftSettings, skip_ratio: float, chooses_size: bool) -> LayerSet:
    """Return the set a search begins with: evenly spaced sub-layers, or nothing skipped of a quantised draft."""
    if chooses_size and settings.draft_format != STORED:
        return LayerSet(n_layers).filled(settings.draft_format)
    return LayerSet.uniform(n_layers, n_skipped_for(n_layers, skip_ratio)).filled(settings.draft_format)


def expected_of(costs: CostProfile | None, completions: Sequence[Completion]) -> float | None:
    """Return E(Spd.) of real runs by measured costs: as their drafter estimated, or by Eq. 6 with their last sets.

    None where neither is known.
    """
    decoded = [done for done in completions if done.verified_widths]  # others ended with the token that prefill gave
    estimated = [done.reckoned_cost for done in decoded if done.reckoned_cost is not None]
    if estimated and len(estimated) == len(decoded):
        return sum(done.n_tokens - done.first_tokens for done in decoded) / sum(estimated)
    return None if costs is None else costs.expected_of(decoded)


def branching_of(widest: int) -> Branching:
    """Return the candidates by confidence in the paper's proportions, `widest` at the least; the paper has 10."""
    return ((0.5, widest), (0.8, math.ceil(widest / 2)), (0.95, math.ceil(widest * 0.3)), (1.0, 1))


def expected(scores: Sequence[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile) -> float:
    """Return the expected speedup of rounds replayed over all the windows."""
    played = replay_all(scores, settings)
    return costs.expected_speedup(layer_set, played.tokens, played.draft_steps, played.widths)


def search_drafting(
    scores: Sequence[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile, longest: int
) -> tuple[SwiftSettings, float, float]:
    """Find the stop threshold, draft length and branching with the highest expected speedup.

    Args:    scores: what the layer set predicted over some windows. longest: draft steps per round at most.
    Returns: the settings with them, or those given where nothing is better by a hundredth; their expected speedup, and
             that of those given.
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
    """Return the settings that Optuna proposes, or those of a finished trial."""
    return replace(
        settings,
        stop_threshold=round(trial.suggest_float("stop_threshold", 0.05, 0.95), 2),
        max_draft_length=trial.suggest_int("max_draft_length", 1, longest),
        branching=branching_of(int(trial.suggest_categorical("widest", WIDTHS) or 1)),
    )
