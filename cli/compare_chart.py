"""A comparison as a bar chart: each method's speed ratio with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import COLOURS, INK, PALE, pale_grid, picture
from .render import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR_IN, AROUND_IN = 0.34, 1.5  # height of a bar with its gap, and of what is above and below all of them
_UNDER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
SURE, UNSURE = COLOURS["attn"], "#9fb3bd"


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the chart as PNG: fastest on top, lossy methods hatched, plain decoding as a line.

    Raises: OutputError: the file cannot be written.
    """
    rows = [row for row in report["results"] if row["ratio"] is not None]
    rows.sort(key=lambda row: row["ratio"])
    title = f"{report['model']} / {report['task']}"
    with picture(path, AROUND_IN + BAR_IN * len(rows), title, h_pad=0.12) as figure:
        axes = figure.subplots()
        _bars(axes, rows)
        axes.set_title(
            f"{report['dtype']} · {report['device']} · {report['prompts']} prompts · ratio to plain decoding with its"
            " 95 % interval · hatched: lossy",
            loc="left",
            fontsize=9,
            color=PALE,
        )


def _bars(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    for place, row in enumerate(rows):
        low, high = row["ratio_interval"] or (row["ratio"], row["ratio"])
        colour = SURE if low > 1 else UNSURE
        hatched: dict[str, Any] = {"hatch": "////", "edgecolor": "white"} if row["lossy"] else {}
        axes.barh(place, row["ratio"], height=0.72, color=colour, linewidth=0, **hatched)
        axes.plot([low, high], [place, place], color=INK, lw=1.2, solid_capstyle="butt")
        axes.plot([low, high], [place, place], color=INK, lw=0, marker="|", ms=6)
        words = f" {number(row['ratio'], unit='x')}  {number(row['tok_s'], 1)} tok/s"
        axes.text(max(high, row["ratio"]), place, words, va="center", fontsize=8, color=INK, bbox=_UNDER)
    axes.axvline(1.0, color=INK, lw=1, ls=(0, (4, 3)))
    furthest = max([1.0, *((row["ratio_interval"] or (0, row["ratio"]))[1] for row in rows)])
    axes.set(xlim=(0, 1.22 * furthest), ylim=(-0.6, len(rows) - 0.4))
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    pale_grid(axes, "x", labelcolor=INK)
