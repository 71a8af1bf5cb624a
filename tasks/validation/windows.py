"""Whether the windows of a split can be learned from and judged by: rows, labels, known values."""

from __future__ import annotations

from pathlib import Path

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, DataSplits
from tasks.validation.sql import literal, quoted

MOST_NAMED = 10


def faults_of_windows(path: Path, columns: DatasetSchema, splits: DataSplits) -> list[str]:
    """What makes training or judgement impossible, each with the column and its cure.

    Args:
        path: Parquet of the training set.
        columns: which column is what.
        splits: windows for training, validation and test.
    """
    named = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    inside = {name: _inside(columns.event_time, window) for name, window in named.items()}
    label = quoted(columns.label)
    facts = [
        f"{fact} FILTER ({condition})"
        for condition in inside.values()
        for fact in ("count(*)", f"min({label})", f"max({label})")
    ]
    known = [
        *(f"count(nullif({quoted(name)}, '')) FILTER ({inside['training']})"
          for name in columns.categorical),
        *(f"count(*) FILTER ({inside['training']} AND NOT isnan({quoted(name)}::DOUBLE))"
          for name in columns.numeric),
    ]  # fmt: skip
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        rows = con.execute(
            f"SELECT {', '.join([*facts, *known])} FROM read_parquet({literal(path)})"
        ).fetchall()[0]
    faults = [
        fault
        for place, (name, window) in enumerate(named.items())
        if (fault := _fault(name, window, columns, *rows[3 * place : 3 * place + 3]))
    ]
    inputs = (*columns.categorical, *columns.numeric)
    unknown = [name for name, count in zip(inputs, rows[9:], strict=True) if not count]
    if unknown and rows[0]:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        faults.append(
            f"{', '.join(unknown[:MOST_NAMED])}{more} have no known value in any of the "
            f"{rows[0]:,} rows of the training window {splits.train}; look at the query and at the "
            "ttl of the feature view, or take them out of the feature service"
        )
    return faults


def _fault(
    name: str, window: TimeWindow, columns: DatasetSchema, num_rows: int, low: object, high: object
) -> str | None:
    if not num_rows:
        return f"no row lies in the {name} window {window}; move splits.{name} to where rows are"
    if low != high:
        return None
    return (
        f"label {columns.label} is {low} in all {num_rows:,} rows of the {name} window {window}, "
        "expected more than one value; widen the window, or mend the label's query"
    )


def _inside(column: str, window: TimeWindow) -> str:
    moment = quoted(column)
    return f"{moment} >= {literal(window.start)} AND {moment} < {literal(window.end)}"
