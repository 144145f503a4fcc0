"""`swiftopt bench throughput`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..core.errors import SettingsError
from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from .options import db_option, from_field, json_option, machine_options, open_store, pick, positive, speed_option
from .output import emit_json, note, note_load, show

if TYPE_CHECKING:
    from ..core.types import Prompt
    from ..decoding.method import Method


@click.command(short_help="Several requests at once: drafting beside plain batching.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@click.option("--limit", type=positive, help="Take only the first prompts of the stream.")
@from_field(GenerateRequest, "task", "Whose stored plan drafts.  [default: each prompt's own task]")
@from_field(GenerateRequest, "method", "What drafts.  [default: the stored plan, or adaptive where there is none]")
@click.option("--concurrency", "words", default="1,2,4,8", show_default=True, help="Requests at a time, several runs.")
@click.option("--rate", type=float, help="Requests that arrive per second.  [default: all at once]")
@click.option("--rounds", type=positive, default=2, show_default=True, help="Times that both take their turn.")
@machine_options(GenerateRequest)
@speed_option(GenerateRequest)
@db_option
@json_option
def throughput(
    stream: str,
    limit: int | None,
    words: str,
    rate: float | None,
    rounds: int,
    db: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Decode a stream's prompts several at a time, with plain batching and with drafting by turns.

    Prints tokens per second of all requests together, the time to the first token with the wait for a place, and the
    time per token after it. `equal` counts requests whose tokens are those of plain batching.

    \b
    Example:
      swiftopt bench throughput --model smollm2-135m --stream prompts.jsonl --limit 8 --concurrency 1,4,8
    """
    concurrencies = _numbers(words)
    if rate is not None and rate <= 0:
        raise SettingsError(f"--rate {rate:g} lets no request arrive: use a number above 0")
    prompts = read_stream(stream, options["task"], limit)
    request = pick(GenerateRequest, options)

    from ..bench.throughput import measure
    from ..core.types import Sampling
    from ..decoding.session import Session
    from ..models.loading import load
    from ..tasks.generate import Planner
    from .checks import check_model

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
    if as_json:
        emit_json(report)
    else:
        show(table_of(report))


def _numbers(words: str) -> list[int]:
    try:
        found = [int(word) for word in words.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingsError(f"--concurrency {words} is no list of numbers from 1 on: use one like 1,4,8")
    return found


def table_of(report: dict[str, Any]) -> Any:
    """A row per way and number of requests."""
    from rich.table import Table

    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("at once", "", "tok/s", "ratio", "first token p50", "p95", "ms/token p50", "p95", "p99", "equal"):
        table.add_column(name, justify="left" if not name else "right")
    for result in report["results"]:
        for way in ("plain", "drafting"):
            own, drafts = result[way], way == "drafting"
            first, each = own["first_token_s"], own["per_token_s"]
            table.add_row(
                "" if drafts else str(result["concurrency"]),
                way,
                f"{own['tok_s']:.1f}",
                f"{result['ratio']:.2f}x" if drafts else "",
                f"{first['p50']:.2f} s",
                f"{first['p95']:.2f} s",
                *(f"{1000 * each[p]:.0f}" for p in ("p50", "p95", "p99")),
                f"{result['equal']} of {result['compared']}" if drafts else "",
            )
    return table
