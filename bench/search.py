"""Compares search strategies on the same recorded windows, which each strategy sees in the same order.

A long search from the best set of all strategies estimates how far their results are from the optimum.

    python -m swiftopt.bench.search --model M --stream prompts.jsonl --record texts.json --png search.png
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.table import Table

from ..core.errors import InvalidInput, NotFound
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..decoding.engine import alone
from ..decoding.events import Round
from ..models.costs import machine_name
from ..optimizer.search import Search
from ..optimizer.strategies import SIZE_CHOOSING, strategy_info
from ..optimizer.task_state import sub_layers_of
from ..terminal import commands, inputs, options, program, value_types
from ..terminal.charts import Pictures
from ..terminal.commands import measurement
from ..terminal.inputs import decoding_request
from ..terminal.output import Result, check_writable, note, writing
from ..terminal.render import fixed, number, numbers, table
from ..terminal.value_types import positive
from .charts import draw_search
from .long_search import OnGain, left_out_of, with_long_search
from .recorded_windows import RecordedWindows, TextRecord, record_texts
from .turn import measured

SCHEMA = "swiftopt.bench-search/1"
GOAL = 0.95  # The goal is this share of the best final objective, or of the final objective of BASE.
BASE = "swift"
SEARCHES = ("published", "swift", "random", *SIZE_CHOOSING)  # Default of --strategies.
# With these settings a search ends only when its passes are used up.
ENDLESS_SETTINGS = {"max_steps": 10**6, "patience": 10**6, "target_matchness": 1.0, "deterministic": True}
SPENT = {"passes": 0, "seconds": 1}  # Costs of a search, with the decimal places that tables show.


def run_strategy(windows: RecordedWindows, strategy: str, n_passes: int, on_gain: OnGain) -> Any:
    """Run one strategy's search for `n_passes` passes, and return its figures and curve.

    A pass is one candidate on one window; other work counts as its number of rows divided by the window. The curve has
    a point for each change of the set in use. The time for judging sets on all windows does not count.
    """
    settings = replace(windows.settings, strategy=strategy)
    ratio = settings.start_skip_ratio(windows.runtime.info.n_parameters)
    search = Search("", windows.runtime.whole, sub_layers_of(windows.runtime), settings, ratio, windows.costs)
    seconds, set_in_use, curve = 0.0, None, []
    try:
        for prompt_id, context in windows.contexts(search.scratch_rows):
            clock = perf_counter()
            alone(search.score(context, prompt_id))
            seconds += perf_counter() - clock
            passes = search.rows_run / windows.window
            objective, n_steps, n_accepted = windows.judge(search.layer_set)
            if search.layer_set != set_in_use:
                set_in_use = search.layer_set
                curve.append([round(passes, 2), round(seconds, 3), round(objective, 5)])
                on_gain(strategy, passes, objective)
            if passes >= n_passes or not search.optimising:
                break
            deque(search.lower_skip_ratio(Round(context, (), round(n_steps), round(n_accepted), 0, 0.0, 0.0)), 0)
    finally:
        search.finish("the benchmark is over")
    best = max(objective for _, _, objective in curve)
    return {
        "strategy": strategy,
        "passes": round(passes, 2),
        "seconds": round(seconds, 3),
        "candidates": len(search.trials),
        "best": best,
        "final": curve[-1][2],
        **left_out_of(search.layer_set),
        "stopped_because": search.stopped_because,
        "curve": curve,
    }


def compare_strategies(
    windows: RecordedWindows, strategies: Sequence[str], n_passes: int, on_gain: OnGain
) -> dict[str, Any]:
    """Return the object that `python -m swiftopt.bench.search --json` prints.

    After Ctrl-C it contains the finished strategies.

    Raises: KeyboardInterrupt: no strategy has finished.
    """
    results, interrupted = list[dict[str, Any]](), False
    try:
        for strategy in strategies:
            results.append(run_strategy(windows, strategy, n_passes, on_gain))
    except KeyboardInterrupt:
        if not results:
            raise
        interrupted = True
    goal = GOAL * max(result["final"] for result in results)
    base_result = next((result for result in results if result["strategy"] == BASE), None)
    for result in results:
        result["to_goal"] = _costs_to_reach(result["curve"], goal)
        result["to_base"] = (
            None if base_result is None else _costs_to_reach(result["curve"], GOAL * base_result["final"])
        )
    return {
        "schema": SCHEMA,
        "interrupted": interrupted,
        "device": machine_name(windows.runtime),
        "dtype": windows.runtime.dtype_name,
        "texts": len(windows.texts),
        "windows": windows.n_windows,
        "window": windows.window,
        "stride": windows.stride,
        "goal": round(goal, 5),
        "results": results,
    }


def _costs_to_reach(curve: Sequence[Sequence[float]], goal: float) -> Mapping[str, float] | None:
    """Return the passes and seconds from which on the objective is at or above `goal`; None if it ends below."""
    last_below = max((i for i, (_, _, objective) in enumerate(curve) if objective < goal), default=-1)
    if last_below + 1 == len(curve):
        return None
    passes, seconds, _ = curve[last_below + 1]
    return {"passes": passes, "seconds": seconds}


# --- command line


@commands.command()
@options.model
@click.option(
    "--stream", type=value_types.FILE, help="Prompts to record, one JSON object per line; - is standard input."
)
@click.option("--limit", type=positive, default=8, help="Number of prompts to record.")
@measurement("--record", type=value_types.PATH, help="File of recorded texts and costs; written if it is missing.")
@measurement("--strategies", default=",".join(SEARCHES), help="Strategies to compare, separated by commas.")
@measurement("--passes", type=positive, default=300, help="Number of passes of each strategy.")
@measurement(
    "--window",
    "context_window",
    type=positive,
    default=commands.default_of(SwiftSettings, "context_window"),
    help="γ: generated tokens on which a candidate is scored.",
)
@measurement("--stride", type=positive, default=4, help="Tokens between two steps of a search.")
@options.shared(SwiftSettings, "seed")
@measurement(
    "--long-search",
    type=value_types.natural,
    default=0,
    metavar="N",
    help="Judge N further sets, from the best one on.",
)
@options.pictures("Draw the objective against passes and seconds.")
@options.machine(GenerateRequest, "max_new_tokens")
@options.json
def command(
    stream: str | None,
    limit: int,
    record: Path | None,
    strategies: str,
    passes: int,
    stride: int,
    long_search: int,
    pictures: Pictures,
    **values: Any,
) -> Result:
    """Run search strategies on the same recorded windows, and show how soon each finds a good layer set.

    Plain decoding completes the prompts once. Each strategy then sees the completions grow; every set that it takes
    into use is judged on all windows, outside of the timing. The objective is the speedup expected from measured costs.
    A pass is one candidate on one window; other work of a strategy counts by its number of rows. A long search climbs
    on from the best set, to estimate how far the strategies are from the optimum. Ctrl-C shows the finished strategies
    and the best set of the long search so far.
    """
    strategy_names = [name.strip() for name in strategies.split(",")]
    for name in strategy_names:
        strategy_info(name)
    is_recorded = record is not None and record.exists()
    if stream is None and not is_recorded:
        raise NotFound("there is no text to search on: give --stream, or a --record that exists")
    prompts = [] if stream is None else read_stream(stream, None, limit)
    request, settings = decoding_request(values), inputs.pick(SwiftSettings, {**values, **ENDLESS_SETTINGS})
    lengths = [prompt.max_new_tokens or request.max_new_tokens for prompt in prompts]
    if not is_recorded and max(lengths) < settings.context_window:
        raise InvalidInput(
            f"no completion has {settings.context_window} tokens: raise --max-new-tokens or lower --window"
        )
    if record is not None and not is_recorded:
        check_writable(record)

    texts = TextRecord.read(record) if record is not None and is_recorded else None
    runtime = inputs.load(request)
    if texts is not None:
        texts.check(runtime)
    else:
        texts = record_texts(runtime, prompts, request.max_new_tokens, note)
        if record is not None:
            with writing(record):
                texts.write(record)
    windows = RecordedWindows(runtime, texts, settings, stride)
    report = {"model": request.model, **compare_strategies(windows, strategy_names, passes, _note_gain)}
    if long_search and not report["interrupted"]:
        report = with_long_search(windows, report, long_search, _note_gain)
    pictures.draw(draw_search, report)
    return Result(report, [_search_table(report)], interrupted=report["interrupted"])


def _note_gain(strategy: str, passes: float, objective: float) -> None:
    note(f"{strategy}, {passes:.0f} passes: {objective:.3f}x")


def _search_table(report: Mapping[str, Any]) -> Table:
    goal = f"to {report['goal']:.3f}x"
    headings = numbers("objective", "left out", "passes", "seconds", f"passes {goal}", f"seconds {goal}")
    rows = []
    for result in report["results"]:
        to_goal = result["to_goal"] or {"passes": None, "seconds": None}
        cost_cells = [number(costs[key], digits) for costs in (result, to_goal) for key, digits in SPENT.items()]
        rows.append((result["strategy"], f"{result['final']:.3f}x", str(result["n_skipped"]), *cost_cells))
    caption = None
    if long_search := report.get("long_search"):
        caption = (
            f"a long search over {long_search['sets']} sets: {long_search['best']:.3f}x,"
            f" {long_search['n_skipped']} left out"
        )
    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['windows']} windows"
    return table([fixed("strategy"), *headings], rows, lined=True, title=title, caption=caption)


if __name__ == "__main__":
    measured(lambda: program.main(command, "python -m swiftopt.bench.search"))
