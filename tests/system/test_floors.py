"""What every installation does, whatever wings it has: tune, generate, compare and serve, on a tiny random model.

`make floors` runs it without any wing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api import serving
from tiny_files import save

from swiftopt.cli.main import run
from swiftopt.decoding.methods import METHODS

PROMPTS = [f"w{i} w{i + 1} w{i} w{i + 1} w{i}" for i in range(2, 10)]
SERVING = ("plain", "adaptive", "swift", "spd", "prompt-lookup")  # the methods of the floors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def called(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rough_costs: None
) -> Any:
    """Run a command on the model, with a database and a stream of its own, and return what it prints as JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))

    def call(*words: str) -> Any:
        args = [*words, "--model", str(folder), "--dtype", "float32", "--max-new-tokens", "24", "--json"]
        code = run(args)
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    return call


def test_tuned_set_drafts_for_every_method_and_changes_no_token(called: Any) -> None:
    search = ("--method", "swift", "--draft-format", "stored", "--context-window", "8", "--max-steps", "10")
    (task,) = called("tune", "--stream", "notes.jsonl", *search)["tasks"]
    assert task["n_trials"] > 0 and task["layer_set"]["version"] == 1
    texts = {
        name: called("generate", "--prompt", PROMPTS[0], "--task", "notes", "--method", name)["text"]
        for name in SERVING
    }
    assert set(SERVING) <= set(METHODS) and len(set(texts.values())) == 1 and texts["plain"]


def test_comparison_has_a_row_of_every_method_of_the_floors(called: Any) -> None:
    report = called("compare", "--stream", "notes.jsonl", "--limit", "2", "--methods", ",".join(SERVING))
    rows = {row["method"]: row for row in report["results"]}
    assert set(rows) == set(SERVING) and all(row["identical"] == row["prompts"] == 2 for row in rows.values())


def test_server_answers_as_generate_does(called: Any, folder: Path, tmp_path: Path) -> None:
    text = called("generate", "--prompt", PROMPTS[0], "--method", "plain")["text"]
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--threads", "1"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        asked = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
        done = served.client.post("/v1/completions", json=asked, timeout=60).json()
    assert done["choices"][0]["text"] == text and done["usage"]["completion_tokens"] == 24
