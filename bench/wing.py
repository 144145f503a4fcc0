"""What the benchmarks add to the floors."""

from __future__ import annotations

from ..core.wings import Wing, WingCommand

WING = Wing(commands=(WingCommand("swiftopt", "bench", "serve", "bench.commands:bench"),))
