"""`swiftopt layers search`: Self-SD's offline search."""

from __future__ import annotations

from typing import Any

import click

from ..core.records import record_to_json
from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from ..core.types import Sampling
from .checks import check_model
from .options import db_option, from_field, json_option, machine_options, open_store, pick, positive
from .output import console, emit_json, note, note_load, show


@click.command("search", short_help="Self-SD's offline search for a layer set.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@click.option("--task", help="Task to store the set under.  [default: the first prompt's own]")
@click.option("--limit", type=positive, default=4, show_default=True, help="Prompts that each candidate decodes.")
@click.option("--max-steps", type=positive, default=200, show_default=True, help="Candidates to try at most.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Begin no candidate after this time.")
@machine_options(GenerateRequest)
@from_field(Sampling, "seed", "Seed of every random choice.", type=int)
@db_option
@json_option
def search(
    stream: str,
    limit: int,
    max_steps: int,
    minutes: float | None,
    db: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Bayesian optimisation over all sub-layers, each candidate by the tokens per second that Self-SD makes with it.

    The set is stored for the method self-sd; the best plan stays what it is until `swiftopt compare` finds it faster.

    \b
    Example:
      swiftopt layers search --model smollm2-135m --stream prompts.jsonl --task notes --minutes 10 --max-new-tokens 32
    """
    prompts = read_stream(stream, options["task"], limit)
    request = pick(GenerateRequest, {**options, "sampling": pick(Sampling, options)})
    check_model(request)

    from ..tasks.self_sd import search_offline, typical_ratio
    from .render import layer_map

    def show_candidate(number: int, candidate: Any) -> None:
        skipped = candidate.layer_set.n_skipped
        note(f"candidate {number}: {skipped} sub-layers left out, {candidate.ratio:.2f}x plain decoding")

    with open_store(db) as store:
        record, found = search_offline(
            request,
            prompts,
            store,
            max_steps,
            float("inf") if minutes is None else 60 * minutes,
            note_load,
            show_candidate,
        )
    figures = {"candidates": len(found.candidates), "ratio": found.best.ratio, "median_ratio": typical_ratio(found)}
    if as_json:
        emit_json({"schema": "swiftopt.layers-search/1", "layer_set": record_to_json(record), **figures})
        return
    show(layer_map(record.layer_set, console().width))
    click.echo(
        f"{record.model}/{record.task} version {record.version}: {found.best.ratio:.2f}x plain decoding on the search's"
        f" own prompts, the best of {len(found.candidates)} candidates (median {typical_ratio(found):.2f}x)"
    )
