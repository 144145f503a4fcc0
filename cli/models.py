"""`swiftopt models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.table import Table

from ..core.types import ModelInfo
from ..models.sources import ALIASES
from . import options
from .output import answer, console, show
from .render import fixed, folding, numeric, size, table

if TYPE_CHECKING:
    from ..store import Store

Tasks = Mapping[str, Sequence[str]]  # tuned under each name of a model


@click.command(short_help="List model names, and what was tuned here.")
@options.store
@options.json
@options.example("models")
def models(store: Store, as_json: bool) -> None:
    """List the short names of models, and what was loaded and tuned here.

    Any folder of a saved model, GGUF file or hub id of a supported architecture works as well.
    """
    stored, records = store.models(), store.layer_sets()
    tasks = {r.model: sorted({o.task for o in records if o.model == r.model}) for r in records}

    def show_text() -> None:
        show(aliases_table(tasks))
        if stored:
            show("", stored_table(stored, tasks, console().width))

    value = {
        "schema": "swiftopt.models/1",
        "aliases": [{"alias": name, **asdict(alias)} for name, alias in ALIASES.items()],
        "stored": [info.to_json() for info in stored],
        "tasks": tasks,
    }
    answer(as_json, value, show_text)


def aliases_table(tasks: Tasks) -> Table:
    """List the short names of models, with the tasks tuned under each."""
    rows = [
        (name, alias.hub_id, str(alias.n_layers), size(alias.n_parameters), ", ".join(tasks.get(name, ())))
        for name, alias in ALIASES.items()
    ]
    return table([fixed("alias"), fixed("hub id"), numeric("layers"), numeric("size"), folding("tuned")], rows)


def stored_table(stored: Sequence[ModelInfo], tasks: Tasks, width: int) -> Table:
    """List models that were loaded here, with every name they were loaded by."""
    columns = [folding("names", max_width=width // 2), folding("architecture"), numeric("layers"), numeric("size")]
    rows = []
    for info in stored:
        tuned = sorted({task for name in info.names for task in tasks.get(name, ())})
        names = "\n".join(sorted(info.names, key=len))
        rows.append((names, info.architecture, str(info.n_layers), size(info.n_parameters), ", ".join(tuned)))
    titled = {"title": "loaded here", "title_justify": "left", "title_style": "bold", "header_style": "table.header"}
    return table([*columns, folding("tuned tasks")], rows, gap=2, **titled)
