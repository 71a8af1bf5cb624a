"""What a source is to landing, and how rows from elsewhere are copied for it."""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import SourceFile
from tasks.features.tables import formats
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError, DataContractError, FalajError, TransientError
from tasks.kernel.files import digest_of, digest_of_all


@dataclass(frozen=True)
class Source:
    """What a uri names at this moment, as far as a window needs it."""

    seen: SourceFile
    """Its state. The same state gives the same rows."""
    bring: Callable[[], Sequence[Path]]
    """Gives local files with the window's rows, and maybe others."""
    digest: Callable[[], str] | None = None
    """Looks again: differs from that of `seen` where the source has changed meanwhile. None where
    what is brought cannot change."""


@contextmanager
def about(table: RawTable) -> Iterator[None]:
    """Let errors say which raw table they are about, and that nothing was landed."""
    try:
        yield
    except (ConfigurationError, DataContractError, TransientError) as exc:
        raise type(exc)(f"raw table {table.name}: {exc}. Nothing was landed") from exc
    except FileNotFoundError as exc:
        raise TransientError(
            f"raw table {table.name}: {exc.filename} went away while it was read; run again. "
            "Nothing was landed"
        ) from exc
    except PermissionError as exc:
        raise ConfigurationError(
            f"raw table {table.name}: {exc.filename} may not be read ({exc.strerror}); give this "
            "user the right to read it. Nothing was landed"
        ) from exc


@contextmanager
def source_explained(
    table: RawTable, what: str, errors: type[Exception], passing: re.Pattern[str], advice: str
) -> Iterator[None]:
    """Say in our words what a library says of a source.

    Args:
        table: what is read.
        what: the source, for people.
        errors: class of the library's exceptions.
        passing: of `<SQLSTATE or class>: <text>`, where trying again may help.
        advice: what to see to where it may not.

    Raises:
        TransientError: the source does not answer.
        ConfigurationError: it refuses.
    """
    try:
        yield
    except FalajError:
        raise
    except errors as exc:
        plain = re.sub(r"\x1b\[\d+m", "", str(exc))
        plain = re.sub(r"(://[^:/@\s]*):[^@\s]+@", r"\1:***@", " ".join(plain.split()))
        reason = f"{getattr(exc, 'sqlstate', '') or type(exc).__name__}: {plain}"
        is_passing = passing.search(reason)
        reason = reason[: formats.LONGEST_REASON]
        if is_passing:
            raise TransientError(
                f"{what} does not answer ({reason}); see that it runs, and that {table.uri!r} and "
                "the network are right, then run again"
            ) from None
        raise ConfigurationError(f"{what} refused {table.uri!r} ({reason}); {advice}") from None


def digest_of_states(states: Sequence[tuple[str, str]]) -> str:
    """Digest over names and states of several files, whatever their order."""
    return digest_of_all(sorted(states))


def copied(table: RawTable, file: Path) -> Source:
    """A file that was copied here whole, and that nobody else changes."""
    seen = SourceFile(uri=table.uri, sha256=digest_of(file), num_bytes=file.stat().st_size)
    return Source(seen, lambda: [formats.unpacked(file, file.parent / "unpacked")])


def library(name: str, extra: str, table: RawTable) -> Any:
    """A module that only some sources need.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"{table.uri!r} needs the package {exc.name}, which is not installed; run `pip install "
            f"'falaj[{extra}]'`"
        ) from exc


def copy_window(
    rows: ds.Dataset, table: RawTable, window: TimeWindow, target: Path, origin: Path = Path()
) -> Path:
    """Write the declared columns of the window's rows to a Parquet file.

    What the dataset can tell from statistics to lie outside is not read.

    Args:
        rows: where they are.
        table: what is declared.
        window: what is asked for; rows without a time belong to it too.
        target: the file; its folder is made.
        origin: path of the only file, whose folders may be columns.
    """
    own, present = formats.own_names(table), set(rows.schema.names)
    lacking = set(own.values()) - present - formats.folder_values(origin).keys()
    # With a column missing all are taken, for the message tells what there is.
    columns = None if lacking or not own else sorted(present.intersection(own.values()))
    condition = inside_window(rows.schema, table, window)
    return write_rows(rows.scanner(columns=columns, filter=condition).to_reader(), target)


def write_rows(reader: pa.RecordBatchReader, target: Path) -> Path:
    """Write a stream of rows to a Parquet file; its folder is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(target, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    return target


def inside_window(schema: pa.Schema, table: RawTable, window: TimeWindow) -> ds.Expression | None:
    """Condition for the time column, if it tells; of coarser times a bit more."""
    column = formats.own_names(table).get(table.time_column or "", "")
    bounds = formats.near(window, formats.plain_type(schema, column))
    if bounds is None:
        return None
    field, kind = ds.field(column), schema.field(column).type
    zone = getattr(kind, "tz", None) and "UTC"
    since, until = (
        pa.scalar(moment.astimezone(UTC), pa.timestamp("us", zone)).cast(kind, safe=False)
        for moment in (bounds.start, bounds.end + timedelta(seconds=1))
    )
    return ((field >= since) & (field < until)) | field.is_null()
