"""`swiftopt bench`: measure decoding on this machine; what measures searches is in `bench_search`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from ..bench.ablations import ABLATIONS
from ..core.errors import SettingsError
from ..core.requests import EARLIER_NAMES, PEERS, GenerateRequest, ServedModel
from ..core.streams import StreamForm, read_stream, read_with_others
from ..decoding.methods import METHODS
from . import options
from .bench_search import search, stream_shift
from .charts import Pictures, draw_ablation, draw_decoding, draw_peers, draw_serving, draw_throughput
from .options import ConfiguredGroup, check_model, check_words, database_url, decoding_request, open_store, positive
from .output import Result, note, note_load, note_run, show
from .render import folding, heading, interval, lined_table, number, numeric, table

if TYPE_CHECKING:
    from ..core.types import Prompt
    from ..decoding.methods import Method
    from ..models.runtime import Runtime

DTYPES = ("auto", "bfloat16", "float16", "float32")
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


@click.group(cls=ConfiguredGroup, short_help="Measure decoding on this machine.")
@options.example("bench decode --model smollm2-135m --stream prompts.jsonl --methods plain,swift,hf-plain")
def bench() -> None:
    """Measure decoding on this machine."""


@bench.command(short_help="Methods side by side on the same prompts.")
@options.model
@options.stream
@options.group(
    options.PROMPTS, click.option("--task", help="Whose stored layer set to use.  [default: each prompt's own task]")
)
@options.layer_set
@options.group(options.MEASUREMENT, click.option("--methods", default=",".join(COMPARED), help="What to compare."))
@options.group(
    options.MEASUREMENT,
    click.option(
        "--assistant",
        metavar="MODEL",
        shell_complete=options.models,
        help="The smaller model that drafts for hf-assisted.",
    ),
)
@options.limit
@options.group(
    options.MEASUREMENT,
    click.option(
        "--ignore-eos", is_flag=True, help="Go on behind stop tokens, so that every completion has full length."
    ),
)
@options.form
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.pictures("Draw the ratios as a bar chart.")
@options.db
@options.json
@options.example("bench decode --model smollm2-135m --stream prompts.jsonl --limit 8 --max-new-tokens 64 --json")
def decode(
    stream: str,
    form: StreamForm,
    methods: str,
    assistant: str | None,
    limit: int | None,
    ignore_eos: bool,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Decode every prompt with every method, interleaved in one process, greedily.

    `swift` drafts with the task's stored layer set or the given one; with neither it searches while it decodes, and
    that time counts. `best` is what the task's stored plan says; the other methods of `swiftopt compare` run with what
    is stored for them. `hf-plain`, `hf-lookup` and `hf-assisted` are transformers' own generate: alone, with prompt
    lookup, with --assistant drafting.
    """
    prompts = read_stream(stream, values["task"], limit, form)
    chosen = [EARLIER_NAMES.get(word.strip(), word.strip()) for word in methods.split(",")]
    check_words("method", chosen, (*METHODS, "best", *PEERS))
    if "hf-assisted" in chosen and assistant is None:
        raise SettingsError("hf-assisted drafts with a smaller model: name one with --assistant")
    request = decoding_request(values)

    from ..bench.decode import run_methods
    from ..tasks.generate import Planner

    runtime = _loaded(request, request.model)
    if request.layer_set is not None:  # a set of another model must not cost the plain runs
        Planner(request, runtime, None).plan_for(request.layer_set.task)
    with open_store(db) as store:
        store.remember_model(runtime.info)
        drafting = None if assistant is None else _loaded(request, assistant)
        report = run_methods(runtime, prompts, chosen, request, store, note_run, drafting, ignore_eos)
    if pictures:
        draw_decoding(report, pictures)
    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['prompts']} prompts"
    headings = ("tok/s", f"ratio to {report['base']}", "95 % interval", "α", "M", "identical")
    rows = []
    for row in report["results"]:
        figures = (number(row["tok_s"], 1), number(row["ratio"], unit="x"), interval(row["ratio_interval"]))
        means = (number(row[key]) for key in ("acceptance_rate", "mean_generated_length"))
        rows.append((row["method"], *figures, *means, f"{row['identical']}/{row['of']}"))
    return Result(report, [lined_table(Column("method"), headings, rows, title)])


def _loaded(request: GenerateRequest, model: str) -> Runtime:
    from ..models.loading import load

    return load(model, request.dtype, request.device, note_load, request.speed)


@bench.command(short_help="The papers' ablations, on this machine and model.")
@click.argument("name")
@options.model
@options.stream
@options.group(
    options.PROMPTS,
    click.option("--task", help="Whose stored layer set, heads and probe to use.  [default: the stream's task]"),
)
@options.draft_model
@options.limit
@options.form
@options.machine(GenerateRequest, "max_new_tokens")
@options.pictures("Draw the ratios as a bar chart.")
@options.db
@options.json
@options.example("bench ablate swift-parts --model smollm2-135m --stream prompts.jsonl --limit 8")
def ablate(
    name: str,
    stream: str,
    form: StreamForm,
    limit: int | None,
    draft_model: str | None,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Run one of the papers' ablations; its variants decode the same prompts by turns.

    NAME is swift-parts, swift-self-sd, swift-window, swift-schedule, swift-ratio, adadecode-parts,
    adadecode-threshold, adadecode-trees, spd-settings, self-sd-steps, paradecode-parts, paradecode-threshold,
    mtad-threshold, mtad-beams, mtad-warp, adaspeed or adaspeed-exit. What is not stored for the task is made briefly
    and not kept, on prompts behind --limit where there are any.
    """
    check_words("ablation", [name], ABLATIONS)
    prompts, others = read_with_others(stream, values["task"], limit, form)
    request = decoding_request(values)
    if draft_model is not None:
        check_model(replace(request, model=draft_model))

    from ..bench.ablate import ablate as run

    with open_store(db) as store:
        report = run(name, request, draft_model, prompts, store, others, note, note_run)
    if pictures:
        draw_ablation(report, pictures)
    return Result(report, _ablation_view(report), interrupted=report["interrupted"])


def _ablation_view(report: Mapping[str, Any]) -> list[RenderableType]:
    """Return the variants of an ablation as a table, and why others were not run."""
    shown = ABLATIONS[report["name"]].shown
    columns = [folding("variant"), *(numeric(HEADINGS[key]) for key in shown)]
    rows = [
        (row["label"], *(_cell(key, row.get(key)) for key in shown))
        for row in report["rows"]
        if row["ratio"] is not None
    ]
    failed = [f"{row['label']}: not run: {row['reason']}" for row in report["rows"] if row["reason"] is not None]
    if report["made"] and report["made_on"] != "other prompts":
        failed.append(f"made on {report['made_on']} themselves, which favours the variants that use it")
    return [heading(f"{report['title']} ({report['source']})"), table(columns, rows, gap=2), *failed]


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
@options.group(
    options.PROMPTS,
    options.from_field(GenerateRequest, "task", "Whose stored plan drafts.  [default: each prompt's own task]"),
)
@options.group(
    options.DRAFTING,
    options.from_field(
        GenerateRequest, "method", "What drafts.  [default: the stored plan, or adaptive where there is none]"
    ),
)
@options.group(
    options.MEASUREMENT,
    click.option("--concurrency", "words", default="1,2,4,8", help="Requests at a time, several runs."),
)
@options.group(
    options.MEASUREMENT,
    click.option("--rate", type=float, help="Requests that arrive per second.  [default: all at once]"),
)
@options.group(
    options.MEASUREMENT, click.option("--rounds", type=positive, default=2, help="Times that both take their turn.")
)
@options.form
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.pictures("Draw the speed and the time per token by requests at once.")
@options.db
@options.json
@options.example("bench throughput --model smollm2-135m --stream prompts.jsonl --limit 8 --concurrency 1,4,8")
def throughput(
    stream: str,
    form: StreamForm,
    limit: int | None,
    words: str,
    rate: float | None,
    rounds: int,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Decode a stream's prompts several at a time, with plain batching and with drafting by turns.

    Prints tokens per second of all requests together, the time to the first token with the wait for a place, and the
    time per token after it. `equal` counts requests whose tokens are those of plain batching.
    """
    concurrencies = _numbers(words)
    if rate is not None and rate <= 0:
        raise SettingsError(f"--rate {rate:g} lets no request arrive: use a number above 0")
    prompts = read_stream(stream, values["task"], limit, form)
    request = decoding_request(values)

    from ..bench.throughput import measure
    from ..decoding.session import Session
    from ..tasks.generate import Planner

    runtime = _loaded(request, request.model)
    session = Session(runtime, request.sampling, request.max_new_tokens, ignore_eos=True)
    for prompt in prompts:
        session.check(prompt)
    with open_store(db) as store:
        planner = Planner(request, runtime, store, note_load)

        def drafting(prompt: Prompt) -> Method:
            return planner.drafting_for(request.task or prompt.task)

        report = measure(session, prompts, drafting, concurrencies, rate, rounds, note)
    report = {"model": request.model, **report}
    if pictures:
        draw_throughput(report, pictures)
    return Result(report, [_throughput_table(report)])


def _numbers(words: str) -> list[int]:
    try:
        found = [int(word) for word in words.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingsError(f"--concurrency {words} is no list of numbers from 1 on: use one like 1,4,8")
    return found


def _throughput_table(report: dict[str, Any]) -> Table:
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
@options.group(options.PROMPTS, click.option("--task", help="Task of all lines.  [default: each prompt's own]"))
@options.group(
    options.MEASUREMENT,
    click.option("--concurrency", type=positive, default=1, help="Clients that ask at once."),
    click.option("--window", type=positive, default=10, show_default=True, help="Requests that a ratio is of."),
)
@options.shared(GenerateRequest, "max_new_tokens")
@options.form
@options.machine(ServedModel, "speed")
@options.pictures("Draw the speed by request.")
@options.group(
    options.SERVICES,
    click.option("--stay", is_flag=True, help="Serve on until Ctrl-C, for the dashboard; not with --json."),
)
@options.db
@options.json
@options.example("bench serve --model smollm2-135m --stream prompts.jsonl --limit 40 --db new.db --png speed.png")
def serve(
    stream: str,
    form: StreamForm,
    limit: int | None,
    task: str | None,
    concurrency: int,
    window: int,
    pictures: Pictures,
    stay: bool,
    db: str | None,
    **values: Any,
) -> Result:
    """Start a server and ask it for every prompt of a stream twice, by turns: as it serves, learning, and plainly.

    Prints the ratio of each window of requests, from the first to the last. Where --db is a new file, the server begins
    with nothing.
    """
    if stay and click.get_current_context().params["as_json"]:
        raise click.UsageError("--stay is for looking at the dashboard, and --json for programs: choose one")
    prompts = read_stream(stream, task, limit, form)
    request = decoding_request(values)

    from ..bench.serving import measure, served

    given = [f"--{name}={values[name]}" for name in ("dtype", "device", "speed")]
    more = ["--concurrency", str(concurrency), *(["--db", db] if db else [])]
    with served(request.model, [*given, *more], note) as client:
        report = {"model": request.model, **measure(client, prompts, request.max_new_tokens, concurrency, window, note)}
        if pictures:
            draw_serving(report, pictures)
        if stay:
            show(_serving_table(report))
            show(f"Its dashboard: {client.base_url} (Ctrl-C ends the server)")
            with suppress(KeyboardInterrupt):
                Event().wait()
    return Result(report, () if stay else [_serving_table(report)])


def _serving_table(report: dict[str, Any]) -> Table:
    """Return a row for each window."""
    from ..bench.serving import shift_line

    what = f"{report['prompts']} requests of {report['max_new_tokens']} tokens, {report['concurrency']} at once"
    title = f"{report['model']}, {what}"
    rows, most = [], max(report["windows"])
    for first, ratio in zip(range(1, report["prompts"] + 1, report["window"]), report["windows"], strict=False):
        last = min(first + report["window"] - 1, report["prompts"])
        rows.append((f"{first}-{last}", f"{ratio:.2f}x", "█" * round(30 * ratio / most)))
    columns = [Column("requests", justify="right"), Column("to plain", justify="right"), Column("")]
    equal = f"equal to plain decoding: {report['equal']} of {report['prompts']}"
    caption = "\n".join([*map(shift_line, report["shifts"]), equal])
    return table(columns, rows, title=title, title_justify="left", caption=caption)


@bench.command(short_help="swiftopt and other engines on the same prompts.")
@options.model
@options.stream
@options.group(
    options.PROMPTS,
    click.option("--task", help="Whose stored plan swiftopt/best uses.  [default: each prompt's own task]"),
)
@options.limit
@options.form
@options.group(
    options.MEASUREMENT,
    click.option("--peers", "words", default="all", help="Engines, or rows such as llama-cpp/plain."),
)
@options.group(
    options.MEASUREMENT,
    click.option(
        "--gguf",
        "ggufs",
        multiple=True,
        type=Path,
        metavar="FILE",
        shell_complete=options.files,
        help="Another file of this model, for llama.cpp; repeatable.",
    ),
)
@options.group(
    options.MEASUREMENT,
    click.option(
        "--assistant",
        metavar="MODEL",
        shell_complete=options.models,
        help="The smaller model that drafts for transformers/assisted.",
    ),
)
@options.group(
    options.MEASUREMENT,
    click.option(
        "--exported",
        multiple=True,
        type=Path,
        metavar="FOLDER",
        shell_complete=options.folders,
        help="What `swiftopt export` wrote, a row of its engine; repeatable.",
    ),
)
@options.group(
    options.MEASUREMENT,
    click.option("--base", metavar="ROW", help="Row of the ratios.  [default: llama.cpp's faster plain one]"),
)
@options.group(
    options.MEASUREMENT,
    click.option(
        "--threads", type=positive, help="Threads of each engine.  [default: as many as the machine has cores]"
    ),
)
@options.group(
    options.MEASUREMENT, click.option("--timeout", type=positive, default=600, help="Seconds for one answer.")
)
@options.group(
    options.MACHINE,
    options.from_field(
        GenerateRequest,
        "dtype",
        "auto (as stored) or one of the others, for those that take it.",
        type=click.Choice(DTYPES),
    ),
)
@options.shared(GenerateRequest, "max_new_tokens", "speed")
@options.pictures("Draw the ratios as a bar chart.")
@options.db
@options.json
@options.example("bench peers --model smollm2-135m --stream prompts.jsonl --limit 6 --peers swiftopt,llama-cpp")
def peers(
    stream: str,
    form: StreamForm,
    limit: int | None,
    words: str,
    ggufs: tuple[Path, ...],
    assistant: str | None,
    exported: tuple[Path, ...],
    base: str | None,
    threads: int | None,
    timeout: int,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Decode every prompt with swiftopt and other engines, by turns, each row in a process of its own, greedily.

    The engines are installed once in the user's cache, and GGUF files made there of the model's own weights. What
    cannot be installed or fails is a row that says why. All rows get the same token ids, threads and number of new
    tokens; stop tokens end nothing. `equal to` counts the prompts on which a row that drafts gives its own engine's
    plain tokens, and other rows those of swiftopt/plain. `swiftopt/best` is the stored plan; where there is none,
    adaptive drafts. Ctrl-C shows the prompts that all rows have answered.
    """
    prompts = read_stream(stream, values["task"], limit, form)
    names = words.split(",")

    from ..bench.peers import all_rows, chosen_rows

    known = all_rows(ggufs, Path(assistant) if assistant else None, exported)
    chosen = [row.name for row in chosen_rows(names, known)]
    if base is not None:
        check_words("row", [base], chosen)
    request = decoding_request({**values, "device": "cpu"})
    if assistant is not None:
        check_model(replace(request, model=assistant))

    import torch

    from ..bench.peers import report_of
    from ..engines.turns import Turns, TurnsRequest, questions_of
    from ..models.costs import device_name
    from ..models.sources import local_folder, resolve

    folder = local_folder(resolve(request.model), note_load)
    drafting = local_folder(resolve(assistant), note_load) if assistant else None
    given = {"threads": threads} if threads else {}
    common = TurnsRequest(
        request.model,
        folder,
        request.dtype,
        timeout_s=timeout,
        speed=request.speed,
        db=database_url(db) if db else None,
        **given,
    )
    questions = questions_of(folder, prompts, request.max_new_tokens)
    bench = Turns(common, questions, chosen_rows(names, all_rows(ggufs, drafting, exported)), note)
    bench.run()
    report = report_of(common, bench.runs, bench.questions, device_name(torch.device("cpu")), base, bench.interrupted)
    if pictures:
        draw_peers(report, pictures)
    return Result(report, peers_view(report), interrupted=bench.interrupted)


def peers_view(report: dict[str, Any]) -> list[RenderableType]:
    """Return the table of the rows, and under it why others have no numbers."""
    from ..bench.peers import equal_to

    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    caption = (
        f"decode: tok/s after the first token; ratio: to {report['base']}; accepted: of the drafted tokens;"
        " equal to: whose tokens on how many prompts."
        " Engines round differently; rows of other weights are another model's answers."
    )
    columns = [
        folding("row"),
        *map(numeric, ("tok/s", "decode", "ratio", "95 %", "accepted", "memory")),
        folding("equal to"),
    ]
    rows = []
    failed: dict[str, list[str]] = {}  # by the reason why they have no numbers
    for result in report["results"]:
        if result["tok_s"] is None:
            failed.setdefault(result["reason"], []).append(result["row"])
            rows.append((result["row"], *"––––––", f"not run ({list(failed).index(result['reason']) + 1})"))
            continue
        figures = (
            number(result["tok_s"], 1),
            number(result["decode_tok_s"], 1),
            number(result["ratio"], unit="x"),
            interval(result["ratio_interval"]),
            number(result.get("acceptance")),
            "–" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 1e9:.1f} GB",
        )
        rows.append((result["row"], *figures, equal_to(result)))
    footnotes = [f"({n}) {', '.join(names)}: {reason}" for n, (reason, names) in enumerate(failed.items(), start=1)]
    return [table(columns, rows, title=title, title_justify="left"), *map(Text, (caption, *footnotes))]


for command in (search, stream_shift):
    bench.add_command(command)
