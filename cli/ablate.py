"""`swiftopt bench ablate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..bench.ablation_table import ABLATIONS, Ablation
from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from .checks import check_model, check_words
from .options import db_option, json_option, machine_options, open_store, pick, positive
from .output import emit_json, note, show

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
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@click.option("--task", help="Whose stored layer set, heads and probe to use.  [default: the stream's task]")
@click.option("--draft-model", metavar="MODEL", help="A smaller model with the same tokenizer, for drafts.")
@click.option("--limit", type=positive, help="Take only the first prompts of the stream.")
@machine_options(GenerateRequest)
@db_option
@json_option
def ablate(
    name: str, stream: str, limit: int | None, draft_model: str | None, db: str | None, as_json: bool, **options: Any
) -> None:
    """Run one of the papers' ablations; its variants decode the same prompts by turns.

    NAME is swift-parts, swift-window, swift-schedule, swift-ratio, adadecode-parts, adadecode-threshold,
    mtad-threshold, mtad-beams, mtad-warp or adaspeed. What is not stored for the task is made briefly and not kept.

    \b
    Example:
      swiftopt bench ablate swift-parts --model smollm2-135m --stream prompts.jsonl --limit 8
    """
    check_words("ablation", [name], ABLATIONS)
    prompts = read_stream(stream, options["task"], limit)
    request = pick(GenerateRequest, options)
    check_model(request)
    if draft_model is not None:
        check_model(pick(GenerateRequest, {**options, "model": draft_model}))

    from ..bench.ablate import ablate as run

    with open_store(db) as store:
        report = run(name, request, draft_model, prompts, store, note, _show_run)
    if as_json:
        emit_json(report)
    else:
        _show(report)
    if report["interrupted"]:
        raise KeyboardInterrupt


def _show_run(label: str, number: int, n_prompts: int, timed: Any) -> None:
    speed = timed.tokens / timed.seconds
    note(f"prompt {number + 1} of {n_prompts}, {label}: {timed.tokens} tokens, {speed:.1f} tok/s")


def _show(report: Mapping[str, Any]) -> None:
    from rich.table import Table

    from .render import heading

    shape: Ablation = ABLATIONS[report["name"]]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("variant", overflow="fold")
    for key in shape.shown:
        table.add_column(HEADINGS[key], justify="right", no_wrap=True)
    for row in report["rows"]:
        if row["ratio"] is not None:
            table.add_row(row["label"], *(_cell(key, row.get(key)) for key in shape.shown))
    show(heading(f"{report['title']} ({report['source']})"), table)
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
