"""What a user can do wrong with `swiftopt compare` and with ablations: one sentence each, before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swiftopt.cli.main import run
from swiftopt.papers.ablate import HEADINGS
from swiftopt.papers.ablate import command as ablation
from swiftopt.papers.ablations import ABLATIONS
from swiftopt.terminal import program

COMPARE = ["compare", "--model", "smollm2-135m", "--stream", "good.jsonl"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"prompt": "w1 w2"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([*COMPARE, "--methods", "swfit"], "method 'swfit' is unknown: use one of plain"),
        ([*COMPARE, "--methods", "swfit"], "(nearest: swift)"),
        ([*COMPARE, "--methods", "spd,mtjd", "--lossless"], "mtjd is lossy"),
        ([*COMPARE, "--methods", "hf-assisted"], "--draft-model"),
        ([*COMPARE, "--methods", "hf-plain", "--temperature", "1"], "only greedy decoding"),
        ([*COMPARE, "--set", "spd=5"], "METHOD.KEY=VALUE"),
        ([*COMPARE, "--methods", "spd", "--set", "mtad.top_k=5"], "add mtad to --methods"),
        ([*COMPARE, "--draft-model", "no-such-model-anywhere"], "no-such-model-anywhere"),
        ([*COMPARE[:-1], "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_a_slip_costs_one_sentence(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(args)
    out, err = capsys.readouterr()
    assert code in (2, 3) and out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]


def test_unknown_ablation_costs_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(ablation, [*COMPARE[1:], "swift-part"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ablation 'swift-part' is unknown")


def test_draft_model_that_no_method_drafts_with_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Each ends at a database that cannot be opened, so that no model is loaded."""
    command = [*COMPARE, "--draft-model", "gpt2", "--db", ".", "--methods"]
    assert run([*command, "prompt-lookup,swift"]) == 1
    assert "warning: --draft-model has no effect: none of these methods" in capsys.readouterr().err
    assert run([*command, "prompt-lookup,spd"]) == 1
    assert "warning" not in capsys.readouterr().err


def test_slips_are_found_without_torch(home: Path) -> None:
    program = (
        "import sys\nfrom swiftopt.cli.main import run\n"
        f"code = run({[*COMPARE, '--methods', 'swfit']!r})\nsys.exit(10 if 'torch' in sys.modules else code)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 2


def test_every_ablation_has_headings() -> None:
    assert {key for shape in ABLATIONS.values() for key in shape.shown} <= set(HEADINGS)
