"""The two channels: results go to stdout, everything else to stderr."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console, RenderableType

from ..core.errors import OutputError
from ..core.events import phase_of

Found = TypeVar("Found")

INTERRUPTED = 130  # Exit code after Ctrl-C, as in shells: 128 + SIGINT.


def console(**console_options: Any) -> Console:
    """Make a rich console that obeys --no-color and NO_COLOR and reads no text as markup, with options of `Console`."""
    context = click.get_current_context(silent=True)
    is_plain = context is not None and context.color is False
    return Console(
        color_system=None if is_plain else "auto", markup=False, highlight=False, emoji=False, **console_options
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a command: a JSON object for programs; for people, parts on stdout and remarks on stderr.

    Strings are printed unchanged, other parts are rendered by rich. If `interrupted`, the program exits as after
    Ctrl-C, otherwise with `code`.
    """

    value: Mapping[str, Any]
    parts: Iterable[RenderableType] = ()
    remarks: Iterable[str] = ()
    code: int = 0
    interrupted: bool = False

    def print(self, as_json: bool) -> int:
        """Print the result and return the exit code.

        Raises: KeyboardInterrupt: it is of an interrupted run.
        """
        if as_json:
            emit_json(self.value)
        else:
            for part in self.parts:
                show(part)
            for remark in self.remarks:
                note(remark)
        if self.interrupted:
            raise KeyboardInterrupt
        return self.code


def listing_result(
    report: Mapping[str, Any],
    rows: Sequence[Found],
    table: Callable[[Sequence[Found], int], RenderableType],
    empty_note: str,
) -> Result:
    """Return the result of a listing as a table as wide as the console, or the remark `empty_note` without rows."""
    return Result(report, [table(rows, console().width)] if rows else [], [] if rows else [empty_note])


def show(part: RenderableType) -> None:
    """Print a part of a result for a person, without truncation: a truncated path is useless."""
    if isinstance(part, str):
        click.echo(part)
    else:
        console().print(part, crop=False)


def emit_json(report: Mapping[str, Any]) -> None:
    """Print a result for a program: one object on one line, in ASCII, so that no terminal's encoding can fail on it."""
    click.echo(json.dumps(report))


def note(text: str) -> None:
    """Print a remark to stderr; a failed write to stderr does not fail the command."""
    try:
        click.echo(text, err=True)
    except BrokenPipeError:
        raise
    except OSError:
        silence(sys.stderr)


# Pieces of text: line ends, blanks, single characters of scripts without spaces (Chinese, Japanese), and words.
_UNSPACED = r"\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_PIECES = re.compile(rf"\n|[^\S\n]+|[{_UNSPACED}]|[^\s{_UNSPACED}]+")


class TextPrinter:
    """Prints streamed text; at a terminal, a word that does not fit is erased and moved to the next line."""

    def __init__(self, err: bool = False, dim: bool = False) -> None:
        context, stream = click.get_current_context(silent=True), sys.stderr if err else sys.stdout
        self._console, self._err = console(stderr=err), err
        self._dim = dim and not (context is not None and context.color is False)
        self._wraps = stream.isatty() and not self._console.is_dumb_terminal
        self._column = self._word_start = 0  # Columns of the cursor and of the current word's start.
        self._printed_word = ""  # The printed part of the current word.

    def write(self, text: str) -> None:
        """Print the next part of the text."""
        if self._wraps:
            text = "".join(map(self._wrap, _PIECES.findall(text)))
        text = click.style(text, dim=True) if self._dim else text
        click.echo(
            text, nl=False, err=self._err, color=self._wraps or None
        )  # `color` keeps click from stripping the escape codes that move the cursor.

    def _wrap(self, piece: str) -> str:
        """Return the characters and escape codes that print a piece, and update the cursor's column."""
        width, size = self._console.width, cell_len(piece)
        is_alone = piece.isspace() or re.fullmatch(f"[{_UNSPACED}]", piece) is not None  # The piece belongs to no word.
        if is_alone or not self._printed_word:
            self._printed_word, self._word_start = "", self._column
        word, has_room = self._printed_word + piece, self._column + size < width
        self._printed_word = "" if is_alone else word
        if piece == "\n" or (piece.isspace() and not has_room):
            self._column = 0
            return "\n"
        if has_room or self._word_start == 0:  # The terminal wraps words that are longer than a line.
            self._column = (self._column + size) % width
            return piece
        erase_word = f"\x1b[{cell_len(word) - size}D\x1b[K" if word != piece else ""
        self._column, self._word_start = cell_len(word) % width, 0
        return f"{erase_word}\n{word}"


class StepNotes:
    """Prints one line to stderr per phase of loading and measuring, not per step within a phase."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix, self._phase = prefix, ""

    def __call__(self, step: str) -> None:
        if (phase := phase_of(step)) != self._phase:
            self._phase = phase
            note(f"{self._prefix}{phase}")


class RunNotes:
    """Prints the estimated remaining time after each prompt that all methods have decoded."""

    def __init__(self) -> None:
        self._n_done, self._started_s = 0, 0.0

    def __call__(self, method: str, number: int, n_prompts: int, timing: Any) -> None:
        """Note that `method` has completed prompt `number` (from 0); all methods have completed the earlier ones."""
        self._started_s = self._started_s or time.monotonic() - timing.seconds
        if number > self._n_done:
            self._n_done = number
            left_s = (time.monotonic() - self._started_s) / number * (n_prompts - number)
            note(f"{number} of {n_prompts} prompts done, {about(left_s)} left")


def about(seconds: float) -> str:
    """Format an estimated time: about 40 s, about 4 min, about 2.5 h."""
    if seconds < 90:
        return f"about {max(10, 10 * round(seconds / 10))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 90 * 60 else f"about {seconds / 3600:.1f} h"


def silence(stream: TextIO) -> None:
    """Discard a stream's unwritten output, so that the interpreter's exit does not fail on it either."""
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


def check_writable(path: Path) -> None:
    """Check that a file can be written, and leave it as it is.

    Raises: OutputError: it can not.
    """
    with writing(path):
        target = Path(os.path.realpath(path))  # Target of a symbolic link.
        is_new = not target.exists()
        if is_new or target.is_file() or target.is_dir():  # Opening a pipe would disturb its reader.
            target.open("ab").close()
        if is_new:
            target.unlink()


def check_folder(path: Path, option: str) -> None:
    """Check that files can be made in the folder that `option` names; where it is missing, it is made for its owner.

    Raises: OutputError: they can not.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(f"cannot write to {path}: {reason}; choose another {option}") from error


def write_text(path: Path, text: str) -> None:
    """Write a whole small file.

    Raises: OutputError: it cannot be written.
    """
    with writing(path):
        path.write_text(text, encoding="utf-8")
