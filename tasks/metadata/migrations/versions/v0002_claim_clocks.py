"""A claim holds its boot clock itself; before, it had a table of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Move the clocks into the claims."""
    op.add_column("falaj_claims", sa.Column("boot", sa.String(64)))
    op.add_column("falaj_claims", sa.Column("uptime_s", sa.Double))
    for column in ("boot", "uptime_s"):
        op.execute(
            f"UPDATE falaj_claims SET {column} = (SELECT clock.{column} FROM falaj_claim_clocks "
            "AS clock WHERE clock.episode_id = falaj_claims.episode_id)"
        )
    op.drop_table("falaj_claim_clocks")
