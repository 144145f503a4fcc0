"""The GPU benchmark: whole on a CPU at its tiny shape, and a sentence where its device is missing."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from threading import Timer

import pytest
import torch

from swiftopt.bench import gpu, gpu_all, gpu_peers
from swiftopt.core.layer_sets import LayerSet
from swiftopt.models.quantised import cpu_multiplies_fp8


@pytest.mark.slow
@pytest.mark.usefixtures("rough_costs")
def test_tiny_shape_on_a_cpu_reports_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("REPEATS", "PASS_REPEATS", "LOAD_REPEATS"):
        monkeypatch.setattr(gpu, name, 1)
    # The redundancy is made for drafts of 4 tokens. The best length depends on times, which vary by machine.
    monkeypatch.setattr(gpu, "best_length", lambda *_: 4)
    gpu.main(["--shape", "tiny", "--device", "cpu", "--tokens", "16"])
    *table, line = capsys.readouterr().out.strip().splitlines()
    report = json.loads(line)
    assert report["schema"] == "swiftopt.bench-gpu/1" and report["shape"] == "tiny"
    assert set(report["pass_ms"]["verify"]) == {"1", "2", "4", "8", "16"}
    assert report["plain"]["share"] > 0 and report["plain"]["tokens_per_s"] > 0
    assert report["draft"]["acceptance_rate"] >= 0.9 and 0 < report["redundancy"]["scale"] <= 1
    assert report["draft"]["ratio"] > 0 and report["draft"]["expected_ratio"] > 0
    assert set(report["formats"]) == {"int8", "fp8", "int4"} and set(report["load"]) == {"1", "4", "16", "32"}
    formats = [figures for name, figures in report["formats"].items() if name != "fp8" or cpu_multiplies_fp8()]
    assert all(figures["pass_ms"] > 0 and figures["ratio"] > 0 for figures in formats)
    assert all(figures["plain_tokens_per_s"] > 0 and figures["ratio"] > 0 for figures in report["load"].values())
    assert len(table) == 15


def test_other_steps_run_where_one_exceeds_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gpu_all.DeviceStep(
        "slow", ("-c", "import time; print('begun', flush=True); time.sleep(60); print('{}')"), 1.0
    )
    told = gpu_all.DeviceStep("told", ("-c", """print('{"a": 1}')"""), 30.0)
    monkeypatch.setattr(gpu_all, "steps", lambda device: [slow, told])
    assert gpu_all.main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "begun" in (out := capsys.readouterr().out) and out.endswith("1 of 2 steps ran; failed: slow\n")
    assert json.loads((tmp_path / "told.json").read_text()) == {"a": 1} and not (tmp_path / "slow.json").exists()
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [step["step"] for step in steps] == ["slow", "told"]


def test_steps_take_less_than_nine_minutes_together() -> None:
    *others, last = gpu_all.steps("cuda")
    assert last.name == "peers" and sum(step.limit_s for step in others) <= gpu_all.TOTAL_S
    assert gpu_all.TOTAL_S + gpu_all.GRACE_S <= 540


def test_steps_end_at_the_limit_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('{"kept": true}')
"""
    kept, late = (gpu_all.DeviceStep(name, ("-c", program), 60.0) for name in ("kept", "late"))
    monkeypatch.setattr(gpu_all, "steps", lambda device: [kept, late])
    monkeypatch.setattr(gpu_all, "TOTAL_S", 3.0)
    monkeypatch.setattr(gpu_all, "LEAST_S", 1.0)
    assert gpu_all.main(["--out", str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("== late: no time is left for it\n1 of 2 steps ran\n")
    assert json.loads((tmp_path / "kept.json").read_text()) == {"kept": True}
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [step["exit"] for step in steps] == [0, None]


@pytest.fixture
def at_hand(new_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new machine without a network: it has neither npm nor wheels."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("npm_config_offline", "true")


TINY_PEERS = ["--device", "cpu", "--shape", "tiny", "--tokens", "8", "--peers"]


@pytest.mark.slow
@pytest.mark.usefixtures("at_hand")
def test_peers_run_without_engines_that_cannot_be_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_peers.main([*TINY_PEERS, "swiftopt/plain,node-llama-cpp/plain,llama-cpp/plain"]) == 0
    *_, said, last = capsys.readouterr().out.strip().splitlines()
    assert said == (
        "left out: llama-cpp/plain (xllamacpp 2026.10.11549 cannot be installed: No matching distribution found for"
        " xllamacpp==2026.10.11549); node-llama-cpp/plain (node-llama-cpp 3.22.1 needs npm and node, not found here:"
        " install Node.js 20 or newer)"
    )
    report = json.loads(last)
    assert report["placement"] == "cpu" and report["prompts"] == gpu_peers.N_PROMPTS
    assert [result["tokens"] for result in report["results"] if result["tok_s"]] == [8 * gpu_peers.N_PROMPTS]


@pytest.mark.usefixtures("at_hand")
def test_peers_fail_where_an_installed_engine_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert gpu_peers.main([*TINY_PEERS, "swiftopt/plain"]) == 1
    assert "left out: swiftopt/plain (its process ended with code 1: see " in capsys.readouterr().out


@pytest.mark.usefixtures("at_hand")
def test_interrupted_peers_report_that_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    timer = Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    assert gpu_peers.main([*TINY_PEERS, "swiftopt/plain"]) == 0
    timer.join()
    assert json.loads(capsys.readouterr().out) == {
        "skipped": "it was interrupted before every engine had answered a prompt"
    }


def test_make_redundant_scales_inner_sub_layers_until_drafts_are_accepted() -> None:
    runtime = gpu.permuting_runtime(gpu.SHAPES["tiny"], "cpu")
    half = LayerSet(8, frozenset(range(1, 7)), frozenset(range(1, 7)))
    before = gpu.run(runtime, gpu.drafting(half, 4), 48).acceptance_rate
    scale = gpu.make_redundant(runtime, half, 0.9, 48)
    after = gpu.run(runtime, gpu.drafting(half, 4), 48).acceptance_rate
    assert before is not None and after is not None
    assert before < 0.9 <= after and scale < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test needs a machine without a CUDA device")
def test_benchmark_skips_without_a_gpu_in_a_sentence_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([])
    out, err = capsys.readouterr()
    assert json.loads(out) == {"skipped": gpu.obstacle(gpu.SHAPES["codellama-13b"], "cuda")}
    assert err.startswith("nothing was measured: this machine has no CUDA device") and err.count("\n") == 1


@pytest.mark.gpu
def test_tiny_shape_runs_by_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--shape", "tiny", "--speed", "graphs", "--tokens", "64"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["draft"]["ratio"] > 0
