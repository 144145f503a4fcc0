"""`swiftopt layers` and `models`: list, choose, export and import what is stored."""

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
from ..core.types import Trial, check_task
from ..models.families import model_types
from ..models.sources import ALIASES, LocalCopy, find_alias, local_copies
from ..models.stores import StoredModel, stored_models
from ..terminal import commands, options, value_types
from ..terminal.charts import Pictures, draw_layer_sets
from ..terminal.commands import ConfiguredGroup
from ..terminal.output import Result, console, listing_result, note, write_text
from ..terminal.render import (
    fixed,
    folding,
    numeric,
    ratio,
    record_view,
    size,
    stored_view,
    table,
)
from ..terminal.value_types import ModelTask, positive

if TYPE_CHECKING:
    from ..store import Store

TRIAL_FIGURES = ("step", "origin", "matchness", "score", "adopted")  # Fields of a trial in --json output.


@click.group(cls=ConfiguredGroup, short_help="Show, choose, export and import layer sets.")
@commands.example("layers list", "layers best smollm2-135m/notes --json")
def layers() -> None:
    """List, show, choose, export and import the stored layer sets."""


@layers.command("list", short_help="List the stored layer sets and plans.")
@options.of_model
@options.of_task
@options.store_and_json
@commands.example("layers list --model smollm2-135m")
def list_(of_model: str | None, of_task: str | None, store: Store) -> Result:
    """List the stored layer sets, and the plans without a layer set of their own.

    The newest come first; * marks the best one for its model, task, device and dtype.
    """
    records = [(record, _is_best(store, record)) for record in store.layer_sets(of_model, of_task)]
    plans = [plan for plan in store.plan_versions(of_model, of_task) if plan.own_set is None]
    sets = [{**record.to_json(), "best": best} for record, best in records]
    report = {"schema": "swiftopt.layers-list/1", "layer_sets": sets, "plans": [plan.to_json() for plan in plans]}
    subject = "no layer set is stored for that" if of_model or of_task else "no layer set is stored yet"
    empty_note = f"{subject}: find one with `swiftopt tune --model M --stream FILE --task T`"
    return listing_result(report, [*records, *plans], lambda _, width: stored_view(records, plans, width), empty_note)


@layers.command(short_help="Show the best layer set of a task.")
@options.model_task
@click.option("--device", "device_name", help="Device of the tuning, for example 'NVIDIA H200'.  [default: any]")
@click.option("--dtype", "tuned_dtype", help="Dtype of the tuning, for example bfloat16.  [default: any]")
@options.alias
@options.store_and_json
@commands.example("layers best smollm2-135m/notes --json")
def best(name: ModelTask, device_name: str | None, tuned_dtype: str | None, alias: str, store: Store) -> Result:
    """Show the best layer set of MODEL/TASK; --json prints exactly the object that `export` writes."""
    plan = store.lookup(name.model, name.task, device_name, tuned_dtype, alias)
    record = _layer_set_of(plan, name)
    return Result(record.to_json(), [record_view(record, _trials(store, record), console().width)])


@layers.command("show", short_help="Show a layer set, its map and its search.")
@options.model_task
@options.version
@options.pictures("Also draw the layer map and the search to a file.")
@options.store_and_json
@commands.example("layers show smollm2-135m/notes --version 2 --png notes.png")
def show_(name: ModelTask, version: int | None, pictures: Pictures, store: Store) -> Result:
    """Show a layer set of MODEL/TASK with its map, its figures and the curve of the search that found it."""
    record = _find(store, name, version)
    trials = _trials(store, record)
    pictures.draw(draw_layer_sets, [(record, trials)])
    trial_rows = []
    for trial in trials:
        skipped = {"skip_attn": sorted(trial.layer_set.skip_attn), "skip_mlp": sorted(trial.layer_set.skip_mlp)}
        experts = {"experts": dict(trial.layer_set.experts)} if trial.layer_set.experts else {}
        trial_rows.append({**{name: getattr(trial, name) for name in TRIAL_FIGURES}, **skipped, **experts})
    report = {"schema": "swiftopt.layers-show/1", "layer_set": record.to_json(), "trials": trial_rows}
    return Result({**report, **pictures.to_json()}, [record_view(record, trials, console().width)])


@layers.command("export", short_help="Write a layer set as JSON.")
@options.model_task
@options.version
@click.option("-o", "--out", type=value_types.FILE, help="Write to a file instead of stdout.")
@options.store
@options.as_json
@commands.example("layers export smollm2-135m/notes -o notes.json")
def export_json(name: ModelTask, version: int | None, out: str | None, store: Store, as_json: bool) -> None:
    """Write a layer set of MODEL/TASK as one JSON object for `import` and `generate --layer-set`.

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
@click.argument("file", type=value_types.FILE)
@click.option(
    "--model", "as_model", type=value_types.MODEL, help="Store the set under this model; for a file with one set."
)
@click.option("--task", "as_task", help="Store the set under this task; for a file with one set.")
@click.option("--n-layers", type=positive, help="Depth of a model that swiftopt does not know.")
@options.store_and_json
@commands.example("layers import skip_layers.json")
def import_(file: str, as_model: str | None, as_task: str | None, n_layers: int | None, store: Store) -> Result:
    """Store the layer sets of FILE: an exported one, or the skip_layers.json that SWIFT's authors published.

    A set becomes the best one if its model and task have none yet; `promote` chooses another.
    """
    stored_records = [_add(store, record) for record in _read_records(store, file, as_model, as_task, n_layers)]
    sets = [{**record.to_json(), "promoted": promoted} for record, promoted in stored_records]
    lines = [
        f"{record.model}/{record.task} version {record.version}"
        + ("" if promoted else ", not promoted: the best version stays unchanged")
        for record, promoted in stored_records
    ]
    return Result({"schema": "swiftopt.layers-import/1", "layer_sets": sets}, lines)


@layers.command(short_help="Choose a version as the best one.")
@options.model_task
@click.option("--version", type=positive, required=True, help="The version to choose.")
@options.alias
@options.store_and_json
@commands.example("layers promote smollm2-135m/notes --version 2")
def promote(name: ModelTask, version: int, alias: str, store: Store) -> Result:
    """Choose a version of MODEL/TASK as the best one for the device and dtype of its measurement."""
    return _alias_result("promote", name, store.promote(name.model, name.task, version, alias))


@layers.command(short_help="Undo the last choice.")
@options.model_task
@options.alias
@options.store_and_json
@commands.example("layers rollback smollm2-135m/notes")
def rollback(name: ModelTask, alias: str, store: Store) -> Result:
    """Undo the last choice for MODEL/TASK."""
    return _alias_result("rollback", name, store.rollback(name.model, name.task, alias))


# --- what the commands share


def _find(store: Store, name: ModelTask, version: int | None) -> LayerSetRecord:
    if version is not None:
        return store.layer_set(name.model, name.task, version)
    return _layer_set_of(store.lookup(name.model, name.task), name)


def _layer_set_of(found_plan: FoundPlan, name: ModelTask) -> LayerSetRecord:
    """Return a plan's layer set; print a note if the plan is only the nearest match."""
    if found_plan.fallback:
        note(f"note: {found_plan.fallback}")
    plan = found_plan.plan
    if plan.layer_set is None:
        speed_note = (
            f", measured {ratio(plan.measured_speedup, plan.measured_interval)}" if plan.measured_speedup else ""
        )
        raise LayerSetNotFound(
            f"version {found_plan.version} of {name} decodes with {plan.method} and has no layer set: its verdict is"
            f" {plan.verdict}{speed_note}; `swiftopt layers list` shows what is stored"
        )
    return plan.layer_set


def _trials(store: Store, record: LayerSetRecord) -> Sequence[Trial]:
    return store.trials(record.job, record.task) if record.job else ()


def _is_best(store: Store, record: LayerSetRecord) -> bool:
    """Return whether a lookup for the set's own device and dtype finds a plan with this set."""
    try:
        plan = store.lookup(record.fingerprint or record.model, record.task, record.device, record.dtype)
    except LayerSetNotFound:
        return False
    used_set = plan.plan.layer_set
    return (
        plan.fallback is None
        and used_set is not None
        and (used_set.task, used_set.version) == (record.task, record.version)
    )


def _read_records(
    store: Store, file: str, as_model: str | None, as_task: str | None, n_layers: int | None
) -> list[LayerSetRecord]:
    """Read the layer sets of a file, renaming model and task if new names are given."""
    from ..core.records import import_file

    depths = {name: model_info.n_layers for model_info in store.models() for name in model_info.names}

    def depth_of(name: str) -> int | None:
        alias = find_alias(as_model or name)
        return n_layers or depths.get(as_model or name) or (alias.n_layers if alias else None)

    records = import_file(file, depth_of)
    if as_task is not None:
        check_task(as_task, "--task")
    if (as_model or as_task) and len(records) != 1:
        raise InvalidInput(f"{file} contains {len(records)} layer sets: remove --model and --task to import them all")
    return [dataclasses.replace(r, model=as_model or r.model, task=as_task or r.task) for r in records]


def _add(store: Store, record: LayerSetRecord) -> tuple[LayerSetRecord, bool]:
    """Store a layer set; return it, and whether it was promoted because it is the first of its model and task."""
    promote = True
    with suppress(LayerSetNotFound):
        promote = store.lookup(record.model, record.task).fallback is not None
    return store.add_layer_set(record, promote=promote), promote


def _alias_result(command: str, name: ModelTask, found_plan: FoundPlan) -> Result:
    alias_fields = {**name._asdict(), "alias": found_plan.alias, "version": found_plan.version}
    text = f"{found_plan.alias} of {name} is now version {found_plan.version} ({found_plan.plan.method})"
    return Result({"schema": f"swiftopt.layers-{command}/1", **alias_fields, **found_plan.plan.to_json()}, [text])


# --- models


RUNS = "run by: on a CPU our kernels, exactly; on a GPU torch or Triton"
PROOF = "proof: tests decode with a real model's weights, or with random ones alone"


@commands.command(short_help="List model names, and what was tuned here.")
@click.option("--types", "of_types", is_flag=True, help="List the supported model types instead.")
@options.store_and_json
@commands.example("models", "models --types")
def models(store: Store, of_types: bool) -> Result:
    """List the aliases of models, which of them are on this machine, and what was loaded and tuned here.

    `here` is wheel or cached (by the hub's client); other models are downloaded at first use. Any folder of a saved
    model, GGUF file or hub id of a supported architecture works, too. Models that Ollama, LM Studio or the hub's
    client keep on this machine are listed with the names that open them; they are not copied.

    With --types: each type that a config.json may name, which models are of it, what it computes otherwise than Llama,
    the name of its GGUF files, and whether tests decode with a real model's weights or with random ones. Our kernels
    for CPUs compute all of them, and a draft changes no bit.
    """
    if of_types:
        types = [row._asdict() for row in model_types()]
        return Result({"schema": "swiftopt.model-types/1", "types": types}, [types_table(), "", RUNS, PROOF])
    loaded_models, records, copies = store.models(), store.layer_sets(), local_copies()
    kept_models = stored_models()
    tasks = {r.model: sorted({o.task for o in records if o.model == r.model}) for r in records}
    report = {
        "schema": "swiftopt.models/1",
        "aliases": [
            {"alias": name, **dataclasses.asdict(alias), "here": copies[name]._asdict() if name in copies else None}
            for name, alias in ALIASES.items()
        ],
        "stores": [{**dataclasses.asdict(model), "path": str(model.path)} for model in kept_models],
        "stored": [model_info.to_json() for model_info in loaded_models],
        "tasks": tasks,
    }
    in_stores: list[RenderableType] = ["", stores_table(kept_models)] if kept_models else []
    loaded_tables: list[RenderableType] = (
        ["", stored_table(loaded_models, tasks, console().width)] if loaded_models else []
    )
    return Result(report, [aliases_table(tasks, copies), *in_stores, *loaded_tables])


def types_table() -> Table:
    rows = [(row.type, row.models, "; ".join(row.differences), row.gguf or "", row.weights) for row in model_types()]
    columns = [fixed("type"), folding("models"), folding("differs from Llama"), folding("GGUF"), fixed("proof")]
    return table(columns, rows)


def aliases_table(tasks: Mapping[str, Sequence[str]], copies: Mapping[str, LocalCopy]) -> Table:
    """List the short names of models, those on this machine first, with the tasks tuned under each."""
    rows = []
    for name, alias in sorted(ALIASES.items(), key=lambda alias_item: alias_item[0] not in copies):
        source, tuned_tasks = copies[name].kind if name in copies else "", ", ".join(tasks.get(name, ()))
        rows.append((name, source, alias.hub_id, str(alias.n_layers), size(alias.n_parameters), tuned_tasks))
    columns = [fixed("alias"), fixed("here"), fixed("hub id"), numeric("layers"), numeric("size"), folding("tuned")]
    return table(columns, rows)


def stores_table(models: Sequence[StoredModel]) -> Table:
    """List the models that other programs keep on this machine."""
    rows = []
    for model in models:
        size = "" if model.problem else f"{model.n_bytes / 1e9:.2f} GB"
        rows.append((model.name, size, model.problem or ""))
    titled: dict[str, Any] = {
        "title": "kept by other programs on this machine",
        "title_style": "bold",
        "header_style": "table.header",
    }
    return table([folding("name"), numeric("size"), folding("cannot be opened")], rows, gap=2, **titled)


def stored_table(models: Sequence[ModelInfo], tasks: Mapping[str, Sequence[str]], width: int) -> Table:
    """List models that were loaded here, with every name they were loaded by."""
    columns = [folding("names", max_width=width // 2), folding("architecture"), numeric("layers"), numeric("size")]
    rows = []
    for model_info in models:
        tuned_tasks = sorted({task for name in model_info.names for task in tasks.get(name, ())})
        names = "\n".join(sorted(model_info.names, key=len))
        rows.append(
            (
                names,
                model_info.architecture,
                str(model_info.n_layers),
                size(model_info.n_parameters),
                ", ".join(tuned_tasks),
            )
        )
    title_options: dict[str, Any] = {"title": "loaded here", "title_style": "bold", "header_style": "table.header"}
    return table([*columns, folding("tuned tasks")], rows, gap=2, **title_options)
