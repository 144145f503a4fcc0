"""Papers' methods with each of their numbers and nothing of ours mixed in: `--preset`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

from .errors import SettingsError
from .settings import SwiftSettings


@dataclass(frozen=True, slots=True)
class Preset:
    """How a paper decodes: by `method`, with `settings` in place of its defaults; `source` says where they stand.

    `making` are settings by which what the method needs is made: of `TuningSettings` where that is searched while
    decoding (`is_tuned`), else of `HeadSettings`, of `ProbeSettings` or of Self-SD's search.
    """

    method: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    making: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_tuned(self) -> bool:
        """Whether its layer set is searched while a stream is decoded."""
        return self.method == "swift"

    @property
    def tuning(self) -> dict[str, Any]:
        """Every value of `TuningSettings` by name, of a preset that `is_tuned`."""
        return {**asdict(SwiftSettings()), **self.settings, **self.making}


# What SWIFT leaves to its published code: which window is scored, one candidate a round, the highest score is used, and
# how the Gaussian process is asked.
_SEARCH = {
    "strategy": "published",
    "objective": "matchness",
    "adoption": "highest",
    "window_at": "first",
    "candidates": 1,
    "deterministic": True,
}
QUARTERS = (0.25, 0.5, 0.75)  # of the depth: layers 8, 16 and 24 of 32

PRESETS: Mapping[str, Preset] = {
    "swift": Preset("swift", "SWIFT 4, B.2, C.2", {"sampled": True}, _SEARCH),
    "swift-code": Preset(
        "swift",
        "SWIFT's published code",
        {"sampled": True, "branching": ((0.5, 10), (0.8, 8), (0.95, 5), (1.0, 3))},
        _SEARCH,
    ),
    "self-sd": Preset(
        "self-sd",
        "AdaDecode B, C.1",
        {"stop_threshold": 0.6, "max_draft_length": 12},
        {"max_steps": 200, "n_prompts": 4, "uniform_starts": False},
    ),
    "adadecode": Preset(
        "adadecode",
        "AdaDecode 2, D",
        {"early_threshold": 0.75, "max_early": 5},
        {"epochs": 100, "learning_rate": 5e-3, "batch": 128, "warm_up": 0.03, "shares": QUARTERS},
    ),
    "paradecode": Preset(
        "paradecode",
        "ParaDecode 2, 4.3, C",
        {"early_threshold": 0.0},
        {"epochs": 50, "learning_rate": 5e-3, "batch": 128, "warm_up": 0.03, "shares": QUARTERS},
    ),
    "mtad": Preset(
        "mtad",
        "MTAD 3.2, F",
        {"beam_width": 4, "draft_length": 4, "top_k": 10, "top_p": 0.9, "acceptance_threshold": 0.5},
    ),
    "adaspeed": Preset("adaspeed", "AdaSPEED II, III, A"),
}


def preset_of(name: str) -> Preset:
    """Find a preset.

    Raises: SettingsError: there is none of that name; names the nearest.
    """
    if name not in PRESETS:
        nearest = get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise SettingsError(f"preset {name!r} is unknown: use one of {', '.join(PRESETS)} (nearest: {nearest})")
    return PRESETS[name]
