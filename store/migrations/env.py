"""Run by alembic for each command, never imported; `schema.py` passes the options, the open connection among them."""

from alembic import context

context.configure(**context.config.attributes["options"])
with context.begin_transaction():
    context.run_migrations()
