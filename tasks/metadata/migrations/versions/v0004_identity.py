"""A database has an identity, by which a worker shows that it works on the same one."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the table; its row is written by whoever asks first."""
    op.create_table(
        "falaj_identity",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("identity", sa.String(64), nullable=False),
    )
