"""Layer sets, results and tables as text for a person; pure functions, nothing is printed or read here."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from ..core.events import TaskFinished
from ..core.layer_sets import Kind, LayerSet
from ..core.records import LayerSetRecord, Measurement, Plan, PlanInUse, PlanVersion
from ..core.types import NOT_FASTER, Timings, Trial, Verdict, VerdictWord, origin_words, seconds_by_part

Value = TypeVar("Value")
# Columns of a table, each with a function that renders its cell.
Columns = Sequence[tuple[Column, Callable[[Value], RenderableType]]]

SKIPPED, KEPT = "■", "·"
BARS = "▁▂▃▄▅▆▇█"
LABEL = 6  # Width of the labels left of a layer map or sparkline.
ROOMY = 110  # Terminal width from which listings also show where an entry was tuned, and when.
STYLES: dict[Kind, str] = {"attn": "cyan", "mlp": "magenta"}
VERDICT_STYLES = {"use": "bold green", "plain": "bold yellow", "unmeasured": "bold"}


# --- figures


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return a figure, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def ratio(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """Return a speed ratio with its interval, such as `1.44x [1.39, 1.49]`."""
    interval_words = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return number(value, unit="x") + interval_words


def interval(bounds: Sequence[float] | None) -> str:
    """Return an interval without a unit, such as `1.39-1.49`, or a dash where it was not measured."""
    return "–" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def percent(share: float | None) -> str:
    """Return a share in per cent, or a dash where it was not measured."""
    return "–" if share is None else f"{100 * share:.0f} %"


def size(n_parameters: int) -> str:
    """Return a number of parameters in the usual short form: 135M, 1.5B, 13.0B."""
    if n_parameters >= 999.5e6:  # Smaller counts round to 999M at most.
        return f"{n_parameters / 1e9:.1f}B"
    return f"{n_parameters / 1e6:.0f}M"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as bars between their lowest and highest; more values than columns are averaged in groups."""
    if not values or width < 1:
        return ""
    n = min(width, len(values))
    edges = [i * len(values) // n for i in range(n + 1)]
    group_means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    lowest, highest = min(group_means), max(group_means)
    if highest == lowest:
        return BARS[len(BARS) // 2] * n
    return "".join(
        BARS[min(len(BARS) - 1, int((mean - lowest) / (highest - lowest) * len(BARS)))] for mean in group_means
    )


# --- tables


def folding(header: str, **column_options: Any) -> Column:
    """Make a column of words, which fold where the table has no room for them."""
    return Column(header, overflow="fold", **column_options)


def fixed(header: str, **column_options: Any) -> Column:
    """Make a column of words that are never folded."""
    return Column(header, no_wrap=True, **column_options)


def numeric(header: str) -> Column:
    return Column(header, justify="right", no_wrap=True)


def numbers(*headers: str) -> list[Column]:
    """Make columns of numbers, whose headers may fold."""
    return [Column(header, justify="right") for header in headers]


def table(
    columns: Iterable[Column],
    rows: Iterable[Sequence[RenderableType]],
    gap: int = 1,
    lined: bool = False,
    **table_options: Any,
) -> Table:
    """Make a table, its columns between lines or else `gap` apart; `table_options` goes to `Table`."""
    style_options: dict[str, Any] = {} if lined else {"box": None, "padding": (0, gap, 0, 0), "header_style": "dim"}
    new_table = Table(*columns, **{"title_justify": "left", **style_options, **table_options})
    for row in rows:
        new_table.add_row(*row)
    return new_table


def listing(values: Iterable[Value], columns: Columns[Value], **table_options: Any) -> Table:
    rows = ([cell(row_value) for _, cell in columns] for row_value in values)
    return table([column for column, _ in columns], rows, **table_options)


def figures_table(rows: Iterable[tuple[str, str]]) -> Table:
    return table([fixed("", style="dim"), folding("")], rows, gap=2, show_header=False, pad_edge=False)


def heading(title: str) -> Rule:
    """Return a line with a title at its left."""
    return Rule(Text(title, style="bold"), align="left", style="dim")


# --- layer sets


def layer_map(layer_set: LayerSet, width: int) -> Text:
    """Draw a row for attention and one for MLP, with one mark per sub-layer and a ruler of layers; wraps at `width`.

    A digit is the number of experts that a token takes in a layer, where it takes fewer than the model; a blank is a
    sub-layer that the model's layer does not have.
    """
    n_layers = layer_set.n_layers
    cell = 2 if LABEL + 2 * n_layers <= width else 1
    per_block = _block_length(n_layers, (width - LABEL) // cell)
    text = Text(no_wrap=True)
    for first_layer in range(0, n_layers, per_block):
        layers = range(first_layer, min(first_layer + per_block, n_layers))
        text.append(" " * LABEL + _ruler(layers, cell, width - LABEL) + "\n", style="dim")
        for kind, style in STYLES.items():
            text.append(f"{kind:<{LABEL}}")
            for layer in layers:
                skipped = layer_set.skips(kind, layer)
                n_experts = layer_set.experts_of(layer) if kind == "mlp" else None
                kept = KEPT if n_experts is None or n_experts > 9 else str(n_experts)
                mark = SKIPPED if skipped else kept if layer_set.has(kind, layer) else " "
                text.append(mark.ljust(cell), style=style if skipped else "dim")
            text.append("\n")
    text.append(f"{' ' * LABEL}{SKIPPED} {map_caption(layer_set)}", style="dim")
    return text


def map_caption(layer_set: LayerSet) -> str:
    """Return a caption with the map's counts, short enough for 80 columns."""
    parts = f"{len(layer_set.skip_attn)} attention, {len(layer_set.skip_mlp)} MLP"
    return f"skipped {layer_set.n_skipped} of {layer_set.n_searched}: {parts} (r = {layer_set.skip_ratio:.2f})"


def _block_length(n_layers: int, n_cells: int) -> int:
    """Return the layers per row: the fewest rows that fit, of similar length, each starting at a multiple of ten."""
    if n_layers <= n_cells:
        return n_layers
    n_blocks = math.ceil(n_layers / max(10, n_cells // 10 * 10))
    return math.ceil(n_layers / n_blocks / 10) * 10


def _ruler(layers: range, cell: int, n_cells: int) -> str:
    """Return layer numbers, each above its own column; at every fifth or tenth layer."""
    interval = 5 if cell == 2 else 10
    marks = [" "] * n_cells
    for layer in layers:
        column = (layer - layers.start) * cell
        if layer % interval == 0 and column + len(str(layer)) <= n_cells:
            marks[column : column + len(str(layer))] = str(layer)
    return "".join(marks).rstrip()


def weights_words(layer_set: LayerSet) -> str:
    """Return the weight formats of a draft, each with its number of parts (kept sub-layers and the head)."""
    parts = [(kind, i) for kind in STYLES for i in range(layer_set.n_layers) if layer_set.has(kind, i)]
    kept_parts = [part for part in parts if not layer_set.skips(*part)]
    formats = [layer_set.format_of("head"), *(layer_set.format_of(*part) for part in kept_parts)]
    return _counted((name or "the model's own" for name in formats), "part")


def experts_words(layer_set: LayerSet) -> str:
    """Return how many experts the draft takes of the layers with a mixture, each number with its layers."""
    numbers = [layer_set.experts_of(i) for i in range(layer_set.n_layers) if not layer_set.skips("mlp", i)]
    return _counted(("all that the model uses" if number is None else str(number) for number in numbers), "layer")


def _counted(names: Iterable[str], noun: str) -> str:
    """Return each name with how many things it is of, the most frequent first; a name alone is of all."""
    counts = Counter(names).most_common()
    return ", ".join(
        name if len(counts) == 1 else f"{name} ({n} {noun if n == 1 else noun + 's'})" for name, n in counts
    )


def verdict_words(verdict: Verdict) -> str:
    if verdict.word == "use":
        prompts_words = f" on {verdict.n_prompts} held-out prompts" if verdict.n_prompts else ""
        return f"use: {ratio(verdict.ratio)} of plain decoding's speed{prompts_words}"
    if verdict.word == "plain":
        reason_words = f" ({verdict.reason})" if verdict.reason not in ("", NOT_FASTER) else ""
        return f"plain: drafting is not reliably faster than plain decoding here{reason_words}"
    return "unmeasured: nothing was compared with plain decoding" + (f" ({verdict.reason})" if verdict.reason else "")


def draft_rows(record: LayerSetRecord) -> list[tuple[str, str]]:
    """Return the figures of a record's drafts, each with its name."""
    return [
        ("draft's weights", weights_words(record.layer_set)),
        *([("draft's experts", experts_words(record.layer_set))] if record.layer_set.experts else []),
        ("α, acceptance rate", number(record.acceptance_rate)),
        ("M, tokens per target pass", number(record.mean_generated_length)),
    ]


def ratio_rows(record: LayerSetRecord) -> list[tuple[str, str]]:
    """Return a record's ratios to plain decoding, each with its name."""
    return [
        ("expected ratio", ratio(record.expected_speedup)),
        ("measured ratio", ratio(record.measured_speedup, record.measured_interval)),
    ]


def set_view(
    record: LayerSetRecord,
    task: str,
    trials: Sequence[Trial],
    rows: Iterable[tuple[str, str]],
    verdict: Text,
    width: int,
    timings: Sequence[RenderableType] = (),
) -> list[RenderableType]:
    """Show a layer set: map, search curve, figures, time by part of the run, and verdict."""
    version = f" version {record.version}" if record.version is not None else ""
    return [
        heading(f"{record.model}/{task}{version}"),
        layer_map(record.layer_set, width),
        "",
        matchness_line(trials, width),
        "",
        figures_table(rows),
        "",
        *timings,
        verdict,
    ]


def record_view(record: LayerSetRecord, trials: Sequence[Trial], width: int) -> RenderableType:
    """Show one stored layer set, with its origin."""
    verdict = Verdict(record.verdict, record.measured_speedup, record.measured_interval, record.expected_speedup)
    rows = [
        ("matchness", number(record.matchness)),
        *draft_rows(record),
        *ratio_rows(record),
        ("tuned on", device_words(record) or "–"),
        ("stored at", record.created_at or "–"),
        ("fingerprint", record.fingerprint or "– (not yet seen with its model)"),
    ]
    verdict_line = Text(verdict_words(verdict), style=VERDICT_STYLES[verdict.word])
    return Group(*set_view(record, record.task, trials, rows, verdict_line, width))


def device_words(measured: Measurement) -> str:
    """Return the device and dtype that a layer set or a plan was tuned on."""
    return " ".join(filter(None, (measured.device, measured.dtype)))


def stored_view(
    records: Sequence[tuple[LayerSetRecord, bool]], plans: Sequence[PlanVersion], width: int
) -> RenderableType:
    """List stored layer sets, and below them the plans without one of their own, where there are any."""
    tables: list[RenderableType] = [records_table(records, width)] if records else []
    if plans:
        tables += [*([""] if records else []), plans_table(plans, width)]
    return Group(*tables)


def records_table(records: Sequence[tuple[LayerSetRecord, bool]], width: int) -> Table:
    """List stored layer sets, marking those paired with True as best; the origin is shown if `width` allows."""
    columns: Columns[tuple[LayerSetRecord, bool]] = [
        (folding("model", min_width=6), lambda row: row[0].model),
        (folding("task", min_width=6), lambda row: row[0].task),
        (numeric("v"), lambda row: str(row[0].version)),
        (fixed("best"), lambda row: _best_cell(row[1])),
        (numeric("r"), lambda row: number(row[0].layer_set.skip_ratio)),
        (numeric("match"), lambda row: number(row[0].matchness)),
        (numeric("α"), lambda row: number(row[0].acceptance_rate)),
        (numeric("M"), lambda row: number(row[0].mean_generated_length, 1)),
        (numeric("expected"), lambda row: ratio(row[0].expected_speedup)),
        (numeric("measured"), lambda row: ratio(row[0].measured_speedup)),
        (fixed("verdict"), lambda row: _verdict_cell(row[0].verdict)),
        (folding("tuned on", min_width=6), lambda row: device_words(row[0])),
        (fixed("stored"), lambda row: row[0].created_at[:10]),
    ]
    return listing(records, columns, width=width) if width >= ROOMY else listing(records, columns[:-2])


def plans_table(plans: Sequence[PlanVersion], width: int) -> Table:
    """List stored plans that have no layer set of their own; some decode with the layer set of another version."""
    columns: Columns[PlanVersion] = [
        (folding("model", min_width=6), lambda version: version.model),
        (folding("task", min_width=6), lambda version: version.task),
        (numeric("v"), lambda version: str(version.version)),
        (fixed("best"), lambda version: _best_cell(bool(version.best_for))),
        (folding("method", min_width=8), lambda version: _method_words(version.plan)),
        (folding("layer set", min_width=9), _used_set_words),
        (numeric("measured"), lambda version: ratio(version.plan.measured_speedup)),
        (fixed("verdict"), lambda version: _verdict_cell(version.plan.verdict)),
        (numeric("α"), lambda version: number(version.plan.acceptance_rate)),
        (numeric("M"), lambda version: number(version.plan.mean_generated_length, 1)),
        (folding("tuned on", min_width=6), lambda version: device_words(version.plan)),
        (fixed("stored"), lambda version: (version.created_at or "–")[:10]),
    ]
    title_options: dict[str, Any] = {"title": "plans without a layer set of their own", "title_style": "bold"}
    table_options = {**title_options, "width": width} if width >= ROOMY else title_options
    return listing(plans, columns if width >= ROOMY else columns[:-4], **table_options)


def _best_cell(is_best: bool) -> Text:
    return Text("*" if is_best else "", style="bold green")


def _verdict_cell(word: VerdictWord) -> Text:
    return Text(word.replace("unmeasured", "–"), VERDICT_STYLES[word])


def _method_words(plan: Plan) -> str:
    return plan.method if plan.engine is None else f"{plan.method} in {plan.engine}"


def _used_set_words(version: PlanVersion) -> str:
    record = version.plan.layer_set
    if record is None:
        return "–"
    return f"version {record.version}" + ("" if record.task == version.task else f" of {record.task}")


# --- results of tuning


def matchness_line(trials: Sequence[Trial], width: int) -> Text:
    """Draw matchness over trials as a sparkline, with its range in words."""
    values = [trial.matchness for trial in trials]
    if not values:
        return Text("no trials were recorded", style="dim")
    return _curve(values, width, f"matchness of {len(values)} trials, {min(values):.2f} to {max(values):.2f}")


def paces_line(paces: Sequence[float], width: int) -> Text:
    """Draw the tokens per second of each prompt along the stream as a sparkline (SWIFT Figure 6)."""
    pace_range = f"{min(paces):.1f} to {max(paces):.1f}"
    return _curve(paces, width, f"tok/s of {len(paces)} prompts, during the search, {pace_range}")


def _curve(values: Sequence[float], width: int, caption: str) -> Text:
    line, indent = sparkline(values, width - LABEL), " " * LABEL
    return Text.assemble(indent, (line, "green"), "\n", indent, (caption, "dim"), no_wrap=True)


def timings_table(timings: Timings, n_tokens: int) -> Table:
    """Show the time per token by part of the run (SWIFT Figure 6)."""
    total, n_tokens = timings.total_s or 1.0, max(1, n_tokens)
    columns = [Column("part"), *numbers("ms/token", "%"), Column("")]
    result_table = table(columns, [], gap=2)
    for part, seconds in seconds_by_part(timings).items():
        fraction = seconds / total
        result_table.add_row(
            part, f"{1000 * seconds / n_tokens:.1f}", f"{100 * fraction:.0f}", "█" * round(20 * fraction)
        )
    result_table.add_row("total", f"{1000 * timings.total_s / n_tokens:.1f}", "", "", style="bold")
    return result_table


def command_text(arguments: Sequence[str], width: int) -> Text:
    """Return a command for a shell, continued by backslashes at options where it is wider than `width`."""
    groups: list[str] = []
    for argument in arguments:
        if groups and not argument.startswith("--"):
            groups[-1] += f" {shlex.quote(argument)}"
        else:
            groups.append(shlex.quote(argument))
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 3 <= width:  # 3: a blank before the group, and " \" after it.
            lines[-1] += f" {group}"
        else:
            lines.append(f"  {group}")
    return Text(" \\\n".join(lines), style="bold", no_wrap=True, overflow="ignore")


def tune_summary(
    finished: TaskFinished, plan: PlanInUse, out: str, command: Sequence[str], width: int
) -> RenderableType:
    """Show what a tuning run found for one task, the plan in use, and its `command` where that drafts.

    Ratios to plain decoding are shown only if the plan in use is the one just found.
    """
    record, trials = finished.record, finished.trials
    is_used = plan.drafts and plan.version == record.version
    rows = [*draft_rows(record), ("c, draft pass / plain pass", number(finished.draft_cost))]
    rows += ratio_rows(record) if is_used else []
    if finished.plain_tok_s is not None:
        speeds = f"{number(finished.plain_tok_s, 1)} plain, {number(finished.tuned_tok_s, 1)} with these drafts"
        rows.append(("tokens per second", speeds))
    rows.append(("searched", f"{len(trials)} candidates on {finished.n_prompts} prompts, {finished.n_tokens} tokens"))
    if trials:
        counts = Counter(origin_words(trial.origin) for trial in trials)
        origins = ", ".join(f"{origin} {n}" for origin, n in counts.most_common())
        rows.append(("candidates", f"{origins}; {sum(trial.adopted for trial in trials)} adopted"))
    rows.append(("search ended", finished.stopped_because))
    timings: list[RenderableType] = [timings_table(finished.timings, finished.n_tokens), ""]
    if finished.paces:
        timings[:0] = [paces_line(finished.paces, width), ""]
    style = VERDICT_STYLES["use" if plan.drafts else finished.verdict.word]
    usage: list[RenderableType] = ["use it:", command_text(command, width)] if plan.drafts else []
    return Group(
        *set_view(record, finished.task, trials, rows, Text(plan.sentence, style), width, timings),
        *_advice(finished, plan),
        "",
        Text.assemble("completions: ", out, no_wrap=True, overflow="ignore"),
        *usage,
    )


def _advice(finished: TaskFinished, plan: PlanInUse) -> list[str]:
    """Return why the found layer set is not in use, unless the plan's own sentence says it."""
    version, verdict = finished.record.version, finished.verdict
    if plan.version != version:
        return [f"version {version}, which this run stored, is not in use: `swiftopt layers promote` changes that"]
    return [verdict.reason] if not plan.drafts and verdict.reason not in ("", NOT_FASTER) else []
