"""`python -m swiftopt.bench.stream_shift` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_files import save

from swiftopt.bench import stream_shift
from swiftopt.bench.stream_shift import command
from swiftopt.optimizer import shift
from swiftopt.terminal.program import run

OPTIONS = ["--context-window", "8", "--max-new-tokens", "24", "--max-steps", "12", "--dtype", "float32"]


def lines(task: str, first: int, n: int) -> list[str]:
    return [json.dumps({"task": task, "prompt": f"w{first + i} w{first + i + 1} w{first}"}) for i in range(n)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.jsonl").write_text("\n".join([*lines("notes", 1, 12), *lines("code", 20, 13)]) + "\n")
    (tmp_path / "one.jsonl").write_text("\n".join(lines("notes", 1, 3)) + "\n")
    return tmp_path


def test_three_runs_over_the_same_prompts_are_reported_and_drawn(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shift, "ALARM", 0.4)  # A random model's acceptance hardly changes with the text.
    model = str(save(home / "tiny"))
    args = ["--model", model, "--stream", "two.jsonl", "--prompts", "12", *OPTIONS]
    assert run(command, [*args, "--deterministic", "--png", "shift.png", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["schema"] == "swiftopt.bench-stream-shift/1"
    assert [(result["task"], result["prompts"]) for result in report["results"]] == [("notes", 12), ("code", 12)]
    assert report["shifts"] and f"shift noticed after prompt {report['shifts'][0]['prompt'] + 1}" in err
    for result in report["results"]:
        for name in ("own", "kept", "adapted"):
            assert len(result[name]["by_prompt"]) == 12
            assert result[name]["expected"] is None or result[name]["expected"] > 0
        if result["gap"] is not None:
            assert result["gap"] == pytest.approx(result["own"]["settled"] - result["adapted"]["settled"])
            assert result["within"] == (result["gap"] <= 0.05)
    first = report["results"][0]
    assert first["own"] == first["kept"]  # Both runs have the first task's set.
    assert first["own"]["expected"] is not None
    assert (home / "shift.png").read_bytes().startswith(b"\x89PNG")
    assert run(command, args) == 0
    out, _ = capsys.readouterr()
    assert "shifts noticed after prompts" in " ".join(out.split()) and "code" in out


def test_ctrl_c_shows_what_was_decoded(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save(home / "tiny"))
    args = ["--model", model, "--stream", "two.jsonl", "--prompts", "12", *OPTIONS]

    def out_cut_at(words: str, *more: str) -> str:
        def interrupting(line: str) -> None:
            if line.startswith(words):
                raise KeyboardInterrupt

        monkeypatch.setattr(stream_shift, "note", interrupting)
        assert run(command, [*args, *more]) == 130
        return capsys.readouterr().out

    report = json.loads(out_cut_at("code, adapting", "--svg", "shift.svg", "--json"))
    assert report["interrupted"]
    n_done = {
        kind: [len(result[kind]["by_prompt"]) for result in report["results"]] for kind in ("own", "kept", "adapted")
    }
    assert n_done == {"own": [12, 12], "kept": [12, 12], "adapted": [12, 1]}
    assert report["results"][1]["gap"] is None
    assert "one stream" in (home / "shift.svg").read_text()
    assert "notes" in out_cut_at("notes, its own set")
    assert out_cut_at("code: searching") == ""


def test_stream_of_one_task_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save(home / "tiny"))
    assert run(command, ["--model", model, "--stream", "one.jsonl", *OPTIONS]) != 0
    assert "one task only" in capsys.readouterr().err
