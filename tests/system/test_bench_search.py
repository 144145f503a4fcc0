"""`python -m swiftopt.bench.search` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_files import save

from swiftopt.bench import search
from swiftopt.bench.long_search import LongSearch
from swiftopt.bench.recorded_windows import RecordedWindows, TextRecord
from swiftopt.bench.search import _costs_to_reach, command
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.settings import SwiftSettings
from swiftopt.models.loading import load
from swiftopt.terminal.program import run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{i}", "prompt": f"w{i} w{i + 1} w{i + 2}"}) for i in range(4)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def bench(capsys: pytest.CaptureFixture[str], *args: str, expect: int = 0) -> Any:
    tail = ["--window", "8", "--passes", "20", "--max-new-tokens", "30", "--dtype", "float32", "--json"]
    code = run(command, [*args, *tail])
    out, err = capsys.readouterr()
    assert code == expect, err
    return json.loads(out) if expect == 0 else err


def timeless(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results without what the clock says."""
    kept = ("strategy", "passes", "candidates", "final", "skip_attn", "skip_mlp", "stopped_because")
    return [
        {**{name: result[name] for name in kept}, "curve": [[x, y] for x, _, y in result["curve"]]}
        for result in report["results"]
    ]


def test_strategies_are_compared_on_the_same_record_time_and_again(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", tiny, "--record", "r.json", "--strategies", "swift,local,knapsack,clasp"]
    first = bench(capsys, *common, "--stream", "notes.jsonl", "--limit", "3", "--png", "s.png")
    assert first["schema"] == "swiftopt.bench-search/1" and first["texts"] == 3 and first["windows"] == 9
    assert [result["strategy"] for result in first["results"]] == ["swift", "local", "knapsack", "clasp"]
    for result in first["results"]:
        assert result["passes"] >= 20 or result["stopped_because"]
        assert result["curve"][0][0] <= result["curve"][-1][0] <= result["passes"]
        assert result["final"] == result["curve"][-1][2] <= result["best"]
    best = max(result["final"] for result in first["results"])
    assert first["goal"] == pytest.approx(0.95 * best, abs=1e-4)
    assert any(result["to_goal"] for result in first["results"])
    assert (home / "s.png").read_bytes().startswith(b"\x89PNG")
    assert timeless(bench(capsys, *common)) == timeless(first)


def test_ctrl_c_shows_the_strategies_that_have_ended(
    tiny: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", tiny, "--strategies", "random,local", "--stream", "notes.jsonl", "--limit", "3"]

    def report_cut_at(strategy: str, *more: str, passes: int = 20) -> Any:
        def interrupting(line: str) -> None:
            if line.startswith(strategy):
                raise KeyboardInterrupt

        monkeypatch.setattr(search, "note", interrupting)
        tail = ["--window", "8", "--passes", str(passes), "--max-new-tokens", "30", "--dtype", "float32", "--json"]
        assert run(command, [*common, *more, *tail]) == 130
        out = capsys.readouterr().out
        return json.loads(out) if out else None

    report = report_cut_at("local", "--svg", "s.svg")
    assert report["interrupted"] and [result["strategy"] for result in report["results"]] == ["random"]
    assert ">random</text>" in (home / "s.svg").read_text()
    assert report_cut_at("random") is None
    found = report_cut_at("long search", "--long-search", "60", passes=1)  # which leaves room for a better set
    assert found["interrupted"] and len(found["results"]) == 2 and 0 < found["long_search"]["sets"] < 60
    assert found["long_search"]["best"] > found["long_search"]["start"]


def test_file_that_is_not_a_record_is_refused_before_the_model_is_loaded(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "r.json").write_text("{}")
    for name in ("r.json", "."):
        assert run(command, ["--model", tiny, "--record", name]) == 2
        assert f"{name} is no record of" in (told := capsys.readouterr().err) and "load:" not in told


def test_unwritable_record_is_refused(tiny: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, ["--model", tiny, "--stream", "notes.jsonl", "--record", "no/r.json"]) == 1
    assert "cannot write no/r.json" in capsys.readouterr().err


def test_search_continues_over_repetitions_of_one_short_text(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The window has hardly moved when the text ends, so that only another lap brings text that a look waits for."""
    text = ["--stream", "notes.jsonl", "--limit", "1", "--max-new-tokens", "10", "--dtype", "float32", "--json"]
    local = ["--strategies", "local", "--window", "8", "--stride", "1", "--passes", "12"]
    assert run(command, ["--model", tiny, *text, *local]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["passes"] >= 12 or result["stopped_because"]


@pytest.mark.parametrize("most", [3, 6, 8])
def test_long_search_takes_flips_that_help_within_its_limit(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str], most: int
) -> None:
    common = ["--model", tiny, "--record", "r.json", "--strategies", "random", "--stream", "notes.jsonl"]
    bench(capsys, *common, "--limit", "3")
    runtime = load(tiny, "float32", "cpu")
    judge = RecordedWindows(runtime, TextRecord.read(home / "r.json"), SwiftSettings(context_window=8, seed=0), 4)
    start = LayerSet(4, frozenset({1, 2}), frozenset({1, 2}))
    flipped = [[1 - bit if i == unit else bit for i, bit in enumerate(start.bits())] for unit in range(4)]
    singles = [LayerSet(4).with_bits(bits) for bits in flipped]
    better = [own for own in singles[:most] if judge.judge(own)[0] > judge.judge(start)[0]]
    found = LongSearch(judge, start, most, lambda *_: None).run()
    assert found["sets"] == most and (found["best"] > found["start"]) == bool(better)
    assert found["peaks"] == 0 or most > len(singles)


def test_long_search_ends_at_a_set_that_no_flip_improves(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", tiny, "--record", "r.json", "--strategies", "random", "--long-search", "60"]
    report = bench(capsys, *common, "--stream", "notes.jsonl", "--limit", "3")
    found, (result,) = report["long_search"], report["results"]
    assert found["sets"] >= 60 and found["peaks"] >= 1
    assert found["best"] >= found["start"] == pytest.approx(result["final"], abs=1e-4)
    assert result["of_long"] == pytest.approx(result["final"] / found["best"], abs=1e-4)
    n_searched = len(searchable(4))
    runtime = load(tiny, "float32", "cpu")
    settings = SwiftSettings(context_window=8, seed=0)
    judge = RecordedWindows(runtime, TextRecord.read(home / "r.json"), settings, 4)
    best = LayerSet(4, frozenset(found["skip_attn"]), frozenset(found["skip_mlp"]))
    assert judge.judge(best)[0] == pytest.approx(found["best"])
    for unit in range(n_searched):
        bits = [1 - bit if i == unit else bit for i, bit in enumerate(best.bits())]
        assert judge.judge(LayerSet(4).with_bits(bits))[0] <= found["best"]
        assert judge.race([LayerSet(4).with_bits(bits)], best)[LayerSet(4).with_bits(bits)] <= 1


def test_goal_is_reached_where_the_objective_stays_above_it() -> None:
    curve = [[1, 0.1, 0.5], [5, 0.5, 1.0], [9, 0.9, 0.8], [12, 1.2, 0.97]]
    assert _costs_to_reach(curve, 0.9) == {"passes": 12, "seconds": 1.2}
    assert _costs_to_reach(curve, 0.5) == {"passes": 1, "seconds": 0.1}
    assert _costs_to_reach(curve, 0.99) is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--strategies", "swfit", "--stream", "notes.jsonl"], "'swfit' is unknown"),
        (["--strategies", "local"], "give --stream"),
        (["--record", "bad.json", "--strategies", "local"], "bad.json is no record"),
        (["--stream", "notes.jsonl", "--strategies", "local", "--window", "40"], "no completion has 40 tokens"),
    ],
)
def test_a_slip_costs_one_sentence(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    (home / "bad.json").write_text("[]")
    window = [] if "--window" in args else ["--window", "8"]
    code = run(command, ["--model", tiny, *args, *window, "--max-new-tokens", "12", "--dtype", "float32"])
    out, err = capsys.readouterr()
    assert code in (2, 3) and out == "" and said in err.strip().splitlines()[-1]
