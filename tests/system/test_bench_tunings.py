"""`swiftopt bench tune` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_files import save

from swiftopt.bench.tunings import MOST_POINTS, DraftPlan, TuningBench, WayRun, settings_of, thin_out
from swiftopt.cli.main import run
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings, TuningSettings, presets

PRESETS = presets()
WAYS = "default:2,preset swift,random"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a command over a stream of ten prompts."""
    monkeypatch.chdir(tmp_path)
    prompts = [json.dumps({"prompt": f"w{i} w{i + 1} w{i + 2}"}) for i in range(2, 12)]
    (tmp_path / "stream.jsonl").write_text("\n".join(prompts) + "\n")
    model = str(save(tmp_path / "tiny"))
    words = ["bench", "tune", "--model", model, "--stream", "stream.jsonl", "--limit", "8", "--dtype", "float32"]
    return [*words, "--max-new-tokens", "40", "--runs", "1", "--ways", WAYS]


def test_ways_are_tuned_by_turns_and_what_they_find_is_timed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--png", "tunings.png", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["schema"] == "swiftopt.bench-tune/1" and (report["prompts"], report["unseen"]) == (8, 2)
    runs = report["results"]
    order = [("default", 0), ("preset swift", 0), ("random", 0), ("default", 1)]
    assert [(own["way"], own["seed"]) for own in runs] == order
    assert report["equal"] == report["of"] == report["plans"] * 2 * 2  # unseen prompts and laps
    for own in runs:
        seconds = [at for at, _ in own["curve"]]
        assert own["candidates"] and seconds == sorted(seconds) and 0 < own["setup_s"] <= seconds[0]
        assert own["curve"][-1][1] == own["ratio"] > 0 and own["to_best"] <= 1.0
    assert max(own["to_best"] for own in runs) == 1.0
    assert [own["method"] for own in runs] == ["adaptive", "swift", "adaptive", "adaptive"]
    shares = [own["to_best"] for own in runs if own["way"] == "default"]
    assert report["ways"]["default"]["to_best"]["worst"] == min(shares)
    assert Path("tunings.png").read_bytes().startswith(b"\x89PNG") and "timing: prompt 2 of 2" in err


def test_ways_are_words_and_ctrl_c_times_what_was_found(
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
    assert run([*words, "--ways", "random"]) == 130  # nothing was found
    assert capsys.readouterr().out == ""
    for wrong, reason in (("warp", "warp"), ("default:x", "not a number of runs"), ("preset warp", "warp")):
        assert run([*words, "--ways", wrong]) == 2
        assert reason in capsys.readouterr().err
    assert run([*words, "--limit", "10"]) == 2
    assert "lower --limit" in capsys.readouterr().err


def test_way_is_the_defaults_a_preset_or_another_strategy() -> None:
    assert settings_of("default", 3) == TuningSettings(seed=3)
    assert settings_of("random", 3) == TuningSettings(strategy="random", seed=3)
    preset = settings_of("preset swift", 3)
    assert preset.seed == 3 and preset.strategy == "published" and preset.adoption == "highest"
    assert {name: getattr(preset, name) for name in PRESETS["swift"].making} == dict(PRESETS["swift"].making)


@pytest.mark.parametrize("n", range(1, 10))
def test_curve_keeps_its_ends(n: int) -> None:
    plan = DraftPlan(LayerSet(8), SwiftSettings())
    times = [at for at, _ in thin_out([(float(at), plan) for at in range(n)])]
    assert len(times) == min(n, MOST_POINTS) and (times[0], times[-1]) == (0, n - 1) and times == sorted(set(times))
