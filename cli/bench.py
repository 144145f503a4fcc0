"""`swiftopt bench`: measure decoding on this machine; searches and other engines are in files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from rich.table import Column, Table

from ..bench.ablation_table import ABLATIONS
from ..core.errors import SettingsError
from ..core.requests import EARLIER_NAMES, PEERS, GenerateRequest, ServedModel
from ..core.streams import read_stream
from ..decoding.methods import METHODS
from . import options
from .bench_peers import peers
from .bench_search import search, stream_shift
from .options import PresetGroup, check_model, check_words, open_store, pick, positive, read_layer_set
from .output import answer, note, note_load, note_run, present, show
from .render import folding, heading, lined_table, numeric, table

if TYPE_CHECKING:
    from ..core.types import Prompt
    from ..decoding.methods import Method

COMPARED = ("plain", "swift", "hf-plain", "hf-lookup")
HEADINGS = {
    "mean_generated_length": "M",
    "acceptance_rate": "α",
    "ratio": "ratio",
    "tok_s": "tok/s",
    "perplexity": "PPL",
    "optimise_ms": "search ms",
    "optimise_share": "search %",
    "early_share": "early %",
    "rejected_share": "rejected %",
    "extra_parameters": "new params",
    "consistency": "same",
    "joules_per_token": "J/tok",
}


@click.group(cls=PresetGroup, short_help="Measure decoding on this machine.")
@options.example("bench decode --model smollm2-135m --stream prompts.jsonl --methods plain,swift,hf-plain")
def bench() -> None:
    """Measure decoding on this machine."""


@bench.command(short_help="Methods side by side on the same prompts.")
@options.model
@options.stream
@click.option("--task", help="Whose stored layer set to use.  [default: each prompt's own task]")
@click.option("--layer-set", "layer_set_file", metavar="FILE", help="Draft with this exported layer set.")
@click.option("--methods", default=",".join(COMPARED), show_default=True, help="What to compare.")
@click.option("--assistant", metavar="MODEL", help="The smaller model that drafts for hf-assisted.")
@options.limit
@click.option("--ignore-eos", is_flag=True, help="Go on behind stop tokens, so that every completion has full length.")
@options.machine(GenerateRequest)
@options.speed(GenerateRequest)
@options.db
@options.json
@options.example("bench decode --model smollm2-135m --stream prompts.jsonl --limit 8 --max-new-tokens 64 --json")
def decode(
    stream: str,
    methods: str,
    assistant: str | None,
    layer_set_file: str | None,
    limit: int | None,
    ignore_eos: bool,
    db: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Decode every prompt with every method, interleaved in one process, greedily.

    `swift` drafts with the task's stored layer set or the given one; with neither it searches while it decodes, and
    that time counts. `best` is what the task's stored plan says; the other methods of `swiftopt compare` run with what
    is stored for them. `hf-plain`, `hf-lookup` and `hf-assisted` are transformers' own generate: alone, with prompt
    lookup, with --assistant drafting.
    """
    prompts = read_stream(stream, values["task"], limit)
    record = read_layer_set(layer_set_file) if layer_set_file else None
    request = pick(GenerateRequest, {**values, "layer_set": record})
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
    answer(as_json, report, lambda: show(methods_table(report)))


def methods_table(report: dict[str, Any]) -> Table:
    """Return a row per method."""
    from ..bench.decode import rows

    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['prompts']} prompts"
    headings = ("tok/s", f"ratio to {report['base']}", "95 % interval", "α", "M", "identical")
    made = lined_table(Column("method"), headings, title)
    for row in rows(report):
        made.add_row(*row)
    return made


@bench.command(short_help="The papers' ablations, on this machine and model.")
@click.argument("name")
@options.model
@options.stream
@click.option("--task", help="Whose stored layer set, heads and probe to use.  [default: the stream's task]")
@click.option("--draft-model", metavar="MODEL", help="A smaller model with the same tokenizer, for drafts.")
@options.limit
@options.machine(GenerateRequest)
@options.db
@options.json
@options.example("bench ablate swift-parts --model smollm2-135m --stream prompts.jsonl --limit 8")
def ablate(
    name: str, stream: str, limit: int | None, draft_model: str | None, db: str | None, as_json: bool, **values: Any
) -> None:
    """Run one of the papers' ablations; its variants decode the same prompts by turns.

    NAME is swift-parts, swift-window, swift-schedule, swift-ratio, adadecode-parts, adadecode-threshold,
    mtad-threshold, mtad-beams, mtad-warp or adaspeed. What is not stored for the task is made briefly and not kept.
    """
    check_words("ablation", [name], ABLATIONS)
    prompts = read_stream(stream, values["task"], limit)
    request = pick(GenerateRequest, values)
    check_model(request)
    if draft_model is not None:
        check_model(pick(GenerateRequest, {**values, "model": draft_model}))

    from ..bench.ablate import ablate as run

    with open_store(db) as store:
        report = run(name, request, draft_model, prompts, store, note, note_run)
    answer(as_json, report, lambda: show_ablation(report))
    if report["interrupted"]:
        raise KeyboardInterrupt


def show_ablation(report: Mapping[str, Any]) -> None:
    """Print the variants of an ablation as a table, and why others were not run."""
    shown = ABLATIONS[report["name"]].shown
    columns = [folding("variant"), *(numeric(HEADINGS[key]) for key in shown)]
    rows = [
        (row["label"], *(_cell(key, row.get(key)) for key in shown))
        for row in report["rows"]
        if row["ratio"] is not None
    ]
    show(heading(f"{report['title']} ({report['source']})"), table(columns, rows, gap=2))
    for row in report["rows"]:
        if row["reason"] is not None:
            click.echo(f"{row['label']}: not run: {row['reason']}")


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key.endswith("_share"):
        return f"{100 * value:.1f}"
    if key == "extra_parameters":
        return f"{value:,}"
    return f"{value:.2f}x" if key == "ratio" else f"{value:.2f}"


@bench.command(short_help="Several requests at once: drafting beside plain batching.")
@options.model
@options.stream
@options.limit
@options.from_field(GenerateRequest, "task", "Whose stored plan drafts.  [default: each prompt's own task]")
@options.from_field(
    GenerateRequest, "method", "What drafts.  [default: the stored plan, or adaptive where there is none]"
)
@click.option("--concurrency", "words", default="1,2,4,8", show_default=True, help="Requests at a time, several runs.")
@click.option("--rate", type=float, help="Requests that arrive per second.  [default: all at once]")
@click.option("--rounds", type=positive, default=2, show_default=True, help="Times that both take their turn.")
@options.machine(GenerateRequest)
@options.speed(GenerateRequest)
@options.db
@options.json
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
    answer(as_json, report, lambda: show(throughput_table(report)))


def _numbers(words: str) -> list[int]:
    try:
        found = [int(word) for word in words.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingsError(f"--concurrency {words} is no list of numbers from 1 on: use one like 1,4,8")
    return found


def throughput_table(report: dict[str, Any]) -> Table:
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


@bench.command(short_help="A served stream: a server that learns beside plain decoding.")
@options.model
@options.stream
@options.limit
@click.option("--task", help="Task of all lines.  [default: each prompt's own]")
@click.option("--concurrency", type=positive, default=1, show_default=True, help="Clients that ask at once.")
@options.max_new_tokens(GenerateRequest)
@options.placement(ServedModel)
@options.speed(ServedModel)
@click.option("--png", metavar="FILE", help="Draw the speed by request.")
@options.db
@options.json
@options.example("bench serve --model smollm2-135m --stream prompts.jsonl --limit 40 --db new.db --png speed.png")
def serve(
    model: str,
    stream: str,
    limit: int | None,
    task: str | None,
    concurrency: int,
    png: str | None,
    db: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Start a server and ask it for every prompt of a stream twice, by turns: as it serves, learning, and plainly.

    Prints the ratio of each ten requests, from the first to the last. Where --db is a new file, the server begins with
    nothing.
    """
    prompts = read_stream(stream, task, limit)
    check_model(pick(GenerateRequest, {**values, "model": model}))

    from ..bench.serving import measure, served
    from .charts import draw_serving

    given = [f"--{name}={values[name]}" for name in ("dtype", "device", "speed")]
    more = ["--concurrency", str(concurrency), *(["--db", db] if db else [])]
    with served(model, [*given, *more], note) as client:
        report = {"model": model, **measure(client, prompts, values["max_new_tokens"], concurrency, note)}
    present(report, as_json, lambda found: show(serving_table(found)), png, draw_serving)


def serving_table(report: dict[str, Any]) -> Table:
    """Return a row for each ten requests."""
    what = f"{report['prompts']} requests of {report['max_new_tokens']} tokens, {report['concurrency']} at once"
    title = f"{report['model']}, {what}"
    rows, most = [], max(report["windows"])
    for number, ratio in enumerate(report["windows"]):
        first = number * 10 + 1
        rows.append((f"{first}-{min(first + 9, report['prompts'])}", f"{ratio:.2f}x", "█" * round(30 * ratio / most)))
    columns = [Column("requests", justify="right"), Column("to plain", justify="right"), Column("")]
    caption = f"equal to plain decoding: {report['equal']} of {report['prompts']}"
    return table(columns, rows, title=title, title_justify="left", caption=caption)


for command in (peers, search, stream_shift):
    bench.add_command(command)
