"""`swiftopt models`."""

from __future__ import annotations

import click

from .options import db_option, json_option, open_store
from .output import console, emit_json, show


@click.command(short_help="List model names, and what was tuned here.")
@db_option
@json_option
def models(db: str | None, as_json: bool) -> None:
    """List the short names of models, and what was loaded and tuned here.

    Any folder of a saved model, GGUF file or hub id of a supported architecture works as well.

    \b
    Example:
      swiftopt models
    """
    from ..models.catalog import ALIASES
    from .payloads import models_json
    from .tables import aliases_table, stored_table

    with open_store(db) as store:
        stored, records = store.models(), store.layer_sets()
    tasks_of = {r.model: sorted({o.task for o in records if o.model == r.model}) for r in records}
    if as_json:
        emit_json(models_json(ALIASES, stored, tasks_of))
        return
    rows = [(name, alias.hub_id, alias.n_layers, alias.n_parameters) for name, alias in ALIASES.items()]
    show(aliases_table(rows, tasks_of))
    if stored:
        show("", stored_table(stored, tasks_of, console().width))
