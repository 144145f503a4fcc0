"""Benchmarks of other engines become verdicts; the files are like those of vLLM 0.32 and llama.cpp's server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftopt.cli.main import run
from swiftopt.core.errors import FileNotFound, InvalidInput
from swiftopt.core.records import ModelInfo
from swiftopt.engines.evidence import read_run
from swiftopt.optimizer.verdict import Timed
from swiftopt.store import Store

LENGTHS, PROMPTS = [20, 30, 40, 20, 30, 40], [7, 8, 9, 10, 11, 12]


def vllm(factor: float, **more: Any) -> dict[str, Any]:
    """Return a result of six requests with `factor` seconds per ten tokens."""
    totals = {"completed": 6, "duration": 9.0, "total_output_tokens": sum(LENGTHS), "output_throughput": 20.0}
    per_request = {"input_lens": PROMPTS, "output_lens": LENGTHS, "latencies": [n * factor / 10 for n in LENGTHS]}
    return {"backend": "openai", "model_id": "m", **totals, **per_request, "errors": [""] * 6, **more}


def llamacpp(factor: float, **more: Any) -> list[dict[str, Any]]:
    timings = [
        {"prompt_n": 5, "prompt_ms": 100.0, "predicted_n": n, "predicted_ms": n * 100 * factor, **more} for n in LENGTHS
    ]
    return [{"content": "x", "timings": each} for each in timings]


def written(path: Path, *objects: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, objects)), encoding="utf-8")
    return path


def imported(tmp_path: Path, plain: Path, drafted: Path, *more: str) -> int:
    words = ["import", "smol/code", "--plain", str(plain), "--drafted", str(drafted), "--db", str(tmp_path / "a.db")]
    return run([*words, *more])


@pytest.fixture
def db(tmp_path: Path) -> Path:
    with Store.open(str(tmp_path / "a.db")) as store:
        store.remember_model(ModelInfo("f" * 16, "llama", 30, 135_000_000, ("smol",)))
    return tmp_path / "a.db"


def test_requests_of_both_formats_are_read_with_what_was_drafted(tmp_path: Path) -> None:
    drafted = {"spec_decode_draft_tokens": 50, "spec_decode_accepted_tokens": 20}
    found = read_run(written(tmp_path / "v.json", vllm(0.5, **drafted)))
    assert found.timed[2] == Timed(40, 2.0) and found.prompt_tokens == tuple(PROMPTS) and found.acceptance == 0.4
    found = read_run(written(tmp_path / "l.jsonl", *llamacpp(0.5, draft_n=10, draft_n_accepted=4)))
    assert found.timed[0] == Timed(20, 1.1) and (found.drafted, found.accepted, found.acceptance) == (60, 24, 0.4)
    assert read_run(written(tmp_path / "l.json", llamacpp(1.0))).acceptance is None


def test_benchmark_of_an_engine_becomes_its_plan_with_a_verdict(tmp_path: Path, db: Path) -> None:
    plain, fast = written(tmp_path / "p", vllm(0.5)), written(tmp_path / "f", vllm(0.25))
    settings = written(tmp_path / "s.json", {"method": "ngram", "num_speculative_tokens": 4})
    more = ("--engine", "vllm", "--settings", str(settings), "--device", "NVIDIA H200", "--dtype", "bfloat16")
    assert imported(tmp_path, plain, fast, *more) == 0
    with Store.open(str(db)) as store:
        plan = store.lookup("smol", "code", "NVIDIA H200", "bfloat16", "vllm").plan
    assert (plan.method, plan.verdict, plan.engine) == ("prompt-lookup", "use", "vllm")
    assert plan.settings == {"method": "ngram", "num_speculative_tokens": 4}
    assert plan.measured_speedup == pytest.approx(2.0) and plan.measured_interval == pytest.approx((2.0, 2.0))
    assert imported(tmp_path, fast, plain, *more) == 0  # what is slower leaves plain decoding
    with Store.open(str(db)) as store:
        plan = store.lookup("smol", "code", alias="vllm").plan
    assert (plan.method, plan.verdict, plan.settings) == ("plain", "plain", {})
    assert plan.measured_speedup == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([{"output_throughput": 1.0}], "has totals only: run `vllm bench serve` with --save-detailed"),
        ([vllm(1.0, errors=["", "it broke"])], "1 requests that failed (it broke): run it again"),
        ([{"timings": {"predicted_n": 3}}], "lacks a field of a benchmark"),
        ([vllm(0.0)], "request 1 in"),
        ([vllm(float("nan"))], "has 20 tokens in nan s: run the benchmark again"),
        ([vllm(1.0, spec_decode_draft_tokens="many")], "lacks a field of a benchmark"),
        ([{"a": 1}], "is not a known benchmark"),
        ([], "is not a known benchmark"),
    ],
)
def test_file_that_is_no_benchmark_is_refused_in_a_sentence(tmp_path: Path, values: list[Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_run(written(tmp_path / "x.json", *values))
    assert words in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).count("x.json") == 1
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match=r"deep\.json is not JSON"):
        read_run(tmp_path / "deep.json")
    with pytest.raises(FileNotFound):
        read_run(tmp_path / "nothing.json")


def test_runs_over_other_requests_are_refused_and_nothing_is_stored(
    tmp_path: Path, db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = written(tmp_path / "p", vllm(0.5))
    others = written(tmp_path / "o", vllm(0.5, input_lens=[7, 8, 9, 10, 11, 13]))
    assert imported(tmp_path, plain, others, "--engine", "vllm") == 2
    assert "prompt 6 has 12 tokens in" in capsys.readouterr().err
    assert imported(tmp_path, plain, written(tmp_path / "l", llamacpp(1.0)[:5]), "--engine", "vllm") == 2
    assert "has 6 requests and" in capsys.readouterr().err
    assert imported(tmp_path, plain, plain) == 2
    assert "it is unknown what was benchmarked: use --exported FOLDER, or --engine" in capsys.readouterr().err
    with Store.open(str(db)) as store:
        assert store.plan_versions() == []
