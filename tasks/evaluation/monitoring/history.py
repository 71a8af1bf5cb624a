"""Statistics kept over time: one SQLite file under the state folder, one row a statistic's place.

A row is named by view, feature, day and version of the tables, so that monitoring the same window
again replaces what it wrote, and a version's numbers stay beside those of the next.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, fields
from pathlib import Path

from tasks.evaluation.monitoring.statistics import FeatureDay, ViewDay
from tasks.kernel.errors import StorageError, refused_writes_explained
from tasks.kernel.files import make_folder, shows_damage

FILE = Path("monitoring") / "features.db"
_TIMEOUT_S = 60
_SCHEMA = """
CREATE TABLE IF NOT EXISTS view_days (
    view TEXT, start TEXT, version TEXT, num_rows INTEGER, num_entities INTEGER,
    age_hours REAL, lag_minutes REAL, PRIMARY KEY (view, start, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS feature_days (
    view TEXT, feature TEXT, start TEXT, version TEXT, num_rows INTEGER, null_rate REAL, mean REAL,
    std REAL, low REAL, q05 REAL, median REAL, q95 REAL, high REAL, "distinct" INTEGER,
    top_share REAL, PRIMARY KEY (view, feature, start, version)
) WITHOUT ROWID;
"""


@contextmanager
def _database(home: Path) -> Iterator[sqlite3.Connection]:
    path = home / FILE
    with refused_writes_explained(path):
        make_folder(path.parent)
    try:
        with closing(sqlite3.connect(path, timeout=_TIMEOUT_S)) as con:
            con.execute("PRAGMA journal_mode = WAL")
            con.executescript(_SCHEMA)
            with con:
                yield con
    except sqlite3.DatabaseError as exc:
        cure = "remove the file" if shows_damage(exc) else "free some space or mend its permissions"
        raise StorageError(
            f"{path}: the history of features could not be read or written ({exc}); expected a "
            f"SQLite file and free space. Nothing half written is kept; {cure}, and run again"
        ) from exc


def keep(
    home: Path,
    view: str,
    version: str,
    days: Sequence[ViewDay],
    features: Sequence[FeatureDay],
) -> int:
    """Write the statistics of one view, in one transaction; returns how many rows."""
    with _database(home) as con:
        con.executemany(
            "INSERT OR REPLACE INTO view_days VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (view, d.start.isoformat(), version, d.num_rows, d.num_entities,
                 _finite(d.age_hours), _finite(d.lag_minutes))
                for d in days
            ],
        )  # fmt: skip
        marks = ", ".join("?" for _ in range(len(fields(FeatureDay)) + 2))
        con.executemany(
            f"INSERT OR REPLACE INTO feature_days VALUES ({marks})",
            [(view, f.feature, f.start.isoformat(), version, *astuple(f)[2:]) for f in features],
        )
    return len(days) + len(features)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
