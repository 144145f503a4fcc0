"""`swiftopt db`: the schema of the database, for those who upgrade a service step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import PresetGroup, db_option, json_option
from .output import emit_json, note

if TYPE_CHECKING:
    from ..store.schema import SchemaState

ORDER = ("upgrade", "current", "check")


class DbGroup(PresetGroup):
    """Lists its commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ORDER)


@click.group(cls=DbGroup, short_help="Migrate the database, or look at its schema.")
def db() -> None:
    """The schema of the database; every other command brings it to the newest by itself.

    \b
    Example:
      swiftopt db check --db postgresql://swiftopt@db.example/swiftopt
    """


@db.command(short_help="Bring the database to the newest schema.")
@db_option
@json_option
def upgrade(db: str | None, as_json: bool) -> None:
    """Bring the database to the newest schema; a new one is created. Rows stay.

    \b
    Example:
      swiftopt db upgrade --db postgresql://swiftopt@db.example/swiftopt
    """
    from ..store.schema import bring_to_head

    before, now = bring_to_head(_url(db))
    if as_json:
        emit_json(_payload(now))
    elif before.ok:
        click.echo(f"{now.database} has the newest schema already: {now.revision}")
    else:
        click.echo(f"{now.database} went from {before.revision or 'empty'} to {now.revision}")


@db.command(short_help="Print the schema that the database has.")
@db_option
@json_option
def current(db: str | None, as_json: bool) -> None:
    """Print the revision of the database's schema, or `empty`; nothing is changed or created.

    \b
    Example:
      swiftopt db current
    """
    from ..store.schema import look

    state = look(_url(db))
    if as_json:
        emit_json(_payload(state))
    else:
        click.echo(state.revision or "empty")


@db.command(short_help="End with 0 if the schema is the newest, else with 1.")
@db_option
@json_option
@click.pass_context
def check(context: click.Context, db: str | None, as_json: bool) -> None:
    """End with 0 if the database has the newest schema, else say what it has and end with 1; nothing is changed.

    \b
    Example:
      swiftopt db check && swiftopt serve
    """
    from ..store.schema import look

    state = look(_url(db))
    if as_json:
        emit_json(_payload(state))
    elif state.ok:
        click.echo(f"{state.database} has the newest schema: {state.revision}")
    if not state.ok:
        note(f"error: {schema_fault(state)}")
    context.exit(0 if state.ok else 1)


def schema_fault(state: SchemaState) -> str:
    """What keeps us from using a database, and what to do."""
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
    return {
        "schema": "swiftopt.db/1",
        "database": state.database,
        "revision": state.revision,
        "head": state.head,
        "ok": state.ok,
    }


def _url(db: str | None) -> str:
    from ..store import as_url, default_url

    return as_url(db) if db else default_url()
