"""`python -m swiftopt.bench.repeats` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_files import edit_config, save

from swiftopt.bench.repeats import command
from swiftopt.terminal.program import run


@pytest.mark.slow
def test_repeated_requests_and_prompts_are_measured_with_equal_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(edit_config(save(tmp_path / "tiny"), max_position_embeddings=4096))
    sizes = ["--length", "300", "--files", "1", "--pairs", "1", "--max-new-tokens", "40"]
    assert run(command, ["--model", model, "--dtype", "float32", *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (length,) = report["lengths"]
    assert report["schema"] == "swiftopt.bench-repeats/1" and report["corpus"]["equal"] and length["equal"]
    assert (length["tokens"], length["restart_cached"] % 128) == (300, 0) and length["restart_cached"] >= 256
    assert [version["tokens"] for version in report["corpus"]["on"]] == [39] * 3 and report["corpus"]["ratio"] > 0
