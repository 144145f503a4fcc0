"""What a quantised part of a draft costs, and which parts of a candidate were quantised."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004_quantised_drafts"
down_revision = "0003_plans_of_any_method"

COLUMNS = (("swiftopt_cost_profiles", "formats"), ("swiftopt_trials", "quantised"))


def upgrade() -> None:
    """Add the columns; earlier rows know of nothing quantised."""
    for table, name in COLUMNS:
        op.add_column(table, sa.Column(name, sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop them, and the trials' formats with them."""
    for table, name in COLUMNS:
        with op.batch_alter_table(table) as batch:
            batch.drop_column(name)
