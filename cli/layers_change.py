"""The commands of `swiftopt layers` that change the store: import, promote, rollback."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..core.errors import InvalidInput, LayerSetNotFound
from ..core.records import check_task
from ..core.types import FoundPlan, LayerSetRecord
from .options import ModelTask, alias_option, db_option, json_option, model_task_argument, open_store, positive
from .output import emit_json

if TYPE_CHECKING:
    from ..store import Store


@click.command("import", short_help="Store layer sets from a file.")
@click.argument("file", metavar="FILE")
@click.option("--model", "as_model", help="Store it under this model; for a file with one set.")
@click.option("--task", "as_task", help="Store it under this task; for a file with one set.")
@click.option("--n-layers", type=positive, help="Depth of a model that swiftopt does not know.")
@db_option
@json_option
def import_(
    file: str, as_model: str | None, as_task: str | None, n_layers: int | None, db: str | None, as_json: bool
) -> None:
    """Store the layer sets of FILE: an exported one, or the skip_layers.json that SWIFT's authors published.

    A set becomes the best one where its model and task have none yet; `promote` changes that.

    \b
    Example:
      swiftopt layers import skip_layers.json
    """
    from .payloads import import_json

    with open_store(db) as store:
        records = _renamed(_read(store, file, as_model, n_layers), file, as_model, as_task)
        stored = [_add(store, record) for record in records]
    if as_json:
        emit_json(import_json(stored))
        return
    for record, promoted in stored:
        kept = "" if promoted else ", not promoted: the best one stays what it was"
        click.echo(f"{record.model}/{record.task} version {record.version}{kept}")


@click.command(short_help="Choose a version as the best one.")
@model_task_argument
@click.option("--version", type=positive, required=True, help="The version to choose.")
@alias_option
@db_option
@json_option
def promote(name: ModelTask, version: int, alias: str, db: str | None, as_json: bool) -> None:
    """Choose a version of MODEL/TASK as the best one, for the device and dtype it was tuned or compared on.

    \b
    Example:
      swiftopt layers promote smollm2-135m/notes --version 2
    """
    with open_store(db) as store:
        found = store.promote(name.model, name.task, version, alias)
    _show_move("swiftopt.layers-promote/1", name, found, as_json)


@click.command(short_help="Take back the last choice.")
@model_task_argument
@alias_option
@db_option
@json_option
def rollback(name: ModelTask, alias: str, db: str | None, as_json: bool) -> None:
    """Take back the last choice for MODEL/TASK.

    \b
    Example:
      swiftopt layers rollback smollm2-135m/notes
    """
    with open_store(db) as store:
        found = store.rollback(name.model, name.task, alias)
    _show_move("swiftopt.layers-rollback/1", name, found, as_json)


def _read(store: Store, file: str, as_model: str | None, n_layers: int | None) -> list[LayerSetRecord]:
    from ..models.catalog import find_alias
    from ..store import import_file

    depths = {name: info.n_layers for info in store.models() for name in info.names}

    def depth_of(name: str) -> int | None:
        alias = find_alias(as_model or name)
        return n_layers or depths.get(as_model or name) or (alias.n_layers if alias else None)

    return import_file(file, depth_of)


def _renamed(
    records: Sequence[LayerSetRecord], file: str, as_model: str | None, as_task: str | None
) -> list[LayerSetRecord]:
    if as_task is not None:
        check_task(as_task)
    if (as_model or as_task) and len(records) != 1:
        raise InvalidInput(f"{file} holds {len(records)} layer sets: leave --model and --task out to import them all")
    return [dataclasses.replace(r, model=as_model or r.model, task=as_task or r.task) for r in records]


def _add(store: Store, record: LayerSetRecord) -> tuple[LayerSetRecord, bool]:
    try:
        promote = store.lookup(record.model, record.task).fallback is not None
    except LayerSetNotFound:
        promote = True
    return store.add_layer_set(record, promote=promote), promote


def _show_move(schema: str, name: ModelTask, found: FoundPlan, as_json: bool) -> None:
    from .payloads import plan_json

    if as_json:
        emit_json(plan_json(schema, name.model, name.task, found))
    else:
        click.echo(f"{found.alias} of {name} is now version {found.version} ({found.plan.method})")
