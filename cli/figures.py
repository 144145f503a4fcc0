"""A layer set as a picture: its map, and the matchness of the search that found it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.types import LayerSetRecord, Trial
from .output import writing
from .render import map_caption, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, KEPT = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = {"attn": "#0f7c8f", "mlp": "#c2417c"}
LABELS = {"attn": "attention", "mlp": "MLP"}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a name may hold a dollar sign
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
}
WIDTH_IN, DPI = 10.0, 150


@contextmanager
def picture(
    path: Path, height_in: float, title: str, title_size: int = 13, h_pad: float | None = None
) -> Iterator[Figure]:
    """An empty figure with a title, in the style of all pictures; written as PNG when the block ends.

    Raises: OutputError: the file cannot be written.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where it has no folder of its own
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=h_pad)
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white", layout=layout)
        FigureCanvasAgg(figure)  # draws without a display, whatever backend is configured
        figure.suptitle(title, x=0.012, ha="left", fontsize=title_size, fontweight="bold")
        yield figure
        with writing(path):
            figure.savefig(path, format="png")


def pale_grid(axes: Axes, across: Literal["x", "y"] = "y", **ticks: Any) -> None:
    """Lines behind what is drawn instead of a frame around it."""
    axes.grid(axis=across, color=KEPT, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, **ticks)


def draw(record: LayerSetRecord, trials: Sequence[Trial], path: Path) -> None:
    """Write the picture as PNG; without trials it is the map alone.

    Raises: OutputError: the file cannot be written.
    """
    with picture(path, 5.4 if trials else 2.2, _title(record), h_pad=0.12) as figure:
        rows: Any = figure.subplots(2 if trials else 1, 1, squeeze=False, height_ratios=[1, 3] if trials else None)
        _draw_map(rows[0][0], record)
        if trials:
            _draw_curve(rows[1][0], record, trials)


def _title(record: LayerSetRecord) -> str:
    version = f" · version {record.version}" if record.version is not None else ""
    return f"{record.model} / {record.task}{version}"


def _draw_map(axes: Axes, record: LayerSetRecord) -> None:
    from matplotlib.patches import FancyBboxPatch

    layer_set = record.layer_set
    for row, kind in enumerate(("attn", "mlp")):
        for layer in range(layer_set.n_layers):
            skipped = layer_set.skips("attn" if kind == "attn" else "mlp", layer)
            colour = COLOURS[kind] if skipped else KEPT
            corner = (layer - 0.39, row - 0.36)
            box = FancyBboxPatch(corner, 0.78, 0.72, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec="none")
            axes.add_patch(box)
    step = 5 if layer_set.n_layers > 16 else 1
    axes.set(xlim=(-0.7, layer_set.n_layers - 0.3), ylim=(1.55, -0.55))
    axes.set_xticks(range(0, layer_set.n_layers, step))
    axes.set_yticks([0, 1], [LABELS["attn"], LABELS["mlp"]])
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    caption = map_caption(layer_set).lstrip("■ ")
    axes.set_title(f"{caption} · coloured sub-layers are left out of the draft", loc="left", fontsize=9, color=PALE)
    axes.set_xlabel("layer", fontsize=9, color=PALE)


def _draw_curve(axes: Axes, record: LayerSetRecord, trials: Sequence[Trial]) -> None:
    steps = [trial.step for trial in trials]
    values = [trial.matchness for trial in trials]
    axes.scatter(steps, values, s=9, color=PALE, alpha=0.45, linewidths=0, label="a trial")
    axes.step(steps, list(accumulate(values, max)), where="post", color=COLOURS["attn"], lw=2, label="best so far")
    adopted = [trial for trial in trials if trial.adopted]
    if adopted:
        at = ([trial.step for trial in adopted], [trial.matchness for trial in adopted])
        axes.scatter(*at, s=44, marker="D", color=COLOURS["mlp"], edgecolors="white", zorder=3, label="adopted")
    low = min(values)
    axes.set(xlabel="optimisation step", ylabel="matchness", ylim=(max(-0.02, low - 0.05), 1.02))
    pale_grid(axes, colors=PALE)
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)
    axes.set_title(_figures(record), loc="left", fontsize=9, color=PALE)


def _figures(record: LayerSetRecord) -> str:
    parts = [
        f"α {number(record.acceptance_rate)}",
        f"M {number(record.mean_generated_length)}",
        f"expected {ratio(record.expected_speedup)}",
        f"measured {ratio(record.measured_speedup, record.measured_interval)}",
        f"verdict {record.verdict}",
        " ".join(filter(None, (record.device, record.dtype))),
    ]
    return " · ".join(filter(None, parts))
