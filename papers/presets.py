"""Presets (`--preset`): the papers' methods with the papers' settings."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.settings import Preset

# Heads after a quarter, half and three quarters of the layers: after 8, 16 and 24 of 32 (Figure 3 of both papers).
_HEADS = {"learning_rate": 5e-3, "batch": 128, "warm_up": 0.03, "shares": (0.25, 0.5, 0.75)}
_WARPING = {"top_k": 10, "top_p": 0.9}

PRESETS: Mapping[str, Preset] = {
    "self-sd": Preset(
        "self-sd",
        "AdaDecode C",
        {"stop_threshold": 0.6, "max_draft_length": 12},
        {"max_steps": 200, "n_prompts": 4, "uniform_starts": False},
    ),
    "adadecode": Preset(
        "adadecode",
        "AdaDecode 2, D",
        {"early_threshold": 0.75, "max_early": 5},
        {"epochs": 100, **_HEADS},
    ),
    "paradecode": Preset(
        "paradecode",
        "ParaDecode 2, 4.3, C",
        {"early_threshold": 0.0},
        {"epochs": 50, **_HEADS},
    ),
    "mtad": Preset(
        "mtad",
        "MTAD 3.2, F",
        {"beam_width": 4, "draft_length": 4, **_WARPING, "acceptance_threshold": 0.5},
        sampling={"temperature": 1.0, **_WARPING},
    ),
    "adaspeed": Preset("adaspeed", "AdaSPEED II, III, A"),
}
