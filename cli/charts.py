"""Pictures of layer sets, trainings and benchmarks, as PNG files in one style.

Every `draw_...` raises OutputError where its file cannot be written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.types import LayerSetRecord, LearnedRecord, Trial
from .output import writing
from .render import device_words, map_caption, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Report = Mapping[str, Any]  # a benchmark's, as `--json` prints it

TEAL, PINK, INK, PALE, FAINT, GREY_BLUE = "#0f7c8f", "#c2417c", "#1f2933", "#7b8794", "#e4e7eb", "#9fb3bd"
CYCLE = (PINK, PALE, TEAL, INK, "#d08a1d", "#5b7f2b", "#6d4fa3")
DASHED = (0, (4, 3))
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a name may hold a dollar sign
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titlecolor": PALE,
    "axes.grid": True,  # lines behind the data instead of a frame around it
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2,
    "legend.loc": "lower right",
    "legend.frameon": False,
    "legend.fontsize": 9,
}
WIDTH_IN, DPI = 10.0, 150
BAR_IN, AROUND_BARS_IN = 0.34, 1.5  # height of a bar with its gap, and of what is above and below all of them
KINDS = {"attn": ("attention", TEAL), "mlp": ("MLP", PINK)}
LOSSES = {"heads": "KL to the last layer, nats", "probe": "binary cross-entropy, nats"}
SHIFT_RUNS = (
    ("kept", "first task's set", PALE),
    ("own", "each task's own set", TEAL),
    ("adapted", "one stream, adapting", PINK),
)
MEAN_OF = 4  # prompts behind each point of a line of acceptance


@contextmanager
def picture(
    path: Path, height_in: float, title: str, title_size: int = 13, h_pad: float | None = None, **panels: Any
) -> Iterator[Any]:
    """Give the axes of an empty figure with a title, and write it as PNG when the block ends.

    `panels` goes to `Figure.subplots`.

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
        yield figure.subplots(**panels)
        with writing(path):
            figure.savefig(path, format="png")


def draw_layer_set(record: LayerSetRecord, trials: Sequence[Trial], path: Path) -> None:
    """Draw the map of a layer set, and the matchness of the trials of its search where there are any."""
    version = f" · version {record.version}" if record.version is not None else ""
    title = f"{record.model} / {record.task}{version}"
    height_in, ratios = (5.4, [1, 3]) if trials else (2.2, [1])
    with picture(path, height_in, title, h_pad=0.12, nrows=len(ratios), height_ratios=ratios, squeeze=False) as rows:
        _draw_map(rows[0][0], record)
        if trials:
            _draw_trials(rows[1][0], record, trials)


def _draw_map(axes: Axes, record: LayerSetRecord) -> None:
    from matplotlib.patches import FancyBboxPatch

    layer_set = record.layer_set
    skipped = {"attn": layer_set.skip_attn, "mlp": layer_set.skip_mlp}
    for row, (kind, (_, colour)) in enumerate(KINDS.items()):
        for layer in range(layer_set.n_layers):
            face = colour if layer in skipped[kind] else FAINT
            corner = (layer - 0.39, row - 0.36)
            box = FancyBboxPatch(corner, 0.78, 0.72, boxstyle="round,pad=0,rounding_size=0.12", fc=face, ec="none")
            axes.add_patch(box)
    axes.set(xlim=(-0.7, layer_set.n_layers - 0.3), ylim=(1.55, -0.55))
    axes.set_xticks(range(0, layer_set.n_layers, 5 if layer_set.n_layers > 16 else 1))
    axes.set_yticks([0, 1], [label for label, _ in KINDS.values()])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{map_caption(layer_set)} · coloured sub-layers are left out of the draft")
    axes.set_xlabel("layer", fontsize=9, color=PALE)


def _draw_trials(axes: Axes, record: LayerSetRecord, trials: Sequence[Trial]) -> None:
    steps, values = [trial.step for trial in trials], [trial.matchness for trial in trials]
    axes.scatter(steps, values, s=9, color=PALE, alpha=0.45, linewidths=0, label="a trial")
    axes.step(steps, list(accumulate(values, max)), where="post", color=TEAL, label="best so far")
    adopted = [trial for trial in trials if trial.adopted]
    if adopted:
        at = ([trial.step for trial in adopted], [trial.matchness for trial in adopted])
        axes.scatter(*at, s=44, marker="D", color=PINK, edgecolors="white", zorder=3, label="adopted")
    axes.set(xlabel="optimisation step", ylabel="matchness", ylim=(max(-0.02, min(values) - 0.05), 1.02))
    axes.tick_params(labelcolor=PALE)
    axes.legend(loc="upper right", ncols=3)
    figures = (
        f"α {number(record.acceptance_rate)}",
        f"M {number(record.mean_generated_length)}",
        f"expected {ratio(record.expected_speedup)}",
        f"measured {ratio(record.measured_speedup, record.measured_interval)}",
        f"verdict {record.verdict}",
        device_words(record),
    )
    axes.set_title(" · ".join(filter(None, figures)))


def draw_loss(record: LearnedRecord, path: Path) -> None:
    """Draw the loss of a training."""
    layers = ", ".join(map(str, record.depths))
    with picture(path, 4.2, f"{record.model} / {record.task} · {record.kind} after layer {layers}") as axes:
        axes.plot([step for step, _ in record.curve], [loss for _, loss in record.curve], color=TEAL)
        axes.set(xlabel="step", ylabel=LOSSES[record.kind])
        axes.set_ylim(bottom=0)


def draw_comparison(report: Report, path: Path) -> None:
    """Draw the methods' speed ratios with their intervals as bars: the fastest on top, lossy ones hatched."""
    rows = sorted((row for row in report["results"] if row["ratio"] is not None), key=lambda row: row["ratio"])
    height_in = AROUND_BARS_IN + BAR_IN * len(rows)
    with picture(path, height_in, f"{report['model']} / {report['task']}", h_pad=0.12) as axes:
        highs = [_draw_bar(axes, place, row) for place, row in enumerate(rows)]
        axes.axvline(1.0, color=INK, lw=1, ls=DASHED)
        axes.set(xlim=(0, 1.22 * max([1.0, *highs])), ylim=(-0.6, len(rows) - 0.4))
        axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
        axes.grid(False)
        axes.grid(True, axis="x")
        conditions = f"{report['dtype']} · {report['device']} · {report['prompts']} prompts"
        axes.set_title(f"{conditions} · ratio to plain decoding with its 95 % interval · hatched: lossy")


def _draw_bar(axes: Axes, place: int, row: Report) -> float:
    """Draw a method's bar; return the upper end of its interval."""
    low, high = row["ratio_interval"] or (row["ratio"], row["ratio"])
    colour = TEAL if low > 1 else GREY_BLUE  # bright where the method is surely faster than plain decoding
    hatched: dict[str, Any] = {"hatch": "////", "edgecolor": "white"} if row["lossy"] else {}
    axes.barh(place, row["ratio"], height=0.72, color=colour, linewidth=0, **hatched)
    axes.plot([low, high], [place, place], color=INK, lw=1.2, solid_capstyle="butt")
    axes.plot([low, high], [place, place], color=INK, lw=0, marker="|", ms=6)
    label = f" {number(row['ratio'], unit='x')}  {number(row['tok_s'], 1)} tok/s"
    under = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
    axes.text(max(high, row["ratio"]), place, label, va="center", fontsize=8, color=INK, bbox=under)
    return float(high)


def draw_search(report: Report, path: Path) -> None:
    """Draw the objective that search strategies reach against candidate passes, and against seconds."""
    title = f"{report['model']} · {report['dtype']} · {report['device']} · {report['windows']} windows"
    with picture(path, 4.4, title, 12, ncols=2, sharey=True) as (left, right):
        for column, (axes, ends) in enumerate(((left, "passes"), (right, "seconds"))):
            for colour, result in zip(CYCLE * len(report["results"]), report["results"], strict=False):
                x = [*(point[column] for point in result["curve"]), result[ends]]
                y = [*(point[2] for point in result["curve"]), result["final"]]
                axes.step(x, y, where="post", color=colour, label=result["strategy"])
            axes.axhline(report["goal"], color=INK, lw=1, ls=DASHED)
            axes.set_title(f"dashed: {report['goal']:.3f}x, 95 % of the best")
        left.set(xlabel="candidate passes", ylabel="expected speedup of the set in use")
        right.set(xlabel="seconds of searching")
        right.legend()


def draw_stream_shift(report: Report, path: Path) -> None:
    """Draw acceptance along a stream that changes its task, in the manner of SWIFT Figure 7."""
    title = f"{report['model']} · {report['dtype']} · {report['device']} · {report['method']}"
    with picture(path, 4.4, title, 12) as axes:
        results = report["results"]
        starts = [0, *accumulate(result["prompts"] for result in results)]
        for key, label, colour in SHIFT_RUNS:
            for start, result in zip(starts, results, strict=False):
                values = _moving_means(result[key]["by_prompt"])
                x = range(start + 1, start + 1 + len(values))
                axes.plot(x, values, color=colour, label=None if start else label)
        for start, result in zip(starts, results, strict=False):
            axes.axvline(start + 0.5, color=FAINT, lw=1)
            axes.text(start + 1, 1.01, result["task"], transform=axes.get_xaxis_transform(), fontsize=9, color=PALE)
        for shift in report["shifts"]:
            axes.plot([shift["prompt"] + 1], [0.02], marker="^", color=INK, transform=axes.get_xaxis_transform())
        axes.set(xlabel="prompt of the stream; ▲ a shift was noticed", ylabel=f"acceptance, mean of {MEAN_OF} prompts")
        axes.legend()


def draw_serving(report: Report, path: Path) -> None:
    """Draw the speed of a served stream by request, plain decoding beside it."""
    title = f"{report['model']} · {report['prompts']} requests of {report['max_new_tokens']} tokens"
    with picture(path, 4.4, title, 12) as axes:
        ends = list(accumulate(result["requests"] for result in report["results"]))
        for key, label, colour in (("plain_s", "plain decoding", PALE), ("served_s", "as served, learning", TEAL)):
            speeds = [result["tokens"] / result[key] for result in report["results"]]
            axes.plot(ends, speeds, color=colour, lw=0, marker="o", ms=3, alpha=0.5)
            axes.plot(ends, _moving_means(speeds), color=colour, label=label)
        axes.set(xlabel=f"request; {report['concurrency']} at a time", ylabel=f"tokens per second, mean of {MEAN_OF}")
        axes.set_ylim(bottom=0)
        axes.legend()


def _moving_means(values: Sequence[float | None]) -> list[float]:
    """Return means over the latest prompts up to each; prompts without a draft (None) are left out."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - MEAN_OF) : end] if value is not None]
        means.append(sum(known) / len(known) if known else float("nan"))
    return means
