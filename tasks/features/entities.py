"""The entity frame: whom to predict for, when, with the label; checked before features join it.

Knows nothing of Feast, so a check of a use case need not import it.
"""

from collections.abc import Iterable
from pathlib import Path

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, ExcludedRows, FeatureTables, NumberSummary
from tasks.features.config import FeatureConfig, TrainingSet
from tasks.features.declared.columns import class_number, plain_frame
from tasks.features.declared.queries import frame_query
from tasks.features.offline import duck
from tasks.features.offline.spark_tables import SparkTables
from tasks.features.tables.build import Queries, run_query
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore

EVENT_TIME = "event_timestamp"
"""Column of an entity frame with the moment of the prediction."""


def schema_of(
    spec: TrainingSet, categorical: Iterable[str], numeric: Iterable[str]
) -> DatasetSchema:
    """Columns of a training set that has these inputs."""
    return DatasetSchema(
        row_id=spec.row_id,
        event_time=EVENT_TIME,
        label=spec.label_column,
        categorical=tuple(categorical),
        numeric=tuple(numeric),
        task=spec.task,
        classes=spec.class_names,
        unit=spec.label_unit,
        baseline=spec.baseline,
    )


def write_entities(
    tables: FeatureTables,
    window: TimeWindow,
    config: FeatureConfig,
    repo: Path,
    store: ArtifactStore,
    target: Path,
) -> tuple[tuple[ExcludedRows, ...], NumberSummary]:
    """Write the labelled entity rows; return what was left out, and what labels are like."""
    spec = config.training_set
    folders = {t.name: store.path(t.artifact) for t in tables.raw}
    with duck.duckdb_session(target.parent) as con, SparkTables.chosen(repo, store) as spark:
        queries, query = Queries(con, config, repo, spark), frame_query(repo, config)
        queries.register_raw(folders)
        text = queries.rows_of(query, window, spec.origin)
        run_query(con, f"CREATE TEMP TABLE frame AS {plain_frame(con, text, spec)}", spec.origin)
        _check_frame(con, spec, text, window)
        _check_narrower_window(queries, query, window)
        label, reason = duck.sql_name(spec.label_column), duck.sql_name(spec.exclusion)
        counted = con.execute(
            f"SELECT {reason}, count(*) FROM frame WHERE {label} IS NULL GROUP BY 1 ORDER BY 1"
        ).fetchall()
        mean, deviation, low, high = con.execute(
            f"SELECT avg({label}), stddev_pop({label}), min({label}), max({label}) FROM frame"
        ).fetchall()[0]
        con.execute(
            f"COPY (SELECT * EXCLUDE ({reason}) FROM frame WHERE {label} IS NOT NULL) "
            f"TO {duck.sql_text(target)} (FORMAT parquet)"
        )
    excluded = tuple(ExcludedRows(reason=why or "unstated", num_rows=n) for why, n in counted)
    return excluded, NumberSummary(mean=mean, deviation=deviation, low=low, high=high)


def _check_frame(
    con: duckdb.DuckDBPyConnection, spec: TrainingSet, text: str, window: TimeWindow
) -> None:
    types = {row[0]: row[1] for row in con.execute("DESCRIBE frame").fetchall()}
    wanted = [spec.row_id, EVENT_TIME, spec.label_column, spec.exclusion]
    if missing := [c for c in (*wanted, *spec.categorical, *spec.numeric) if c not in types]:
        raise ConfigurationError(
            f"query {spec.origin} gives no column {', '.join(missing)}, which the training set "
            "names; add it to the query or take it out of use_case.yaml. Nothing was retrieved"
        )
    if not types[EVENT_TIME].startswith("TIMESTAMP"):
        raise ConfigurationError(
            f"query {spec.origin} gives {EVENT_TIME} as {types[EVENT_TIME]}, expected a "
            f"moment; write {EVENT_TIME}::TIMESTAMPTZ. Nothing was retrieved"
        )
    row_id, moment, label = (duck.sql_name(c) for c in (spec.row_id, EVENT_TIME, spec.label_column))
    total, distinct, labelled, outside = con.execute(
        f"SELECT count(*), count(DISTINCT {row_id}), count({label}), count(*) FILTER ("
        f"{moment} < getvariable('window_start') OR {moment} >= getvariable('window_end') "
        f"OR {moment} IS NULL) FROM frame"
    ).fetchall()[0]
    if distinct != total or outside:
        raise DataContractError(
            f"entity frame of {spec.origin}: {total - distinct} of {total} row ids repeat or are "
            f"null, {outside} rows lie outside {window}; expected unique ids inside the window. "
            "Nothing was retrieved"
        )
    if not labelled:
        raise DataContractError(
            f"entity frame of {spec.origin}: none of {total} rows in {window} has a label; choose "
            "a window whose outcomes are known. Nothing was retrieved"
        )
    _check_label(con, spec, text, types[spec.label_column])
    others = types.keys() - set(spec.numeric)
    if endless := duck.endless_numbers(con, "frame", {*others, *spec.unbounded}):
        raise DataContractError(
            f"entity frame of {spec.origin}: {endless}; expected numbers. Divide by nullif(..., 0) "
            "there, or name the column among `unbounded` of the training set. Nothing was retrieved"
        )


def _check_narrower_window(queries: Queries, query: str, window: TimeWindow) -> None:
    """See that the query keeps to a window that ends before the data do, as drift checks ask."""
    con, origin = queries.con, queries.config.training_set.origin
    quarter = (window.end - window.start) / 4
    inner = TimeWindow(start=window.start + quarter, end=window.end - quarter)
    text = queries.rows_of(query, inner, origin)
    run_query(con, f"CREATE OR REPLACE TEMP TABLE narrower AS {text}", origin)
    duck.set_window(con, window)
    moment = duck.sql_name(EVENT_TIME)
    total, before, after = con.execute(
        f"SELECT count(*), count(*) FILTER ({moment} < ?::TIMESTAMPTZ), "
        f"count(*) FILTER ({moment} >= ?::TIMESTAMPTZ) FROM narrower",
        [inner.start, inner.end],
    ).fetchall()[0]
    con.execute("DROP TABLE narrower")
    if before or after:
        raise DataContractError(
            f"entity frame of {origin}: asked for {inner}, it gives {before:,} rows before "
            f"and {after:,} after that, of {total:,}; expected none. Bound {EVENT_TIME} by "
            "getvariable('window_start') and getvariable('window_end') in the query: drift checks "
            "ask for other windows than training. Nothing was retrieved"
        )


def _check_label(con: duckdb.DuckDBPyConnection, spec: TrainingSet, text: str, kind: str) -> None:
    """See that every known label is 0 or 1, a class, or a finite number, as the task wants it."""
    label, is_number = duck.sql_name(spec.label_column), spec.task == "regression"
    fits, rows = "TRUE" if kind in duck.NUMBERS or kind.startswith("DECIMAL") else "FALSE", "frame"
    if fits == "TRUE":
        fits = f"isfinite({label}::DOUBLE)" if is_number else f"{label} IN (0, 1)"
    if spec.classes:  # the frame holds their numbers
        fits, rows = f"{class_number(spec)} >= 0", f"({text.strip().rstrip(';')})"
        kind = "one of several classes"
    found = con.execute(
        f"SELECT {label}::VARCHAR, count(*), sum(count(*)) OVER () FROM {rows} "
        f"WHERE {label} IS NOT NULL AND NOT {fits} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 5"
    ).fetchall()
    if found:
        shown = ", ".join(f"{value!r} ({count:,} rows)" for value, count, _ in found)
        cure = (
            "a finite number, or null where it is not known; mend the query"
            if is_number
            else f"{', '.join(spec.class_names)}, or null where it is not known; add the value to "
            "`classes` of the training set, or mend the query"
            if spec.classes
            else f"0, 1, or null where it is not known; write ({spec.label} = ...)::INTEGER in the "
            "query for one of the values, or set task to regression for a number"
        )
        raise DataContractError(
            f"label {spec.label_column} of {spec.origin} ({kind}) has other values in "
            f"{found[0][2]:,} rows: {shown}; expected {cure}. Nothing was retrieved"
        )
