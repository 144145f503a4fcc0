"""`swiftopt layers`, `export` and `models`: look at what is stored, search a layer set offline, choose, move it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Table

from ..core.errors import InvalidInput, LayerSetNotFound
from ..core.records import FoundPlan, LayerSetRecord, ModelInfo
from ..core.requests import GenerateRequest
from ..core.settings import ENGINES
from ..core.streams import StreamForm, read_stream
from ..core.types import Sampling, check_task
from ..models.sources import ALIASES, find_alias
from . import options
from .charts import Pictures, draw_layer_sets
from .options import ConfiguredGroup, ModelTask, decoding_request, open_store, positive
from .output import Result, console, note, note_load, write_text
from .render import fixed, folding, layer_map, numeric, record_view, records_table, size, table

if TYPE_CHECKING:
    from ..store import Store

TRIAL_FIGURES = ("step", "origin", "matchness", "score", "adopted")  # of a trial, in --json

version_option = click.option("--version", type=positive, help="A version.  [default: the best one]")


@click.group(cls=ConfiguredGroup, short_help="Show, choose, export and import layer sets.")
@options.example("layers list", "layers best smollm2-135m/notes --json")
def layers() -> None:
    """The stored layer sets: look at them, choose among them, export and import."""


@layers.command("list", short_help="List the stored layer sets.")
@click.option("--model", "of_model", shell_complete=options.models, help="Only this model's.")
@click.option("--task", "of_task", help="Only this task's.")
@options.store
@options.json
@options.example("layers list --model smollm2-135m")
def list_(of_model: str | None, of_task: str | None, store: Store) -> Result:
    """List the stored layer sets, newest first; * marks the best of its model, task, device and dtype."""
    records = [(record, _is_best(store, record)) for record in store.layer_sets(of_model, of_task)]
    sets = [{**record.to_json(), "best": best} for record, best in records]
    return Result(
        {"schema": "swiftopt.layers-list/1", "layer_sets": sets},
        [records_table(records, console().width)] if records else [],
        []
        if records
        else ["no layer set is stored yet: find one with `swiftopt tune --model M --stream FILE --task T`"],
    )


@layers.command(short_help="Show the best layer set of a task.")
@options.model_task
@click.option("--device", "device_name", help="As tuned on, for example 'NVIDIA H200'.  [default: any]")
@click.option("--dtype", "tuned_dtype", help="As tuned with, for example bfloat16.  [default: any]")
@options.alias
@options.store
@options.json
@options.example("layers best smollm2-135m/notes --json")
def best(name: ModelTask, device_name: str | None, tuned_dtype: str | None, alias: str, store: Store) -> Result:
    """Show the best layer set of MODEL/TASK; with --json exactly the object that export writes."""
    found = store.lookup(name.model, name.task, device_name, tuned_dtype, alias)
    record = _layer_set_of(found, name)
    return Result(record.to_json(), [record_view(record, (), console().width)])


@layers.command("show", short_help="Show a layer set, its map and its search.")
@options.model_task
@version_option
@options.pictures("Draw the layer map and the search to a file as well.")
@options.store
@options.json
@options.example("layers show smollm2-135m/notes --version 2 --png notes.png")
def show_(name: ModelTask, version: int | None, pictures: Pictures, store: Store) -> Result:
    """Show a layer set of MODEL/TASK with its map, its figures and the curve of the search that found it."""
    record = _find(store, name, version)
    trials = store.trials(record.job, record.task) if record.job else []
    if pictures:
        draw_layer_sets([(record, trials)], pictures)
    tried = []
    for trial in trials:
        parts = {"skip_attn": sorted(trial.layer_set.skip_attn), "skip_mlp": sorted(trial.layer_set.skip_mlp)}
        tried.append({**{name: getattr(trial, name) for name in TRIAL_FIGURES}, **parts})
    value = {"schema": "swiftopt.layers-show/1", "layer_set": record.to_json(), "trials": tried}
    return Result({**value, **pictures.to_json()}, [record_view(record, trials, console().width)])


@layers.command(short_help="Self-SD's offline search for a layer set.")
@options.model
@options.stream
@click.option("--task", help="Task to store the set under.  [default: the first prompt's own]")
@options.group(
    options.PROMPTS, click.option("--limit", type=positive, default=4, help="Prompts that each candidate decodes.")
)
@options.group(
    options.SEARCH, click.option("--max-steps", type=positive, default=200, help="Candidates to try at most.")
)
@options.group(
    options.SEARCH,
    click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Begin no candidate after this time."),
)
@options.form
@options.machine(GenerateRequest, "max_new_tokens")
@options.shared(Sampling, "seed")
@options.db
@options.json
@options.example(
    "layers search --model smollm2-135m --stream prompts.jsonl --task notes --minutes 10 --max-new-tokens 32"
)
def search(
    stream: str, form: StreamForm, limit: int, max_steps: int, minutes: float | None, db: str | None, **values: Any
) -> Result:
    """Bayesian optimisation over all sub-layers, each candidate by the tokens per second that Self-SD makes with it.

    The set is stored for the method self-sd; the best plan stays what it is until `swiftopt compare` finds it faster.
    """
    prompts = read_stream(stream, values["task"], limit, form)
    request = decoding_request(values)

    from ..tasks.recipes import search_offline

    def show_candidate(number: int, candidate: Any) -> None:
        skipped = candidate.layer_set.n_skipped
        note(f"candidate {number}: {skipped} sub-layers left out, {candidate.ratio:.2f}x plain decoding")

    max_s = float("inf") if minutes is None else 60 * minutes
    with open_store(db) as store:
        record, found = search_offline(request, prompts, store, max_steps, max_s, note_load, show_candidate)
    ratio, median, n_tried = found.best.ratio, found.typical_ratio, len(found.candidates)

    figures = {"candidates": n_tried, "ratio": ratio, "median_ratio": median}
    text = (
        f"{record.model}/{record.task} version {record.version}: {ratio:.2f}x plain decoding on the search's"
        f" own prompts, the best of {n_tried} candidates (median {median:.2f}x)"
    )
    return Result(
        {"schema": "swiftopt.layers-search/1", "layer_set": record.to_json(), **figures},
        [layer_map(record.layer_set, console().width), text],
    )


@layers.command("export", short_help="Write a layer set as JSON.")
@options.model_task
@version_option
@click.option("-o", "--out", metavar="FILE", shell_complete=options.files, help="Write to a file instead of stdout.")
@options.store
@options.as_json
@options.example("layers export smollm2-135m/notes -o notes.json")
def export_json(name: ModelTask, version: int | None, out: str | None, store: Store, as_json: bool) -> None:
    """Write a layer set of MODEL/TASK as one JSON object, which `import` and `generate --layer-set` read.

    --json puts the object on one line.
    """
    record = _find(store, name, version)
    text = json.dumps(record.to_json(), indent=None if as_json else 2)
    if out is None:
        click.echo(text)
    else:
        write_text(Path(out), text + "\n")
        note(f"written to {out}")


@layers.command("import", short_help="Store layer sets from a file.")
@click.argument("file", metavar="FILE", shell_complete=options.files)
@click.option(
    "--model", "as_model", shell_complete=options.models, help="Store it under this model; for a file with one set."
)
@click.option("--task", "as_task", help="Store it under this task; for a file with one set.")
@click.option("--n-layers", type=positive, help="Depth of a model that swiftopt does not know.")
@options.store
@options.json
@options.example("layers import skip_layers.json")
def import_(file: str, as_model: str | None, as_task: str | None, n_layers: int | None, store: Store) -> Result:
    """Store the layer sets of FILE: an exported one, or the skip_layers.json that SWIFT's authors published.

    A set becomes the best one where its model and task have none yet; `promote` changes that.
    """
    stored = [_add(store, record) for record in _imported(store, file, as_model, as_task, n_layers)]
    sets = [{**record.to_json(), "promoted": promoted} for record, promoted in stored]
    lines = [
        f"{record.model}/{record.task} version {record.version}"
        + ("" if promoted else ", not promoted: the best one stays what it was")
        for record, promoted in stored
    ]
    return Result({"schema": "swiftopt.layers-import/1", "layer_sets": sets}, lines)


@layers.command(short_help="Choose a version as the best one.")
@options.model_task
@click.option("--version", type=positive, required=True, help="The version to choose.")
@options.alias
@options.store
@options.json
@options.example("layers promote smollm2-135m/notes --version 2")
def promote(name: ModelTask, version: int, alias: str, store: Store) -> Result:
    """Choose a version of MODEL/TASK as the best one, for the device and dtype it was tuned or compared on."""
    return _moved("promote", name, store.promote(name.model, name.task, version, alias))


@layers.command(short_help="Take back the last choice.")
@options.model_task
@options.alias
@options.store
@options.json
@options.example("layers rollback smollm2-135m/notes")
def rollback(name: ModelTask, alias: str, store: Store) -> Result:
    """Take back the last choice for MODEL/TASK."""
    return _moved("rollback", name, store.rollback(name.model, name.task, alias))


# --- what the commands share


def _find(store: Store, name: ModelTask, version: int | None) -> LayerSetRecord:
    if version is not None:
        return store.layer_set(name.model, name.task, version)
    return _layer_set_of(store.lookup(name.model, name.task), name)


def _layer_set_of(found: FoundPlan, name: ModelTask) -> LayerSetRecord:
    """Return the layer set of a plan, with a remark where it is not quite what was asked for."""
    if found.fallback:
        note(f"note: {found.fallback}")
    if found.plan.layer_set is None:
        raise LayerSetNotFound(
            f"version {found.version} of {name} decodes with {found.plan.method} and has no layer set:"
            " `swiftopt layers list` shows those that are stored"
        )
    return found.plan.layer_set


def _is_best(store: Store, record: LayerSetRecord) -> bool:
    """Return whether look-ups for the device and dtype that it was tuned on find this set, in whatever plan."""
    try:
        found = store.lookup(record.fingerprint or record.model, record.task, record.device, record.dtype)
    except LayerSetNotFound:
        return False
    used = found.plan.layer_set
    return found.fallback is None and used is not None and (used.task, used.version) == (record.task, record.version)


def _imported(
    store: Store, file: str, as_model: str | None, as_task: str | None, n_layers: int | None
) -> list[LayerSetRecord]:
    """Read the layer sets of a file, under other names where they are given."""
    from ..core.records import import_file

    depths = {name: info.n_layers for info in store.models() for name in info.names}

    def depth_of(name: str) -> int | None:
        alias = find_alias(as_model or name)
        return n_layers or depths.get(as_model or name) or (alias.n_layers if alias else None)

    records = import_file(file, depth_of)
    if as_task is not None:
        check_task(as_task, "--task")
    if (as_model or as_task) and len(records) != 1:
        raise InvalidInput(f"{file} holds {len(records)} layer sets: leave --model and --task out to import them all")
    return [dataclasses.replace(r, model=as_model or r.model, task=as_task or r.task) for r in records]


def _add(store: Store, record: LayerSetRecord) -> tuple[LayerSetRecord, bool]:
    try:
        promote = store.lookup(record.model, record.task).fallback is not None
    except LayerSetNotFound:
        promote = True
    return store.add_layer_set(record, promote=promote), promote


def _moved(command: str, name: ModelTask, found: FoundPlan) -> Result:
    """Return what an alias means after it was moved."""
    where = {**name._asdict(), "alias": found.alias, "version": found.version}
    text = f"{found.alias} of {name} is now version {found.version} ({found.plan.method})"
    return Result({"schema": f"swiftopt.layers-{command}/1", **where, **found.plan.to_json()}, [text])


# --- other engines


@options.command(short_help="Write a plan as the files of another engine.")
@options.model_task
@click.option("--to", "engine", type=click.Choice(ENGINES), required=True, help="The engine.")
@click.option(
    "--out", metavar="FOLDER", shell_complete=options.folders, required=True, help="A new folder to write to."
)
@version_option
@click.option(
    "--stream",
    metavar="FILE",
    shell_complete=options.files,
    help="Prompts on which the draft's acceptance with keys and values of its own is measured; it then decides.",
)
@click.option("--limit", type=positive, default=8, show_default=True, help="Prompts of it to take.")
@options.store
@options.json
@options.example("export smollm2-135m/notes --to vllm --out notes-draft --stream prompts.jsonl")
def export(
    name: ModelTask, engine: str, out: str, version: int | None, stream: str | None, limit: int, store: Store
) -> Result:
    """Write the plan of MODEL/TASK as what another engine loads: a draft checkpoint, its settings, and a README.

    A set whose rest does not alternate attention and MLP is exported as the nearest one that does; for vLLM as it is,
    where the model is a Llama, Mistral or Qwen2.
    """
    from ..engines.export import SCHEMA, refuse_existing
    from ..engines.export import export as export_plan

    refuse_existing(Path(out))
    found = _to_export(store, name, engine) if version is None else store.plan(name.model, name.task, version)
    if found.fallback:
        note(f"note: {found.fallback}")
    prompts = [] if stream is None else read_stream(stream, name.task, limit)
    made = export_plan(found, name.model, engine, Path(out), store, note_load, prompts)
    layer_set = None if made.layer_set is None else made.layer_set.to_json()
    figures = {"kind": made.kind, "draft_tokens": made.n_draft_tokens, "layer_set": layer_set}
    value = {"schema": SCHEMA, "engine": engine, "out": out, **figures, "files": list(made.files)}
    text = f"{out}: {len(made.files)} files for {engine}; {Path(out) / 'README.md'} says how to run them"
    return Result({**value, "remarks": list(made.remarks)}, [text], [f"note: {each}" for each in made.remarks])


def _to_export(store: Store, name: ModelTask, engine: str) -> FoundPlan:
    """Return the plan that was tuned in the engine, or else the best one."""
    with suppress(LayerSetNotFound):
        found = store.lookup(name.model, name.task, alias=engine)
        if found.plan.method != "plain":
            return found
        note(f"note: in {engine} nothing was faster than plain decoding (version {found.version})")
    return store.lookup(name.model, name.task)


# --- models


@options.command(short_help="List model names, and what was tuned here.")
@options.store
@options.json
@options.example("models")
def models(store: Store) -> Result:
    """List the short names of models, and what was loaded and tuned here.

    Any folder of a saved model, GGUF file or hub id of a supported architecture works as well.
    """
    stored, records = store.models(), store.layer_sets()
    tasks = {r.model: sorted({o.task for o in records if o.model == r.model}) for r in records}
    value = {
        "schema": "swiftopt.models/1",
        "aliases": [{"alias": name, **dataclasses.asdict(alias)} for name, alias in ALIASES.items()],
        "stored": [info.to_json() for info in stored],
        "tasks": tasks,
    }
    loaded: list[RenderableType] = ["", stored_table(stored, tasks, console().width)] if stored else []
    return Result(value, [aliases_table(tasks), *loaded])


def aliases_table(tasks: Mapping[str, Sequence[str]]) -> Table:
    """List the short names of models, with the tasks tuned under each."""
    rows = [
        (name, alias.hub_id, str(alias.n_layers), size(alias.n_parameters), ", ".join(tasks.get(name, ())))
        for name, alias in ALIASES.items()
    ]
    return table([fixed("alias"), fixed("hub id"), numeric("layers"), numeric("size"), folding("tuned")], rows)


def stored_table(stored: Sequence[ModelInfo], tasks: Mapping[str, Sequence[str]], width: int) -> Table:
    """List models that were loaded here, with every name they were loaded by."""
    columns = [folding("names", max_width=width // 2), folding("architecture"), numeric("layers"), numeric("size")]
    rows = []
    for info in stored:
        tuned = sorted({task for name in info.names for task in tasks.get(name, ())})
        names = "\n".join(sorted(info.names, key=len))
        rows.append((names, info.architecture, str(info.n_layers), size(info.n_parameters), ", ".join(tuned)))
    titled = {"title": "loaded here", "title_justify": "left", "title_style": "bold", "header_style": "table.header"}
    return table([*columns, folding("tuned tasks")], rows, gap=2, **titled)
