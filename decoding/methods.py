"""Every method of the catalogue made of its parts; the names are those of `core.methods`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.costs import CostProfile
from ..core.errors import SettingsError
from ..core.method_settings import (
    AdaDecodeSettings,
    AdaptiveSettings,
    AdaSpeedSettings,
    BeamSettings,
    BildSettings,
    JacobiSettings,
    LayerSkipSettings,
    LookaheadSettings,
    LookupSettings,
    MtadSettings,
    ParaDecodeSettings,
    SelfSdSettings,
    SequencesSettings,
    SpdSettings,
    TypicalSettings,
)
from ..core.methods import method_info
from ..core.settings import SwiftSettings
from ..core.types import LayerSet
from ..models.early_exit import Heads, Probe
from ..models.runtime import Runtime
from ..models.stacked import StackedLayers
from .adaptive import AdaptiveDrafter, adaptive
from .beams import BeamDrafter
from .chain import ChainDrafter
from .early import EarlyDrafter
from .jacobi import JacobiDrafter
from .lookahead import LookaheadDrafter
from .lookup import LookupDrafter
from .lossy import JointRatio, KeepAll, Rollback, Typical
from .method import PLAIN, Method, swift
from .models import DraftModel, EarlyExit, OtherModel, SkippedTarget
from .pipeline import PipelineDrafter
from .ratio import BlockRatio, ChainRatio, SeveralRatio
from .sequences import SequencesDrafter
from .stopping import Adaptation, StopRule
from .worth import Prices


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What methods are made of; a method takes what it needs.

    Where a method drafts with a model, that is `draft_runtime`, or else the target without `layer_set`.
    """

    runtime: Runtime
    layer_set: LayerSet | None = None
    heads: Heads | None = None
    probe: Probe | None = None
    draft_runtime: Runtime | None = None
    costs: CostProfile | None = None

    def draft_model(self) -> DraftModel:
        """The smaller model, or the target without the layer set's sub-layers.

        Raises: SettingsError: there is neither. InvalidInput: the model's tokenizer is not the target's.
        """
        model: DraftModel = (
            SkippedTarget(self.skipped()) if self.draft_runtime is None else OtherModel(self.draft_runtime)
        )
        model.check(self.runtime)
        return model

    def skipped(self) -> LayerSet:
        """The layer set.

        Raises: SettingsError: there is none. LayerSetError: it was made for another depth.
        """
        if self.layer_set is None:
            raise SettingsError("this method drafts without some sub-layers: give a layer set, or tune one first")
        self.runtime.check_layer_set(self.layer_set)
        return self.layer_set

    def early_exit(self, exit_layer: int | None) -> EarlyExit:
        """The target's first layers; None: a quarter of them.

        Raises: SettingsError: the model has not so many layers.
        """
        model = EarlyExit(exit_layer or default_exit(self.runtime.n_layers))
        model.check(self.runtime)
        return model


def default_exit(n_layers: int) -> int:
    """Layers run before an early exit where nobody says: LayerSkip's examples leave after 8 of 32."""
    return max(1, round(n_layers / 4))


def build(name: str, parts: Parts, settings: Any = None) -> Method:
    """A method by name.

    Args:   settings: an object of the method's settings class; None: the defaults.
    Raises: SettingsError: there is no such method, or a part is missing. UnsupportedModel: the model cannot run it.
    """
    info = method_info(name)
    return _BUILDERS[name](parts, info.settings() if settings is None else settings)


def _plain(parts: Parts, settings: Any) -> Method:
    return PLAIN


def _swift(parts: Parts, settings: SwiftSettings) -> Method:
    return swift(parts.skipped(), settings)


def _self_sd(parts: Parts, settings: SelfSdSettings) -> Method:
    model = SkippedTarget(parts.skipped())
    return Method("self-sd", ChainDrafter(model, _adaptive(settings), sampled=True), ChainRatio())


def _layerskip(parts: Parts, settings: LayerSkipSettings) -> Method:
    drafter = ChainDrafter(parts.early_exit(settings.exit_layer), StopRule(settings.draft_length), sampled=True)
    return Method("layerskip", drafter, ChainRatio())


def _adaspeed(parts: Parts, settings: AdaSpeedSettings) -> Method:
    drafter = ChainDrafter(parts.early_exit(settings.exit_layer), _adaptive(settings, joint=True), sampled=True)
    return Method("adaspeed", drafter, ChainRatio())


def _adaspeed_probe(parts: Parts, settings: AdaSpeedSettings) -> Method:
    probe = _needed(parts.probe, "a probe", "swiftopt probe train")
    if settings.exit_layer not in (None, probe.depth):
        raise SettingsError(
            f"the probe was trained after {probe.depth} layers, not {settings.exit_layer}: leave exit_layer out, or"
            " train another probe with --layer"
        )
    drafter = ChainDrafter(parts.early_exit(probe.depth), _adaptive(settings, joint=True, probe=probe), sampled=True)
    return Method("adaspeed-probe", drafter, ChainRatio())


def _adadecode(parts: Parts, settings: AdaDecodeSettings) -> Method:
    heads = _needed(parts.heads, "heads", "swiftopt heads train")
    return Method("adadecode", EarlyDrafter(heads, settings.early_threshold, settings.max_early), ChainRatio())


def _paradecode(parts: Parts, settings: ParaDecodeSettings) -> Method:
    heads = _needed(parts.heads, "heads", "swiftopt heads train")
    return Method("paradecode", PipelineDrafter(heads, settings.early_threshold, StackedLayers(parts.runtime)))


def _spd(parts: Parts, settings: SpdSettings) -> Method:
    stop = StopRule(settings.max_draft_length, settings.stop_threshold)
    verifier = BlockRatio() if settings.block_verification else ChainRatio()
    return Method("spd", ChainDrafter(parts.draft_model(), stop, sampled=True), verifier)


def _several(name: str, rule: Any) -> Callable[[Parts, SequencesSettings], Method]:
    def make(parts: Parts, settings: SequencesSettings) -> Method:
        drafter = SequencesDrafter(
            parts.draft_model(), settings.sequences, settings.draft_length, replacement=rule != "without"
        )
        return Method(name, drafter, SeveralRatio(rule))

    return make


def _mtad(parts: Parts, settings: MtadSettings) -> Method:
    drafter = BeamDrafter(
        parts.draft_model(), settings.beam_width, settings.draft_length, settings.top_k, settings.top_p, sampled=True
    )
    return Method("mtad", drafter, JointRatio(settings.acceptance_threshold, settings.top_k, settings.top_p))


def _mtjd(parts: Parts, settings: BeamSettings) -> Method:
    whole = SkippedTarget(LayerSet(parts.runtime.n_layers))
    drafter = BeamDrafter(
        whole, settings.beam_width, settings.draft_length, settings.top_k, settings.top_p, sampled=True, keep=True
    )
    return Method("mtjd", drafter, KeepAll())


def _bild(parts: Parts, settings: BildSettings) -> Method:
    stop = StopRule(settings.max_draft_length, settings.fallback_threshold, keeps_last=False)
    return Method("bild", ChainDrafter(parts.draft_model(), stop, sampled=True), Rollback(settings.rollback_threshold))


def _typical(parts: Parts, settings: TypicalSettings) -> Method:
    drafter = ChainDrafter(parts.draft_model(), StopRule(settings.max_draft_length), sampled=True)
    return Method("typical", drafter, Typical(settings.epsilon, settings.delta))


def _lookahead(parts: Parts, settings: LookaheadSettings) -> Method:
    return Method("lookahead", LookaheadDrafter(settings))


def _jacobi(parts: Parts, settings: JacobiSettings) -> Method:
    return Method("jacobi", JacobiDrafter(settings))


def _lookup(parts: Parts, settings: LookupSettings) -> Method:
    return Method("prompt-lookup", LookupDrafter(settings))


def _by_worth(parts: Parts, settings: AdaptiveSettings) -> Method:
    costs = parts.costs
    if costs is None:
        raise SettingsError("this method decides by measured costs: give Parts the profile that measure_costs returns")
    layer_set = (parts.layer_set or LayerSet(parts.runtime.n_layers)).filled(settings.draft_format)
    if missing := costs.missing(layer_set):
        raise SettingsError(
            f"the costs of {', '.join(sorted(missing))} are not in the profile: add them with measure_format"
        )
    if layer_set.is_whole:
        return Method("adaptive", AdaptiveDrafter(None, Prices(costs, None), settings))
    model = SkippedTarget(layer_set)
    model.check(parts.runtime)
    return adaptive(model, costs, settings)


def _adaptive(settings: SelfSdSettings | AdaSpeedSettings, joint: bool = False, probe: Probe | None = None) -> StopRule:
    adaptation = Adaptation(
        settings.target_acceptance, settings.threshold_step, settings.rate_memory, settings.threshold_memory
    )
    return StopRule(settings.max_draft_length, settings.stop_threshold, joint, adaptation, probe)


def _needed(part: Any, words: str, command: str) -> Any:
    if part is None:
        raise SettingsError(f"this method needs {words}: train them for this model and task with `{command}`")
    return part


_BUILDERS: dict[str, Callable[[Parts, Any], Method]] = {
    "plain": _plain,
    "swift": _swift,
    "self-sd": _self_sd,
    "layerskip": _layerskip,
    "adaspeed": _adaspeed,
    "adaspeed-probe": _adaspeed_probe,
    "adadecode": _adadecode,
    "paradecode": _paradecode,
    "spd": _spd,
    "spectr": _several("spectr", "k-seq"),
    "specinfer": _several("specinfer", "with"),
    "mcss": _several("mcss", "without"),
    "lookahead": _lookahead,
    "jacobi": _jacobi,
    "prompt-lookup": _lookup,
    "adaptive": _by_worth,
    "mtad": _mtad,
    "mtjd": _mtjd,
    "bild": _bild,
    "typical": _typical,
}
