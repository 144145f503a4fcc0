"""The decoding methods by name: where each comes from, what it promises and what it needs. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from . import method_settings as own
from .errors import SettingsError
from .method_settings import MethodSettings
from .settings import SwiftSettings

Need = Literal["layer_set", "heads", "probe", "costs"]


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A method: its paper, whether its output may differ from the target's (`lossy`), and what it needs to run.

    `drafts_with_model` says that a smaller model drafts; without one, the target without a layer set's sub-layers does.
    """

    name: str
    title: str
    source: str
    settings: type[Any] = MethodSettings
    needs: frozenset[Need] = frozenset()
    drafts_with_model: bool = False
    lossy: bool = False

    def settings_from(self, values: Any) -> Any:
        """The method's settings from plain values.

        Raises: SettingsError: one is unknown or out of range.
        """
        try:
            return self.settings.from_json(values)
        except SettingsError as error:
            raise SettingsError(f"method {self.name}: {error}") from error


def _info(name: str, title: str, source: str, settings: type[Any] = MethodSettings, *needs: Need, **more: bool) -> Any:
    return MethodInfo(name, title, source, settings, frozenset(needs), **more)


_SKIP: Need = "layer_set"

METHODS: dict[str, MethodInfo] = {
    info.name: info
    for info in (
        _info("plain", "plain decoding", "one token per pass"),
        _info("swift", "SWIFT", "arXiv:2410.06916", SwiftSettings, _SKIP),
        _info("self-sd", "Self-SD (Draft & Verify)", "arXiv:2309.08168", own.SelfSdSettings, _SKIP),
        _info("layerskip", "LayerSkip", "arXiv:2404.16710", own.LayerSkipSettings),
        _info("adaspeed", "AdaSPEED", "AdaSPEED II.A", own.AdaSpeedSettings),
        _info("adaspeed-probe", "AdaSPEED with a probe", "AdaSPEED II.B", own.AdaSpeedSettings, "probe"),
        _info("adadecode", "AdaDecode", "arXiv:2506.03700", own.AdaDecodeSettings, "heads"),
        _info("paradecode", "ParaDecode", "ParaDecode, section 2.2", own.ParaDecodeSettings, "heads"),
        _info("spd", "speculative decoding", "arXiv:2211.17192", own.SpdSettings, drafts_with_model=True),
        _info("spectr", "SpecTr (k-SEQ)", "arXiv:2310.15141", own.SequencesSettings, drafts_with_model=True),
        _info("specinfer", "SpecInfer", "arXiv:2305.09781", own.SequencesSettings, drafts_with_model=True),
        _info("mcss", "MCSS", "arXiv:2401.06706", own.SequencesSettings, drafts_with_model=True),
        _info("lookahead", "Lookahead decoding", "arXiv:2402.02057", own.LookaheadSettings),
        _info("jacobi", "Jacobi decoding", "arXiv:2305.10427", own.JacobiSettings),
        _info("prompt-lookup", "prompt lookup", "n-gram drafting", own.LookupSettings),
        _info("adaptive", "adaptive drafts", "docs/methods.md", own.AdaptiveSettings, "costs"),
        _info("mtad", "MTAD", "MTAD 3.2", own.MtadSettings, drafts_with_model=True, lossy=True),
        _info("mtjd", "MTJD", "MTAD 3.1", own.BeamSettings, lossy=True),
        _info("bild", "BiLD", "arXiv:2302.07863", own.BildSettings, drafts_with_model=True, lossy=True),
        _info(
            "typical", "typical decoding", "arXiv:2401.10774", own.TypicalSettings, drafts_with_model=True, lossy=True
        ),
    )
}


def method_info(name: str) -> MethodInfo:
    """A method by name.

    Raises: SettingsError: there is none; names the nearest.
    """
    if name not in METHODS:
        nearest = get_close_matches(name, METHODS, n=1, cutoff=0.0)[0]
        raise SettingsError(f"there is no method {name!r} (nearest: {nearest}): known are {', '.join(METHODS)}")
    return METHODS[name]
