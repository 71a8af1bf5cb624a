"""How many rows of a raw table lie in a window: what has come since somebody last looked."""

from __future__ import annotations

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables
from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import duckdb_session, parquet, sql_name
from tasks.features.tables.raw_table import RawTable
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore


def count_rows(
    tables: FeatureTables,
    name: str,
    window: TimeWindow,
    config: FeatureConfig,
    store: ArtifactStore,
) -> int:
    """Rows of a published raw table whose time lies in the window; 0 before the first refresh.

    Args:
        tables: the published version.
        name: of the raw table.
        window: half-open, UTC.
        config: declares the table and its time column.
        store: where the table's files are.

    Raises:
        ConfigurationError: there is no such table with a time column.
        ArtifactError: its files are gone.
    """
    column = _time_column(name, config)
    published = {table.name: table for table in tables.raw}
    if name not in published:
        return 0
    folder = store.path(published[name].artifact, verify=False)
    query = f"SELECT count(*) FROM {parquet(folder)} WHERE {column} >= ? AND {column} < ?"
    limits = {"memory_limit_mb": config.memory_limit_mb}
    with duckdb_session(store.root, **limits) as con:
        found = con.execute(query, [window.start, window.end]).fetchall()
    return int(found[0][0])


def _time_column(name: str, config: FeatureConfig) -> str:
    table: RawTable | None = next((t for t in config.raw_tables if t.name == name), None)
    if table is None or table.time_column is None:
        raise ConfigurationError(
            f"{name!r} is no raw table with a time column, so its rows cannot be placed in a "
            "window; expected one of the use case's raw tables. Nothing was counted"
        )
    return sql_name(table.time_column)
