"""`heads` and `probe` from the outside: train, list, show, export, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_files import save

from swiftopt.cli.main import run
from swiftopt.models.loading import load
from swiftopt.papers.early_exit import learned_from_bytes, n_parameters
from swiftopt.store import Store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, new_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a stream, a database and a cache of its own."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.chdir(tmp_path)
    for task in ("code", "notes"):
        lines = [json.dumps({"prompt": f"w{i} w{2 * i} w{len(task)}"}) for i in range(8)]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "one.jsonl").write_text('{"prompt": "w1"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


def train(kind: str, model: Path, *more: str) -> list[str]:
    return [kind, "train", "--model", str(model), "--stream", "code.jsonl", "--max-new-tokens", "12", *more]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert run([*args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("kind", ["heads", "probe"])
def test_what_was_trained_can_be_listed_shown_and_exported(
    kind: str, model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = answer(capsys, *train(kind, model, "--epochs", "2", "--png", "loss.png"))
    assert trained["schema"] == f"swiftopt.{kind}-train/1"
    assert (trained[kind]["task"], trained[kind]["version"]) == ("code", 1)
    assert (home / "loss.png").read_bytes().startswith(b"\x89PNG")
    listed = answer(capsys, kind, "list")
    assert listed[kind] == [trained[kind]]
    shown = answer(capsys, kind, "show", f"{model}/code", "--svg", "loss.svg")
    assert shown["figures"] == trained[kind]["figures"] and shown["curve"]
    assert (shown["png"], shown["svg"]) == (None, "loss.svg") and f" / code · {kind}" in (home / "loss.svg").read_text()
    answer(capsys, kind, "export", f"{model}/code", "-o", "out.safetensors")
    runtime = load(str(model))
    learned = learned_from_bytes(kind, (home / "out.safetensors").read_bytes(), runtime)
    assert n_parameters(learned) == trained[kind]["n_parameters"]
    assert not any((home / "cache" / "training").iterdir())  # the checkpoint has served


@pytest.mark.parametrize("kind", ["heads", "probe"])
def test_figures_fit_into_80_columns(
    kind: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(train(kind, model, "--epochs", "2")) == 0
    assert run([kind, "list"]) == 0
    shown = capsys.readouterr()
    assert "after layer" in shown.out and max(map(len, shown.out.splitlines())) <= 80
    assert "train: step" in shown.err and "collect: " in shown.err


def test_several_streams_give_mixed_heads(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = answer(capsys, *train("heads", model, "--stream", "notes.jsonl", "--epochs", "1"))
    assert trained["heads"]["task"] == "mixed" and trained["heads"]["figures"]["prompts"] == 16


@pytest.mark.slow
def test_training_that_was_killed_goes_on_where_it_was(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = train("heads", model, "--epochs", "100000", "--minutes", "0.08")
    with subprocess.Popen([sys.executable, "-m", "swiftopt", *options], stderr=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 60
        while not list((home / "cache").rglob("state-*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
    assert run(options) == 0
    told = capsys.readouterr().err
    assert "resumed: 8 of 8 prompts were done before" in told and "resumed: step" in told
    with Store.open() as store:
        assert len(store.learned_list()) == 1


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--stream", "empty.jsonl"], 2, "empty.jsonl holds no prompt"),
        (["--stream", "absent.jsonl"], 3, "there is no stream absent.jsonl"),
        (["--layers", "9"], 2, "layer 9 is out of range: the model has 4, use 1 to 3"),
        (["--layers", "a,b"], 2, "layers 'a,b' is not a list of numbers"),
        (["--limit", "1"], 2, "training needs at least 2 prompts"),
        (["--max-new-tokens", "2", "--limit", "2"], 2, "raise --max-new-tokens"),
        (["--max-new-tokens", "1"], 2, "max_new_tokens 1 is out of range"),
        (["--task", "a/b"], 2, "'a/b'"),
        (["--minutes", "0"], 2, "minutes 0.0 is out of range"),
        (["--seed", "9" * 20], 2, "is out of range: use a number from -92"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistake_gets_one_sentence(
    more: list[str], code: int, words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(train("heads", model, *more)) == code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last and "Traceback" not in last


@pytest.mark.parametrize("kind", ["heads", "probe"])
def test_what_is_not_stored_is_told_with_the_command_that_trains_it(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([kind, "show", "smollm2-135m/nothing"]) == 3
    assert f"swiftopt {kind} train" in capsys.readouterr().err
    assert run([kind, "list"]) == 0
    assert f"no {kind} stored yet" in capsys.readouterr().err
