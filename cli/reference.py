"""What is made from all commands: `swiftopt completion`, and the page of what `--help` prints; a test compares the two.

python -m swiftopt.cli.reference > docs/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.shell_completion import get_completion_class

from . import options
from .main import LONG_NAMES, PREFIX, TOML_FILE, ProgramSettings, swiftopt
from .output import INTERRUPTED, Result

WIDTH = 80  # columns, whatever the terminal has
SHELLS = ("bash", "zsh", "fish")

EXIT_CODES = {
    0: "done",
    1: "something failed: the database or an output file cannot be used, or a check of `doctor`",
    2: "the input cannot be used: an option, a stream's line, a layer set, a model's architecture",
    3: "not found: a model, a file, a stored layer set",
    4: "a job that was followed has failed",
    5: "a job that was followed was cancelled",
    6: "Redis or the server does not answer, or refuses the key",
    7: "the job is not in a state for that, or an idempotency key was used for something else",
    INTERRUPTED: "Ctrl-C; what was finished until then is kept, and a job in a queue goes on",
}

INTRODUCTION = """\
# Command line

This page is printed by `python -m swiftopt.cli.reference`; a test compares the two, so change the help texts instead.

Results go to stdout; progress, remarks and errors go to stderr. `--json` makes the result one JSON object with a
`schema` key (`generate --stream`: one object per prompt, each on its own line). An error is one sentence.\
"""

CONFIGURATION = f"""\
An option on the command line wins over its environment variable, that over `{TOML_FILE}` in the working
folder, that over the default. An unknown key in the file is an error. The key of a server is read from
`SWIFTOPT_API_KEY` alone, so that no listing of processes and no file shows it.\
"""


@options.command(short_help="Print a script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@options.json
@options.example(
    "completion bash > ~/.local/share/bash-completion/completions/swiftopt",
    "completion zsh > ~/.zfunc/_swiftopt",
    "completion fish > ~/.config/fish/completions/swiftopt.fish",
)
def completion(shell: str) -> Result:
    """Print a script for bash (4.4 or newer), zsh or fish that completes commands, options, and values of options.

    Values are choices, aliases of models, methods, search strategies and files; no database is asked. zsh needs
    `fpath+=~/.zfunc` before `compinit` in ~/.zshrc.
    """
    script = _completer(shell)
    return Result({"schema": "swiftopt.completion/1", "shell": shell, "script": script}, [script])


def _completer(shell: str) -> str:
    """Return click's script for a shell; it asks `swiftopt` itself, with a variable that `click.Group.main` reads."""
    completer = get_completion_class(shell)
    assert completer is not None, f"click knows no {shell}"
    return completer(swiftopt, {}, "swiftopt", "_SWIFTOPT_COMPLETE").source().rstrip("\n")


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yield (command line, help text) of a command and of all below it, in the order in which help lists them."""
    settings = {**command.context_settings, "terminal_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None:
                yield from commands(found, below, context)


def page() -> str:
    """Return the whole page, as markdown."""
    codes = [f"| {code} | {words} |" for code, words in EXIT_CODES.items()]
    configured = [
        f"| `{LONG_NAMES.get(key, PREFIX + key.upper())}` | `{key}` | `--{key.replace('_', '-')}` |"
        for key in ProgramSettings.model_fields
    ]
    parts = [
        INTRODUCTION,
        "\n".join(["## Exit codes", "", "| code | meaning |", "|---|---|", *codes]),
        "## Configuration",
        CONFIGURATION,
        "\n".join([f"| variable | key in `{TOML_FILE}` | option |", "|---|---|---|", *configured]),
        *(f"## {path}\n\n```text\n{text}\n```" for path, text in commands(swiftopt, "swiftopt")),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    click.echo(page(), nl=False)
