"""The loss of a training as a picture."""

from __future__ import annotations

from pathlib import Path

from ..core.learned import LearnedRecord
from .figures import COLOURS, INK, PALE, pale_grid, picture


def draw_curve(record: LearnedRecord, path: Path) -> None:
    """Write the picture as PNG.

    Raises: OutputError: the file cannot be written.
    """
    words = {"heads": "KL to the last layer, nats", "probe": "binary cross-entropy, nats"}
    layers = ", ".join(map(str, record.depths))
    title = f"{record.model} / {record.task} · {record.kind} after layer {layers}"
    with picture(path, 4.2, title) as figure:
        axes = figure.subplots()
        axes.plot([step for step, _ in record.curve], [loss for _, loss in record.curve], color=COLOURS["attn"], lw=2)
        axes.set(xlabel="step", ylabel=words[record.kind])
        axes.set_ylim(bottom=0)
        pale_grid(axes, colors=PALE, labelcolor=INK)
