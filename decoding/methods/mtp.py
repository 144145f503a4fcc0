"""Multi-token prediction: the layer that ships with a checkpoint for this drafts a chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...core.errors import SettingsError
from ...core.serialization import Settings, count, share
from ...core.settings import STORED, Format
from ..draft import Drafter
from ..verify import TargetWalk, Verifier
from . import Resources, method
from .chains import ChainDrafter, StopRule

if TYPE_CHECKING:
    from ..mtp import MtpLayer


@dataclass(frozen=True, slots=True)
class MtpSettings(Settings):
    """Multi-token prediction (arXiv:2412.19437) with one layer, whose output is fed back to it (arXiv:2401.15077)."""

    max_draft_length: int = count(4)
    stop_threshold: float | None = share(0.5)  # None: fixed draft length.
    # Format of the layer's weights, and of the head that it drafts with.
    draft_format: Literal[Format, "stored"] = "int4"


@method("mtp", "multi-token prediction", "arXiv:2412.19437", MtpSettings)
def _mtp(resources: Resources, settings: MtpSettings) -> tuple[Drafter, Verifier]:
    model = mtp_model(resources, settings.draft_format)
    if model is None:
        raise SettingsError(
            "this model's files hold no multi-token-prediction layer that swiftopt reads: use another method"
        )
    return ChainDrafter(model, StopRule(settings.max_draft_length, settings.stop_threshold)), TargetWalk()


def mtp_model(resources: Resources, draft_format: str) -> MtpLayer | None:
    """Return the layer of the target's checkpoint as a draft model; None: it has none."""
    from ...models.loading import mtp_of
    from ..mtp import MtpLayer

    layer = mtp_of(resources.runtime)
    if layer is None:
        return None
    model = MtpLayer(layer, None if draft_format == STORED else draft_format)
    model.check(resources.runtime)
    return model
