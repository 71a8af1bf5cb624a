"""The ledger: what each run took, of processors, devices, energy and money."""

import sqlalchemy as sa
from alembic import op

from tasks.metadata.tables import NUMBER, UtcTime

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the table."""
    texts = {"run_id": 80, "root_id": 80, "flow": 80, "use_case": 120, "model": 120, "owner": 120}
    texts |= {"hardware_class": 63, "state": 20}
    op.create_table(
        "falaj_uses",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        *(sa.Column(name, sa.String(size), nullable=False) for name, size in texts.items()),
        *(sa.Column(name, UtcTime, nullable=False) for name in ("started", "ended")),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("seconds", "cpu_s", "gpu_s")),
        sa.Column("joules", sa.Double),
        sa.Column("estimated", sa.Boolean, nullable=False),
        sa.Column("amount", sa.Double),
        sa.Column("currency", sa.String(3), nullable=False),
        sqlite_autoincrement=True,
    )
    for name in ("root_id", "started"):
        op.create_index(f"ix_falaj_uses_{name}", "falaj_uses", [name])
