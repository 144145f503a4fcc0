"""A decoding method: a drafter, with its stop rule and branching, and the verifier that its drafts need."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.settings import SwiftSettings
from ..core.types import LayerSet
from .chain import ChainDrafter, NoDrafter
from .draft import Drafter, Verifier
from .models import SkippedTarget
from .stopping import StopRule
from .verify import TargetWalk


@dataclass(frozen=True, slots=True)
class Method:
    """A recipe that the one loop decodes with; `name` is what results carry."""

    name: str
    drafter: Drafter
    verifier: Verifier = field(default_factory=TargetWalk)

    @property
    def lossy(self) -> bool:
        """Whether the output may differ in distribution from the target's own."""
        return self.verifier.lossy

    @property
    def layer_set(self) -> LayerSet | None:
        """The sub-layers that its drafts leave out, if that is how it drafts."""
        return self.drafter.layer_set


PLAIN = Method("plain", NoDrafter())


def swift(draft: LayerSet | SkippedTarget, settings: SwiftSettings) -> Method:
    """SWIFT's draft: the target without some sub-layers, stopped early, each position with its top candidates.

    Args:   draft: the layer set, or what holds it while a search changes it.
    Source: SWIFT 4.2, Eq. 5.
    """
    stop = StopRule(settings.max_draft_length, settings.stop_threshold if settings.early_stop else None)
    branching = settings.branching if settings.dynamic_verification else None
    model = draft if isinstance(draft, SkippedTarget) else SkippedTarget(draft)
    return Method("swift", ChainDrafter(model, stop, branching))
