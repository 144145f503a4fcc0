"""A comparison of search strategies as a picture: the objective against candidate passes, and against seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import DPI, INK, KEPT, PALE, STYLE, WIDTH_IN
from .output import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#c2417c", "#7b8794", "#0f7c8f", "#1f2933", "#d08a1d", "#5b7f2b", "#6d4fa3")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG.

    Raises: OutputError: the file cannot be written.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where it has no folder of its own
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 4.4), dpi=DPI, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12))
        FigureCanvasAgg(figure)  # draws without a display, whatever backend is configured
        title = f"{report['model']} · {report['dtype']} · {report['device']} · {report['windows']} windows"
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        left, right = figure.subplots(1, 2, sharey=True)
        for place, axes in enumerate((left, right)):
            _panel(axes, report, place)
        left.set(xlabel="candidate passes", ylabel="expected speedup of the set in use")
        right.set(xlabel="seconds of searching")
        right.legend(loc="lower right", frameon=False, fontsize=9)
        with writing(path):
            figure.savefig(path, format="png")


def _panel(axes: Axes, report: Mapping[str, Any], place: int) -> None:
    for number, result in enumerate(report["results"]):
        end = result[("passes", "seconds")[place]]
        x = [*(point[place] for point in result["curve"]), end]
        y = [*(point[2] for point in result["curve"]), result["final"]]
        axes.step(x, y, where="post", color=PALETTE[number % len(PALETTE)], lw=2, label=result["strategy"])
    axes.axhline(report["goal"], color=INK, lw=1, ls=(0, (4, 3)))
    axes.set_title(f"dashed: {report['goal']:.3f}x, 95 % of the best", loc="left", fontsize=9, color=PALE)
    axes.grid(axis="y", color=KEPT, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=PALE, labelcolor=INK)
