"""`swiftopt bench search` and `swiftopt bench stream-shift`: how searches find layer sets, and follow other text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ..core.costs import CostProfile
from ..core.errors import NotFound
from ..core.events import event_line
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings, TuningSettings
from ..core.streams import read_stream
from ..optimizer.strategies import SIZE_CHOOSING, STRATEGIES
from . import options
from .charts import Pictures, draw_search, draw_stream_shift
from .options import check_words, decoding_request, default_of, pick, positive, warn_idle
from .output import Result, note, note_load, writing
from .render import fixed, lined_table, number

if TYPE_CHECKING:
    from ..optimizer.drafting import Trying

COMPARED = ("swift", "random", *SIZE_CHOOSING)
SPENT = {"passes": 0, "seconds": 1}  # what a search takes, with the digits that are shown of it


@options.command("search", short_help="Search strategies side by side on recorded text.")
@options.model
@click.option(
    "--stream",
    metavar="FILE",
    shell_complete=options.files,
    help="Prompts to record, one JSON object per line; - is standard input.",
)
@click.option("--limit", type=positive, default=8, help="Prompts that are recorded.")
@options.group(
    options.MEASUREMENT,
    click.option(
        "--record",
        type=Path,
        metavar="FILE",
        shell_complete=options.files,
        help="Recorded texts and costs: read where the file is, else written.",
    ),
)
@options.group(
    options.MEASUREMENT, click.option("--strategies", default=",".join(COMPARED), help="What to compare, by commas.")
)
@options.group(
    options.MEASUREMENT, click.option("--passes", type=positive, default=300, help="Candidate passes of each strategy.")
)
@options.group(
    options.MEASUREMENT,
    click.option(
        "--window",
        type=positive,
        default=default_of(SwiftSettings, "context_window"),
        help="γ, generated tokens that score a candidate.",
    ),
)
@options.group(
    options.MEASUREMENT,
    click.option("--stride", type=positive, default=4, help="Tokens between two steps of a search."),
)
@options.shared(SwiftSettings, "seed")
@options.group(
    options.MEASUREMENT,
    click.option(
        "--long-search",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Judge N sets more, up from the best one.",
    ),
)
@options.pictures("Draw the best objective against candidate passes and seconds.")
@options.machine(GenerateRequest, "max_new_tokens")
@options.json
@options.example("bench search --model smollm2-135m --stream prompts.jsonl --record texts.json --png search.png")
def search(
    stream: str | None,
    limit: int,
    record: Path | None,
    strategies: str,
    passes: int,
    window: int,
    stride: int,
    seed: int,
    long_search: int,
    pictures: Pictures,
    **values: Any,
) -> Result:
    """Run search strategies on the same recorded windows and show how soon each finds a good layer set.

    The prompts are completed once by plain decoding. Every strategy then sees the completions grow, and each set it
    takes into use is judged on all of them, outside the timing. The objective is the expected speedup of measured
    costs. A pass is one candidate on one window; studies of the model count by the rows that they run. A long search
    says how far they end from the best there is: it climbs on from the best set, every step judged on all windows.
    """
    chosen = [word.strip() for word in strategies.split(",")]
    check_words("strategy", chosen, STRATEGIES)
    recorded_before = record is not None and record.exists()
    if stream is None and not recorded_before:
        raise NotFound("there is nothing to search on: give --stream, or a --record that was written before")
    prompts = [] if stream is None else read_stream(stream, None, limit)
    request = decoding_request(values)

    from ..bench import search as bench
    from ..models.loading import load

    runtime = load(request.model, request.dtype, request.device, note_load)
    if record is not None and recorded_before:
        texts = bench.TextRecord.read(record, runtime)
    else:
        texts = bench.record(runtime, prompts, request.max_new_tokens, note)
        if record is not None:
            with writing(record):
                texts.write(record)
    # No search may stop before its passes are used up, for what each finds in them is compared.
    settings = SwiftSettings(
        context_window=window, seed=seed, max_steps=10**6, patience=10**6, target_matchness=1.0, deterministic=True
    )
    run = bench.Bench(runtime, texts, settings, stride)
    report = {"model": request.model, **bench.compare_strategies(run, chosen, passes, _note_gain)}
    if long_search:
        report = bench.with_long_search(run, report, long_search, _note_gain)
    if pictures:
        draw_search(report, pictures)
    return Result(report, [_search_table(report)])


def _note_gain(strategy: str, passes: float, value: float) -> None:
    note(f"{strategy}, {passes:.0f} passes: {value:.3f}x")


def _search_table(report: dict[str, Any]) -> Table:
    goal = f"to {report['goal']:.3f}x"
    headings = ("objective", "left out", "passes", "seconds", f"passes {goal}", f"seconds {goal}")
    rows = []
    for result in report["results"]:
        reached = result["to_goal"] or {"passes": None, "seconds": None}
        spent = [number(figures[key], digits) for figures in (result, reached) for key, digits in SPENT.items()]
        rows.append((result["strategy"], f"{result['final']:.3f}x", str(result["n_skipped"]), *spent))
    caption = None
    if found := report.get("long_search"):
        caption = f"a long search over {found['sets']} sets: {found['best']:.3f}x, {found['n_skipped']} left out"
    return lined_table(
        fixed("strategy"), headings, rows, f"{_conditions(report)}, {report['windows']} windows", caption
    )


@options.command("stream-shift", short_help="A stream that changes its task, and how acceptance follows.")
@options.model
@click.option(
    "--stream",
    required=True,
    metavar="FILE",
    shell_complete=options.files,
    help="Prompts that come task by task; - is standard input.",
)
@options.group(options.MEASUREMENT, click.option("--prompts", type=positive, default=16, help="Prompts of each task."))
@options.pictures("Draw acceptance along the stream.")
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.settings
@options.shared(TuningSettings, "seed")
@options.json
@options.example(
    "bench stream-shift --model smollm2-135m --stream five-tasks.jsonl --max-new-tokens 64 --png shift.png"
)
def stream_shift(stream: str, prompts: int, pictures: Pictures, **values: Any) -> Result:
    """Decode several tasks as one stream that does not name them, and see how soon the layer set follows.

    Three runs on the same prompts: each task with the set that a search on it alone ends with; all tasks with the
    first one's set; and all as one stream, where a shift must be noticed from acceptance and hidden states. After ten
    prompts of a task, acceptance should be within 5 points of that of its own set; the speedups are expected ones, by
    measured costs.
    """
    lines = read_stream(stream, None, None)
    settings: SwiftSettings = pick(TuningSettings, values)
    check_words("strategy", [settings.strategy], STRATEGIES)
    warn_idle(settings, "max_steps")  # no stream's length ends these searches
    request = decoding_request({**values, "settings": settings})

    from ..bench.stream_shift import StreamShift
    from ..decoding.engine import exhaust
    from ..decoding.session import Session
    from ..models.costs import with_formats
    from ..models.loading import load
    from ..optimizer.drafting import prepared
    from ..tasks.recipes import stored_costs

    runtime = load(request.model, request.dtype, request.device, note_load, request.speed)
    session = Session(runtime, request.sampling, request.max_new_tokens)
    n_positions = max(session.check(prompt) for prompt in lines)
    plain = stored_costs(runtime, None, n_positions, note)

    def measured(*formats: str) -> CostProfile:
        return with_formats(runtime, plain, formats, note)

    settings, costs = exhaust(prepared(session, lines, settings, measured), _note_format)
    bench = StreamShift(runtime, lines, prompts, settings, request.max_new_tokens, costs, note)
    report = {"model": request.model, **bench.run()}
    if pictures:
        draw_stream_shift(report, pictures)
    return Result(report, [_shift_table(report)])


def _note_format(event: Trying) -> None:
    note(event_line(event) or "")


def _shift_table(report: dict[str, Any]) -> Table:
    noticed = ", ".join(str(shift["prompt"] + 1) for shift in report["shifts"]) or "never"
    caption = (
        f"α and expected speedup after the first {report['settled_after']} prompts of each task:"
        " with its own set, with the first task's, and in one stream that adapts"
    )
    title = f"{_conditions(report)}; shifts noticed after prompts {noticed}"
    headings = ("left out", "α own", "α first", "α one", "missing", "x own", "x one")
    rows = []
    for result in report["results"]:
        rates = (number(result[run]["settled"], 3) for run in ("own", "kept", "adapted"))
        gap = "–" if result["gap"] is None else f"{result['gap']:+.3f}"
        speeds = (number(result[run]["expected"], unit="x") for run in ("own", "adapted"))
        rows.append((result["task"], str(result["n_skipped"]), *rates, gap, *speeds))
    return lined_table(fixed("task"), headings, rows, title, caption)


def _conditions(report: dict[str, Any]) -> str:
    return f"{report['model']}, {report['dtype']}, {report['device']}"
