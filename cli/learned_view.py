"""Trained heads and probes as text for a person; pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.learned import LearnedRecord
from .render import number, sparkline

SHOWN = ("0.5", "0.6", "0.75", "0.85", "0.95")  # thresholds in the table; all are in --json
CURVE_COLUMNS = 60


def percent(value: float | None) -> str:
    """A share, or a dash where it was not measured."""
    return "–" if value is None else f"{100 * value:.0f} %"


def figures_table(record: LearnedRecord) -> RenderableType:
    """All that is worth knowing of one record, in 80 columns."""
    figures = record.figures
    head = f"{record.kind} of {record.model}/{record.task}, version {record.version}"
    spent = (
        f"{number(figures.get('positions'), 0)} positions,"
        f" {number(figures.get('held_out_positions'), 0)} more held out;"
        f" {number(figures.get('steps'), 0)} steps in {number(figures.get('train_s'), 0)} s;"
        f" {record.n_parameters} parameters"
    )
    parts: list[RenderableType] = [Text(head, style="bold"), Text(spent)]
    if len(record.curve) > 1:
        parts.append(Text(_curve(record)))
    parts += [_heads(record), _thresholds(record)] if record.kind == "heads" else [_probe(record)]
    return Group(*parts)


def learned_table(records: Sequence[LearnedRecord], width: int) -> Table:
    """Stored records, one a line."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name, fixed in (("model", False), ("task", False), ("v", True), ("layers", True), ("figures", False)):
        table.add_column(name, no_wrap=fixed, overflow="fold")
    if width >= 110:
        table.add_column("stored", no_wrap=True)
    for record in records:
        layers = ",".join(map(str, record.depths))
        cells = [record.model, record.task, str(record.version), layers, _summary(record)]
        table.add_row(*cells, *([record.created_at[:10]] if width >= 110 else []))
    return table


def _summary(record: LearnedRecord) -> str:
    figures = record.figures
    if record.kind == "probe":
        return f"accuracy {number(figures.get('accuracy'))}, AUC {number(figures.get('auc'))}"
    return f"early {percent(figures.get('early@0.75'))}, rejected {percent(figures.get('rejected@0.75'))}"


def _curve(record: LearnedRecord) -> str:
    losses = [loss for _, loss in record.curve]
    return f"loss {losses[0]:.3f} {sparkline(losses, CURVE_COLUMNS)} {losses[-1]:.3f}"


def _heads(record: LearnedRecord) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("after layer", "KL", "agrees with the last layer", "untrained"):
        table.add_column(name, justify="right")
    for depth in record.depths:
        named = {name: record.figures.get(f"{name}@{depth}") for name in ("kl", "agreement", "identity")}
        table.add_row(str(depth), number(named["kl"]), percent(named["agreement"]), percent(named["identity"]))
    return table


def _thresholds(record: LearnedRecord) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("threshold", "predicted early", "rejected of these"):
        table.add_column(name, justify="right")
    for threshold in SHOWN:
        early, rejected = (record.figures.get(f"{name}@{threshold}") for name in ("early", "rejected"))
        table.add_row(threshold, percent(early), percent(rejected if early else None))
    return table


def _probe(record: LearnedRecord) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("after layer", "accuracy", "AUC", "accepted (base rate)"):
        table.add_column(name, justify="right")
    accuracy, auc, base = (record.figures.get(name) for name in ("accuracy", "auc", "base_rate"))
    table.add_row(str(record.depths[0]), number(accuracy), number(auc), number(base))
    return table
