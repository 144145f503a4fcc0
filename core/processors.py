"""How many threads to compute with: what the machine, the process's affinity and its container leave it."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import SettingsError

THREADS = "SWIFTOPT_THREADS"  # environment: overrules what is found
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container: "max 100000" or microseconds per period


def usable_cores() -> int:
    """Processors that this process may use, a container's quota counted in."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, min(affinity, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no such file, or no quota
        return affinity


def n_threads() -> int:
    """SWIFTOPT_THREADS, else OMP_NUM_THREADS, else one per usable core.

    Raises: SettingsError: SWIFTOPT_THREADS is no number from 1 to 255.
    """
    given = os.environ.get(THREADS)
    if given is None:
        usual = os.environ.get("OMP_NUM_THREADS", "")
        return min(int(usual) if usual.isdecimal() and int(usual) > 0 else usable_cores(), 255)
    if not given.isdecimal() or not 1 <= int(given) <= 255:
        raise SettingsError(f"{THREADS} is {given!r}: give a number of threads from 1 to 255")
    return int(given)
