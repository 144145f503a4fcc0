"""The comparison as a table and a picture, of made-up figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swiftopt.cli.compare import comparison_view, plan_words
from swiftopt.decoding.methods import METHODS
from swiftopt.tasks.report import Figures
from swiftopt.terminal.charts import Pictures, draw_ratios

pytestmark = pytest.mark.wing("papers")  # whose methods fill the table


def result(method: str, ratio: float | None, **more: Any) -> dict[str, Any]:
    interval = None if ratio is None else (ratio - 0.1, ratio + 0.1)
    measured: dict[str, Any] = {} if ratio is None else {"prompts": 8, "tokens": 512, "seconds": 12.8 / ratio}
    rates = dict(acceptance_rate=0.75, mean_generated_length=12.25, passes_per_token=0.08, identical=8)
    sizes = dict(perplexity=1234.5, extra_parameters=494_032_768, extra_bytes=1_200_000_000, joules_per_token=0.25)
    values: dict[str, Any] = {} if ratio is None else {**rates, **sizes, "tok_s": 1040.0 * ratio}
    lossy = METHODS[method].lossy
    made = Figures(method, lossy=lossy, of=8, ratio=ratio, ratio_interval=interval, **{**measured, **values, **more})
    return made.to_json()


def report(**changes: Any) -> dict[str, Any]:
    ratios = {name: 1.6 - 0.05 * place for place, name in enumerate(METHODS)}
    results = [result(name, ratio) for name, ratio in ratios.items() if name not in ("paradecode", "plain")]
    results += [result("plain", 1.0), result("paradecode", None, reason="its layers differ")]
    plan = {"method": "swift", "verdict": "use", "measured_speedup": 1.55, "measured_interval": (1.45, 1.65)}
    values: dict[str, Any] = {
        "model": "smollm2-135m", "task": "notes", "device": "cpu", "dtype": "bfloat16", "prompts": 8,
        "max_new_tokens": 64, "sampling": {"temperature": 0.0}, "draft_model": None, "energy": "rapl", "made": [],
        "made_on": "other prompts", "results": results, "plan": plan, "standing": None, "stored": True,
        "interrupted": False,
    }  # fmt: skip
    return {**values, **changes}


def shown(values: dict[str, Any], width: int) -> str:
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(comparison_view(values, width))
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_cuts_nothing(width: int) -> None:
    text = shown(report(), width)
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    assert all(name in text for name in METHODS)
    assert "1612.0" in text and "1.45-1.65" in text and "12.25" in text


def test_a_wide_terminal_shows_more() -> None:
    narrow, wide = shown(report(), 80), shown(report(), 120)
    assert "passes" in wide and "494M" in wide and "passes" not in narrow


def test_lossy_methods_stand_below_a_line_and_are_marked() -> None:
    lines = shown(report(), 80).splitlines()
    line = next(i for i, text in enumerate(lines) if text.startswith("────") and "smollm" not in text)
    below = [text.split()[0] for text in lines[line + 1 : line + 5]]
    assert set(below) == {name for name, info in METHODS.items() if info.lossy}
    assert all("≈" in text for text in lines[line + 1 : line + 5])
    assert "lossy: the output may differ" in "\n".join(lines)


def test_what_is_missing_is_said() -> None:
    slow = result("jacobi", 0.3, prompts=2, reason="because it is less than half as fast as plain decoding")
    made = [{"piece": "heads", "how": "40 steps of training, 22 s", "seconds": 22.0}]
    text = shown(
        report(results=[slow, result("paradecode", None, reason="its layers differ")], energy=None, made=made), 80
    )
    assert "paradecode: not run: its layers differ" in text
    assert "jacobi: 2 of 8 prompts, because it is less than half as fast" in text
    assert "energy per token: not measured" in text and "J/tok" not in text
    assert "heads (40 steps of training, 22 s)" in text
    cut = shown(report(results=[result("jacobi", 1.1, prompts=2), result("spd", None)], interrupted=True), 80)
    assert "jacobi: 2 of 8 prompts, interrupted" in cut and "spd: not run: interrupted" in cut


def test_the_last_line_says_what_became_the_plan() -> None:
    assert plan_words(report()) == "plan of smollm2-135m/notes: swift, 1.55x [1.45, 1.65] of plain decoding's speed"
    plain = {"method": "plain", "verdict": "plain", "measured_speedup": None, "measured_interval": None}
    assert "plain, because no lossless method is reliably faster here" in plan_words(report(plan=plain))
    assert "(not stored)" in plan_words(report(plan=plain, stored=False))
    assert "interrupted" in plan_words(report(plan=None, interrupted=True))
    standing = {"method": "spd", "verdict": "use", "measured_speedup": 1.7, "measured_interval": (1.6, 1.8)}
    assert "stays spd" in plan_words(report(standing=standing))


@pytest.mark.parametrize("n_rows", [1, 19])
def test_the_chart_is_a_picture_that_grows_with_its_bars(tmp_path: Path, n_rows: int) -> None:
    values = report(model="a model of $5", results=report()["results"][:n_rows])
    draw_ratios(values, Pictures(tmp_path / "c.png"))
    data = (tmp_path / "c.png").read_bytes()
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert data.startswith(b"\x89PNG") and width == 1500
    assert height > 40 * min(n_rows, 18)
