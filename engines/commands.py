"""Other engines: `swiftopt export`, `tune --engine`, `import` of their own benchmarks, and `bench peers`."""

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

# Options of `tune` that also apply with --engine. --device is added unless servers run already.
USED = (
    *("model", "stream", "task", "limit", "max_new_tokens", "dtype", "threads", "db", "as_json"),
    *("engine", "engine_urls", "draft_model"),
)
STEPS = {1: "kinds", 2: "lengths", 3: "held out"}
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Options of `bench peers` that apply with --gguf and no --model.
SAME_FILE = ("ggufs", "depths", "at_once", "words", "max_new_tokens", "threads", "timeout_s", "speed", "db", "as_json")


# --- export


@commands.command(short_help="Export a plan for another engine.")
@options.model_task
@click.option("--to", "engine", type=click.Choice(ENGINES), required=True, help="The engine.")
@click.option("--out", type=value_types.FOLDER, required=True, help="New folder to write.")
@options.version
@click.option(
    "--stream",
    type=value_types.FILE,
    help="Prompts for measuring the draft's acceptance with its own keys and values, which then decides.",
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

    made = export_plan(plan, name.model, engine, Path(out), store, StepNotes("load: "), prompts)
    layer_set = None if made.layer_set is None else made.layer_set.to_json()
    figures = {"kind": made.kind, "draft_tokens": made.n_draft_tokens, "layer_set": layer_set}
    value = {"schema": EXPORT_SCHEMA, "engine": engine, "out": out, **figures, "files": list(made.files)}
    text = f"{out}: {len(made.files)} files for {engine}; {Path(out) / 'README.md'} explains how to run them"
    return Result({**value, "remarks": list(made.remarks)}, [text], [f"note: {remark}" for remark in made.remarks])


def _to_export(store: Store, name: ModelTask, engine: str) -> FoundPlan:
    """Return the plan that was tuned in the engine, or else the best one."""
    with suppress(LayerSetNotFound):
        plan = store.lookup(name.model, name.task, alias=engine)
        if plan.plan.method != "plain":
            return plan
        note(f"note: in {engine} nothing was faster than plain decoding (version {plan.version})")
    return store.lookup(name.model, name.task)


# --- tune in an engine


def server_of(text: str) -> tuple[str, str]:
    """Read NAME=URL.

    Raises: ValueError: it is not that.
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
        help=f"Tune another engine by running the drafts that it supports. One of {', '.join(ENGINES)}.",
    ),
    option(
        commands.ENGINES,
        "--engine-url",
        "engine_urls",
        type=value_types.Parsed("NAME=URL", server_of),
        multiple=True,
        help="Use a running server of it; plain=URL first; repeatable.  [default: install and start it]",
    ),
)


def tune_engine(pictures: Pictures, values: Mapping[str, Any]) -> Result | None:
    """Tune another engine for the stream, if one is named, with the options of `tune` that apply to it.

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
    used = USED if servers else (*USED, "device")
    for param in click.get_current_context().command.params:
        if param.name not in used and inputs.on_command_line(param.name or ""):
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
    columns = [folding("way"), folding("step"), *map(numeric, ("tok/s", "ratio", "acceptance")), folding("equal")]
    rows = []
    for way in tuned.tried:
        figures = (number(way.tok_s, 1), number(way.ratio, unit="x"), number(way.acceptance))
        equal = "not run" if way.tok_s is None else f"{way.equal}/{way.n_prompts}"
        rows.append((way.name, STEPS[way.step], *figures, equal))
    failed = [f"{way.name}: {way.reason}" for way in tuned.tried if way.tok_s is None]
    verdict, plan = tuned.verdict, tuned.found
    chosen = tuned.way if verdict.word == "use" else "plain"
    lines = [
        f"{engine}, task {tuned.task}: decode with {chosen}{_beside_plain(verdict)}; {verdict.reason}",
        f"Stored as version {plan.version}.",
    ]
    if verdict.word == "use" and plan.plan.settings.get("drafts") is not None:
        place = shlex.quote(f"{model}/{tuned.task}")
        lines.append(f"Its files: swiftopt export {place} --to {engine} --version {plan.version} --out FOLDER")
    title = f"{model} in {engine}, task {tuned.task}"
    return [table(columns, rows, title=title), *failed, *lines]


def _beside_plain(verdict: Verdict) -> str:
    return "" if verdict.ratio is None else f", {verdict.ratio:.2f}x plain ({interval(verdict.interval)})"


# --- import


@commands.command("import", short_help="Store the result of an engine's own benchmark.")
@options.model_task
@click.option("--plain", type=PATH, required=True, help="Benchmark file of plain decoding.")
@click.option("--drafted", type=PATH, required=True, help="Benchmark file of the same requests with the plan.")
@click.option("--exported", type=value_types.FOLDER, help="The exported folder that was run.")
@click.option("--engine", type=click.Choice(ENGINES), help="The engine, if no exported plan was run.")
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

    FILEs are results of `vllm bench serve --save-result --save-detailed`, or answers of llama.cpp's server with their
    `timings`, one per line: the same requests in the same order, plain and with the plan.
    """
    plan = _plan_that_ran(store, name, exported, engine, settings)

    from .evidence import import_evidence

    plan = replace(plan, device=device_name, dtype=run_dtype)
    stored, verdict, run = import_evidence(store, name.model, name.task, plan, plain, drafted)
    acceptance = None if run.acceptance is None else round(run.acceptance, 4)
    value = {"schema": "swiftopt.import/1", "engine": plan.engine, "requests": len(run.timed), "acceptance": acceptance}
    what = f"{verdict.word}{_beside_plain(verdict)}"
    text = f"{name} version {stored.version}, for {plan.engine}: {what} on {len(run.timed)} requests"
    return Result({**value, "verdict": asdict(verdict), "found": stored.to_json()}, [text])


def _plan_that_ran(
    store: Store, name: ModelTask, exported: str | None, engine: str | None, settings: Path | None
) -> Plan:
    """Return the plan that a benchmark ran with, of an exported folder or of an engine's settings.

    Raises: InvalidInput: neither is given, or both are, or a file is not what it should be.
    """
    if (exported is None) == (engine is None):
        raise InvalidInput(
            "it is unknown what was benchmarked: use --exported FOLDER, or --engine with --settings FILE"
        )
    if exported is None:
        chosen = {} if settings is None else read_object(settings, "an engine's settings")
        text = chosen.get("method") == "ngram" or str(chosen.get("spec-type", "")).startswith("ngram")
        return Plan("prompt-lookup" if text else "spd", settings=chosen, engine=engine)
    if settings is not None:
        raise InvalidInput("--exported contains the settings: remove --settings")
    about_file = Path(exported) / EXPORT_SUMMARY
    about = read_object(about_file, "an exported plan")
    if about.get("schema") != EXPORT_SCHEMA or about.get("engine") not in ENGINES:
        raise InvalidInput(f"{about_file} is not an exported plan: use a folder that `swiftopt export` wrote")
    record = None
    if about.get("kind") == "draft":
        record = store.plan(name.model, name.task, int(about.get("version") or 0)).plan.layer_set
    kept = {"drafts": "layers" if record is not None else about.get("kind"), "draft_tokens": about.get("draft_tokens")}
    return Plan("prompt-lookup" if about.get("kind") == "text" else "spd", record, kept, engine=str(about["engine"]))


# --- benchmark


def _counts(text: str, least: int) -> tuple[int, ...]:
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
@options.task("plan", "Whose stored plan swiftopt/best uses.  [default: each prompt's own task]", commands.PROMPTS)
@options.limit
@options.form
@measurement("--peers", "words", default="all", help="Engines, or rows such as llama-cpp/plain.")
@measurement(
    "--gguf",
    "ggufs",
    multiple=True,
    type=PATH,
    help="Without --model: the file that swiftopt, llama.cpp and ik_llama.cpp run. With --model: another file of this"
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
    help="Folder of `swiftopt export`, for a row of its engine; repeatable.",
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
    """Decode every prompt with swiftopt and other engines alternately, each row in its own process, greedily.

    The engines are installed once in the user's cache, and GGUF files are created there from the model's own weights.
    An engine that cannot be installed or fails has a row with the reason. All run on one device, by default the one on
    which swiftopt would load the model; on a GPU each engine's CUDA build runs. All rows get the same token ids,
    threads and number of new tokens; stop tokens are ignored. `equal to` counts the prompts on which a row with drafts
    gives the plain tokens of its own engine, and other rows those of swiftopt/plain. `swiftopt/best` is the stored
    plan, or adaptive drafts if there is none. Ctrl-C shows the prompts that all rows have answered.

    With --gguf and no --model, engines that read GGUF run that file unchanged, alternately: with each prompt length of
    --depths and each number of concurrent requests of --at-once, every cell in new processes. The seconds from a
    process's start to its first token are measured with the file on disk (cold) and in memory (warm).
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
    chosen = chosen_rows(names, all_rows(ggufs, Path(assistant) if assistant else None, folders))
    if base is not None:
        look_up("row", base, {row.name: row for row in chosen})

    import torch

    from ..models.costs import device_name
    from ..models.sources import local_folder, resolve
    from .devices import chosen_device
    from .peers import report_of
    from .turns import Turns, TurnsRequest, questions_of

    folder = local_folder(resolve(request.model), StepNotes("load: "))
    drafting = local_folder(resolve(assistant), StepNotes("load: ")) if assistant else None
    given = {"threads": threads} if threads else {}
    places = {"folder": folder, "db": inputs.database_url(db) if db else None}
    device = chosen_device(request.device, folder, request.dtype)
    common = pick(TurnsRequest, {**values, **given, **places, "device": device})
    questions = questions_of(folder, prompts, request.max_new_tokens)
    bench = Turns(common, questions, chosen_rows(names, all_rows(ggufs, drafting, folders)), note)
    bench.run()
    machine = device_name(torch.device(device))
    report = report_of(common, bench.runs, bench.questions, machine, base, bench.interrupted)
    pictures.draw(draw_ratios, report)
    return Result(report, peers_view(report), interrupted=bench.interrupted)


def _same_file(names: Sequence[str], ggufs: Sequence[Path], values: Mapping[str, Any]) -> Result:
    if len(ggufs) > 1:
        raise InvalidInput("without --model one file is measured: use one --gguf, or add the --model of all files")
    for param in click.get_current_context().command.params:
        if param.name not in SAME_FILE and inputs.on_command_line(param.name or ""):
            note(f"warning: {param.opts[0]} has no effect without --model")

    from .peers import chosen_rows
    from .same_file import SameFile, SameFileRequest, file_rows, same_file_view

    rows = chosen_rows(names, file_rows())
    given = {name: values[name] for name in ("threads",) if values[name]}
    kept = {name: values[name] for name in ("depths", "at_once", "max_new_tokens", "timeout_s", "speed")}
    db = inputs.database_url(values["db"]) if values["db"] else None
    bench = SameFile(SameFileRequest(str(ggufs[0]), db=db, **kept, **given), rows, note)
    bench.run()

    import torch

    from ..models.costs import device_name

    report = bench.report(device_name(torch.device("cpu")))
    return Result(report, same_file_view(report), interrupted=report["interrupted"])


def peers_view(report: Mapping[str, Any]) -> list[RenderableType]:
    """Return the table of the rows, and under it why others have no numbers."""
    from .peers import equal_to

    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    caption = (
        f"decode: tok/s after the first token; ratio: to {report['base']}; accepted: of the drafted tokens;"
        " equal to: whose tokens on how many prompts."
        " Engines round differently; rows of other weights are another model's answers."
    )
    rows = []
    failed: dict[str, list[str]] = {}  # Names of the rows without numbers, by reason.
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
            failed.setdefault(result["reason"], []).append(result["row"])
        equal = equal_to(result) if result["tok_s"] else f"not run ({list(failed).index(result['reason']) + 1})"
        rows.append((result["row"], *figures, equal))
    footnotes = [f"({n}) {', '.join(names)}: {reason}" for n, (reason, names) in enumerate(failed.items(), start=1)]
    headings = ("tok/s", "decode", "ratio", "95 %", "accepted", "memory")
    columns = [folding("row"), *map(numeric, headings), folding("equal to")]
    return [table(columns, rows, title=title), *map(Text, (caption, *footnotes))]
