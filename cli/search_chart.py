"""A comparison of search strategies as a picture: the objective against candidate passes, and against seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import INK, PALE, pale_grid, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#c2417c", "#7b8794", "#0f7c8f", "#1f2933", "#d08a1d", "#5b7f2b", "#6d4fa3")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG.

    Raises: OutputError: the file cannot be written.
    """
    title = f"{report['model']} · {report['dtype']} · {report['device']} · {report['windows']} windows"
    with picture(path, 4.4, title, 12) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for place, axes in enumerate((left, right)):
            _panel(axes, report, place)
        left.set(xlabel="candidate passes", ylabel="expected speedup of the set in use")
        right.set(xlabel="seconds of searching")
        right.legend(loc="lower right", frameon=False, fontsize=9)


def _panel(axes: Axes, report: Mapping[str, Any], place: int) -> None:
    for number, result in enumerate(report["results"]):
        end = result[("passes", "seconds")[place]]
        x = [*(point[place] for point in result["curve"]), end]
        y = [*(point[2] for point in result["curve"]), result["final"]]
        axes.step(x, y, where="post", color=PALETTE[number % len(PALETTE)], lw=2, label=result["strategy"])
    axes.axhline(report["goal"], color=INK, lw=1, ls=(0, (4, 3)))
    axes.set_title(f"dashed: {report['goal']:.3f}x, 95 % of the best", loc="left", fontsize=9, color=PALE)
    pale_grid(axes, colors=PALE, labelcolor=INK)
