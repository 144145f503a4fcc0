"""One small program per rival: each runs in the rival's own environment and imports nothing of swiftopt but one."""
