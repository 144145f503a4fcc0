"""Other engines: `swiftopt tune --engine`, and `swiftopt import` of what an engine's own benchmark measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from rich.console import RenderableType

from ..core.errors import InvalidInput
from ..core.records import Plan
from ..core.settings import ENGINES
from ..core.streams import read_stream
from ..models.sources import check_names
from . import options
from .options import ModelTask, on_command_line, open_store
from .output import Result, note
from .render import folding, interval, number, numeric, table

if TYPE_CHECKING:
    from ..engines.tuning import EngineTuned
    from ..store import Store

# Options of `tune` that it obeys with --engine, too.
USED = (
    *("model", "stream", "task", "limit", "max_new_tokens", "dtype", "threads", "db", "as_json"),
    *("engine", "engine_urls", "draft_model"),
)
STEPS = {1: "kinds", 2: "lengths", 3: "held out"}


def server_of(text: str) -> tuple[str, str]:
    """Read NAME=URL.

    Raises: ValueError: it is not that.
    """
    name, equals, url = text.partition("=")
    parts = urlsplit(url)
    if not name or not equals or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{text!r} is not NAME=URL, for example plain=http://127.0.0.1:8000")
    return name, url


def tune_engine(values: Mapping[str, Any]) -> Result:
    """Tune another engine for the stream, with the options of `tune` that it has a use for.

    Raises: SwiftoptError: as `EngineTuning.run`.
    """
    servers = tuple(values["engine_urls"])
    names = [name for name, _ in servers]
    if servers and (len(servers) < 2 or names[0] != "plain" or len(set(names)) < len(names)):
        raise InvalidInput(
            "--engine-url compares servers: name the plain one first, as plain=URL, and one or more others by names of"
            " their own"
        )
    if servers and values["draft_model"]:
        raise InvalidInput("--draft-model is for engines that swiftopt starts: leave it out with --engine-url")
    flags = {param.name: param.opts[0] for param in click.get_current_context().command.params}
    for name in flags:
        if name not in USED and on_command_line(name or ""):
            note(f"warning: {flags[name]} has no effect with --engine, which runs {values['engine']} itself, greedily")
    prompts = read_stream(values["stream"], values["task"], values["limit"], values["form"])
    check_names(values["model"], values["dtype"], "cpu")

    from ..engines.tuning import EngineTuneRequest, EngineTuning

    request = EngineTuneRequest(
        values["model"],
        values["engine"],
        values["dtype"],
        values["max_new_tokens"],
        values["draft_model"],
        servers,
    )
    with open_store(values["db"]) as store:
        tuned = EngineTuning(request, store, note).run(prompts)
    tasks = [{**asdict(each), "found": each.found.to_json()} for each in tuned]
    value = {"schema": "swiftopt.tune-engine/1", "model": request.model, "engine": request.engine, "tasks": tasks}
    shown = [part for each in tuned for part in tuned_view(request.model, request.engine, each)]
    return Result(value, shown)


def tuned_view(model: str, engine: str, tuned: EngineTuned) -> list[RenderableType]:
    """Return the table of what was tried, the verdict, and what to do with it."""
    columns = [folding("way"), folding("step"), *map(numeric, ("tok/s", "ratio", "acceptance")), folding("equal")]
    rows, failed = [], []
    for each in tuned.tried:
        if each.tok_s is None:
            rows.append((each.name, STEPS[each.step], "–", "–", "–", "not run"))
            failed.append(f"{each.name}: {each.reason}")
            continue
        equal = f"{each.equal}/{each.n_prompts}"
        figures = (number(each.tok_s, 1), number(each.ratio, unit="x"), number(each.acceptance))
        rows.append((each.name, STEPS[each.step], *figures, equal))
    verdict, found = tuned.verdict, tuned.found
    ratio = "" if verdict.ratio is None else f", {verdict.ratio:.2f}x plain ({interval(verdict.interval)})"
    chosen = tuned.way if verdict.word == "use" else "plain"
    lines = [
        f"{engine}, task {tuned.task}: decode with {chosen}{ratio}; {verdict.reason}",
        f"Stored as version {found.version}.",
    ]
    if verdict.word == "use" and found.plan.settings.get("drafts") is not None:
        place = f"{model}/{tuned.task}"
        lines.append(f"Its files: swiftopt export {place} --to {engine} --version {found.version} --out FOLDER")
    title = f"{model} in {engine}, task {tuned.task}"
    return [table(columns, rows, title=title, title_justify="left"), *failed, *lines]


@options.command("import", short_help="Store what an engine's own benchmark measured.")
@options.model_task
@click.option(
    "--plain",
    type=Path,
    metavar="FILE",
    shell_complete=options.files,
    required=True,
    help="The benchmark of plain decoding.",
)
@click.option(
    "--drafted",
    type=Path,
    metavar="FILE",
    shell_complete=options.files,
    required=True,
    help="The same requests with the plan.",
)
@click.option(
    "--exported",
    type=Path,
    metavar="FOLDER",
    shell_complete=options.folders,
    help="What was run: a folder that `export` wrote.",
)
@click.option("--engine", type=click.Choice(ENGINES), help="The engine, where what was run is no exported plan.")
@click.option(
    "--settings",
    type=Path,
    metavar="FILE",
    shell_complete=options.files,
    help="The engine's settings then, as a JSON object.",
)
@click.option("--device", "device_name", help="The machine of the benchmark, for example 'NVIDIA H200'.")
@click.option("--dtype", "run_dtype", help="What the engine computed in, for example bfloat16.")
@options.store
@options.json
@options.example("import smollm2-135m/notes --exported notes-vllm --plain plain.json --drafted drafted.json")
def import_(
    name: ModelTask,
    plain: Path,
    drafted: Path,
    exported: Path | None,
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

    from ..engines.evidence import import_evidence

    plan = replace(plan, device=device_name, dtype=run_dtype)
    found, verdict, run = import_evidence(store, name.model, name.task, plan, plain, drafted)
    acceptance = None if run.acceptance is None else round(run.acceptance, 4)
    value = {"schema": "swiftopt.import/1", "engine": plan.engine, "requests": len(run.timed), "acceptance": acceptance}
    ratio = "" if verdict.ratio is None else f", {verdict.ratio:.2f}x plain ({interval(verdict.interval)})"
    text = f"{name} version {found.version}, for {plan.engine}: {verdict.word}{ratio} on {len(run.timed)} requests"
    return Result({**value, "verdict": asdict(verdict), "found": found.to_json()}, [text])


def _plan_that_ran(
    store: Store, name: ModelTask, exported: Path | None, engine: str | None, settings: Path | None
) -> Plan:
    """Return the plan that a benchmark ran with, of an exported folder or of an engine's settings.

    Raises: InvalidInput: neither is given, or both are, or a file is not what it should be.
    """
    if (exported is None) == (engine is None):
        raise InvalidInput("say what was benchmarked: --exported FOLDER, or --engine with --settings FILE")
    if exported is None:
        own = {} if settings is None else _object(settings)
        text = own.get("method") == "ngram" or str(own.get("spec-type", "")).startswith("ngram")
        return Plan("prompt-lookup" if text else "spd", settings=own, engine=engine)
    if settings is not None:
        raise InvalidInput("--exported has the settings in it: leave out --settings")
    about = _object(exported / "export.json")
    if about.get("schema") != "swiftopt.export/1" or about.get("engine") not in ENGINES:
        raise InvalidInput(
            f"{exported / 'export.json'} is no exported plan: name a folder that `swiftopt export` wrote"
        )
    record = None
    if about.get("kind") == "draft":
        record = store.plan(name.model, name.task, int(about.get("version") or 0)).plan.layer_set
    kept = {"drafts": "layers" if record is not None else about.get("kind"), "draft_tokens": about.get("draft_tokens")}
    return Plan("prompt-lookup" if about.get("kind") == "text" else "spd", record, kept, engine=str(about["engine"]))


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON ({error}): give one object") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} holds no JSON object: give one")
    return found
