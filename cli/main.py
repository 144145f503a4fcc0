"""The program `swiftopt`: finds a command's module when it is called, and turns errors into one sentence and a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

import click

from .. import __version__
from ..core.errors import SwiftoptError
from .options import PresetGroup

# Each names a module of this package that holds a command of the same name.
COMMANDS = ("tune", "generate", "layers", "models", "bench", "doctor")
INTERRUPTED = 130  # what a shell reports for Ctrl-C


class LazyGroup(PresetGroup):
    """Imports a command's module when the command, or the help that lists it, is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f".{cmd_name}", __package__), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        from .config import load_settings

        ctx.default_map = load_settings()
        return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="swiftopt")
@click.option("--no-color", is_flag=True, help="No colours; the variable NO_COLOR does the same.")
@click.pass_context
def swiftopt(context: click.Context, no_color: bool) -> None:
    """Find the sub-layers a language model can skip while drafting, and decode faster with them, losslessly.

    Results go to stdout, progress and warnings to stderr. Options win over SWIFTOPT_* variables, those over
    ./swiftopt.toml, that over the defaults.

    \b
    Example:
      swiftopt tune --model smollm2-135m --stream prompts.jsonl --task notes
      swiftopt generate --model smollm2-135m --task notes --prompt "Once upon a time"
    """
    if no_color or os.environ.get("NO_COLOR"):
        context.color = False


def run(args: Sequence[str]) -> int:
    """Run one command line; returns its exit code. What is nobody's mistake but ours is raised."""
    try:
        result = swiftopt.main(list(args), prog_name="swiftopt", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort as abort:
        if isinstance(abort.__cause__, EOFError):  # click takes it for Ctrl-D, but nothing here asks questions
            raise abort.__cause__ from None
        click.echo("interrupted: what was finished until now is kept", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SwiftoptError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except BrokenPipeError:
        _silence(sys.stdout)
        return 1


def main() -> NoReturn:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show α or a bar gets a question mark, not a traceback
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    sys.exit(run(sys.argv[1:]))


def _silence(stream: TextIO) -> None:
    """Let the flush at the interpreter's end go nowhere: the reader of the pipe has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
