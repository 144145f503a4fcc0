"""`swiftopt completion`: scripts that complete commands in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ..terminal import commands, options
from ..terminal.output import Result
from .main import swiftopt

SHELLS = ("bash", "zsh", "fish")


@commands.command(short_help="Print a script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@options.json
@commands.example(
    "completion bash > ~/.local/share/bash-completion/completions/swiftopt",
    "completion zsh > ~/.zfunc/_swiftopt",
    "completion fish > ~/.config/fish/completions/swiftopt.fish",
)
def completion(shell: str) -> Result:
    """Print a script for bash (4.4 or newer), zsh or fish that completes commands, options, and values of options.

    Completed values are choices, model aliases, methods, search strategies and files, but nothing from the database.
    zsh needs `fpath+=~/.zfunc` before `compinit` in ~/.zshrc.
    """
    completer = get_completion_class(shell)
    assert completer is not None, f"click knows no {shell}"
    # The script gets completions by running `swiftopt` with this variable set, which `click.Group.main` reads.
    script = completer(swiftopt, {}, "swiftopt", "_SWIFTOPT_COMPLETE").source().rstrip("\n")
    return Result({"schema": "swiftopt.completion/1", "shell": shell, "script": script}, [script])
