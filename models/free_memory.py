"""The memory that a process can still allocate on this machine; without torch."""

from __future__ import annotations

from pathlib import Path

import psutil

CONTAINER = Path("/sys/fs/cgroup")  # Folder of the container's memory limit and usage files (cgroup v2).


def free_memory() -> int:
    """Return the bytes that this process can still allocate on this machine, within the container's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CONTAINER / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (CONTAINER / "memory.stat").read_text(encoding="ascii").splitlines())
        return min(free, max(0, limit - used + int(kept["inactive_file"])))
    except (OSError, ValueError, KeyError):  # There is no limit, or its files cannot be read.
        return free
