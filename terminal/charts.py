"""Pictures of layer sets, searches and comparisons, as PNG and SVG files in one style: the dashboard's.

`Pictures.failed` lists the files that a `draw_...` could not write.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import OutputError
from ..core.events import TaskFinished
from ..core.layer_sets import KINDS
from ..core.records import LayerSetRecord
from ..core.types import Trial, seconds_by_part
from .output import check_writable, note, writing
from .render import device_words, map_caption, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Report = Mapping[str, Any]  # A benchmark's report, as `--json` prints it.

# Colours of the light theme in server/dashboard/static/style.css.
BLUE, ORANGE, MID_BLUE, LIGHT_BLUE, PALE_BLUE, KEPT = "#0b5c94", "#b54708", "#2f78ad", "#4d93c0", "#7fb0d6", "#d7e3ee"
INK, GREY, LINE = "#1c2128", "#57606a", "#d0d7de"
GREEN, PURPLE = "#1a6b35", "#8a5cc2"
CYCLE = (ORANGE, GREY, BLUE, PALE_BLUE, GREEN, PURPLE, INK)
DASHED = (0, (4, 3))
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,  # Model and task names may contain dollar signs.
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titlecolor": GREY,
    "axes.grid": True,  # Grid lines replace the frame around it.
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINE,
    "hatch.linewidth": 1.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "svg.fonttype": "none",  # Keep text as searchable text instead of paths.
    "svg.hashsalt": "swiftopt",  # Fixed salt: the same data give the same file.
}
NO_METADATA: dict[str, dict[str, str | None]] = {"png": {"Software": None}, "svg": {"Creator": None, "Date": None}}
WIDTH_IN, DPI = 10.0, 150
BAR_IN, AROUND_BARS_IN = 0.36, 1.4  # Heights of a bar with its gap, and of title and axis together.
MAP_IN, TRIALS_IN, PACES_IN, PARTS_IN = 1.9, 3.0, 2.4, 1.2
PARTS = {"left out": ORANGE, "int4": MID_BLUE, "fp8": LIGHT_BLUE, "int8": PALE_BLUE, "kept": KEPT}
# Colours of a run's seconds: shades of teal, which no other panel of its picture has.
SECONDS = {"optimise": "#0b5a52", "draft": "#2f8f84", "verify": "#86c5bd", "other": "#d3e8e5"}
MOST_COLUMNS = 7  # Most columns of a legend.
OBJECTIVES = {"expected_speedup": "expected speedup", "matchness": "matchness"}
MEAN_OF = 4  # Window of the moving means, in prompts.
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}  # Style of labels next to a point.


@dataclass(frozen=True)
class Pictures:
    """The files that a picture is written to; false if there are none. `origin` is written into their metadata.

    Errors of writing are collected in `failed`, so that the result is printed even if its picture cannot be written.
    """

    png: Path | None = None
    svg: Path | None = None
    origin: str | None = None
    failed: list[OutputError] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.files)

    @property
    def files(self) -> dict[str, Path]:
        return {name: path for name, path in (("png", self.png), ("svg", self.svg)) if path is not None}

    def to_json(self) -> dict[str, str | None]:
        """Return the names of both files, None where there is none."""
        return {name: str(path) if (path := self.files.get(name)) else None for name in NO_METADATA}

    def check(self) -> None:
        """Check that the files can be written, and leave them as they are.

        Raises: OutputError: one can not.
        """
        for path in self.files.values():
            check_writable(path)

    def draw(self, draw_data: Callable[..., None], data: Any) -> None:
        """Call `draw_data`, one of the `draw_...` functions, with `data` if there are files to write."""
        if self:
            draw_data(data, self)

    def raise_failed(self) -> None:
        """Raises: OutputError: a picture was not written."""
        if self.failed:
            raise self.failed[0]


@contextmanager
def picture(
    pictures: Pictures, height_in: float, title: str, h_pad: float | None = None, **panels: Any
) -> Iterator[Any]:
    """Yield the axes of an empty figure with a title, and write the figure in each format when the block ends.

    `panels` goes to `Figure.subplots`. A file that cannot be written is kept as `failed`.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # Hide matplotlib's warning about a missing cache folder.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=h_pad)
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white", layout=layout)
        FigureCanvasAgg(figure)  # This canvas needs no display, whatever backend is configured.
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        yield figure.subplots(**panels)
        for name, path in pictures.files.items():
            try:
                with writing(path), warnings.catch_warnings():
                    # The font may lack letters of a name; boxes are drawn for them, so hide the warning.
                    warnings.filterwarnings("ignore", "Glyph")
                    figure.savefig(path, format=name, metadata={**NO_METADATA[name], "Description": pictures.origin})
            except OutputError as error:
                pictures.failed.append(error)
            else:
                note(f"drawn to {path}")


def legend(*all_axes: Axes) -> None:
    """Draw a single legend for all axes at the bottom of the figure, with each label once, as wide as the figure."""
    handles_by_label: dict[str, Any] = {}
    for axes in all_axes:
        handles, labels = axes.get_legend_handles_labels()
        handles_by_label |= dict(zip(labels, handles, strict=True))
    if handles_by_label:
        figure: Any = all_axes[0].figure
        for n_columns in range(min(len(handles_by_label), MOST_COLUMNS), 0, -1):
            drawn = figure.legend(
                handles_by_label.values(), handles_by_label, loc="outside lower left", ncols=n_columns
            )
            if n_columns == 1 or drawn.get_window_extent(figure.canvas.get_renderer()).width <= figure.bbox.width:
                return
            drawn.remove()


def model_name(model: str) -> str:
    """Return the last part of a model's path or hub id, without characters that are not allowed in SVG files."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in Path(model).name or model)


def conditions(report: Report, *further_words: str) -> str:
    return " · ".join([*(report[key] for key in ("dtype", "device") if report.get(key)), *further_words])


def moving_means(values: Sequence[float | None]) -> list[float]:
    """Return moving means over the last MEAN_OF prompts; values of None (no draft) are left out."""
    means = []
    for end in range(1, len(values) + 1):
        numbers = [number for number in values[max(0, end - MEAN_OF) : end] if number is not None]
        means.append(sum(numbers) / len(numbers) if numbers else float("nan"))
    return means


def draw_speeds(
    axes: Axes, x: Sequence[int], speeds: Sequence[float], colour: str, label: str, points_label: str | None = None
) -> None:
    """Draw tokens per second as points, and their moving means as a line."""
    axes.plot(x, speeds, color=colour, lw=0, marker="o", ms=3, alpha=0.4, label=points_label)
    axes.plot(x, moving_means(speeds), color=colour, label=label)


# --- layer sets


def draw_layer_sets(sets_and_trials: Sequence[tuple[LayerSetRecord, Sequence[Trial]]], pictures: Pictures) -> None:
    """Draw the map of each layer set, and the trials of its search where there are any; all are of one model."""
    _draw_sets([(record, trials, None) for record, trials in sets_and_trials], pictures)


def draw_tuning(tasks: Sequence[TaskFinished], pictures: Pictures) -> None:
    """Draw each task's layer set, search, speed along the stream, and time by part of the run (SWIFT Figure 6)."""
    _draw_sets([(task.record, task.trials, task) for task in tasks], pictures)


def _draw_sets(
    panels_data: Sequence[tuple[LayerSetRecord, Sequence[Trial], TaskFinished | None]], pictures: Pictures
) -> None:
    """Draw a column of panels with the model's name as title and one legend at the bottom."""
    # Height of each panel in inches, and the function that draws it.
    panels: list[tuple[float, Callable[[Any], None]]] = []
    for record, trials, task in panels_data:
        name = f"{record.task} · " if len(panels_data) > 1 else ""
        panels.append((MAP_IN, partial(_draw_map, record=record, name=name)))
        if trials:
            panels.append((TRIALS_IN, partial(_draw_trials, record=record, trials=trials)))
        if task is not None and task.paces:
            panels += [(PACES_IN, partial(_draw_paces, task=task)), (PARTS_IN, partial(_draw_parts, task=task))]
    first_record = panels_data[0][0]
    version = f" · version {first_record.version}" if first_record.version is not None else ""
    title = (
        model_name(first_record.model)
        if len(panels_data) > 1
        else f"{model_name(first_record.model)} / {first_record.task}{version}"
    )
    heights = [height for height, _ in panels]
    rows = {"nrows": len(heights), "height_ratios": heights, "squeeze": False}
    with picture(pictures, 0.8 + sum(heights), title, h_pad=0.12, **rows) as grid:
        all_axes = [axes for row in grid for axes in row]
        for axes, (_, draw) in zip(all_axes, panels, strict=True):
            draw(axes)
        legend(*all_axes)


def _draw_map(axes: Axes, record: LayerSetRecord, name: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    layer_set, labelled = record.layer_set, set()
    for row, kind in enumerate(KINDS):
        for layer in filter(partial(layer_set.has, kind), range(layer_set.n_layers)):
            skipped = layer_set.skips(kind, layer)
            state = "left out" if skipped else (layer_set.format_of(kind, layer) or "kept").split("-")[0]
            pattern: dict[str, Any] = {"hatch": "///", "ec": "white"} if skipped else {"ec": "none"}
            pattern["label"] = None if state in labelled else state
            labelled.add(state)
            style = "round,pad=0,rounding_size=0.12"
            corner = (layer - 0.39, row - 0.36)
            axes.add_patch(FancyBboxPatch(corner, 0.78, 0.72, boxstyle=style, fc=PARTS[state], lw=0, **pattern))
            if kind == "mlp" and not skipped and (n_experts := layer_set.experts_of(layer)) is not None:
                axes.text(layer, row, str(n_experts), ha="center", va="center", fontsize=9, color=INK)
    axes.set(xlim=(-0.7, layer_set.n_layers - 0.3), ylim=(1.55, -0.55), title=f"{name}{map_caption(layer_set)}")
    axes.set_xticks(range(0, layer_set.n_layers, 5 if layer_set.n_layers > 16 else 1))
    axes.set_yticks([0, 1], list(KINDS.values()))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    numbers = "; number in a cell: experts per token, if fewer than the model uses" if layer_set.experts else ""
    axes.set_xlabel(f"layer{numbers}", color=GREY)


def _draw_trials(axes: Axes, record: LayerSetRecord, trials: Sequence[Trial]) -> None:
    """Draw each trial's score, the best score so far, and the adopted trials."""
    steps, values = [trial.step for trial in trials], [trial.score for trial in trials]
    axes.scatter(steps, values, s=12, color=GREY, alpha=0.55, linewidths=0, label="a trial")
    axes.step(steps, list(accumulate(values, max)), where="post", color=BLUE, label="best so far")
    if adopted := [(trial.step, trial.score) for trial in trials if trial.adopted]:
        x, y = zip(*adopted, strict=True)
        axes.scatter(x, y, s=48, marker="D", color=GREEN, edgecolors="white", zorder=3, label="adopted")
    ratios = (
        f"expected {ratio(record.expected_speedup)}",
        f"measured {ratio(record.measured_speedup, record.measured_interval)}",
    )
    figures = (
        f"α {number(record.acceptance_rate)}",
        f"M {number(record.mean_generated_length)}",
        *(() if record.verdict == "plain" else ratios),  # No speed ratios for a draft that is not used.
        f"verdict {record.verdict}",
        device_words(record),
    )
    objective = OBJECTIVES.get(str(record.settings.get("objective")), "score")
    axes.set(xlabel="trial", ylabel=objective, title=" · ".join(filter(None, figures)))
    axes.margins(y=0.12)
    if objective == "matchness":
        end_at_one(axes)


def end_at_one(axes: Axes) -> None:
    """Limit the y axis to 1 for values that are shares; matplotlib's margin would exceed 1."""
    axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))


def log_axis(axes: Axes) -> None:
    """Scale the y axis by logarithms, with its ticks at 1, 2 and 5 times powers of ten, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    # matplotlib's own formatter writes powers in its mathematical notation, which these pictures do not parse.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_paces(axes: Axes, task: TaskFinished) -> None:
    """Draw tokens per second by prompt, with plain decoding's speed as a line."""
    labels = f"mean of {MEAN_OF} prompts", "tok/s of a prompt"
    draw_speeds(axes, range(1, len(task.paces) + 1), task.paces, PURPLE, *labels)
    axes.locator_params(axis="x", integer=True)
    if task.plain_tok_s is not None:
        axes.axhline(task.plain_tok_s, color=INK, lw=1, ls=DASHED, label="plain decoding")
    axes.set(xlabel="prompt of the stream, during the search", ylabel="tokens per second", ylim=(0, None))


def _draw_parts(axes: Axes, task: TaskFinished) -> None:
    """Draw the share of each part of the run in its seconds; the numbers are in the title."""
    total, left_percent = task.timings.total_s or 1.0, 0.0
    percents = {name: 100 * seconds / total for name, seconds in seconds_by_part(task.timings).items()}
    for name, percent in percents.items():
        axes.barh(0, percent, left=left_percent, color=SECONDS[name], label=name, linewidth=0)
        left_percent += percent
    shares = " · ".join(f"{name} {percent:.1f} %" for name, percent in percents.items())
    axes.set(xlim=(0, 100), yticks=[], xlabel="% of the stream's seconds", title=shares)
    axes.grid(False)


# --- comparisons


def draw_ratios(report: Report, pictures: Pictures) -> None:
    """Draw the speed ratios of `compare`, `bench decode`, `bench ablate` or `bench peers` as bars, with intervals.

    The fastest row is on top; variants of an ablation keep its order. Rows that did not run have no bar. Lossy rows and
    engines with other weights are hatched.
    """
    subtitle = f" / {report['task']}" if "task" in report else f" · {report['title']}" if "title" in report else ""
    of_engines = any("same_weights" in row for row in report.get("results", ()))
    name, hatching_reason = (
        ("row", "other weights") if of_engines else ("label" if "rows" in report else "method", "lossy")
    )
    all_rows = (
        report["rows"][::-1] if "rows" in report else sorted(report["results"], key=lambda row: row.get("ratio") or 0.0)
    )
    hatched = [row[name] for row in all_rows if row.get("lossy") or not row.get("same_weights", True)]
    rows = [row for row in all_rows if row.get("ratio") is not None]
    with picture(pictures, AROUND_BARS_IN + BAR_IN * len(rows), f"{model_name(report['model'])}{subtitle}") as axes:
        highs = [_draw_bar(axes, position, row, row[name] in hatched) for position, row in enumerate(rows)]
        axes.axvline(1.0, color=INK, lw=1, ls=DASHED)
        tokens = f" of {report['max_new_tokens']} tokens" if "max_new_tokens" in report else ""
        title = conditions(report, f"{report['prompts']} prompts{tokens}")
        axes.set(xlim=(0, 1.32 * max([1.0, *highs])), ylim=(-0.6, len(rows) - 0.4), title=title)
        axes.set_yticks(range(len(rows)), [row[name] for row in rows])
        axes.grid(False)
        axes.grid(True, axis="x")
        hint = f"; hatched: {hatching_reason}" if hatched else ""
        base = report.get("base", "the variant's base")
        axes.set_xlabel(f"ratio to {base}, with its 95 % interval{hint}", fontsize=10)


def _draw_bar(axes: Axes, position: int, row: Report, hatched: bool) -> float:
    """Draw a row's bar; return the upper end of its interval."""
    low_end, high_end = row["ratio_interval"] or (row["ratio"], row["ratio"])
    colour = BLUE if low_end > 1 else PALE_BLUE  # Dark if the whole interval lies above the base (ratio 1).
    pattern: dict[str, Any] = {"hatch": "////", "edgecolor": "white"} if hatched else {}
    axes.barh(position, row["ratio"], height=0.72, color=colour, linewidth=0, **pattern)
    axes.plot([low_end, high_end], [position, position], color=INK, lw=1.2, solid_capstyle="butt")
    axes.plot([low_end, high_end], [position, position], color=INK, lw=0, marker="|", ms=6)
    label = f"{number(row['ratio'], unit='x')} · {number(row['tok_s'], 1)} tok/s"
    label_box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
    axes.annotate(label, (max(high_end, row["ratio"]), position), bbox=label_box, xytext=(6, 0), va="center", **BESIDE)
    return float(high_end)
