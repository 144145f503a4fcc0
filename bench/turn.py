"""The turn of a benchmark: no other measurement runs on this machine, and what it started ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch

from ..core.errors import Busy
from ..core.processes import die_with
from ..models.measuring import held_by_children, measuring_turn

WAIT_S = 900.0  # Longest wait for another measurement.
HELP = ("--help", "-h")


def measured(main: Callable[[], Any], wait_s: float = WAIT_S) -> None:
    """Run a benchmark's program while no other process measures on the processors; end with its exit code."""
    if any(word in HELP for word in sys.argv[1:]):
        sys.exit(main())
    say = partial(click.echo, err=True)
    try:
        with measuring_turn(torch.device("cpu"), say, wait_s, alone=True), held_by_children(torch.device("cpu")):
            sys.exit(main())
    except Busy as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def started(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that the kernel kills when this one ends, however that happens."""
    return subprocess.Popen(command, preexec_fn=partial(die_with, os.getpid()), **options)
