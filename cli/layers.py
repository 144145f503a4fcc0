"""`swiftopt layers`: look at the stored layer sets, move them in and out, and choose among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.errors import LayerSetNotFound
from ..core.records import record_to_json
from ..core.types import FoundPlan, LayerSetRecord, Trial
from .layers_change import import_, promote, rollback
from .layers_search import search
from .options import (
    ModelTask,
    PresetGroup,
    alias_option,
    db_option,
    json_option,
    model_task_argument,
    open_store,
    positive,
)
from .output import console, emit_json, note, show, write_text

if TYPE_CHECKING:
    from ..store import Store

ORDER = ("list", "best", "show", "search", "export", "import", "promote", "rollback")

version_option = click.option("--version", type=positive, help="A version.  [default: the best one]")


class LayersGroup(PresetGroup):
    """Lists its commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ORDER)


@click.group(cls=LayersGroup, short_help="Show, choose, export and import layer sets.")
def layers() -> None:
    """The stored layer sets: look at them, choose among them, export and import.

    \b
    Example:
      swiftopt layers list
      swiftopt layers best smollm2-135m/notes --json
    """


@layers.command("list", short_help="List the stored layer sets.")
@click.option("--model", "of_model", help="Only this model's.")
@click.option("--task", "of_task", help="Only this task's.")
@db_option
@json_option
def list_(of_model: str | None, of_task: str | None, db: str | None, as_json: bool) -> None:
    """List the stored layer sets, newest first; * marks the best of its model, task, device and dtype.

    \b
    Example:
      swiftopt layers list --model smollm2-135m
    """
    from .payloads import list_json
    from .tables import records_table

    with open_store(db) as store:
        records = [(record, _is_best(store, record)) for record in store.layer_sets(of_model, of_task)]
    if as_json:
        emit_json(list_json(records))
    elif records:
        show(records_table(records, console().width))
    else:
        note("no layer set is stored yet: find one with `swiftopt tune --model M --stream FILE --task T`")


@layers.command(short_help="Show the best layer set of a task.")
@model_task_argument
@click.option("--device", "device_name", help="As tuned on, for example 'NVIDIA H200'.  [default: any]")
@click.option("--dtype", "tuned_dtype", help="As tuned with, for example bfloat16.  [default: any]")
@alias_option
@db_option
@json_option
def best(
    name: ModelTask,
    device_name: str | None,
    tuned_dtype: str | None,
    alias: str,
    db: str | None,
    as_json: bool,
) -> None:
    """Show the best layer set of MODEL/TASK; with --json exactly the object that export writes.

    \b
    Example:
      swiftopt layers best smollm2-135m/notes --json
    """
    with open_store(db) as store:
        found = store.lookup(name.model, name.task, device_name, tuned_dtype, alias)
    if found.fallback:
        note(f"note: {found.fallback}")
    record = _layer_set_of(found, name)
    if as_json:
        emit_json(record_to_json(record))
    else:
        _show_record(record, ())


@layers.command("show", short_help="Show a layer set, its map and its search.")
@model_task_argument
@version_option
@click.option("--png", metavar="FILE", help="Draw the layer map and the matchness curve to a file as well.")
@db_option
@json_option
def show_(name: ModelTask, version: int | None, png: str | None, db: str | None, as_json: bool) -> None:
    """Show a layer set of MODEL/TASK with its map, its figures and the curve of the search that found it.

    \b
    Example:
      swiftopt layers show smollm2-135m/notes --version 2 --png notes.png
    """
    from .payloads import show_json

    with open_store(db) as store:
        record = _find(store, name, version)
        trials = store.trials(record.job, record.task) if record.job else []
    if png is not None:
        from .figures import draw

        draw(record, trials, Path(png))
        note(f"drawn to {png}")
    if as_json:
        emit_json(show_json(record, trials, png))
    else:
        _show_record(record, trials)


@layers.command(short_help="Write a layer set as JSON.")
@model_task_argument
@version_option
@click.option("-o", "--out", metavar="FILE", help="Write to a file instead of stdout.")
@db_option
@json_option
def export(name: ModelTask, version: int | None, out: str | None, db: str | None, as_json: bool) -> None:
    """Write a layer set of MODEL/TASK as one JSON object, which `import` and `generate --layer-set` read.

    --json puts the object on one line.

    \b
    Example:
      swiftopt layers export smollm2-135m/notes -o notes.json
    """
    with open_store(db) as store:
        record = _find(store, name, version)
    text = json.dumps(record_to_json(record), indent=None if as_json else 2)
    if out is None:
        click.echo(text)
    else:
        write_text(Path(out), text + "\n")
        note(f"written to {out}")


def _find(store: Store, name: ModelTask, version: int | None) -> LayerSetRecord:
    if version is not None:
        return store.layer_set(name.model, name.task, version)
    found = store.lookup(name.model, name.task)
    if found.fallback:
        note(f"note: {found.fallback}")
    return _layer_set_of(found, name)


def _layer_set_of(found: FoundPlan, name: ModelTask) -> LayerSetRecord:
    if found.plan.layer_set is None:
        raise LayerSetNotFound(
            f"version {found.version} of {name} decodes with {found.plan.method} and has no layer set:"
            " `swiftopt layers list` shows those that are stored"
        )
    return found.plan.layer_set


def _is_best(store: Store, record: LayerSetRecord) -> bool:
    """Whether look-ups for the device and dtype that it was tuned on lead to this set, whatever plan it belongs to."""
    try:
        found = store.lookup(record.fingerprint or record.model, record.task, record.device, record.dtype)
    except LayerSetNotFound:
        return False
    used = found.plan.layer_set
    return found.fallback is None and used is not None and (used.task, used.version) == (record.task, record.version)


def _show_record(record: LayerSetRecord, trials: Sequence[Trial]) -> None:
    from .render import record_view

    to = console()
    to.print(record_view(record, trials, to.width))


for command in (search, import_, promote, rollback):
    layers.add_command(command)
