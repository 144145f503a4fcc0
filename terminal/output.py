"""The two channels: results go to stdout, everything else to stderr."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
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

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells report it


def console(**more: Any) -> Console:
    """Make a rich console that obeys --no-color and NO_COLOR, and reads no text as markup; `more` goes to `Console`."""
    context = click.get_current_context(silent=True)
    plain = context is not None and context.color is False
    return Console(color_system=None if plain else "auto", markup=False, highlight=False, emoji=False, **more)


@dataclass(frozen=True, slots=True)
class Result:
    """What a command has found: a JSON object for a program; for a person parts on stdout and remarks on stderr.

    Texts are printed as they are, other parts as rich draws them. What was `interrupted` ends the program as Ctrl-C
    does, otherwise its exit code is `code`.
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


def listed(
    value: Mapping[str, Any], found: Sequence[Found], table: Callable[[Sequence[Found], int], RenderableType], none: str
) -> Result:
    """Return the result of a list, with the table of what was found in the console's width; `none` is for nothing."""
    return Result(value, [table(found, console().width)] if found else [], [] if found else [none])


def show(part: RenderableType) -> None:
    """Print a part of a result for a person; nothing is cut off, for a cut path is of no use."""
    if isinstance(part, str):
        click.echo(part)
    else:
        console().print(part, crop=False)


def emit_json(value: Mapping[str, Any]) -> None:
    """Print a result for a program: one object on one line, in ASCII, so that no terminal's encoding can fail on it."""
    click.echo(json.dumps(value))


def note(text: str) -> None:
    """Print a remark to stderr; where stderr cannot take it, the result still counts."""
    try:
        click.echo(text, err=True)
    except BrokenPipeError:
        raise
    except OSError:
        silence(sys.stderr)


# Line ends, blanks, characters of scripts that are written without blanks, and words or parts of them.
_UNSPACED = r"\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_PIECES = re.compile(rf"\n|[^\S\n]+|[{_UNSPACED}]|[^\s{_UNSPACED}]+")


class TextPrinter:
    """Prints text as it comes; at a terminal a word that does not fit is taken back and begins the next line."""

    def __init__(self, err: bool = False, dim: bool = False) -> None:
        context, stream = click.get_current_context(silent=True), sys.stderr if err else sys.stdout
        self._console, self._err = console(stderr=err), err
        self._dim = dim and not (context is not None and context.color is False)
        self._wraps = stream.isatty() and not self._console.is_dumb_terminal
        self._column = self._start = 0  # of the cursor, and of the word that it stands in
        self._word = ""  # as far as it is printed

    def write(self, text: str) -> None:
        """Print the next part of the text."""
        if self._wraps:
            text = "".join(map(self._fitted, _PIECES.findall(text)))
        text = click.style(text, dim=True) if self._dim else text
        click.echo(
            text, nl=False, err=self._err, color=self._wraps or None
        )  # else click leaves out what moves the cursor

    def _fitted(self, piece: str) -> str:
        """Return what prints a piece of the text, and follow the cursor."""
        width, size = self._console.width, cell_len(piece)
        is_alone = piece.isspace() or re.fullmatch(f"[{_UNSPACED}]", piece) is not None  # no part of a word
        if is_alone or not self._word:
            self._word, self._start = "", self._column
        word, fits = self._word + piece, self._column + size < width
        self._word = "" if is_alone else word
        if piece == "\n" or (piece.isspace() and not fits):
            self._column = 0
            return "\n"
        if fits or self._start == 0:  # a word that no line has room for is left to the terminal
            self._column = (self._column + size) % width
            return piece
        back = f"\x1b[{cell_len(word) - size}D\x1b[K" if word != piece else ""
        self._column, self._start = cell_len(word) % width, 0
        return f"{back}\n{word}"


class StepNotes:
    """Prints a line to stderr for each phase of loading and measuring: a step counts on within its phase."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix, self._phase = prefix, ""

    def __call__(self, step: str) -> None:
        if (phase := phase_of(step)) != self._phase:
            self._phase = phase
            note(f"{self._prefix}{phase}")


class RunNotes:
    """Says after each prompt that methods have decoded by turns how long the others will take."""

    def __init__(self) -> None:
        self._n_done, self._began = 0, 0.0

    def __call__(self, method: str, number: int, n_prompts: int, timed: Any) -> None:
        """Take in that `method` has completed prompt `number`, from 0: all before it are done."""
        self._began = self._began or time.monotonic() - timed.seconds
        if number > self._n_done:
            self._n_done = number
            left_s = (time.monotonic() - self._began) / number * (n_prompts - number)
            note(f"{number} of {n_prompts} prompts done, {about(left_s)} left")


def about(seconds: float) -> str:
    """Return a time that is estimated: about 40 s, about 4 min, about 2.5 h."""
    if seconds < 90:
        return f"about {max(10, 10 * round(seconds / 10))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 90 * 60 else f"about {seconds / 3600:.1f} h"


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


def check_writable(path: Path) -> None:
    """Check that a file can be written, and leave it as it is.

    Raises: OutputError: it can not.
    """
    with writing(path):
        target = Path(os.path.realpath(path))  # what a link leads to
        is_new = not target.exists()
        if is_new or target.is_file() or target.is_dir():  # opening would disturb a pipe
            target.open("ab").close()
        if is_new:
            target.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a whole small file.

    Raises: OutputError: it cannot be written.
    """
    with writing(path):
        path.write_text(text, encoding="utf-8")
