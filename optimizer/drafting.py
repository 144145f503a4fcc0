"""The method that a search finds layer sets for, and what such runs come to by measured costs."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.costs import CostProfile
from ..core.formats import STORED
from ..core.method_settings import AdaptiveSettings
from ..core.settings import SwiftSettings
from ..core.types import Completion, LayerSet, n_skipped_for
from ..decoding.adaptive import adaptive
from ..decoding.method import Method, swift
from ..decoding.models import SkippedTarget

# The search's layer set names the format of every part.
ADAPTIVE = AdaptiveSettings(draft_format=STORED)


def drafting_with(draft: SkippedTarget, settings: SwiftSettings, costs: CostProfile | None) -> Method:
    """The method of `settings`, drafting with what `draft` holds; without costs there is nothing to adapt by."""
    if settings.method == "adaptive" and costs is not None:
        return adaptive(draft, costs, ADAPTIVE)
    return swift(draft, settings)


def starting_set(n_layers: int, settings: SwiftSettings, skip_ratio: float, chooses_size: bool) -> LayerSet:
    """What a search begins with: evenly spaced sub-layers, or a quantised draft to be thinned out."""
    if chooses_size and settings.draft_format != STORED:
        return LayerSet(n_layers).filled(settings.draft_format)
    return LayerSet.uniform(n_layers, n_skipped_for(n_layers, skip_ratio)).filled(settings.draft_format)


def expected_of(costs: CostProfile | None, completions: Sequence[Completion]) -> float | None:
    """E(Spd.) of real runs by measured costs: as their drafter reckoned, or by Eq. 6 with the set each ended with.

    None where neither can be said.
    """
    reckoned = [done.reckoned_cost for done in completions if done.reckoned_cost is not None]
    if reckoned and len(reckoned) == len(completions):
        return sum(done.n_tokens - done.first_tokens for done in completions) / sum(reckoned)
    return None if costs is None else costs.expected_of(completions)
