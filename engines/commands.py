"""Commands for other engines: `export`, `import`, `tune --engine` and `bench peers`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from rich.console import RenderableType
from rich.text import Text

from ..core.errors import InvalidInput, LayerSetNotFound, look_up
from ..core.records import FoundPlan, Plan, read_object
from ..core.requests import GenerateRequest
from ..core.settings import ENGINES, EXPORT_SCHEMA, EXPORT_SUMMARY
from ..core.streams import StreamForm, read_stream
from ..core.types import Verdict
from ..models.saved import refuse_existing
from ..models.sources import check_names
from ..terminal import commands, inputs, options, value_types
from ..terminal.charts import Pictures, draw_ratios
from ..terminal.commands import measurement, option
from ..terminal.inputs import pick
from ..terminal.output import Result, StepNotes, note
from ..terminal.render import folding, interval, number, numeric, table
from ..terminal.value_types import PATH, ModelTask, positive

if TYPE_CHECKING:
    from ..store import Store
    from .tuning import EngineTuned

# Options of `tune` that apply with --engine as well; --device does so unless servers already run.
ENGINE_OPTIONS = (
    *("model", "stream", "task", "limit", "max_new_tokens", "dtype", "threads", "db", "as_json"),
    *("engine", "engine_urls", "draft_model"),
)
STEPS = {1: "kinds", 2: "lengths", 3: "held out"}
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Options of `bench peers` that apply with --gguf but without --model.
SAME_FILE_OPTIONS = (
    *("ggufs", "depths", "at_once", "words", "max_new_tokens", "threads", "timeout_s", "speed", "db", "as_json"),
)


# --- export


@commands.command(short_help="Export a plan for another engine.")
@options.model_task
@click.option("--to", "engine", type=click.Choice(ENGINES), required=True, help="The engine.")
@click.option("--out", type=value_types.FOLDER, required=True, help="New folder to write.")
@options.version
@click.option(
    "--stream",
    type=value_types.FILE,
    help="Prompts on which to measure the draft's acceptance, which then chooses the layer set and draft lengths.",
)
@click.option("--limit", type=positive, default=8, show_default=True, help="Number of its prompts to use.")
@options.store_and_json
@commands.example("export smollm2-135m/notes --to vllm --out notes-draft --stream prompts.jsonl")
def export(
    name: ModelTask, engine: str, out: str, version: int | None, stream: str | None, limit: int, store: Store
) -> Result:
    """Export the plan of MODEL/TASK in the form that another engine loads: a draft checkpoint, settings, and a README.

    If the kept sub-layers of a set do not alternate attention and MLP, the nearest set that does is exported. For vLLM
    it is exported unchanged if the model is a Llama, Mistral or Qwen2.
    """
    refuse_existing(Path(out))
    plan = _to_export(store, name, engine) if version is None else store.plan(name.model, name.task, version)
    if plan.fallback:
        note(f"note: {plan.fallback}")
    prompts = [] if stream is None else read_stream(stream, name.task, limit)

    from .export import export as export_plan

    exported = export_plan(plan, name.model, engine, Path(out), store, StepNotes("load: "), prompts)
    layer_set = None if exported.layer_set is None else exported.layer_set.to_json()
    figures = {"kind": exported.kind, "draft_tokens": exported.n_draft_tokens, "layer_set": layer_set}
    value = {"schema": EXPORT_SCHEMA, "engine": engine, "out": out, **figures, "files": list(exported.files)}
    text = f"{out}: {len(exported.files)} files for {engine}; {Path(out) / 'README.md'} explains how to run them"
    notes = [f"note: {remark}" for remark in exported.remarks]
    return Result({**value, "remarks": list(exported.remarks)}, [text], notes)


def _to_export(store: Store, name: ModelTask, engine: str) -> FoundPlan:
    """Return the plan that was tuned in the engine, unless it is plain decoding; else the task's best plan."""
    with suppress(LayerSetNotFound):
        plan = store.lookup(name.model, name.task, alias=engine)
        if plan.plan.method != "plain":
            return plan
        note(f"note: in {engine} nothing was faster than plain decoding (version {plan.version})")
    return store.lookup(name.model, name.task)


# --- tune in an engine


def server_of(text: str) -> tuple[str, str]:
    """Return name and URL of NAME=URL.

    Raises: ValueError: the text has another form.
    """
    name, equals, url = text.partition("=")
    parts = urlsplit(url)
    if not name or not equals or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{text!r} is not NAME=URL, for example plain=http://127.0.0.1:8000")
    return name, url


engine_options = commands.together(
    option(
        commands.ENGINES,
        "--engine",
        metavar="NAME",
        type=click.Choice(ENGINES),
        help=f"Tune another engine by running the kinds of drafts that it supports. One of {', '.join(ENGINES)}.",
    ),
    option(
        commands.ENGINES,
        "--engine-url",
        "engine_urls",
        type=value_types.Parsed("NAME=URL", server_of),
        multiple=True,
        help="Use a running server of it; plain=URL first; repeatable.  [default: install and start the engine]",
    ),
)


def tune_engine(pictures: Pictures, values: Mapping[str, Any]) -> Result | None:
    """Tune another engine for the stream; return None if --engine names none.

    Raises: SwiftoptError: as in `EngineTuning.run`.
    """
    if values["engine"] is None:
        if values["engine_urls"]:
            raise InvalidInput("--engine-url is for another engine: add --engine")
        return None
    servers = tuple(values["engine_urls"])
    names = [name for name, _ in servers]
    if servers and (len(servers) < 2 or names[0] != "plain" or len(set(names)) < len(names)):
        raise InvalidInput(
            "--engine-url compares servers: give the plain one first, as plain=URL, and then at least one other with"
            " another name"
        )
    if servers and values["draft_model"]:
        raise InvalidInput("--draft-model is for engines that swiftopt starts: remove it, or remove --engine-url")
    applicable = ENGINE_OPTIONS if servers else (*ENGINE_OPTIONS, "device")
    for param in click.get_current_context().command.params:
        if param.name not in applicable and inputs.on_command_line(param.name or ""):
            flag, engine = param.opts[0], values["engine"]
            note(f"warning: {flag} has no effect with --engine, which runs {engine} itself, greedily")
    prompts = options.prompts_of(values["stream"], values["task"], values["limit"], values["form"])
    for model in filter(None, (values["model"], values["draft_model"])):
        check_names(model, values["dtype"], values["device"])

    from .packages import check_tunable

    check_tunable(values["engine"], bool(servers), prompts)

    from .tuning import EngineTuneRequest, EngineTuning

    request = pick(EngineTuneRequest, {**values, "servers": servers})
    with inputs.open_store(values["db"]) as store:
        tuned = EngineTuning(request, store, note).run(prompts)
    tasks = [{**asdict(task), "found": task.found.to_json()} for task in tuned]
    value = {"schema": "swiftopt.tune-engine/1", "model": request.model, "engine": request.engine, "tasks": tasks}
    shown = [part for task in tuned for part in tuned_view(request.model, request.engine, task)]
    return Result(value, shown)


def tuned_view(model: str, engine: str, tuned: EngineTuned) -> list[RenderableType]:
    """Return the table of the variants tried for a task, the reasons why some failed, and the verdict."""
    columns = [folding("way"), folding("step"), *map(numeric, ("tok/s", "ratio", "acceptance")), folding("equal")]
    rows = []
    for variant in tuned.tried:
        figures = (number(variant.tok_s, 1), number(variant.ratio, unit="x"), number(variant.acceptance))
        equal = "not run" if variant.tok_s is None else f"{variant.equal}/{variant.n_prompts}"
        rows.append((variant.name, STEPS[variant.step], *figures, equal))
    failures = [f"{variant.name}: {variant.reason}" for variant in tuned.tried if variant.tok_s is None]
    verdict, plan = tuned.verdict, tuned.found
    chosen = tuned.way if verdict.word == "use" else "plain"
    lines = [
        f"{engine}, task {tuned.task}: decode with {chosen}{_ratio_words(verdict)}; {verdict.reason}",
        f"Stored as version {plan.version}.",
    ]
    if verdict.word == "use" and plan.plan.settings.get("drafts") is not None:
        name = shlex.quote(f"{model}/{tuned.task}")
        lines.append(f"Its files: swiftopt export {name} --to {engine} --version {plan.version} --out FOLDER")
    title = f"{model} in {engine}, task {tuned.task}"
    return [table(columns, rows, title=title), *failures, *lines]


def _ratio_words(verdict: Verdict) -> str:
    return "" if verdict.ratio is None else f", {verdict.ratio:.2f}x plain ({interval(verdict.interval)})"


# --- import


@commands.command("import", short_help="Store the result of an engine's own benchmark.")
@options.model_task
@click.option("--plain", type=PATH, required=True, help="Benchmark file of plain decoding.")
@click.option("--drafted", type=PATH, required=True, help="Benchmark file of the same requests with the plan.")
@click.option("--exported", type=value_types.FOLDER, help="Exported folder that the engine ran with.")
@click.option("--engine", type=click.Choice(ENGINES), help="The engine, if it did not run an exported plan.")
@click.option("--settings", type=PATH, help="The engine's settings in that case, a JSON file.")
@click.option("--device", "device_name", help="Device of the benchmark, for example 'NVIDIA H200'.")
@click.option("--dtype", "run_dtype", help="Dtype of the benchmark, for example bfloat16.")
@options.store_and_json
@commands.example("import smollm2-135m/notes --exported notes-vllm --plain plain.json --drafted drafted.json")
def import_(
    name: ModelTask,
    plain: Path,
    drafted: Path,
    exported: str | None,
    engine: str | None,
    settings: Path | None,
    device_name: str | None,
    run_dtype: str | None,
    store: Store,
) -> Result:
    """Store the verdict of another engine's own benchmark on a plan of MODEL/TASK, as a version for that engine.

    The benchmark files are results of `vllm bench serve --save-result --save-detailed`, or answers of llama.cpp's
    server with their `timings`, one per line. Both have the same requests in the same order.
    """
    plan = _plan_that_ran(store, name, exported, engine, settings)

    from .evidence import import_evidence

    plan = replace(plan, device=device_name, dtype=run_dtype)
    stored, verdict, run = import_evidence(store, name.model, name.task, plan, plain, drafted)
    acceptance = None if run.acceptance is None else round(run.acceptance, 4)
    value = {"schema": "swiftopt.import/1", "engine": plan.engine, "requests": len(run.timed), "acceptance": acceptance}
    result = f"{verdict.word}{_ratio_words(verdict)}"
    text = f"{name} version {stored.version}, for {plan.engine}: {result} on {len(run.timed)} requests"
    return Result({**value, "verdict": asdict(verdict), "found": stored.to_json()}, [text])


def _plan_that_ran(
    store: Store, name: ModelTask, exported: str | None, engine: str | None, settings: Path | None
) -> Plan:
    """Return the plan that a benchmark ran with: of an exported folder, or of an engine's settings.

    Raises: InvalidInput: neither or both are given, or a file is not what it should be.
    """
    if (exported is None) == (engine is None):
        raise InvalidInput(
            "it is unknown what was benchmarked: use --exported FOLDER, or --engine with --settings FILE"
        )
    if exported is None:
        engine_settings = {} if settings is None else read_object(settings, "an engine's settings")
        method, spec_type = engine_settings.get("method"), str(engine_settings.get("spec-type", ""))
        is_text = method == "ngram" or spec_type.startswith("ngram")
        return Plan("prompt-lookup" if is_text else "spd", settings=engine_settings, engine=engine)
    if settings is not None:
        raise InvalidInput("--exported contains the settings: remove --settings")
    summary_file = Path(exported) / EXPORT_SUMMARY
    summary = read_object(summary_file, "an exported plan")
    if summary.get("schema") != EXPORT_SCHEMA or summary.get("engine") not in ENGINES:
        raise InvalidInput(f"{summary_file} is not an exported plan: use a folder that `swiftopt export` wrote")
    kind, record = summary.get("kind"), None
    if kind == "draft":
        record = store.plan(name.model, name.task, int(summary.get("version") or 0)).plan.layer_set
    drafts = {"drafts": kind if record is None else "layers", "draft_tokens": summary.get("draft_tokens")}
    return Plan("prompt-lookup" if kind == "text" else "spd", record, drafts, engine=str(summary["engine"]))


# --- benchmark


def _counts(text: str, least: int) -> tuple[int, ...]:
    """Return the numbers of N,N.

    Raises: ValueError: the text has another form, or a number is below `least`.
    """
    counts = tuple(int(word) for word in text.split(",") if word.strip().isdecimal())
    if len(counts) != len(text.split(",")) or min(counts) < least:
        raise ValueError(f"{text!r} is not a list of numbers from {least} on: use for example 1,4,8")
    return counts


@commands.command(
    short_help="swiftopt and other engines on the same prompts, or on one GGUF file.",
    common="model stream task limit max_new_tokens words ggufs depths at_once base exported png db as_json",
)
@option(commands.MACHINE, "--model", type=value_types.MODEL, help=f"{options.MODEL_HELP} Not needed with --gguf.")
@option(commands.PROMPTS, "--stream", type=value_types.FILE, help=options.STREAM_HELP)
@options.task("plan", "Task whose stored plan swiftopt/best uses.  [default: each prompt's task]", commands.PROMPTS)
@options.limit
@options.form
@measurement("--peers", "words", default="all", help="Engines, or rows such as llama-cpp/plain.")
@measurement(
    "--gguf",
    "ggufs",
    multiple=True,
    type=PATH,
    help="Without --model: the file that swiftopt, llama.cpp and ik_llama.cpp run. With --model: a further file of this"
    " model for llama.cpp; repeatable.",
)
@measurement(
    "--depths",
    type=value_types.Parsed("N,N", lambda text: _counts(text, 0)),
    default="0,2000,8000",
    help="Without --model: prompt lengths in tokens.",
)
@measurement(
    "--at-once",
    type=value_types.Parsed("N,N", lambda text: _counts(text, 1)),
    default="1,4,8",
    help="Without --model: numbers of concurrent requests.",
)
@measurement(
    "--assistant",
    metavar="MODEL",
    type=value_types.MODEL,
    help="Smaller draft model for transformers/assisted.",
)
@measurement(
    "--exported",
    multiple=True,
    type=value_types.FOLDER,
    help="Folder of `swiftopt export`, which adds a row of its engine; repeatable.",
)
@measurement("--base", metavar="ROW", help="Base row of the ratios.  [default: llama.cpp's faster plain row]")
@measurement("--threads", type=positive, help="Threads of each engine.  [default: number of cores]")
@measurement("--timeout", "timeout_s", type=positive, default=600, help="Time limit of an answer in seconds.")
@commands.from_field(
    commands.MACHINE,
    GenerateRequest,
    "dtype",
    "auto (as stored) or another dtype, for engines with that option.",
    type=click.Choice(DTYPES),
)
@options.shared(GenerateRequest, "device", "max_new_tokens", "speed")
@options.pictures("Draw the ratios as a bar chart.")
@options.db_and_json
@commands.example(
    "bench peers --model smollm2-135m --stream prompts.jsonl --limit 6 --peers swiftopt,llama-cpp",
    "bench peers --gguf model-Q4_K_M.gguf --depths 0,2000 --at-once 1,4",
)
def peers(
    model: str | None,
    stream: str | None,
    limit: int | None,
    form: StreamForm,
    words: str,
    ggufs: tuple[Path, ...],
    depths: tuple[int, ...],
    at_once: tuple[int, ...],
    assistant: str | None,
    exported: tuple[str, ...],
    base: str | None,
    threads: int | None,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Decode every prompt greedily with swiftopt and other engines, which take turns, each row in its own process.

    The engines are installed once in the user's cache, and GGUF files are created there from the model's own weights.
    If an engine cannot be installed or fails, its row shows the reason. All engines run on one device, by default the
    one on which swiftopt would load the model; on a GPU each engine's CUDA build runs. All rows get the same token ids,
    number of threads and number of new tokens; stop tokens are ignored. `equal to` counts the prompts on which a row
    with drafts has the tokens of its engine's plain row, and other rows those of swiftopt/plain. `swiftopt/best` is the
    stored plan, or adaptive drafts if there is none. Ctrl-C shows the results for the prompts that all rows have
    answered.

    With --gguf but without --model, engines that read GGUF run this file unchanged and take turns: with each prompt
    length of --depths and each number of concurrent requests of --at-once, in new processes each time. The seconds from
    the start of a process until its first token are measured with the file on disk (cold) and in memory (warm).
    """
    names = words.split(",")
    if ggufs and model is None:
        return _same_file(names, ggufs, {**values, "depths": depths, "at_once": at_once, "threads": threads, "db": db})
    for flag, value in (("--model", model), ("--stream", stream)):
        if value is None:
            raise click.UsageError(f"Missing option '{flag}'.")
    assert stream is not None
    prompts = options.prompts_of(stream, values["task"], limit, form)
    values["model"] = model
    request = inputs.decoding_request(values, assistant)

    from .peers import all_rows, chosen_rows

    folders = tuple(map(Path, exported))
    rows = chosen_rows(names, all_rows(ggufs, Path(assistant) if assistant else None, folders))
    if base is not None:
        look_up("row", base, {row.name: row for row in rows})

    import torch

    from ..models.costs import device_name
    from ..models.sources import local_folder, resolve
    from .devices import chosen_device
    from .peers import report_of
    from .turns import Turns, TurnsRequest, questions_of

    folder = local_folder(resolve(request.model), StepNotes("load: "))
    assistant_folder = local_folder(resolve(assistant), StepNotes("load: ")) if assistant else None
    device = chosen_device(request.device, folder, request.dtype)
    overrides = {"folder": folder, "db": inputs.database_url(db) if db else None, "device": device}
    turns_request = pick(TurnsRequest, {**values, **({"threads": threads} if threads else {}), **overrides})
    questions = questions_of(folder, prompts, request.max_new_tokens)
    bench = Turns(turns_request, questions, chosen_rows(names, all_rows(ggufs, assistant_folder, folders)), note)
    bench.run()
    machine = device_name(torch.device(device))
    report = report_of(turns_request, bench.runs, bench.questions, machine, base, bench.interrupted)
    pictures.draw(draw_ratios, report)
    return Result(report, peers_view(report), interrupted=bench.interrupted)


def _same_file(names: Sequence[str], ggufs: Sequence[Path], values: Mapping[str, Any]) -> Result:
    if len(ggufs) > 1:
        raise InvalidInput("without --model one file is measured: use one --gguf, or add the --model of all files")
    for param in click.get_current_context().command.params:
        if param.name not in SAME_FILE_OPTIONS and inputs.on_command_line(param.name or ""):
            note(f"warning: {param.opts[0]} has no effect without --model")

    from .peers import chosen_rows
    from .same_file import SameFile, SameFileRequest, file_rows, same_file_view

    rows = chosen_rows(names, file_rows())
    settings = {name: values[name] for name in ("depths", "at_once", "max_new_tokens", "timeout_s", "speed")}
    threads = {"threads": values["threads"]} if values["threads"] else {}
    db = inputs.database_url(values["db"]) if values["db"] else None
    bench = SameFile(SameFileRequest(str(ggufs[0]), db=db, **settings, **threads), rows, note)
    bench.run()

    import torch

    from ..models.costs import device_name

    report = bench.report(device_name(torch.device("cpu")))
    return Result(report, same_file_view(report), interrupted=report["interrupted"])


def peers_view(report: Mapping[str, Any]) -> list[RenderableType]:
    """Return the table of the rows, and below it the reasons why rows were not run."""
    from .peers import equal_to

    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    caption = (
        f"decode: tok/s after the first token; ratio: to {report['base']}; accepted: share of the drafted tokens;"
        " equal to: row with the same tokens, and on how many prompts."
        " Engines round differently; with other weights, the tokens are those of another model."
    )
    rows = []
    failures: dict[str, list[str]] = {}  # Names of the rows without numbers, by reason.
    for result in report["results"]:
        memory = result.get("peak_bytes")
        figures = (
            number(result["tok_s"], 1),
            number(result.get("decode_tok_s"), 1),
            number(result.get("ratio"), unit="x"),
            interval(result.get("ratio_interval")),
            number(result.get("acceptance")),
            number(memory and memory / 1e9, 1, " GB"),
        )
        if result["tok_s"] is None:
            failures.setdefault(result["reason"], []).append(result["row"])
        equal = equal_to(result) if result["tok_s"] else f"not run ({list(failures).index(result['reason']) + 1})"
        rows.append((result["row"], *figures, equal))
    footnotes = [f"({n}) {', '.join(names)}: {reason}" for n, (reason, names) in enumerate(failures.items(), start=1)]
    headings = ("tok/s", "decode", "ratio", "95 %", "accepted", "memory")
    columns = [folding("row"), *map(numeric, headings), folding("equal to")]
    return [table(columns, rows, title=title), *map(Text, (caption, *footnotes))]
