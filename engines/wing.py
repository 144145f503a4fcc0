"""Registers the commands and options for other engines with the core package."""

from __future__ import annotations

from ..core.wings import Wing, WingCommand

WING = Wing(
    commands=(
        WingCommand("swiftopt", "export", "layers", "engines.commands:export"),
        WingCommand("swiftopt", "import", "layers", "engines.commands:import_"),
        WingCommand("bench", "peers", "serve", "engines.commands:peers"),
    ),
    options={"tune": "engines.commands:engine_options"},
    tunings=("engines.commands:tune_engine",),
)
