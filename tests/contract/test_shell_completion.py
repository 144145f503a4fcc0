"""`swiftopt completion`: the scripts, and what the shell offers with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from swiftopt.cli.main import run
from swiftopt.cli.main import swiftopt as program

SCRIPT = shutil.which("swiftopt", path=str(Path(sys.executable).parent)) or "swiftopt"
# What bash does at Tab: it sets the words and calls the function that `complete -F` named. Outside of a real completion
# `compopt` fails, so what it is asked for is printed instead.
AT_TAB = """
source {completer} || exit 9
compopt() {{ echo compopt "$@"; }}
[[ $(complete -p swiftopt) == *"-F _swiftopt_completion "* ]] || exit 8
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_swiftopt_completion {script}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def completer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash, as the program prints it."""
    path = tmp_path_factory.mktemp("completer") / "swiftopt.bash"
    path.write_text(subprocess.run([SCRIPT, "completion", "bash"], capture_output=True, text=True, check=True).stdout)
    return path


def offered(words: str, folder: Path, completer: Path) -> list[str]:
    """Return what bash offers for the last of the words, in a folder without configuration."""
    bash = ["bash", "--norc", "-c", AT_TAB.format(script=SCRIPT, completer=completer, words=words)]
    done = subprocess.run(bash, capture_output=True, text=True, timeout=60, cwd=folder, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("swiftopt tu", ["tune"]),
        ("swiftopt layers ro", ["rollback"]),
        ("swiftopt tune --model smollm2-", ["smollm2-135m", "smollm2-360m", "smollm2-1.7b"]),
        ("swiftopt tune --max-n", ["--max-new-tokens"]),
        ("swiftopt tune --skip-ratio 0.5 --skip", ["--skip-ratio-step"]),  # not twice
        ("swiftopt tune --objective ''", ["expected_speedup", "matchness"]),
        ("swiftopt tune --strategy kn", ["knapsack"]),
        ("swiftopt generate --method prompt", ["prompt-lookup"]),
        ("swiftopt tune --model smollm2-135m --stream pro", ["compopt -o default"]),
        ("swiftopt serve --stream-folder pro", ["compopt -o dirnames"]),
        ("swiftopt tune --model ./models/", ["compopt -o default"]),
        ("swiftopt completion ''", ["bash", "zsh", "fish"]),
        ("swiftopt nonsense --x", []),
    ],
)
def test_bash_offers(words: str, wanted: list[str], completer: Path, tmp_path: Path, unconfigured: None) -> None:
    assert [word for word in offered(words, tmp_path, completer) if word] == wanted


def test_completing_neither_reads_nor_makes_a_database(tmp_path: Path, unconfigured: None) -> None:
    (tmp_path / "swiftopt.toml").write_text("modle = 1")  # an error for every command
    environment = {**os.environ, "SWIFTOPT_DATABASE_URL": str(tmp_path / "some.db")}
    asked = {"_SWIFTOPT_COMPLETE": "bash_complete", "COMP_WORDS": "swiftopt\nlayers\nbest\n", "COMP_CWORD": "3"}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment | asked)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
    assert not (tmp_path / "some.db").exists()


@pytest.mark.parametrize(
    ("shell", "says"), [("bash", "complete -o nosort -F"), ("zsh", "#compdef swiftopt"), ("fish", "--command swiftopt")]
)
def test_script_of_each_shell_is_printed(shell: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert says in out
    assert "_SWIFTOPT_COMPLETE" in out
    assert err == ""


def test_other_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


def test_every_file_and_model_completes() -> None:
    silent = []
    for path, command in every(program, ()):
        context = click.Context(command)
        for param in command.params:
            takes = "FILE" in (param.metavar or "") or getattr(param.type, "name", "") == "FILE"
            if (
                takes or (param.metavar or "").endswith("MODEL") or "--model" in param.opts
            ) and not param.shell_complete(context, "./x"):
                silent.append((*path, param.name))
    assert silent == []


def every(command: click.Command, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    found = []
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        found += every(below, (*path, name))
    return found
