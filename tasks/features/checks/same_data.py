"""Whether landed rows continue the published tables, or are other data under the same name."""

from __future__ import annotations

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, LandedRows, TableRef
from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import names, parquet, sql_name
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore

MIN_ROWS = 20
"""Published rows of a window below which nothing is said of their keys."""
MIN_SHARE = 0.1
"""Share of the published rows' keys that has to land again. A correction replaces values."""
SHOWN = 12


def check_same_data(
    landed: LandedRows, base: FeatureTables, config: FeatureConfig, store: ArtifactStore
) -> None:
    """See that rows about to be merged into the published tables are of the same data.

    Two data sets under one name of a use case would be mixed in its tables and its online values.

    Raises:
        ConfigurationError: they are not, and the configuration does not adopt these tables.
    """
    if not base.raw or (config.adopts and base.version.startswith(config.adopts)):
        return
    published = {ref.name: ref for ref in base.raw}
    common = [
        (table, published[table.name], ref)
        for table, ref in zip(config.raw_tables, landed.tables, strict=True)
        if table.name in published
    ]
    reasons = [_why_other(*tables, landed.window, store) for tables in common]
    reasons += [] if common else [f"none of the published raw tables {', '.join(published)} landed"]
    for reason in filter(None, reasons):
        raise ConfigurationError(
            f"{reason}. Rows of two data sets would be mixed in the tables and the online values. "
            "Give the new data a `name` of its own in use_case.yaml, or another state folder "
            "(FALAJ_HOME); where they do continue these tables, set features.adopts: "
            f"{base.version[:SHOWN]}. Nothing was published"
        )


def _why_other(
    table: RawTable, before: TableRef, landed: TableRef, window: TimeWindow, store: ArtifactStore
) -> str:
    """Why a landed table is not the published one; empty where it may be."""
    old, new = (parquet(store.path(ref.artifact)) for ref in (before, landed))
    key = list(dict.fromkeys((*table.key, *([table.time_column] if table.time_column else []))))
    # As text: a column may have another type by now.
    texts = ", ".join(f"{sql_name(c)}::VARCHAR AS {sql_name(c)}" for c in key)
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        held = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {old}").fetchall()]
        if absent := [column for column in key if column not in held]:
            return f"raw table {table.name}: the published rows have no {', '.join(absent)}"
        if table.time_column is None:
            return ""
        moment = sql_name(table.time_column)
        num_old, num_again = con.execute(
            f"WITH old AS (SELECT DISTINCT {texts} FROM {old} WHERE {moment} >= ?::TIMESTAMPTZ AND "
            f"{moment} < ?::TIMESTAMPTZ), new AS (SELECT {texts} FROM {new}) SELECT count(*), "
            f"(SELECT count(*) FROM old SEMI JOIN new USING ({names(key)})) FROM old",
            [window.start, window.end],
        ).fetchall()[0]
    if num_old < MIN_ROWS or num_again >= MIN_SHARE * num_old:
        return ""
    return (
        f"raw table {table.name}: of {num_old:,} published rows in {window}, {num_again:,} are in "
        f"the file now (by {', '.join(key)})"
    )
