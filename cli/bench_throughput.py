"""`swiftopt bench throughput`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.table import Column, Table

from ..core.errors import SettingsError
from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from . import options
from .options import check_model, open_store, pick, positive
from .output import answer, note, note_load, show
from .render import table

if TYPE_CHECKING:
    from ..core.types import Prompt
    from ..decoding.methods import Method


@click.command(short_help="Several requests at once: drafting beside plain batching.")
@options.model_option
@options.stream_option
@options.limit_option
@options.from_field(GenerateRequest, "task", "Whose stored plan drafts.  [default: each prompt's own task]")
@options.from_field(
    GenerateRequest, "method", "What drafts.  [default: the stored plan, or adaptive where there is none]"
)
@click.option("--concurrency", "words", default="1,2,4,8", show_default=True, help="Requests at a time, several runs.")
@click.option("--rate", type=float, help="Requests that arrive per second.  [default: all at once]")
@click.option("--rounds", type=positive, default=2, show_default=True, help="Times that both take their turn.")
@options.machine_options(GenerateRequest)
@options.speed_option(GenerateRequest)
@options.db_option
@options.json_option
@options.example("bench throughput --model smollm2-135m --stream prompts.jsonl --limit 8 --concurrency 1,4,8")
def throughput(
    stream: str,
    limit: int | None,
    words: str,
    rate: float | None,
    rounds: int,
    db: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Decode a stream's prompts several at a time, with plain batching and with drafting by turns.

    Prints tokens per second of all requests together, the time to the first token with the wait for a place, and the
    time per token after it. `equal` counts requests whose tokens are those of plain batching.
    """
    concurrencies = _numbers(words)
    if rate is not None and rate <= 0:
        raise SettingsError(f"--rate {rate:g} lets no request arrive: use a number above 0")
    prompts = read_stream(stream, values["task"], limit)
    request = pick(GenerateRequest, values)

    from ..bench.throughput import measure
    from ..core.types import Sampling
    from ..decoding.session import Session
    from ..models.loading import load
    from ..tasks.generate import Planner

    check_model(request)
    runtime = load(request.model, request.dtype, request.device, note_load, request.speed)
    session = Session(runtime, Sampling(), request.max_new_tokens, ignore_eos=True)
    for prompt in prompts:
        session.check(prompt)
    with open_store(db) as store:
        planner = Planner(request, runtime, store, note_load)

        def drafting(prompt: Prompt) -> Method:
            return planner.drafting_for(request.task or prompt.task)

        report = measure(session, prompts, drafting, concurrencies, rate, rounds, note)
    report = {"model": request.model, **report}
    answer(as_json, report, lambda: show(table_of(report)))


def _numbers(words: str) -> list[int]:
    try:
        found = [int(word) for word in words.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingsError(f"--concurrency {words} is no list of numbers from 1 on: use one like 1,4,8")
    return found


def table_of(report: dict[str, Any]) -> Table:
    """Return a table with a row for each way of decoding at each number of requests."""
    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    headings = ("tok/s", "ratio", "first token p50", "p95", "ms/token p50", "p95", "p99", "equal")
    columns = [Column("at once", justify="right"), Column(""), *(Column(name, justify="right") for name in headings)]
    rows = []
    for result in report["results"]:
        for way in ("plain", "drafting"):
            own, drafts = result[way], way == "drafting"
            first, each = own["first_token_s"], own["per_token_s"]
            cells = (
                "" if drafts else str(result["concurrency"]),
                way,
                f"{own['tok_s']:.1f}",
                f"{result['ratio']:.2f}x" if drafts else "",
                f"{first['p50']:.2f} s",
                f"{first['p95']:.2f} s",
                *(f"{1000 * each[p]:.0f}" for p in ("p50", "p95", "p99")),
                f"{result['equal']} of {result['compared']}" if drafts else "",
            )
            rows.append(cells)
    return table(columns, rows, title=title, title_justify="left")
