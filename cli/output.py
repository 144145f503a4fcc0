"""The two channels: results go to stdout, everything else to stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console, RenderableType

from ..core.errors import OutputError

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells report it


def console(*, stderr: bool = False) -> Console:
    """Make a rich console that obeys --no-color and NO_COLOR, and reads no text as markup."""
    context = click.get_current_context(silent=True)
    plain = context is not None and context.color is False
    return Console(stderr=stderr, color_system=None if plain else "auto", markup=False, highlight=False, emoji=False)


def show(*renderables: RenderableType) -> None:
    """Print a result for a person."""
    console().print(*renderables, sep="\n")


def answer(as_json: bool, value: Mapping[str, Any], show_text: Callable[[], object]) -> None:
    """Print a result as one JSON object, or for a person by calling `show_text`."""
    if as_json:
        emit_json(value)
    else:
        show_text()


def present(
    report: dict[str, Any],
    as_json: bool,
    show_table: Callable[[dict[str, Any]], None],
    png: str | None,
    draw: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """Print a benchmark's report, and draw its picture where one is wanted."""
    if png is not None:
        draw(report, Path(png))
    answer(as_json, report, lambda: show_table(report))


def emit_json(value: Mapping[str, Any]) -> None:
    """Print a result for a program: one object on one line."""
    click.echo(json_line(value))


def json_line(value: Mapping[str, Any]) -> str:
    """Return JSON in ASCII, so that no terminal's encoding can fail on a model's text."""
    return json.dumps(value)


def note(text: str) -> None:
    """Print a remark to stderr; where stderr cannot take it, the result still counts."""
    try:
        click.echo(text, err=True)
    except BrokenPipeError:
        raise
    except OSError:
        silence(sys.stderr)


def note_load(step: str) -> None:
    """Print how far the loading of a model is."""
    note(f"load: {step}")


def note_run(method: str, number: int, n_prompts: int, timed: Any) -> None:
    """Print the speed of one completion of a benchmark; `number` counts from 0."""
    speed = timed.tokens / timed.seconds
    note(f"prompt {number + 1} of {n_prompts}, {method}: {timed.tokens} tokens, {speed:.1f} tok/s")


def silence(stream: TextIO) -> None:
    """Discard what is still to be written to a stream, also at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence.

    Raises: OutputError: disk full, no permission, no such folder.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error)).lower()
        advice = "free some space" if error.errno == errno.ENOSPC else "choose another file"
        raise OutputError(f"cannot write {path}: {reason}; {advice} and run the command again") from error


def write_text(path: Path, text: str) -> None:
    """Write a whole small file.

    Raises: OutputError: it cannot be written.
    """
    with writing(path):
        path.write_text(text, encoding="utf-8")
