"""The program `swiftopt`: imports a command when it is called, and turns errors into one sentence and a code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

import click

from .. import __version__
from ..core.errors import SwiftoptError
from . import options
from .options import ConfiguredGroup
from .output import INTERRUPTED, note, silence

MODULES = {  # of the commands, in the order in which help lists them
    "tune": "jobs",
    "generate": "generate",
    "chat": "chat",
    "compare": "compare",
    "layers": "layers",
    "export": "layers",
    "import": "engines",
    "heads": "training_commands",
    "probe": "training_commands",
    "models": "layers",
    "jobs": "jobs",
    "worker": "services",
    "serve": "services",
    "bench": "bench",
    "db": "services",
    "doctor": "doctor",
    "completion": "reference",
}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # errors of what stdout leads to


class LazyGroup(ConfiguredGroup):
    """Imports a command's module when the command, or the help that lists it, is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        module = import_module(f".{MODULES[cmd_name]}", __package__)
        command: click.Command = getattr(module, cmd_name + "_" * iskeyword(cmd_name))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=list(MODULES), ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        from .config import load_settings, misspelt

        ctx.default_map = load_settings()
        for remark in misspelt(os.environ):
            note(f"note: {remark}")
        return super().invoke(ctx)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, prog_name="swiftopt")
@click.option("--no-color", is_flag=True, help="No colours; the variable NO_COLOR does the same.")
@click.pass_context
@options.example(
    "tune --model smollm2-135m --stream prompts.jsonl --task notes",
    'generate --model smollm2-135m --task notes --prompt "Once upon a time"',
)
def swiftopt(context: click.Context, no_color: bool) -> None:
    """Find the sub-layers a language model can skip while drafting, and decode faster with them, losslessly.

    Results go to stdout, progress and warnings to stderr. Options win over SWIFTOPT_* variables, those over
    ./swiftopt.toml, that over the defaults.
    """
    if no_color or os.environ.get("NO_COLOR"):
        context.color = False


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors that are swiftopt's own are raised."""
    try:
        result = swiftopt.main(list(args), prog_name="swiftopt", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt) as abort:
        if isinstance(abort.__cause__, EOFError):  # click takes it for Ctrl-D, but no command asks for input
            raise abort.__cause__ from None
        note("interrupted: what was finished until now is kept")
        return INTERRUPTED
    except click.ClickException as error:
        note(_usage(error))
        return error.exit_code
    except SwiftoptError as error:
        note(f"error: {error}")
        return error.exit_code
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            if error.errno not in UNWRITABLE:
                raise
            note(f"error: cannot write the result: {(error.strerror or '').lower()}; send stdout somewhere else")
        silence(sys.stdout)
        return 1


def _usage(error: click.ClickException) -> str:
    """Return a usage error as one line, but the whole help for a group that was called with nothing."""
    text = error.format_message().replace(". Did you", ": did you")
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return text
    context = getattr(error, "ctx", None)
    advice = f" (see `{context.command_path} --help`)" if context is not None else ""
    return f"error: {text[:1].lower()}{text[1:].rstrip('.')}{advice}"


def main() -> NoReturn:
    """Run the console script."""
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show α or a bar shows a question mark, not a traceback
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    sys.exit(run(sys.argv[1:]))


def _replace_closed_streams() -> None:
    """Open the null device for streams that the caller closed; else the next file opened would take their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
