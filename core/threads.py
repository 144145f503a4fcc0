"""Threads that repeat a step in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(step: Callable[[], None], every_s: float, name: str, join_s: float | None = None) -> Iterator[None]:
    """Call `step` every `every_s` seconds in a thread named `name` while the block runs.

    Args: step: handles its own errors. join_s: maximum wait for a running step when the block ends; None: no limit.
    """
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            step()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(join_s)
