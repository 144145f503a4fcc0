"""Runs a command line as a program: errors become exit codes, and output survives any terminal."""

from __future__ import annotations

import codecs
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from ..core import collector
from ..core.errors import SwiftoptError
from .inputs import lacks
from .output import INTERRUPTED, note, silence

# Signals that interrupt a command as Ctrl-C does, so that finished work is printed: `kill`, a lost terminal.
INTERRUPTS = (signal.SIGTERM, signal.SIGHUP)
# Error codes when stdout cannot be written.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
IN_ASCII = dict(zip("■█▁▂▃▄▅▆▇·━–…αγε", "##1234567.--.age", strict=True))  # Replacements on ASCII-only terminals.


def run(program: click.Command, args: Sequence[str], name: str | None = None) -> int:
    """Run one command line of a program and return its exit code; unexpected errors (bugs) are raised."""
    try:
        exit_code = program.main(list(args), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return exit_code if isinstance(exit_code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt) as abort:
        if isinstance(abort.__cause__, EOFError):  # No Ctrl-D, as click assumes: no command prompts for input.
            raise abort.__cause__ from None
        note("interrupted: finished work is kept")
        return INTERRUPTED
    except click.ClickException as error:
        note(_usage(error))
        return error.exit_code
    except SwiftoptError as error:
        note(f"error: {error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "swiftopt"):
            raise
        note(f"error: {lacks(package)}")
        return 1
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            if error.errno not in UNWRITABLE:
                raise
            note(f"error: cannot write the result: {(error.strerror or '').lower()}; redirect stdout elsewhere")
        silence(sys.stdout)
        return 1


def interrupt_by_signals() -> None:
    """Let `INTERRUPTS` raise KeyboardInterrupt once, unless they are ignored; a second signal ends the process."""
    for number in INTERRUPTS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def end_by_signals() -> None:
    """Let `INTERRUPTS` end the process again."""
    for number in INTERRUPTS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: object) -> NoReturn:
    end_by_signals()
    raise KeyboardInterrupt


def _usage(error: click.ClickException) -> str:
    """Return a usage error as one line; for a group called without arguments, return its whole help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    # click lists what may be chosen a line each, and asks in a separate sentence.
    text = " ".join(error.format_message().split())
    text = text.replace(". Did you", ": did you").replace(". Choose from:", ": choose from")
    context = getattr(error, "ctx", None)
    advice = f" (see `{context.command_path} --help`)" if context is not None else ""
    return f"error: {text[:1].lower()}{text[1:].rstrip('.')}{advice}"


def main(program: click.Command, name: str | None = None) -> NoReturn:
    """Run a program with the arguments of this process, and end it."""
    collector.start()
    interrupt_by_signals()
    _replace_closed_streams()
    codecs.register_error("swiftopt", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda **_: None)(errors="swiftopt")
    sys.exit(run(program, sys.argv[1:], name))


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: replace characters that the terminal's encoding lacks by ASCII of the same width."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(IN_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _replace_closed_streams() -> None:
    """Open the null device for standard streams that are closed: else the next opened file gets their descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
