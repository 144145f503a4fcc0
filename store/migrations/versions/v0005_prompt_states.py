"""Where the prompts of a layer set lie, so that sets of similar text can be found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_prompt_states"
down_revision = "0004_quantised_drafts"

TABLE, NAME = "swiftopt_layer_sets", "prompt_state"


def upgrade() -> None:
    """Add the column; of earlier sets nothing is known."""
    op.add_column(TABLE, sa.Column(NAME, sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Drop it; sets of similar text are no longer found."""
    op.drop_column(TABLE, NAME)  # in place: as a copy, the table could not be replaced while plans point at it
