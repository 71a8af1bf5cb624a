"""One label for each row of a request, whichever slots answered it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tasks.predictions.joining import LabelJoin
from tasks.predictions.labels import KNOWN_AT, LABEL
from tasks.predictions.reading import read_rows
from tasks.predictions.schema import EVENT_TIME, REQUEST_ID, REQUEST_ROW


def labels_of_requests(home: Path, join: LabelJoin, seen_after: timedelta) -> pd.DataFrame:
    """Labels of the answered rows of a query, each row of a request once.

    A copy of a request arrives a moment after it, so that another label may be the nearest to it:
    the row that arrived first says which label all have.

    Args:
        home: state folder.
        join: labels that are known, and the query; nothing is loaded yet.
        seen_after: a row is looked at so long after it arrived.

    Returns:
        Columns `request_id`, `request_row`, `label`, and `known_at`: the moment from which both the
        row could be looked at and its label was known. Rows in this order have nothing put between
        them by a label that comes later.

    Raises:
        DataContractError: a table is damaged, or there are too many labels.
    """
    tables = list(read_rows(home, join.query, join.columns)) if join.has_labels else []
    if not tables:
        return _table([], [], [], [])
    rows = _first_of_each(pa.concat_tables(tables))
    join.load(rows.column(REQUEST_ID))
    found = join.find(rows)
    has = ~np.isnan(found.label)
    since = np.maximum(found.known, found.moments + seen_after // timedelta(microseconds=1))
    named = rows.filter(pa.array(has))
    ids, numbers = (named.column(name).to_numpy() for name in (REQUEST_ID, REQUEST_ROW))
    return _table(ids, numbers, found.label[has], since[has])


def _table(ids: Any, numbers: Any, labels: Any, known: Any) -> pd.DataFrame:
    return pd.DataFrame(
        {
            REQUEST_ID: pd.Series(ids, dtype=str),
            REQUEST_ROW: pd.Series(numbers, dtype="int32"),
            LABEL: pd.Series(labels, dtype=float),
            KNOWN_AT: pd.to_datetime(pd.Series(known, dtype="int64"), unit="us", utc=True),
        }
    )


def _first_of_each(rows: pa.Table) -> pa.Table:
    """Of each row of a request the one that arrived first."""
    order = np.argsort(rows.column(EVENT_TIME).cast(pa.int64()).to_numpy(), kind="stable")
    ids = rows.column(REQUEST_ID).to_numpy()
    keys = pd.DataFrame(  # 64 bits are told apart much faster than ids
        {
            REQUEST_ID: pd.util.hash_array(ids, categorize=False),
            REQUEST_ROW: rows.column(REQUEST_ROW).to_numpy(),
        }
    )
    is_first = np.empty(rows.num_rows, bool)
    is_first[order] = ~keys.iloc[order].duplicated().to_numpy()
    return rows.filter(pa.array(is_first))
