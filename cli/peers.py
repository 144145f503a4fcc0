"""`swiftopt bench peers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from ..core.requests import GenerateRequest
from ..core.streams import read_stream
from .options import db_option, from_field, json_option, pick, positive, speed_option
from .output import emit_json, note, note_load, show

DTYPES = ("auto", "bfloat16", "float16", "float32")
TIMEOUT_S = 600.0  # for one answer, and for loading


@click.command(short_help="swiftopt and other engines on the same prompts.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@click.option("--task", help="Whose stored plan swiftopt/best uses.  [default: each prompt's own task]")
@click.option("--limit", type=positive, help="Take only the first prompts of the stream.")
@click.option("--peers", "words", default="all", show_default=True, help="Engines, or rows such as llama-cpp/plain.")
@click.option(
    "--gguf", "ggufs", multiple=True, metavar="FILE", help="Another file of this model, for llama.cpp; repeatable."
)
@click.option("--assistant", metavar="MODEL", help="The smaller model that drafts for transformers/assisted.")
@click.option("--base", metavar="ROW", help="Row of the ratios.  [default: llama.cpp's faster plain one]")
@click.option("--threads", type=positive, help="Threads of each engine.  [default: as many as the machine has cores]")
@click.option("--timeout", type=positive, default=int(TIMEOUT_S), show_default=True, help="Seconds for one answer.")
@from_field(
    GenerateRequest,
    "dtype",
    "auto (as stored) or one of the others, for those that take it.",
    type=click.Choice(DTYPES),
)
@from_field(
    GenerateRequest, "max_new_tokens", "Tokens per completion, where the stream's line says nothing.", type=positive
)
@speed_option(GenerateRequest)
@db_option
@json_option
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
    **options: Any,
) -> None:
    """Decode every prompt with swiftopt and other engines, by turns, each row in a process of its own, greedily.

    The engines are installed once in the user's cache, and GGUF files made there of the model's own weights. What
    cannot be installed or fails is a row that says why. All rows get the same token ids, threads and number of new
    tokens; stop tokens end nothing. `equal to` counts the prompts on which a row that drafts gives its own engine's
    plain tokens, and other rows those of swiftopt/plain. `swiftopt/best` is the stored plan; where there is none,
    adaptive drafts.

    \b
    Example:
      swiftopt bench peers --model smollm2-135m --stream prompts.jsonl --limit 6 --peers swiftopt,llama-cpp
    """
    prompts = read_stream(stream, options["task"], limit)
    request = pick(GenerateRequest, {**options, "device": "cpu"})
    names = words.split(",")

    from ..bench.peer_rows import all_rows, chosen_rows
    from .checks import check_model, check_words

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
    from ..store import as_url

    folder = local_folder(resolve(request.model), note_load)
    drafting = local_folder(resolve(assistant), note_load) if assistant else None
    given = {"threads": threads} if threads else {}
    common = PeersRequest(
        request.model,
        folder,
        request.dtype,
        timeout_s=timeout,
        speed=request.speed,
        db=as_url(db) if db else None,
        **given,
    )
    questions = questions_of(folder, prompts, request.max_new_tokens)
    rows = chosen_rows(names, all_rows(paths, drafting))
    bench = PeersBench(common, questions, rows, note)
    bench.run()
    report = report_of(common, bench.runs, questions, device_name(torch.device("cpu")), base)
    if as_json:
        emit_json(report)
    else:
        show(*table_of(report))


def table_of(report: dict[str, Any]) -> list[RenderableType]:
    """The rows, and under them why others have no numbers."""
    from rich.table import Table

    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    caption = (
        f"decode: tok/s after the first token; ratio: to {report['base']}; equal to: whose tokens on how many prompts."
        " Engines round differently; rows of other weights are another model's answers."
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("row", "tok/s", "decode", "ratio", "95 %", "memory", "equal to"):
        wraps = name in ("row", "equal to")
        table.add_column(name, justify="left" if wraps else "right", no_wrap=not wraps, overflow="fold")
    rows_of: dict[str, list[str]] = {}  # by the reason why they have no numbers
    for result in report["results"]:
        if result["tok_s"] is None:
            rows_of.setdefault(result["reason"], []).append(result["row"])
        table.add_row(*cells(result, list(rows_of).index(result["reason"]) + 1 if result["tok_s"] is None else 0))
    reasons = enumerate(rows_of.items(), start=1)
    return [table, caption, *(f"({number}) {', '.join(rows)}: {reason}" for number, (reason, rows) in reasons)]


def cells(result: dict[str, Any], footnote: int = 0) -> tuple[str, ...]:
    """One row of the table; `footnote` is the number of the reason where it was not measured."""
    from ..bench.peers import equal_to

    if result["tok_s"] is None:
        return (result["row"], "–", "–", "–", "–", "–", f"not run ({footnote})")
    low, high = result["ratio_interval"]
    decoding, peak = result["decode_tok_s"], result["peak_bytes"]
    return (
        result["row"],
        f"{result['tok_s']:.1f}",
        "–" if decoding is None else f"{decoding:.1f}",
        f"{result['ratio']:.2f}x",
        f"{low:.2f}-{high:.2f}",
        "–" if peak is None else f"{peak / 1e9:.1f} GB",
        equal_to(result),
    )
