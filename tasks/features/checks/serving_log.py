"""The log of served features: its columns, and rows of it from an online answer.

Said in one place, because a server writes the log and the skew check reads it. For each row of a
request: which request, when, for which entity, the features as they were served, and of each view
how old it was and in what state. So a later check knows not only that a value differs but why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from feast.types import from_feast_to_pyarrow_type, from_value_type
from feast.value_type import ValueType

from tasks.features.online.answer import LABELS, OnlineAnswer
from tasks.features.online.plan import ReadPlan
from tasks.kernel.errors import ConfigurationError, DataContractError

REQUEST_ID = "request_id"
REQUEST_ROW = "request_row"
REQUEST_TIME = "event_timestamp"
"""The name under which historical retrieval takes the moment of each row."""

MOMENT_TYPE = pa.timestamp("us", tz="UTC")


def age_column(view: str) -> str:
    """Column with the age of a view's values, in seconds; null where nothing was stored."""
    return f"age_s:{view}"


def state_column(view: str) -> str:
    """Column with a view's state: `fresh`, `stale`, `missing` or `ahead`."""
    return f"state:{view}"


def log_schema(plan: ReadPlan) -> pa.Schema:
    """Columns of the log of one feature service, in order.

    `request_id` and `request_row` name a row; `event_timestamp` is the moment at which features
    were read (microseconds, UTC); then the key columns, the features as they were served, and for
    each view its age and state.

    Raises:
        ConfigurationError: a feature's type has no place in a Parquet file.
    """
    keys = plan.request_columns.items()
    return pa.schema(
        [
            pa.field(REQUEST_ID, pa.string(), nullable=False),
            pa.field(REQUEST_ROW, pa.int32(), nullable=False),
            pa.field(REQUEST_TIME, MOMENT_TYPE, nullable=False),
            *(pa.field(name, _arrow_type(name, kind)) for name, kind in keys),
            *(pa.field(f.output, _arrow_type(f.output, f.value_type)) for f in plan.features),
            *(pa.field(age_column(view.name), pa.float64()) for view in plan.views),
            *(pa.field(state_column(view.name), pa.string()) for view in plan.views),
        ]
    )


def log_rows(
    plan: ReadPlan, request_id: str, entities: Mapping[str, Sequence[Any]], answer: OnlineAnswer
) -> pa.Table:
    """Rows of the log for one answered request.

    Args:
        plan: of the reader that answered.
        request_id: name of the request.
        entities: key columns that were asked for.
        answer: what was served.
    """
    moments = np.broadcast_to(answer.moments_us, answer.num_rows)
    columns: dict[str, Any] = {
        REQUEST_ID: [request_id] * answer.num_rows,
        REQUEST_ROW: np.arange(answer.num_rows, dtype=np.int32),
        REQUEST_TIME: pa.array(moments, pa.int64()).cast(pa.timestamp("us")),
        **{name: list(entities[name]) for name in plan.request_columns},
        **answer.columns,
    }
    words = np.array(LABELS, object)
    for position, view in enumerate(answer.view_names):
        columns[age_column(view)] = answer.age_s[position]
        columns[state_column(view)] = words[answer.state[position]]
    schema = log_schema(plan)
    arrays = [_as_arrow(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def read_log(path: Path, plan: ReadPlan, batch_rows: int) -> Iterator[pa.Table]:
    """The log, at most `batch_rows` rows at a time.

    Args:
        path: Parquet file, or folder of them. An absent or empty folder is an empty log.
        plan: says which columns there must be.
        batch_rows: bound on the rows in memory.

    Raises:
        DataContractError: a column is absent or has another type, or the file is no Parquet.
    """
    if not path.exists() or (path.is_dir() and not any(path.rglob("*.parquet"))):
        return
    schema = log_schema(plan)
    try:
        logged = ds.dataset(path, format="parquet", exclude_invalid_files=False)
        _check_columns(path, logged.schema, schema)
        for batch in logged.to_batches(columns=schema.names, batch_size=batch_rows):
            if batch.num_rows:
                yield pa.Table.from_batches([batch]).cast(schema)
    except pa.ArrowInvalid as exc:
        raise DataContractError(
            f"{path.name} cannot be read as a log of served features ({exc}); expected Parquet "
            f"with the columns of {plan.service}. Nothing was compared"
        ) from exc


def _check_columns(path: Path, present: pa.Schema, wanted: pa.Schema) -> None:
    missing = [field.name for field in wanted if field.name not in present.names]
    if missing:
        raise DataContractError(
            f"{path.name} lacks column(s) {', '.join(missing)} of the log of served features; it "
            f"has {', '.join(present.names) or 'none'}. Was it written for another feature "
            "service? Nothing was compared"
        )


def _arrow_type(name: str, kind: ValueType) -> pa.DataType:
    try:
        return from_feast_to_pyarrow_type(from_value_type(kind))
    except (KeyError, ValueError) as exc:
        raise ConfigurationError(
            f"{name} is a {kind.name}, which the log of served features cannot hold"
        ) from exc


def _as_arrow(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(kind)
    return pa.array(values, kind, from_pandas=True)  # NaN and NaT are null
