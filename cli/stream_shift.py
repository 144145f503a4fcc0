"""`swiftopt bench stream-shift`."""

from __future__ import annotations

from typing import Any

import click

from ..core.costs import CostProfile
from ..core.events import FormatTried
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from .checks import check_model, check_words
from .live import RunState, event_line
from .options import from_field, json_option, machine_options, pick, positive, settings_options, speed_option
from .output import note, note_load, present, show


@click.command("stream-shift", short_help="A stream that changes its task, and how acceptance follows.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts that come task by task; - is standard input.")
@click.option("--prompts", type=positive, default=16, show_default=True, help="Prompts of each task.")
@click.option("--png", metavar="FILE", help="Draw acceptance along the stream.")
@machine_options(GenerateRequest)
@speed_option(GenerateRequest)
@settings_options
@from_field(SwiftSettings, "seed", "Seed of every random choice.", type=int)
@json_option
def stream_shift(
    stream: str,
    prompts: int,
    png: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Decode several tasks as one stream that does not name them, and see how soon the layer set follows.

    Three runs on the same prompts: each task with the set that a search on it alone ends with; all tasks with the
    first one's set; and all as one stream, where a shift must be noticed from acceptance and hidden states. After ten
    prompts of a task, acceptance should be within 5 points of that of its own set; the speedups are expected ones, by
    measured costs.

    \b
    Example:
      swiftopt bench stream-shift --model smollm2-135m --stream five-tasks.jsonl --max-new-tokens 64 --png shift.png
    """
    lines = read_stream(stream, None, None)
    settings: SwiftSettings = pick(SwiftSettings, options)
    request = pick(GenerateRequest, {**options, "settings": settings})

    from ..optimizer.strategies import STRATEGIES

    check_words("strategy", [settings.strategy], STRATEGIES)
    check_model(request)

    from ..bench.stream_shift import StreamShift
    from ..decoding.engine import exhaust
    from ..decoding.session import Session
    from ..models.costs import with_formats
    from ..models.loading import load
    from ..optimizer.draft_format import prepared
    from ..tasks.stored_costs import stored_costs
    from .stream_shift_chart import draw

    runtime = load(request.model, request.dtype, request.device, note_load, request.speed)
    session = Session(runtime, request.sampling, request.max_new_tokens)
    n_positions = max(session.check(prompt) for prompt in lines)
    plain = stored_costs(runtime, None, n_positions, note)

    def measured(*formats: str) -> CostProfile:
        return with_formats(runtime, plain, formats, note)

    settings, costs = exhaust(prepared(session, lines, settings, measured), _show_format)
    bench = StreamShift(runtime, lines, prompts, settings, request.max_new_tokens, costs, note)
    report = {"model": request.model, **bench.run()}
    present(report, as_json, _show_table, png, draw)


def _show_format(tried: FormatTried) -> None:
    note(event_line(tried, RunState()) or "")


def _show_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    noticed = ", ".join(str(shift["prompt"] + 1) for shift in report["shifts"]) or "never"
    title = f"{report['model']}, {report['dtype']}, {report['device']}; shifts noticed after prompts {noticed}"
    caption = (
        f"α and expected speedup after the first {report['settled_after']} prompts of each task:"
        " with its own set, with the first task's, and in one stream that adapts"
    )
    table = Table(title=title, title_justify="left", caption=caption)
    for name in ("task", "left out", "α own", "α first", "α one", "missing", "x own", "x one"):
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=name == "task")
    for result in report["results"]:
        rates = (_rate(result[run]["settled"]) for run in ("own", "kept", "adapted"))
        gap = "–" if result["gap"] is None else f"{result['gap']:+.3f}"
        speeds = (_ratio(result[run]["expected"]) for run in ("own", "adapted"))
        table.add_row(result["task"], str(result["n_skipped"]), *rates, gap, *speeds)
    show(table)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
