"""The tables as the first swiftopt created them, for tests of what becomes of its databases."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

from swiftopt.store.migrations import REVISIONS, upgrade
from swiftopt.store.tables import NAMING

FIRST = MetaData(naming_convention=NAMING)

Table(
    "swiftopt_models",
    FIRST,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", String, nullable=True, unique=True),
    Column("architecture", String, nullable=False),
    Column("n_layers", Integer, nullable=False),
    Column("n_parameters", BigInteger, nullable=False),
    Column("created_at", String, nullable=False),
)
Table(
    "swiftopt_model_names",
    FIRST,
    Column("name", String, primary_key=True),
    Column("model_id", Integer, ForeignKey("swiftopt_models.id"), nullable=False, index=True),
)
Table(
    "swiftopt_jobs",
    FIRST,
    Column("id", String, primary_key=True),
    Column("state", String, nullable=False),
    Column("request", JSON, nullable=False),
    Column("error", String, nullable=True),
    Column("created_at", String, nullable=False),
    Column("finished_at", String, nullable=True),
)
Table(
    "swiftopt_trials",
    FIRST,
    Column("id", Integer, primary_key=True),
    Column("job_id", String, ForeignKey("swiftopt_jobs.id"), nullable=False),
    Column("task", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("n_layers", Integer, nullable=False),
    Column("skip_attn", JSON, nullable=False),
    Column("skip_mlp", JSON, nullable=False),
    Column("origin", String, nullable=False),
    Column("matchness", Double, nullable=False),
    Column("score", Double, nullable=False),
    Column("prompt_id", String, nullable=False),
    Column("position", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("adopted", Boolean, nullable=False),
    Column("seconds", Double, nullable=False),
    Index(None, "job_id", "task", "step"),
)
Table(
    "swiftopt_layer_sets",
    FIRST,
    Column("id", Integer, primary_key=True),
    Column("model_id", Integer, ForeignKey("swiftopt_models.id"), nullable=False),
    Column("task", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("model_name", String, nullable=False),
    Column("skip_attn", JSON, nullable=False),
    Column("skip_mlp", JSON, nullable=False),
    Column("quantised", JSON, nullable=False),
    Column("matchness", Double, nullable=True),
    Column("acceptance_rate", Double, nullable=True),
    Column("mean_generated_length", Double, nullable=True),
    Column("expected_speedup", Double, nullable=True),
    Column("measured_speedup", Double, nullable=True),
    Column("measured_low", Double, nullable=True),
    Column("measured_high", Double, nullable=True),
    Column("verdict", String, nullable=False),
    Column("device", String, nullable=True),
    Column("dtype", String, nullable=True),
    Column("settings", JSON, nullable=False),
    Column("stream_sha256", String, nullable=True),
    Column("swiftopt_version", String, nullable=False),
    Column("created_at", String, nullable=False),
    Column("job_id", String, ForeignKey("swiftopt_jobs.id"), nullable=True, index=True),
    UniqueConstraint("model_id", "task", "version"),
)
Table(
    "swiftopt_plans",
    FIRST,
    Column("id", Integer, primary_key=True),
    Column("layer_set_id", Integer, ForeignKey("swiftopt_layer_sets.id"), nullable=False, unique=True),
    Column("method", String, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("verdict", String, nullable=False),
)
Table(
    "swiftopt_alias_moves",
    FIRST,
    Column("id", Integer, primary_key=True),
    Column("model_id", Integer, ForeignKey("swiftopt_models.id"), nullable=False),
    Column("task", String, nullable=False),
    Column("alias", String, nullable=False),
    Column("device", String, nullable=True),
    Column("dtype", String, nullable=True),
    Column("plan_id", Integer, ForeignKey("swiftopt_plans.id"), nullable=False),
    Column("undoes_id", Integer, ForeignKey("swiftopt_alias_moves.id"), nullable=True, unique=True),
    Column("created_at", String, nullable=False),
    Index(None, "model_id", "task", "alias"),
)
Table(
    "swiftopt_cost_profiles",
    FIRST,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", String, nullable=False),
    Column("device", String, nullable=False),
    Column("dtype", String, nullable=False),
    Column("context_bucket", Integer, nullable=False),
    Column("n_layers", Integer, nullable=False),
    Column("attn_s", Double, nullable=False),
    Column("mlp_s", Double, nullable=False),
    Column("head_s", Double, nullable=False),
    Column("fixed_s", Double, nullable=False),
    Column("pass_s", JSON, nullable=False),
    Column("created_at", String, nullable=False),
    UniqueConstraint("fingerprint", "device", "dtype", "context_bucket", "n_layers"),
)
VERSIONS = Table("swiftopt_alembic_version", FIRST, Column("version_num", String(32), primary_key=True))


def create(connection: Connection, revision: str) -> None:
    """Create an empty database of that schema, by way of the first."""
    FIRST.create_all(connection)
    connection.execute(VERSIONS.insert().values(version_num=REVISIONS[0]))
    upgrade(connection, REVISIONS[0], revision)
