"""`swiftopt compare`."""

from __future__ import annotations

from typing import Any

import click

from ..core.errors import StreamError
from ..core.requests import GenerateRequest
from ..core.streams import STDIN, read_stream
from ..core.types import Prompt, Sampling
from ..decoding.methods import METHODS
from ..tasks.requests import PEERS, CompareRequest, chosen_methods, parse_settings
from .options import (
    check_model,
    db_option,
    json_option,
    machine_options,
    open_store,
    pick,
    positive,
    sampling_options,
    speed_option,
    together,
)
from .output import console, note, note_run, present, show

OTHERS = 32  # prompts behind --limit that brief searches and trainings look at


def _names(lossy: bool) -> str:
    return ", ".join(name for name, info in METHODS.items() if info.lossy is lossy)


method_options = together(
    click.option("--methods", default="all", show_default=True, help="all, or names from the list below, by commas."),
    click.option("--draft-model", metavar="MODEL", help="A smaller model with the same tokenizer, for drafts."),
    click.option("--lossless", is_flag=True, help="Only methods that keep the model's own output."),
    click.option(
        "--set", "assignments", multiple=True, metavar="METHOD.KEY=VALUE", help="A method's setting; may be repeated."
    ),
)

HELP = f"""Run decoding methods by turns on the same prompts; the best lossless one becomes the task's plan.

What a method needs and the database lacks (a layer set, heads, a probe) is made first, within about a minute and
outside the timing. plain always runs, for the others are measured against it. Methods: {_names(lossy=False)}, and the
lossy {_names(lossy=True)}. {", ".join(PEERS)} are transformers' own.

\b
Example:
  swiftopt compare --model smollm2-135m --stream prompts.jsonl --limit 8 --max-new-tokens 64 --png ratios.png
"""


@click.command(short_help="All decoding methods side by side; the best becomes the plan.", help=HELP)
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@click.option("--task", help="Whose plan this makes.  [default: the stream's task; default, if it holds several]")
@click.option("--limit", type=positive, help="Compare on the first prompts of the stream only.")
@method_options
@click.option("--png", metavar="FILE", help="Draw the ratios as a bar chart.")
@click.option("--no-store", is_flag=True, help="Store neither the report, nor the plan, nor what had to be made.")
@machine_options(GenerateRequest)
@speed_option(GenerateRequest)
@sampling_options
@db_option
@json_option
def compare(
    stream: str,
    limit: int | None,
    methods: str,
    lossless: bool,
    assignments: tuple[str, ...],
    png: str | None,
    no_store: bool,
    db: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    chosen = chosen_methods(methods, lossless)
    values = {"methods": chosen, "settings": parse_settings(assignments, chosen), "keep": not no_store}
    request = pick(CompareRequest, {**options, **values, "sampling": pick(Sampling, options)})
    prompts, others = _prompts(stream, options["task"], limit)
    check_model(request)
    if request.draft_model is not None:
        check_model(pick(GenerateRequest, {**options, "model": request.draft_model}))

    from ..tasks.compare import Comparison
    from .charts import draw_comparison

    with open_store(db) as store:
        report = Comparison(request, prompts, store, others, note, note_run).run()
    present(report, as_json, _show_table, png, draw_comparison)
    if report["interrupted"]:
        raise KeyboardInterrupt


def _show_table(report: dict[str, Any]) -> None:
    from .compare_view import comparison_view

    show(comparison_view(report, console().width))


def _prompts(stream: str, task: str | None, limit: int | None) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to compare on, and others of the same stream behind them."""
    prompts = read_stream(stream, task, limit)
    if limit is None or stream == STDIN:
        return prompts, []
    try:
        return prompts, read_stream(stream, task, limit + OTHERS)[len(prompts) :]
    except StreamError:  # in a line that nobody asked for
        return prompts, []
