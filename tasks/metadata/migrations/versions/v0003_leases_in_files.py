"""Leases of devices are files that the kernel locks; before, they were rows."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Remove the tables of the leases."""
    for table in ("falaj_lease_units", "falaj_leases", "falaj_lease_state"):
        op.drop_table(table)
