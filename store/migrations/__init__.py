"""Alembic migrations, shipped in the wheel."""

# The newest revision in versions/, known here so that opening an up-to-date store needs no alembic.
HEAD = "0005_prompt_states"
VERSION_TABLE = "swiftopt_alembic_version"  # not alembic's default: Optuna reads a foreign `alembic_version` as its own
