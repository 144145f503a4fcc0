"""One small program per engine: each runs in the engine's own environment and imports nothing of swiftopt but one."""
