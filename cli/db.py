"""`swiftopt db`: migrate the database, or look at its schema, to upgrade a service step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import options
from .options import PresetGroup, database_url
from .output import answer, note

if TYPE_CHECKING:
    from ..store.schema import SchemaState


@click.group(cls=PresetGroup, short_help="Migrate the database, or look at its schema.")
@options.example("db check --db postgresql://swiftopt@db.example/swiftopt")
def db() -> None:
    """The schema of the database; every other command brings it to the newest by itself."""


@db.command(short_help="Bring the database to the newest schema.")
@options.db
@options.json
@options.example("db upgrade --db postgresql://swiftopt@db.example/swiftopt")
def upgrade(db: str | None, as_json: bool) -> None:
    """Bring the database to the newest schema; a new one is created. Rows stay."""
    from ..store.schema import bring_to_head

    before, now = bring_to_head(database_url(db))
    done = "has the newest schema already:" if before.ok else f"went from {before.revision or 'empty'} to"
    answer(as_json, _payload(now), lambda: click.echo(f"{now.database} {done} {now.revision}"))


@db.command(short_help="Print the schema that the database has.")
@options.db
@options.json
@options.example("db current")
def current(db: str | None, as_json: bool) -> None:
    """Print the revision of the database's schema, or `empty`; nothing is changed or created."""
    from ..store.schema import look

    state = look(database_url(db))
    answer(as_json, _payload(state), lambda: click.echo(state.revision or "empty"))


@db.command(short_help="End with 0 if the schema is the newest, else with 1.")
@options.db
@options.json
@click.pass_context
@options.example("db check && swiftopt serve")
def check(context: click.Context, db: str | None, as_json: bool) -> None:
    """End with 0 if the database has the newest schema, else say what it has and end with 1; nothing is changed."""
    from ..store.schema import look

    state = look(database_url(db))
    found = f"{state.database} has the newest schema: {state.revision}"
    answer(as_json, _payload(state), lambda: click.echo(found) if state.ok else None)
    if not state.ok:
        note(f"error: {schema_problem(state)}")
    context.exit(0 if state.ok else 1)


def schema_problem(state: SchemaState) -> str:
    """Return why a database cannot be used, and what to do."""
    if state.revision is None:
        return f"the database {state.database} is empty: create its tables with `swiftopt db upgrade`"
    if state.newer:
        advice = "install that version, or choose another database with --db"
        return f"the database {state.database} has the schema {state.revision} of a newer swiftopt: {advice}"
    return (
        f"the database {state.database} has the schema {state.revision}, this version wants {state.head}: "
        "run `swiftopt db upgrade`"
    )


def _payload(state: SchemaState) -> dict[str, Any]:
    values = {name: getattr(state, name) for name in ("database", "revision", "head", "ok")}
    return {"schema": "swiftopt.db/1", **values}
