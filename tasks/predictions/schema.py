"""The prediction log: its folders, its columns, and how a part of it is named.

Said in one place, because servers write the log, and drift checks, releases and people read it. One
row for each row of an answered request, and one for each request that was refused:

    <home>/predictions/model=<name>/day=<YYYY-MM-DD>/part-*.parquet

The day is the UTC day of `event_timestamp`. Parts never change: what merges or rewrites parts puts
a new one beside them that names, in its metadata, the ones that it replaces. So no reader of
`tasks.predictions.reading` ever meets a row twice, whenever a process is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa

MOMENT_TYPE = pa.timestamp("us", tz="UTC")

REQUEST_ID = "request_id"
REQUEST_ROW = "request_row"
EVENT_TIME = "event_timestamp"
MODEL, VERSION, VARIANT, SLOT, HARDWARE = "model", "version", "variant", "slot", "hardware"
SUBJECT, SCORE, SCORES, ERROR = "subject", "score", "scores", "error"
LATENCY_US, COMPUTE_US, BATCH_ROWS = "latency_us", "compute_us", "batch_rows"

FEATURE, ENTITY, AGE, STATE = "f:", "e:", "age_s:", "state:"
"""Beginnings of the names of a feature, an entity key, and a view's age and state."""

FIXED = pa.schema(
    [
        pa.field(REQUEST_ID, pa.string()),
        pa.field(REQUEST_ROW, pa.int32()),
        pa.field(EVENT_TIME, MOMENT_TYPE),
        *(pa.field(name, pa.string()) for name in (MODEL, VERSION, VARIANT, SLOT, HARDWARE)),
        pa.field(SUBJECT, pa.string()),
        pa.field(SCORE, pa.float64()),
        pa.field(SCORES, pa.list_(pa.float32())),
        pa.field(ERROR, pa.string()),
        pa.field(LATENCY_US, pa.int64()),
        pa.field(COMPUTE_US, pa.int64()),
        pa.field(BATCH_ROWS, pa.int32()),
    ]
)
"""Columns that every model has.

`event_timestamp` is when the request arrived. `score` is null where nothing was answered, and where
the model gives several numbers a row: those are in `scores`. `error` is the word of the refusal.
`latency_us` lasts from arrival to answer, `compute_us` is the model's own time for the whole batch
of `batch_rows` rows.
"""

REPLACES = b"falaj.replaces"
"""Metadata of a part that was made of others: their names, a comma between them."""

PARTS, MERGED, ASIDE = "part-", "merged-", ".aside-"


def log_root(home: Path) -> Path:
    """Folder of the prediction log in a state folder."""
    return home / "predictions"


def model_folder(home: Path, model: str) -> Path:
    """Folder of one model; a name that could lead elsewhere is quoted."""
    return log_root(home) / f"model={quote(model, safe='')}"


def day_folder(home: Path, model: str, day: date) -> Path:
    """Folder of one UTC day of a model."""
    return model_folder(home, model) / f"day={day.isoformat()}"


def day_of(folder: Path) -> date | None:
    """The UTC day of a folder; None where it is no day's."""
    try:
        return date.fromisoformat(folder.name.removeprefix("day="))
    except ValueError:
        return None


def logged_models(home: Path) -> list[str]:
    """Models that have a log, in order."""
    folders = log_root(home).glob("model=*")
    return sorted(unquote(folder.name.removeprefix("model=")) for folder in folders)


def typed(name: str) -> pa.DataType | None:
    """Type of a column by its name; None of a feature, whose type is its model's."""
    if name in FIXED.names:
        return FIXED.field(name).type
    if name.startswith(AGE):
        return pa.float64()
    return pa.string() if name.startswith((ENTITY, STATE)) else None


def in_order(names: Iterable[str]) -> list[str]:
    """Names of columns as a part holds them: fixed ones, keys, features, then ages and states."""
    fixed = {name: position for position, name in enumerate(FIXED.names)}
    kinds = (ENTITY, FEATURE, AGE, STATE)

    def rank(name: str) -> tuple[int, int, str]:
        if name in fixed:
            return (0, fixed[name], "")
        kind = next((i for i, beginning in enumerate(kinds) if name.startswith(beginning)), 4)
        return (1 + kind, 0, name)

    return sorted(names, key=rank)
