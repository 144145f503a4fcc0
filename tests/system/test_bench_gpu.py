"""The GPU benchmark: whole on a CPU at its tiny shape, and a sentence where its device is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swiftopt.bench import gpu, gpu_all
from swiftopt.core.types import LayerSet


def test_tiny_shape_on_a_cpu_reports_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("REPEATS", "PASS_REPEATS", "LOAD_REPEATS"):
        monkeypatch.setattr(gpu, name, 1)
    gpu.main(["--shape", "tiny", "--device", "cpu", "--tokens", "32"])
    *table, line = capsys.readouterr().out.strip().splitlines()
    report = json.loads(line)
    assert report["schema"] == "swiftopt.bench-gpu/1" and report["shape"] == "tiny"
    assert set(report["pass_ms"]["verify"]) == {"1", "2", "4", "8", "16"}
    assert report["plain"]["share"] > 0 and report["plain"]["tokens_per_s"] > 0
    assert report["draft"]["acceptance_rate"] >= 0.9 and 0 < report["redundancy"]["scale"] <= 1
    assert report["draft"]["ratio"] > 0 and report["draft"]["expected_ratio"] > 0
    assert set(report["formats"]) == {"int8", "int4"} and set(report["load"]) == {"1", "4", "16", "32"}
    assert all(own["pass_ms"] > 0 and own["ratio"] > 0 for own in report["formats"].values())
    assert all(own["plain_tokens_per_s"] > 0 and own["ratio"] > 0 for own in report["load"].values())
    assert len(table) == 14


def test_all_steps_run_and_one_that_takes_too_long_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gpu_all.DeviceStep("slow", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 1.0)
    told = gpu_all.DeviceStep("told", ("-c", """print('{"a": 1}')"""), 30.0)
    monkeypatch.setattr(gpu_all, "steps", lambda device: [slow, told])
    assert gpu_all.main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "begun" in (out := capsys.readouterr().out) and out.endswith("1 of 2 steps ran; failed: slow\n")
    assert json.loads((tmp_path / "told.json").read_text()) == {"a": 1} and not (tmp_path / "slow.json").exists()
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [one["step"] for one in steps] == ["slow", "told"] and steps[0]["seconds"] < 30


def test_steps_take_less_than_nine_minutes_together() -> None:
    assert sum(step.limit_s for step in gpu_all.steps("cuda")) < 540


def test_the_smaller_what_inner_sub_layers_add_the_more_drafts_are_accepted() -> None:
    runtime = gpu.random_runtime(gpu.SHAPES["tiny"], "cpu")
    half = LayerSet(8, frozenset(range(1, 7)), frozenset(range(1, 7)))
    before = gpu.run(runtime, gpu.drafting(half, 4), 48).acceptance_rate
    scale = gpu.make_redundant(runtime, half, 0.9, 48)
    after = gpu.run(runtime, gpu.drafting(half, 4), 48).acceptance_rate
    assert before is not None and after is not None
    assert before < 0.9 <= after and scale < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a CUDA device says")
def test_without_a_gpu_it_skips_in_a_sentence_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([])
    out, err = capsys.readouterr()
    assert json.loads(out) == {"skipped": gpu.obstacle(gpu.SHAPES["codellama-13b"], "cuda")}
    assert err.startswith("nothing was measured: this machine has no CUDA device") and err.count("\n") == 1


@pytest.mark.gpu
def test_tiny_shape_runs_by_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--shape", "tiny", "--speed", "graphs", "--tokens", "64"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["draft"]["ratio"] > 0
