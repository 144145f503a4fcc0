"""`swiftopt bench`."""

from __future__ import annotations

from typing import Any

import click

from ..core.errors import SettingsError
from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from ..decoding.methods import METHODS
from ..tasks.requests import EARLIER_NAMES, PEERS
from .bench_ablate import ablate
from .bench_peers import peers
from .bench_search import search, stream_shift
from .bench_throughput import throughput
from .options import (
    PresetGroup,
    check_model,
    check_words,
    db_option,
    json_option,
    machine_options,
    open_store,
    pick,
    positive,
    read_layer_set,
    speed_option,
)
from .output import emit_json, note_load, note_run, show

COMPARED = ("plain", "swift", "hf-plain", "hf-lookup")


@click.group(cls=PresetGroup, short_help="Measure decoding on this machine.")
def bench() -> None:
    """Measure decoding on this machine.

    \b
    Example:
      swiftopt bench decode --model smollm2-135m --stream prompts.jsonl --methods plain,swift,hf-plain
    """


bench.add_command(ablate)
bench.add_command(peers)
bench.add_command(throughput)
bench.add_command(search)
bench.add_command(stream_shift)


@bench.command(short_help="Methods side by side on the same prompts.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@click.option("--task", help="Whose stored layer set to use.  [default: each prompt's own task]")
@click.option("--layer-set", "layer_set_file", metavar="FILE", help="Draft with this exported layer set.")
@click.option("--methods", default=",".join(COMPARED), show_default=True, help="What to compare.")
@click.option("--assistant", metavar="MODEL", help="The smaller model that drafts for hf-assisted.")
@click.option("--limit", type=positive, help="Take only the first prompts of the stream.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind stop tokens, so that every completion has full length.")
@machine_options(GenerateRequest)
@speed_option(GenerateRequest)
@db_option
@json_option
def decode(
    stream: str,
    methods: str,
    assistant: str | None,
    layer_set_file: str | None,
    limit: int | None,
    ignore_eos: bool,
    db: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Decode every prompt with every method, interleaved in one process, greedily.

    `swift` drafts with the task's stored layer set or the given one; with neither it searches while it decodes, and
    that time counts. `best` is what the task's stored plan says; the other methods of `swiftopt compare` run with what
    is stored for them. `hf-plain`, `hf-lookup` and `hf-assisted` are transformers' own generate: alone, with prompt
    lookup, with --assistant drafting.

    \b
    Example:
      swiftopt bench decode --model smollm2-135m --stream prompts.jsonl --limit 8 --max-new-tokens 64 --json
    """
    prompts = read_stream(stream, options["task"], limit)
    record = read_layer_set(layer_set_file) if layer_set_file else None
    request = pick(GenerateRequest, {**options, "layer_set": record})
    chosen = [EARLIER_NAMES.get(word.strip(), word.strip()) for word in methods.split(",")]
    check_words("method", chosen, (*METHODS, "best", *PEERS))
    if "hf-assisted" in chosen and assistant is None:
        raise SettingsError("hf-assisted drafts with a smaller model: name one with --assistant")
    check_model(request)

    from ..bench.decode import run_methods
    from ..models.loading import load
    from ..tasks.generate import Planner

    runtime = load(request.model, request.dtype, request.device, note_load, request.speed)
    if record is not None:
        Planner(request, runtime, None).plan_for(record.task)  # a set of another model must not cost the plain runs
    with open_store(db) as store:
        store.remember_model(runtime.info)
        drafting = (
            None if assistant is None else load(assistant, request.dtype, request.device, note_load, request.speed)
        )
        report = run_methods(runtime, prompts, chosen, request, store, note_run, drafting, ignore_eos)
    if as_json:
        emit_json(report)
    else:
        _show_table(report)


def _show_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    from ..bench.decode import rows

    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['prompts']} prompts"
    table = Table(title=title, title_justify="left")
    for name in ("method", "tok/s", f"ratio to {report['base']}", "95 % interval", "α", "M", "identical"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows(report):
        table.add_row(*row)
    show(table)
