"""`swiftopt bench search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..core.errors import NotFound
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..optimizer.strategies import SIZE_CHOOSING, STRATEGIES
from .checks import check_model, check_words
from .options import default_of, from_field, json_option, machine_options, pick, positive
from .output import note, note_load, present, show, writing

COMPARED = ("swift", "random", *SIZE_CHOOSING)


@click.command("search", short_help="Search strategies side by side on recorded text.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", metavar="FILE", help="Prompts to record, one JSON object per line; - is standard input.")
@click.option("--limit", type=positive, default=8, show_default=True, help="Prompts that are recorded.")
@click.option("--record", metavar="FILE", help="Recorded texts and costs: read where the file is, else written.")
@click.option("--strategies", default=",".join(COMPARED), show_default=True, help="What to compare, by commas.")
@click.option("--passes", type=positive, default=300, show_default=True, help="Candidate passes of each strategy.")
@click.option(
    "--window",
    type=positive,
    default=default_of(SwiftSettings, "context_window"),
    show_default=True,
    help="γ, generated tokens that score a candidate.",
)
@click.option("--stride", type=positive, default=4, show_default=True, help="Tokens between two steps of a search.")
@from_field(SwiftSettings, "seed", "Seed of every random choice.", type=int)
@click.option(
    "--long-search",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Judge N sets more, up from the best one.",
)
@click.option("--png", metavar="FILE", help="Draw the best objective against candidate passes and seconds.")
@machine_options(GenerateRequest)
@json_option
def search(
    stream: str | None,
    limit: int,
    record: str | None,
    strategies: str,
    passes: int,
    window: int,
    stride: int,
    seed: int,
    long_search: int,
    png: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run search strategies on the same recorded windows and show how soon each finds a good layer set.

    The prompts are completed once by plain decoding. Every strategy then sees the completions grow, and each set it
    takes into use is judged on all of them, outside the timing. The objective is the expected speedup of measured
    costs. A pass is one candidate on one window; studies of the model count by the rows that they run. A long search
    says how far they end from the best there is: it climbs on from the best set, every step judged on all windows.

    \b
    Example:
      swiftopt bench search --model smollm2-135m --stream prompts.jsonl --record texts.json --png search.png
    """
    chosen = [word.strip() for word in strategies.split(",")]
    check_words("strategy", chosen, STRATEGIES)
    path = None if record is None else Path(record)
    if stream is None and (path is None or not path.exists()):
        raise NotFound("there is nothing to search on: give --stream, or a --record that was written before")
    prompts = [] if stream is None else read_stream(stream, None, limit)
    request = pick(GenerateRequest, options)
    check_model(request)

    from ..bench import search as bench
    from ..bench.long_search import with_long_search
    from ..models.loading import load
    from .search_chart import draw

    runtime = load(request.model, request.dtype, request.device, note_load)
    if path is not None and path.exists():
        recorded = bench.Record.read(path, runtime)
    else:
        recorded = bench.record(runtime, prompts, request.max_new_tokens, note)
        if path is not None:
            with writing(path):
                recorded.write(path)
    # As long as the passes last: what a search would stop at is what is looked for here.
    settings = SwiftSettings(
        context_window=window, seed=seed, max_steps=10**6, patience=10**6, target_matchness=1.0, deterministic=True
    )
    run = bench.Bench(runtime, recorded, settings, stride)
    report = {"model": request.model, **bench.compare_strategies(run, chosen, passes, _show_gain)}
    if long_search:
        report = with_long_search(run, report, long_search, _show_gain)
    present(report, as_json, _show_table, png, draw)


def _show_gain(strategy: str, passes: float, value: float) -> None:
    note(f"{strategy}, {passes:.0f} passes: {value:.3f}x")


def _show_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['windows']} windows"
    table = Table(title=title, title_justify="left")
    goal = f"to {report['goal']:.3f}x"
    for name in ("strategy", "objective", "left out", "passes", "seconds", f"passes {goal}", f"seconds {goal}"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for result in report["results"]:
        reached = result["to_goal"]
        ends = ("–", "–") if reached is None else (f"{reached['passes']:.0f}", f"{reached['seconds']:.1f}")
        table.add_row(
            result["strategy"],
            f"{result['final']:.3f}x",
            str(result["n_skipped"]),
            f"{result['passes']:.0f}",
            f"{result['seconds']:.1f}",
            *ends,
        )
    if found := report.get("long_search"):
        table.caption = f"a long search over {found['sets']} sets: {found['best']:.3f}x, {found['n_skipped']} left out"
    show(table)
