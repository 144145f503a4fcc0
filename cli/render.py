"""Records and results as text for a person; pure functions, nothing is printed or read here."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..core.events import TaskFinished
from ..core.types import LayerSet, LayerSetRecord, Timings, Trial, Verdict

SKIPPED, KEPT = "■", "·"
BARS = "▁▂▃▄▅▆▇█"
LABEL = 6  # columns of the words left of a layer map or sparkline
STYLES = {"attn": "cyan", "mlp": "magenta"}
VERDICT_STYLES = {"use": "bold green", "plain": "bold yellow", "unmeasured": "bold"}


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def ratio(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """A speed ratio with its interval, such as `1.44x [1.39, 1.49]`."""
    between = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return number(value, unit="x") + between


def layer_map(layer_set: LayerSet, width: int) -> Text:
    """One row attention, one row MLP, a mark per sub-layer under a ruler of layers; folds where `width` ends."""
    n_layers = layer_set.n_layers
    cell = 2 if LABEL + 2 * n_layers <= width else 1
    per_block = _block_length(n_layers, (width - LABEL) // cell)
    text = Text(no_wrap=True)
    for start in range(0, n_layers, per_block):
        layers = range(start, min(start + per_block, n_layers))
        text.append(" " * LABEL + _ruler(layers, cell, width - LABEL) + "\n", style="dim")
        for kind in ("attn", "mlp"):
            text.append(f"{kind:<{LABEL}}")
            for layer in layers:
                skipped = layer_set.skips(kind, layer)
                text.append((SKIPPED if skipped else KEPT).ljust(cell), style=STYLES[kind] if skipped else "dim")
            text.append("\n")
    text.append(" " * LABEL + map_caption(layer_set), style="dim")
    return text


def map_caption(layer_set: LayerSet) -> str:
    """The map in numbers; short enough for 80 columns."""
    parts = f"{len(layer_set.skip_attn)} attention, {len(layer_set.skip_mlp)} MLP"
    return (
        f"{SKIPPED} skipped {layer_set.n_skipped} of {layer_set.n_searched}: {parts} (r = {layer_set.skip_ratio:.2f})"
    )


def _block_length(n_layers: int, room: int) -> int:
    """Layers per row: as few rows as fit, about equally long, each beginning at a multiple of ten."""
    if n_layers <= room:
        return n_layers
    n_blocks = math.ceil(n_layers / max(10, room // 10 * 10))
    return math.ceil(n_layers / n_blocks / 10) * 10


def _ruler(layers: range, cell: int, room: int) -> str:
    """Layer numbers, each above its own column; at every fifth or tenth layer."""
    every = 5 if cell == 2 else 10
    marks = [" "] * room
    for layer in layers:
        at = (layer - layers.start) * cell
        if layer % every == 0 and at + len(str(layer)) <= room:
            marks[at : at + len(str(layer))] = str(layer)
    return "".join(marks).rstrip()


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars between their lowest and highest; more values than columns are averaged in equal groups."""
    if not values or width < 1:
        return ""
    n = min(width, len(values))
    edges = [i * len(values) // n for i in range(n + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[len(BARS) // 2] * n
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means)


def matchness_line(trials: Sequence[Trial], width: int) -> Text:
    """Matchness over trials as a sparkline between its range, with the best in words."""
    values = [trial.matchness for trial in trials]
    if not values:
        return Text("no trials were recorded", style="dim")
    line = sparkline(values, width - LABEL)
    caption = f"matchness of {len(values)} trials, {min(values):.2f} to {max(values):.2f}"
    return Text.assemble(" " * LABEL, (line, "green"), "\n", " " * LABEL, (caption, "dim"), no_wrap=True)


def timings_table(timings: Timings, n_tokens: int) -> Table:
    """Where the time of a token went (SWIFT Figure 6)."""
    table = Table("part", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("ms/token", "%"):
        table.add_column(heading, justify="right")
    table.add_column("")
    total = timings.total_s or 1.0
    parts = {"optimise": timings.optimise_s, "draft": timings.draft_s, "verify": timings.verify_s}
    for name, seconds in {**parts, "other": timings.other_s}.items():
        share = seconds / total
        table.add_row(name, f"{1000 * seconds / max(1, n_tokens):.1f}", f"{100 * share:.0f}", "█" * round(20 * share))
    table.add_row("total", f"{1000 * timings.total_s / max(1, n_tokens):.1f}", "", "", style="bold")
    return table


def figures_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values in two columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def record_rows(record: LayerSetRecord, draft_cost: float | None = None) -> list[tuple[str, str]]:
    """A record's figures, each under its name."""
    cost = [] if draft_cost is None else [("c, draft pass / plain pass", number(draft_cost))]
    return [
        ("draft's weights", weights_words(record.layer_set)),
        ("α, acceptance rate", number(record.acceptance_rate)),
        ("M, tokens per target pass", number(record.mean_generated_length)),
        *cost,
        ("expected ratio", ratio(record.expected_speedup)),
        ("measured ratio", ratio(record.measured_speedup, record.measured_interval)),
    ]


def tried_words(trials: Sequence[Trial]) -> str:
    """Who proposed the candidates, and how many of them were taken into use."""
    counts = Counter(trial.origin for trial in trials)
    n_adopted = sum(trial.adopted for trial in trials)
    return ", ".join(f"{n} {origin}" for origin, n in counts.most_common()) + f"; {n_adopted} adopted"


def weights_words(layer_set: LayerSet) -> str:
    """The formats of a draft's weights, by how many of its parts have them."""
    names = [layer_set.format_of("head")]
    names += [layer_set.format_of("attn", i) for i in range(layer_set.n_layers) if i not in layer_set.skip_attn]
    names += [layer_set.format_of("mlp", i) for i in range(layer_set.n_layers) if i not in layer_set.skip_mlp]
    counts = Counter("the model's own" if name is None else name for name in names)
    return ", ".join(name if len(counts) == 1 else f"{name} ({n} parts)" for name, n in counts.most_common())


def verdict_words(verdict: Verdict) -> str:
    """The verdict as a sentence."""
    if verdict.word == "use":
        on = f" on {verdict.n_prompts} held-out prompts" if verdict.n_prompts else ""
        return f"use: {ratio(verdict.ratio)} of plain decoding's speed{on}"
    if verdict.word == "plain":
        return "plain: drafting is not reliably faster than plain decoding here"
    return "unmeasured: nothing was compared with plain decoding" + (f" ({verdict.reason})" if verdict.reason else "")


def verdict_text(verdict: Verdict) -> Text:
    """The verdict as a sentence, in the colour of good or bad news."""
    return Text(verdict_words(verdict), style=VERDICT_STYLES[verdict.word])


def record_verdict(record: LayerSetRecord) -> Verdict:
    """What a record still knows of its verdict."""
    return Verdict(record.verdict, record.measured_speedup, record.measured_interval, record.expected_speedup)


def command_text(arguments: Sequence[str], width: int) -> Text:
    """A command for a shell, continued by backslashes at options where it is wider than `width`."""
    groups: list[str] = []
    for argument in arguments:
        if groups and not argument.startswith("--"):
            groups[-1] += f" {shlex.quote(argument)}"
        else:
            groups.append(shlex.quote(argument))
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 3 <= width:  # a blank, and " \" in case more follows
            lines[-1] += f" {group}"
        else:
            lines.append(f"  {group}")
    return Text(" \\\n".join(lines), style="bold", no_wrap=True, overflow="ignore")


def heading(title: str) -> Rule:
    """A line with a title at its left."""
    return Rule(Text(title, style="bold"), align="left", style="dim")


def tune_summary(finished: TaskFinished, out: str, command: Sequence[str], width: int) -> RenderableType:
    """What a tuning run found for one task, and how to use it."""
    record = finished.record
    version = f" version {record.version}" if record.version is not None else ""
    speeds = f"{number(finished.plain_tok_s, 1)} plain, {number(finished.tuned_tok_s, 1)} tuned"
    searched = f"{len(finished.trials)} trials on {finished.n_prompts} prompts, {finished.n_tokens} tokens"
    rows = [*record_rows(record, finished.draft_cost), ("tokens per second", speeds), ("searched", searched)]
    if finished.trials:
        rows.append(("tried", tried_words(finished.trials)))
    return Group(
        heading(f"{record.model}/{finished.task}{version}"),
        layer_map(record.layer_set, width),
        "",
        matchness_line(finished.trials, width),
        "",
        figures_table([*rows, ("stopped because", finished.stopped_because)]),
        "",
        timings_table(finished.timings, finished.n_tokens),
        "",
        verdict_text(finished.verdict),
        "",
        Text.assemble("completions: ", out, no_wrap=True, overflow="ignore"),
        "use it:",
        command_text(command, width),
    )


def record_view(record: LayerSetRecord, trials: Sequence[Trial], width: int) -> RenderableType:
    """One stored layer set: map, curve, figures and where it comes from."""
    version = f" version {record.version}" if record.version is not None else ""
    origin = [
        ("tuned on", " ".join(filter(None, (record.device, record.dtype))) or "–"),
        ("stored at", record.created_at or "–"),
        ("fingerprint", record.fingerprint or "– (not yet seen with its model)"),
    ]
    return Group(
        heading(f"{record.model}/{record.task}{version}"),
        layer_map(record.layer_set, width),
        "",
        matchness_line(trials, width),
        "",
        figures_table([("matchness", number(record.matchness)), *record_rows(record), *origin]),
        "",
        verdict_text(record_verdict(record)),
    )
