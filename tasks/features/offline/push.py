"""Append pushed rows to a view's file; readers and other writers meet it whole."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from feast.feature_view import FeatureView

from tasks.features.access.guarded_store import file_lock
from tasks.features.online.write_rules import check_pushed
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.files import replacing


def append_rows(view: FeatureView, path: Path, rows: pa.Table) -> None:
    """Append to a Parquet file, one writer after the other, or a part to a folder of them.

    Raises:
        WindowError: a time is missing, has no time zone or lies in the future.
        FeatureStoreError: the rows have other columns than the file.
        TransientError: another writer holds the file for too long.
        StorageError: the disk refused the write.
    """
    check_pushed(view, rows)
    with file_lock(path.with_name(f"{path.name}.lock")):
        parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        typed = _as_stored(view, rows, pq.read_schema(parts[0]) if parts else rows.schema)
        if path.is_dir():
            _put(typed, path / f"{uuid4().hex}.parquet")
        else:
            _put(pa.concat_tables([pq.read_table(path), typed]), path)


def _as_stored(view: FeatureView, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    try:
        return rows.cast(schema)
    except (ValueError, pa.ArrowInvalid) as exc:
        raise FeatureStoreError(
            f"rows pushed to feature view {view.name} have the columns {rows.schema.names}, its "
            f"table has {schema.names}, in this order ({exc}). Nothing was written"
        ) from exc


def _put(rows: pa.Table, file: Path) -> None:
    """Write aside, then rename."""
    with replacing(file) as aside:
        pq.write_table(rows, aside)
