"""`swiftopt bench peers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from . import options
from .options import check_model, check_words, database_url, pick, positive
from .output import answer, note, note_load, show
from .render import folding, number, numeric, table

DTYPES = ("auto", "bfloat16", "float16", "float32")
TIMEOUT_S = 600.0  # for one answer, and for loading


@click.command(short_help="swiftopt and other engines on the same prompts.")
@options.model
@options.stream
@click.option("--task", help="Whose stored plan swiftopt/best uses.  [default: each prompt's own task]")
@options.limit
@click.option("--peers", "words", default="all", show_default=True, help="Engines, or rows such as llama-cpp/plain.")
@click.option(
    "--gguf", "ggufs", multiple=True, metavar="FILE", help="Another file of this model, for llama.cpp; repeatable."
)
@click.option("--assistant", metavar="MODEL", help="The smaller model that drafts for transformers/assisted.")
@click.option("--base", metavar="ROW", help="Row of the ratios.  [default: llama.cpp's faster plain one]")
@click.option("--threads", type=positive, help="Threads of each engine.  [default: as many as the machine has cores]")
@click.option("--timeout", type=positive, default=int(TIMEOUT_S), show_default=True, help="Seconds for one answer.")
@options.from_field(
    GenerateRequest,
    "dtype",
    "auto (as stored) or one of the others, for those that take it.",
    type=click.Choice(DTYPES),
)
@options.max_new_tokens(GenerateRequest)
@options.speed(GenerateRequest)
@options.db
@options.json
@options.example("bench peers --model smollm2-135m --stream prompts.jsonl --limit 6 --peers swiftopt,llama-cpp")
def peers(
    stream: str,
    limit: int | None,
    words: str,
    ggufs: tuple[str, ...],
    assistant: str | None,
    base: str | None,
    threads: int | None,
    timeout: int,
    db: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Decode every prompt with swiftopt and other engines, by turns, each row in a process of its own, greedily.

    The engines are installed once in the user's cache, and GGUF files made there of the model's own weights. What
    cannot be installed or fails is a row that says why. All rows get the same token ids, threads and number of new
    tokens; stop tokens end nothing. `equal to` counts the prompts on which a row that drafts gives its own engine's
    plain tokens, and other rows those of swiftopt/plain. `swiftopt/best` is the stored plan; where there is none,
    adaptive drafts. Ctrl-C shows the prompts that all rows have answered.
    """
    prompts = read_stream(stream, values["task"], limit)
    request = pick(GenerateRequest, {**values, "device": "cpu"})
    names = words.split(",")

    from ..bench.peer_rows import all_rows, chosen_rows

    paths = [Path(name) for name in ggufs]
    known = all_rows(paths, Path(assistant) if assistant else None)
    chosen = [row.name for row in chosen_rows(names, known)]
    if base is not None:
        check_words("row", [base], chosen)
    check_model(request)
    if assistant is not None:
        check_model(replace(request, model=assistant))

    import torch

    from ..bench.peers import PeersBench, PeersRequest, questions_of, report_of
    from ..models.costs import device_name
    from ..models.sources import local_folder, resolve

    folder = local_folder(resolve(request.model), note_load)
    drafting = local_folder(resolve(assistant), note_load) if assistant else None
    given = {"threads": threads} if threads else {}
    common = PeersRequest(
        request.model,
        folder,
        request.dtype,
        timeout_s=timeout,
        speed=request.speed,
        db=database_url(db) if db else None,
        **given,
    )
    questions = questions_of(folder, prompts, request.max_new_tokens)
    rows = chosen_rows(names, all_rows(paths, drafting))
    bench = PeersBench(common, questions, rows, note)
    bench.run()
    report = report_of(common, bench.runs, bench.questions, device_name(torch.device("cpu")), base, bench.interrupted)
    answer(as_json, report, lambda: show(*table_of(report)))
    if bench.interrupted:
        raise KeyboardInterrupt


def table_of(report: dict[str, Any]) -> list[RenderableType]:
    """Return the table of the rows, and under it why others have no numbers."""
    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    caption = (
        f"decode: tok/s after the first token; ratio: to {report['base']}; equal to: whose tokens on how many prompts."
        " Engines round differently; rows of other weights are another model's answers."
    )
    columns = [folding("row"), *map(numeric, ("tok/s", "decode", "ratio", "95 %", "memory")), folding("equal to")]
    rows = []
    failed: dict[str, list[str]] = {}  # by the reason why they have no numbers
    for result in report["results"]:
        if result["tok_s"] is None:
            failed.setdefault(result["reason"], []).append(result["row"])
        rows.append(cells(result, list(failed).index(result["reason"]) + 1 if result["tok_s"] is None else 0))
    footnotes = [f"({n}) {', '.join(names)}: {reason}" for n, (reason, names) in enumerate(failed.items(), start=1)]
    return [table(columns, rows, title=title, title_justify="left"), caption, *footnotes]


def cells(result: dict[str, Any], footnote: int = 0) -> tuple[str, ...]:
    """Return one row of the table; `footnote` is the number of the reason where it was not measured."""
    from ..bench.peers import equal_to

    if result["tok_s"] is None:
        return (result["row"], *"–––––", f"not run ({footnote})")
    low, high = result["ratio_interval"]
    return (
        result["row"],
        number(result["tok_s"], 1),
        number(result["decode_tok_s"], 1),
        number(result["ratio"], unit="x"),
        f"{low:.2f}-{high:.2f}",
        "–" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 1e9:.1f} GB",
        equal_to(result),
    )
