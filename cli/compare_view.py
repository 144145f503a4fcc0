"""Render a comparison as a table; pure functions over the object that `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .render import heading, number, ratio, size

Row = Mapping[str, Any]
LOSSY = "≈"
ROOMY = 116  # columns of a terminal that shows all but one column of the table


def comparison_view(report: Row, width: int) -> RenderableType:
    """Return the table, remarks, and the resulting plan."""
    rows = [row for row in report["results"] if row["ratio"] is not None]
    lossy = any(row["lossy"] for row in rows)
    remarks = [f"{LOSSY} lossy: the output may differ from the model's own"] if lossy else []
    if report["energy"] is None:
        remarks.append("energy per token: not measured, this machine does not tell")
    remarks += [f"made for this comparison: {made['piece']} ({made['how']})" for made in report["made"]]
    remarks += [text for row in report["results"] if (text := _reason(row))]
    if report["made"] and report["made_on"] != "other prompts":
        remarks.append(f"made on {report['made_on']} themselves, which favours the methods that use it")
    style = "bold green" if report["plan"] and report["plan"]["verdict"] == "use" else "bold yellow"
    return Group(
        heading(f"{report['model']}/{report['task']}"),
        Text(_conditions(report), style="dim"),
        comparison_table(rows, width, report["energy"] is not None),
        *(Text(text, style="dim") for text in remarks),
        "",
        Text(plan_words(report), style=style),
    )


def comparison_table(rows: Sequence[Row], width: int, energy: bool) -> Table:
    """Return the methods by ratio, lossy ones below a line; `width` decides which columns are shown."""
    columns = [column for column in _columns(energy) if width >= column[2]]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name, _, _ in columns:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    lossless, lossy = [row for row in rows if not row["lossy"]], [row for row in rows if row["lossy"]]
    for row in lossless:
        style = "bold green" if row["ratio_interval"] and row["ratio_interval"][0] > 1 else None
        table.add_row(*(cell(row) for _, cell, _ in columns), style=style)
    if lossy and lossless:
        table.add_row(*(Text("─" * _widest(rows, column), style="dim") for column in columns))
    for row in lossy:
        table.add_row(*(cell(row) for _, cell, _ in columns))
    return table


def plan_words(report: Row) -> str:
    """Describe the resulting plan of the task, or why there is none."""
    plan, standing, where = report["plan"], report["standing"], f"{report['model']}/{report['task']}"
    if report["interrupted"]:
        return f"interrupted: {where} keeps the plan it had"
    if standing:
        return f"plan of {where}: stays {standing['method']}, which did not run here and was measured to be faster"
    kept = "" if report["stored"] else " (not stored)"
    if plan["verdict"] == "use":
        speed = ratio(plan["measured_speedup"], plan["measured_interval"])
        return f"plan of {where}: {plan['method']}, {speed} of plain decoding's speed{kept}"
    return f"plan of {where}: plain, for no lossless method is reliably faster here{kept}"


def _conditions(report: Row) -> str:
    sampling = report["sampling"]
    how = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    drafts = f", drafts by {report['draft_model']}" if report["draft_model"] else ""
    return (
        f"{report['dtype']}, {report['device']}, {report['prompts']} prompts,"
        f" up to {report['max_new_tokens']} tokens, {how}{drafts}"
    )


def _reason(row: Row) -> str:
    if row["ratio"] is None:
        return f"{row['method']}: not run: {row['reason']}"
    if row["prompts"] < row["of"]:
        return f"{row['method']}: {row['prompts']} of {row['of']} prompts, {row['reason']}"
    return ""


def _columns(energy: bool) -> list[tuple[str, Callable[[Row], str], int]]:
    """Return (heading, cell, least columns of a terminal that shows it)."""
    columns: list[tuple[str, Callable[[Row], str], int]] = [
        ("method", lambda row: f"{row['method']} {LOSSY}" if row["lossy"] else row["method"], 0),
        ("tok/s", lambda row: number(row["tok_s"], 1), 0),
        ("ratio", lambda row: number(row["ratio"], unit="x"), 0),
        ("95 %", _interval, 0),
        ("α", lambda row: number(row["acceptance_rate"]), 0),
        ("M", lambda row: number(row["mean_generated_length"]), 0),
        ("passes", lambda row: number(row["passes_per_token"]), ROOMY),
        ("same", _identical, 0),
        ("PPL", lambda row: number(row["perplexity"], 2 if (row["perplexity"] or 0) < 1000 else 0), 0),
        ("to plain", lambda row: number(row["perplexity_ratio"], unit="x"), ROOMY + 10),
        ("early", lambda row: _percent(row["early_share"]), ROOMY),
        ("rejected", lambda row: _percent(row["rejected_share"]), ROOMY),
        ("params", lambda row: "–" if row["extra_parameters"] is None else _short(row["extra_parameters"]), ROOMY),
        ("memory", lambda row: "–" if row["extra_bytes"] is None else _megabytes(row["extra_bytes"]), 80),
        ("J/tok", lambda row: number(row["joules_per_token"]), 0),
    ]
    return columns if energy else columns[:-1]


def _interval(row: Row) -> str:
    low, high = row["ratio_interval"] or (None, None)
    return "–" if low is None else f"{low:.2f}-{high:.2f}"


def _identical(row: Row) -> str:
    return "–" if row["identical"] is None else f"{row['identical']}/{row['prompts']}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _short(n_parameters: int) -> str:
    return size(n_parameters) if n_parameters >= 100_000 else f"{n_parameters:,}"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f}M" if n_bytes < 100 * 2**20 else f"{n_bytes / 2**20:.0f}M"


def _widest(rows: Sequence[Row], column: tuple[str, Callable[[Row], str], int]) -> int:
    name, cell, _ = column
    return max(len(name), *(len(cell(row)) for row in rows))
