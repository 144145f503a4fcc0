"""`swiftopt bench ablate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..bench.ablation_table import ABLATIONS
from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from . import options
from .options import check_model, check_words, open_store, pick
from .output import answer, note, note_run, show
from .render import folding, heading, numeric, table

HEADINGS = {
    "mean_generated_length": "M",
    "acceptance_rate": "α",
    "ratio": "ratio",
    "tok_s": "tok/s",
    "perplexity": "PPL",
    "optimise_ms": "search ms",
    "optimise_share": "search %",
    "early_share": "early %",
    "rejected_share": "rejected %",
    "extra_parameters": "new params",
    "consistency": "same",
    "joules_per_token": "J/tok",
}


@click.command(short_help="The papers' ablations, on this machine and model.")
@click.argument("name")
@options.model_option
@options.stream_option
@click.option("--task", help="Whose stored layer set, heads and probe to use.  [default: the stream's task]")
@click.option("--draft-model", metavar="MODEL", help="A smaller model with the same tokenizer, for drafts.")
@options.limit_option
@options.machine_options(GenerateRequest)
@options.db_option
@options.json_option
@options.example("bench ablate swift-parts --model smollm2-135m --stream prompts.jsonl --limit 8")
def ablate(
    name: str, stream: str, limit: int | None, draft_model: str | None, db: str | None, as_json: bool, **values: Any
) -> None:
    """Run one of the papers' ablations; its variants decode the same prompts by turns.

    NAME is swift-parts, swift-window, swift-schedule, swift-ratio, adadecode-parts, adadecode-threshold,
    mtad-threshold, mtad-beams, mtad-warp or adaspeed. What is not stored for the task is made briefly and not kept.
    """
    check_words("ablation", [name], ABLATIONS)
    prompts = read_stream(stream, values["task"], limit)
    request = pick(GenerateRequest, values)
    check_model(request)
    if draft_model is not None:
        check_model(pick(GenerateRequest, {**values, "model": draft_model}))

    from ..bench.ablate import ablate as run

    with open_store(db) as store:
        report = run(name, request, draft_model, prompts, store, note, note_run)
    answer(as_json, report, lambda: show_ablation(report))
    if report["interrupted"]:
        raise KeyboardInterrupt


def show_ablation(report: Mapping[str, Any]) -> None:
    """Print the variants of an ablation as a table, and why others were not run."""
    shown = ABLATIONS[report["name"]].shown
    columns = [folding("variant"), *(numeric(HEADINGS[key]) for key in shown)]
    rows = [
        (row["label"], *(_cell(key, row.get(key)) for key in shown))
        for row in report["rows"]
        if row["ratio"] is not None
    ]
    show(heading(f"{report['title']} ({report['source']})"), table(columns, rows, gap=2))
    for row in report["rows"]:
        if row["reason"] is not None:
            click.echo(f"{row['label']}: not run: {row['reason']}")


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key.endswith("_share"):
        return f"{100 * value:.1f}"
    if key == "extra_parameters":
        return f"{value:,}"
    return f"{value:.2f}x" if key == "ratio" else f"{value:.2f}"
