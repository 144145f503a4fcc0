"""Keeps measurements apart: one at a time on a machine, and the processes that it starts end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial, wraps
from typing import Any

import click

from ..core.errors import Busy
from ..core.processes import die_with
from ..core.settings import OMP_THREADS, THREADS, n_threads, usable_cores
from ..models.measuring import held_by_children, measuring_turn
from ..terminal.commands import ConfiguredGroup
from ..terminal.output import INTERRUPTED, note
from ..terminal.program import interrupt_by_signals

WAIT_S = 900.0  # Longest wait for another measurement.
HELP = ("--help", "-h")


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other process measures on the processors, and make others wait in turn.

    At the end a remark says if a variable left cores idle, which the results alone would not tell from a slow machine.

    Raises: Busy: another process still measures after `WAIT_S`.
    """
    with measuring_turn("cpu", note, WAIT_S, alone=True), held_by_children("cpu"):
        yield
        name = THREADS if THREADS in os.environ else OMP_THREADS
        if name in os.environ and n_threads() < usable_cores():
            note(f"measured on {n_threads()} of {usable_cores()} cores, because {name} is {os.environ[name]}")


class MeasuringGroup(ConfiguredGroup):
    """A group of commands that take turns at measuring, those of wings included.

    Options are parsed before the wait, so that help and usage errors appear at once.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, further_args = super().resolve_command(ctx, args)
        callback = None if command is None else command.callback
        if command is not None and callback is not None:
            command = copy(command)
            command.callback = _in_turn(callback)
        return name, command, further_args


def _in_turn(callback: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(callback)
    def run(*args: Any, **values: Any) -> Any:
        with turn():
            return callback(*args, **values)

    return run


def measured(main: Callable[[], Any]) -> None:
    """Run a benchmark's program in its turn, and exit with the program's exit code."""
    if any(word in HELP for word in sys.argv[1:]):
        sys.exit(main())
    try:
        interrupt_by_signals()
        with turn():
            exit_code = main()
        sys.exit(exit_code)
    except Busy as error:
        note(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(INTERRUPTED)


def started(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that the kernel kills when this one ends, even if this one is killed."""
    return subprocess.Popen(command, preexec_fn=partial(die_with, os.getpid()), **options)
