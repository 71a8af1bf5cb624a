"""A window of the log as one file, for people and other tools."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from tasks.kernel.errors import ConfigurationError, refused_writes_explained
from tasks.predictions.schema import SCORES

ENDINGS = (".parquet", ".csv")
PRIVATE_FILE = 0o600
"""Whoever exports says by moving or opening the file who else may read what people sent."""


def write_window(tables: Iterator[pa.Table], schema: pa.Schema, target: Path) -> int:
    """Write rows as Parquet or CSV, by the name's ending, aside and then renamed; how many.

    Its owner alone can read it, as the log itself.

    CSV has no lists, so the column `scores` is not in it.

    Raises:
        ConfigurationError: the name ends in another way.
        StorageError: the disk refused a write.
    """
    if target.suffix not in ENDINGS:
        raise ConfigurationError(
            f"{target} ends in {target.suffix or 'nothing'}; expected {' or '.join(ENDINGS)}. "
            "Nothing was written"
        )
    names = [n for n in schema.names if target.suffix != ".csv" or n != SCORES]
    schema = pa.schema([schema.field(name) for name in names])
    aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    rows = 0
    with refused_writes_explained(target):
        try:
            aside.touch(PRIVATE_FILE)
            with _opened(aside, target.suffix, schema) as writer:
                for table in tables:
                    writer.write_table(table.select(names))
                    rows += table.num_rows
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    return rows


def _opened(file: Path, ending: str, schema: pa.Schema) -> Any:
    if ending == ".csv":
        return pc.CSVWriter(file, schema)
    return pq.ParquetWriter(file, schema, compression="zstd")
