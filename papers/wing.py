"""Registers the papers' commands, methods, presets and the parts that these methods need."""

from __future__ import annotations

from ..core.wings import Wing, WingCommand, WingPart

READER = "papers.early_exit:learned_from_bytes"
WING = Wing(
    commands=(
        WingCommand("swiftopt", "heads", "layers", "papers.commands:heads"),
        WingCommand("swiftopt", "probe", "layers", "papers.commands:probe"),
        WingCommand("layers", "search", "show", "papers.commands:search"),
    ),
    methods="papers.methods",
    presets="papers.presets:PRESETS",
    parts={
        "heads": WingPart("heads train", "papers.parts:make_heads", READER),
        "probe": WingPart("probe train", "papers.parts:make_probe", READER),
        "self-sd": WingPart("layers search", "papers.parts:make_self_sd_set"),
    },
    tunings=("papers.commands:tune_preset",),
)
