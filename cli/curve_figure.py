"""The loss of a training as a picture."""

from __future__ import annotations

import logging
from pathlib import Path

from ..core.learned import LearnedRecord
from .figures import COLOURS, DPI, INK, KEPT, PALE, STYLE, WIDTH_IN
from .output import writing


def draw_curve(record: LearnedRecord, path: Path) -> None:
    """Write the picture as PNG.

    Raises: OutputError: the file cannot be written.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where it has no folder of its own
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    words = {"heads": "KL to the last layer, nats", "probe": "binary cross-entropy, nats"}
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 4.2), dpi=DPI, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12))
        FigureCanvasAgg(figure)  # draws without a display, whatever backend is configured
        layers = ", ".join(map(str, record.depths))
        title = f"{record.model} / {record.task} · {record.kind} after layer {layers}"
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        axes = figure.subplots()
        axes.plot([step for step, _ in record.curve], [loss for _, loss in record.curve], color=COLOURS["attn"], lw=2)
        axes.set(xlabel="step", ylabel=words[record.kind])
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=KEPT, lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, colors=PALE, labelcolor=INK)
        with writing(path):
            figure.savefig(path, format="png")
