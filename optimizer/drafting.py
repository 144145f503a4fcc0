"""The method that a search finds layer sets for, and what such runs come to by measured costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.costs import CostProfile
from ..core.formats import STORED
from ..core.method_settings import AdaptiveSettings
from ..core.settings import SwiftSettings
from ..core.types import Completion, LayerSet, n_skipped_for
from ..decoding.adaptive import AdaptiveDrafter, adaptive
from ..decoding.method import Method, swift
from ..decoding.models import SkippedTarget

# The search's layer set names the format of every part.
ADAPTIVE = AdaptiveSettings(draft_format=STORED)


def drafting_with(draft: SkippedTarget, settings: SwiftSettings, costs: CostProfile | None) -> Method:
    """The method of `settings`, drafting with what `draft` holds; without costs there is nothing to adapt by."""
    if settings.method == "adaptive" and costs is not None:
        return adaptive(draft, costs, ADAPTIVE)
    return swift(draft, settings)


def learnt_by(method: Method) -> dict[str, Any] | None:
    """What its drafts have learnt while they were used, as JSON values; None: they learn nothing."""
    return method.drafter.state() if isinstance(method.drafter, AdaptiveDrafter) else None


def learn_again(method: Method, learnt: Mapping[str, Any] | None) -> None:
    """Go on from what `learnt_by` said of a method of the same settings.

    Raises: KeyError, TypeError, ValueError: that is no such state.
    """
    if isinstance(method.drafter, AdaptiveDrafter) and learnt is not None:
        method.drafter.restore(learnt)


def starting_set(n_layers: int, settings: SwiftSettings, skip_ratio: float, chooses_size: bool) -> LayerSet:
    """What a search begins with: evenly spaced sub-layers, or a quantised draft to be thinned out."""
    if chooses_size and settings.draft_format != STORED:
        return LayerSet(n_layers).filled(settings.draft_format)
    return LayerSet.uniform(n_layers, n_skipped_for(n_layers, skip_ratio)).filled(settings.draft_format)


def expected_of(costs: CostProfile | None, completions: Sequence[Completion]) -> float | None:
    """E(Spd.) of real runs by measured costs: as their drafter reckoned, or by Eq. 6 with the set each ended with.

    None where neither can be said.
    """
    decoded = [done for done in completions if done.verified_widths]  # others ended with the token that prefill gave
    reckoned = [done.reckoned_cost for done in decoded if done.reckoned_cost is not None]
    if reckoned and len(reckoned) == len(decoded):
        return sum(done.n_tokens - done.first_tokens for done in decoded) / sum(reckoned)
    return None if costs is None else costs.expected_of(decoded)
