"""Settings of Python's garbage collector: imports create half a million objects that are never freed."""

from __future__ import annotations

import atexit
import gc

DEFAULT_THRESHOLDS = gc.get_threshold()
# Allocations between two collections while the program loads. With Python's default of 700, collections take a
# quarter of the import time; with 50,000 still a twentieth.
STARTUP_THRESHOLD = 500_000


def start() -> None:
    """Collect rarely until the model is loaded, and never at exit: a full collection takes 0.9 s."""
    gc.set_threshold(STARTUP_THRESHOLD, *DEFAULT_THRESHOLDS[1:])
    atexit.register(gc.freeze)


def leave_imports() -> None:
    """Exclude all objects that exist before the first model is read, half a million, from later collections.

    Otherwise a collection soon after `run` would traverse them, for 0.13 s, before the model's first token.
    """
    if gc.get_threshold()[0] == STARTUP_THRESHOLD:
        gc.freeze()


def run() -> None:
    """Restore Python's default threshold after `start`: from now on garbage may hold large tensors."""
    if gc.get_threshold()[0] == STARTUP_THRESHOLD:
        gc.set_threshold(*DEFAULT_THRESHOLDS)
