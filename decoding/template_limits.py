"""Limits on chat templates, which are programs by the model's author: time, memory, and powers of large numbers.

transformers runs them in jinja2's sandbox, which protects the machine but does not limit their time and memory.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

LONGEST_S = 5.0  # Seconds that a template may run; those of known models take milliseconds.
MOST_BYTES = 2 << 30  # Additional memory that the process may take while a template runs.
MOST_BITS = 1 << 12  # Maximum bits of a power: a larger one would be a single step that cannot be interrupted.
_RENDERING = threading.Lock()  # Memory limits apply to the process, so templates run one at a time.


class LimitExceeded(Exception):
    """A template exceeds one of the limits; the message is a sentence. Templates themselves never raise it."""


class _Overdue(Exception):
    """The template ran longer than `LONGEST_S`."""


class _TooLarge(Exception):
    """The template asked for a power of more than `MOST_BITS`."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, without powers of large numbers."""

    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
            raise _TooLarge
        return super().call_binop(context, operator, left, right)


@contextmanager
def limited() -> Iterator[None]:
    """Run a block in which transformers compiles or renders a chat template, in this thread.

    Raises: LimitExceeded: the template exceeds one of the limits.
    """
    with _RENDERING:
        try:
            with _our_sandbox(), _limited_time(), _limited_memory():
                yield
        except (_Overdue, _TooLarge, MemoryError, RecursionError) as error:
            words = {
                _Overdue: f"runs longer than {LONGEST_S:g} s",
                _TooLarge: "computes with numbers that are too large",
                MemoryError: f"takes more than {MOST_BYTES / 2**30:g} GiB of memory",
                RecursionError: "calls itself without end",
            }
            reason = next(reason for kind, reason in words.items() if isinstance(error, kind))
            raise LimitExceeded(
                f"this model's chat template {reason}: send prompts as plain text, or use a model with another template"
            ) from None


@contextmanager
def _our_sandbox() -> Iterator[None]:
    """Make transformers compile templates for `LimitedEnvironment`; it looks up the sandbox when it compiles one."""
    module: Any = chat_template_utils
    usual = module.ImmutableSandboxedEnvironment
    module.ImmutableSandboxedEnvironment = LimitedEnvironment
    try:
        yield
    finally:
        module.ImmutableSandboxedEnvironment = usual


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raise `_Overdue` in this thread after `LONGEST_S`, between two bytecode steps."""
    thread, lock, is_done = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def stop() -> None:
        with lock:
            if not is_done:
                interrupt(thread, ctypes.py_object(_Overdue))

    timer = threading.Timer(LONGEST_S, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_done = True
            interrupt(thread, None)  # Cancel a pending exception, which would otherwise be raised later in other code.
        timer.cancel()


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Make allocations beyond `MOST_BYTES` of additional memory fail, if the system supports it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    usual = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    ceilings = [has + MOST_BYTES, *(limit for limit in usual if limit != resource.RLIM_INFINITY)]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (min(ceilings), usual[1]))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, usual)
