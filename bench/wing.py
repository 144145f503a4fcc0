"""Registers the benchmark commands with the core package."""

from __future__ import annotations

from ..core.wings import Wing, WingCommand

WING = Wing(commands=(WingCommand("swiftopt", "bench", "serve", "bench.commands:bench"),))
