"""`swiftopt bench tune` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_files import save

from swiftopt.bench.tunings import MAX_POINTS, DraftPlan, TuningBench, WayRun, settings_of, thin_out
from swiftopt.cli.main import run
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings, TuningSettings, presets

PRESETS = presets()
WAYS = "default:2,preset swift,random"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a command line that tunes on a stream of ten prompts."""
    monkeypatch.chdir(tmp_path)
    prompts = [json.dumps({"prompt": f"w{i} w{i + 1} w{i + 2}"}) for i in range(2, 12)]
    (tmp_path / "stream.jsonl").write_text("\n".join(prompts) + "\n")
    model = str(save(tmp_path / "tiny"))
    words = ["bench", "tune", "--model", model, "--stream", "stream.jsonl", "--limit", "8", "--dtype", "float32"]
    return [*words, "--max-new-tokens", "40", "--runs", "1", "--ways", WAYS]


def test_ways_are_tuned_alternately_and_their_plans_are_timed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--png", "tunings.png", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["schema"] == "swiftopt.bench-tune/1" and (report["prompts"], report["unseen"]) == (8, 2)
    runs = report["results"]
    order = [("default", 0), ("preset swift", 0), ("random", 0), ("default", 1)]
    assert [(result["way"], result["seed"]) for result in runs] == order
    assert report["equal"] == report["of"] == report["plans"] * 2 * 2  # Two unseen prompts, two laps.
    for result in runs:
        seconds = [elapsed_s for elapsed_s, _ in result["curve"]]
        assert result["candidates"] and seconds == sorted(seconds) and 0 < result["setup_s"] <= seconds[0]
        assert result["curve"][-1][1] == result["ratio"] > 0 and result["to_best"] <= 1.0
    assert max(result["to_best"] for result in runs) == 1.0
    assert [result["method"] for result in runs] == ["adaptive", "swift", "adaptive", "adaptive"]
    shares = [result["to_best"] for result in runs if result["way"] == "default"]
    assert report["ways"]["default"]["to_best"]["worst"] == min(shares)
    assert Path("tunings.png").read_bytes().startswith(b"\x89PNG") and "timing: prompt 2 of 2" in err


def test_ctrl_c_times_the_finished_runs_and_unknown_ways_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = TuningBench.tune_once

    def interrupted(bench: TuningBench, way: str, seed: int) -> WayRun:
        if way == "random":
            raise KeyboardInterrupt
        return tuned(bench, way, seed)

    monkeypatch.setattr(TuningBench, "tune_once", interrupted)
    assert run(words) == 130
    out, _ = capsys.readouterr()
    assert "default" in out and "preset swift" in out and "random" not in out
    assert run([*words, "--ways", "random"]) == 130  # No run has finished.
    assert capsys.readouterr().out == ""
    for wrong, reason in (("warp", "warp"), ("default:x", "not a number of runs"), ("preset warp", "warp")):
        assert run([*words, "--ways", wrong]) == 2
        assert reason in capsys.readouterr().err
    assert run([*words, "--limit", "10"]) == 2
    assert "lower --limit" in capsys.readouterr().err


def test_way_names_the_defaults_a_preset_or_a_strategy() -> None:
    assert settings_of("default", 3) == TuningSettings(seed=3)
    assert settings_of("random", 3) == TuningSettings(strategy="random", seed=3)
    preset = settings_of("preset swift", 3)
    assert preset.seed == 3 and preset.strategy == "published" and preset.adoption == "highest"
    assert {name: getattr(preset, name) for name in PRESETS["swift"].making} == dict(PRESETS["swift"].making)


@pytest.mark.parametrize("n", range(1, 10))
def test_thinned_plans_include_the_first_and_the_last(n: int) -> None:
    plan = DraftPlan(LayerSet(8), SwiftSettings())
    times = [seconds for seconds, _ in thin_out([(float(i), plan) for i in range(n)])]
    assert len(times) == min(n, MAX_POINTS) and (times[0], times[-1]) == (0, n - 1) and times == sorted(set(times))
