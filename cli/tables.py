"""Lists as tables for a person; pure functions, as in render.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from ..core.types import LayerSetRecord, ModelInfo
from .render import VERDICT_STYLES, number, ratio

CHECK_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
Justify = Literal["left", "right"]


def records_table(records: Sequence[tuple[LayerSetRecord, bool]], width: int) -> Table:
    """Stored layer sets, `best` ones marked; columns of provenance only where `width` has room for them."""
    roomy = width >= 110
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", width=width if roomy else None)
    columns: list[tuple[str, Justify, bool]] = [
        ("model", "left", False), ("task", "left", False), ("v", "right", True), ("best", "left", True),
        ("r", "right", True), ("match", "right", True), ("α", "right", True), ("M", "right", True),
        ("expected", "right", True), ("measured", "right", True), ("verdict", "left", True),
    ]  # fmt: skip
    if roomy:
        columns += [("tuned on", "left", False), ("stored", "left", True)]
    for name, justify, fixed in columns:
        table.add_column(name, justify=justify, no_wrap=fixed, overflow="fold", min_width=None if fixed else 6)
    for record, best in records:
        table.add_row(*record_cells(record, best, roomy))
    return table


def record_cells(record: LayerSetRecord, best: bool, roomy: bool) -> list[str | Text]:
    """One row of `records_table`."""
    cells: list[str | Text] = [
        record.model,
        record.task,
        str(record.version),
        Text("*", style="bold green") if best else "",
        number(record.layer_set.skip_ratio),
        number(record.matchness),
        number(record.acceptance_rate),
        number(record.mean_generated_length, 1),
        ratio(record.expected_speedup),
        ratio(record.measured_speedup),
        Text({"unmeasured": "–"}.get(record.verdict, record.verdict), style=VERDICT_STYLES[record.verdict]),
    ]
    return [*cells, " ".join(filter(None, (record.device, record.dtype))), record.created_at[:10]] if roomy else cells


def aliases_table(rows: Sequence[tuple[str, str, int, int]], tasks_of: Mapping[str, Sequence[str]]) -> Table:
    """Short names: (alias, hub id, layers, parameters), and the tasks tuned under each."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("alias", no_wrap=True)
    table.add_column("hub id", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("tuned", overflow="fold")
    for alias, hub_id, n_layers, n_parameters in rows:
        table.add_row(alias, hub_id, str(n_layers), size(n_parameters), ", ".join(tasks_of.get(alias, ())))
    return table


def stored_table(stored: Sequence[ModelInfo], tasks_of: Mapping[str, Sequence[str]], width: int) -> Table:
    """Models that were loaded here, with every name they were loaded by."""
    table = Table(title="loaded here", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("names", overflow="fold", max_width=width // 2)
    table.add_column("architecture", overflow="fold")
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("tuned tasks", overflow="fold")
    for info in stored:
        tasks = sorted({task for name in info.names for task in tasks_of.get(name, ())})
        table.add_row(
            "\n".join(sorted(info.names, key=len)),
            info.architecture,
            str(info.n_layers),
            size(info.n_parameters),
            ", ".join(tasks),
        )
    return table


def size(n_parameters: int) -> str:
    """A number of parameters as people say it: 135M, 1.5B, 13.0B."""
    if n_parameters >= 999.5e6:  # below it rounds to 999M at most
        return f"{n_parameters / 1e9:.1f}B"
    return f"{n_parameters / 1e6:.0f}M"


def checks_table(checks: Sequence[tuple[str, str, str]]) -> Table:
    """The doctor's lines: name, status, words."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, status, text in checks:
        table.add_row(Text(status, style=CHECK_STYLES[status]), name, text)
    return table
