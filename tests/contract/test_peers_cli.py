"""What a user can do wrong with `swiftopt bench peers`: one sentence each, before anything is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftopt.cli.main import run

pytestmark = pytest.mark.wing("bench", "engines")
PEERS = ["bench", "peers", "--model", "smollm2-135m", "--stream", "good.jsonl"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([*PEERS, "--peers", "lama-cpp"], "peer 'lama-cpp' is unknown (nearest: llama-cpp)"),
        ([*PEERS, "--peers", "swiftopt", "--base", "vllm/plain"], "row 'vllm/plain' is unknown"),
        ([*PEERS, "--gguf", "missing.gguf"], "missing.gguf is not a file"),
        ([*PEERS, "--gguf", "a.gguf", "--gguf", "b/a.gguf"], "have the same name"),
        ([*PEERS, "--device", "tpu"], "device 'tpu' is unknown: use one of auto, cpu, cuda"),
        ([*PEERS, "--assistant", "no-such-model-anywhere"], "no-such-model-anywhere"),
        ([*PEERS[:-1], "missing.jsonl"], "missing.jsonl"),
        (["bench", "peers", "--model", "./nowhere", "--stream", "good.jsonl"], "there is no folder ./nowhere"),
    ],
)
def test_a_slip_costs_one_sentence(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"prompt": "w1 w2"}\n')
    (tmp_path / "b").mkdir()
    for name in ("a.gguf", "b/a.gguf"):
        (tmp_path / name).touch()
    code = run(args)
    out, err = capsys.readouterr()
    assert code in (2, 3) and out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]
