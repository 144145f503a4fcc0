"""Acceptance along a stream that changes its task, as a picture in the manner of SWIFT Figure 7."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from .figures import INK, KEPT, PALE, pale_grid, picture

RUNS = (
    ("kept", "first task's set", PALE),
    ("own", "each task's own set", "#0f7c8f"),
    ("adapted", "one stream, adapting", "#c2417c"),
)
MEAN_OF = 4  # prompts behind each point of a line


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG.

    Raises: OutputError: the file cannot be written.
    """
    title = f"{report['model']} · {report['dtype']} · {report['device']} · {report['method']}"
    with picture(path, 4.4, title, 12) as figure:
        axes = figure.subplots()
        results = report["results"]
        starts = [0, *accumulate(result["prompts"] for result in results)]
        for key, label, colour in RUNS:
            for number, result in enumerate(results):
                values = result[key]["by_prompt"]
                x = range(starts[number] + 1, starts[number] + 1 + len(values))
                axes.plot(x, _smooth(values), color=colour, lw=2, label=label if number == 0 else None)
        for start, result in zip(starts, results, strict=False):
            axes.axvline(start + 0.5, color=KEPT, lw=1)
            axes.text(start + 1, 1.01, result["task"], transform=axes.get_xaxis_transform(), fontsize=9, color=PALE)
        for shift in report["shifts"]:
            axes.plot([shift["prompt"] + 1], [0.02], marker="^", color=INK, transform=axes.get_xaxis_transform())
        axes.set(xlabel="prompt of the stream; ▲ a shift was noticed", ylabel=f"acceptance, mean of {MEAN_OF} prompts")
        axes.legend(loc="lower right", frameon=False, fontsize=9)
        pale_grid(axes, colors=PALE, labelcolor=INK)


def _smooth(values: list[float | None]) -> list[float]:
    """Means of the latest few; a prompt without a draft counts for nothing."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - MEAN_OF) : end] if value is not None]
        means.append(sum(known) / len(known) if known else float("nan"))
    return means
