"""When Python's garbage collector looks: the modules of a program are half a million objects, which come to stay."""

from __future__ import annotations

import atexit
import gc

USUAL = gc.get_threshold()
WHILE_STARTING = 50_000  # new objects between two looks; Python's 700 take a quarter of the time of the imports


def start() -> None:
    """Let a program collect seldom until its model is there, and not at its end: to walk everything takes 0.9 s."""
    gc.set_threshold(WHILE_STARTING, *USUAL[1:])
    atexit.register(gc.freeze)


def run() -> None:
    """Collect as often as usual if this program was started: from now on what is collected may hold tensors."""
    if gc.get_threshold()[0] == WHILE_STARTING:
        gc.set_threshold(*USUAL)
