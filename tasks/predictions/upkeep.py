"""Upkeep of the log: old days are removed, small segments become one, damage is set aside.

Any number of processes may do it; the one that holds a model's folder works, the others pass by.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.kernel.files import private_folder
from tasks.kernel.settings import bring, children, drop
from tasks.predictions import schema as log
from tasks.predictions import segments as segmenting
from tasks.predictions.config import PredictionLogConfig

logger = logging.getLogger(__name__)

COMPACT_SEGMENTS = 120
"""Segments of the current day from which they are merged; those of a finished day always are."""
SETTLED_H = 1
"""A day is finished so long after its end: what arrived at midnight is written by then."""


def keep_up(
    home: Path,
    writer: segmenting.SegmentWriter,
    config: PredictionLogConfig,
    now: datetime,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """See to every model's folder that nobody else holds.

    Each row is rewritten twice at most: when its segment is one of many of its day, and when the
    day has ended.

    Args:
        home: state folder.
        writer: of this process.
        config: retention.
        now: the moment, UTC.
        stopping: asked between days; True ends the work there.

    Raises:
        StorageError: the disk refused; what was there is unchanged.
    """
    kept_from = now - timedelta(days=config.retention_days)
    finished_before = (now - timedelta(hours=SETTLED_H)).date()
    for name in log.logged_models(home):
        folder = log.model_folder(home, name)
        with segmenting.folder_held(folder, exclusive=True, wait=False) as held:
            for day_folder in children(folder) if held else ():
                day = log.day_of(day_folder)
                if stopping():
                    return
                if day is not None and day < kept_from.date():
                    _remove(day_folder)
                elif day is not None:
                    _keep_day(home, day_folder, writer, is_finished=day < finished_before)
    _remove_files(home, kept_from)


def damaged(segment: Path, exc: Exception) -> str:
    """The sentence about a damaged segment."""
    return (
        f"{segment} is damaged ({str(exc).splitlines()[0]}); expected a whole Parquet file. Its "
        "rows are left out and the next upkeep moves it to predictions/damaged; put it back from a "
        "copy"
    )


def _keep_day(
    home: Path, folder: Path, writer: segmenting.SegmentWriter, *, is_finished: bool
) -> None:
    """Merge segments of a day whose columns agree in type."""
    segmenting.remove_replaced(folder)
    segments, least = segmenting.visible_segments(folder), 2
    if not is_finished:
        segments = [file for file in segments if file.name.startswith(log.WRITTEN)]
        least = COMPACT_SEGMENTS
    if len(segments) < least:
        return
    undamaged = [file for file in segments if _is_whole(home, file)]
    if len(undamaged) < 2:
        return
    try:
        schema = pa.unify_schemas([pq.read_schema(f).remove_metadata() for f in undamaged])
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return  # a field was masked from some moment of this day on, and has another type since
    segmenting.replace_segments(writer, folder, undamaged, _tables(undamaged, schema), schema)


def _is_whole(home: Path, segment: Path) -> bool:
    """Read all of a segment; a damaged one is moved out of the log, where nobody reads it.

    A damaged copy of what machines share is brought again: that one may be whole.
    """
    if (fault := _fault(segment)) is None:
        return True
    aside = private_folder(log.log_root(home) / "damaged")
    day = segment.parent
    aside = segment.rename(aside / f"{day.parent.name}.{day.name}.{segment.name}")
    if bring(segment).exists() and _fault(segment) is None:
        aside.unlink()
        return True
    logger.error("%s", damaged(segment, fault))
    drop(segment)
    return False


def _fault(segment: Path) -> Exception | None:
    try:
        for _ in _row_groups(segment, page_checksum_verification=True):
            pass
    except (OSError, pa.ArrowException) as exc:
        return exc
    return None


def _row_groups(segment: Path, **options: bool) -> Iterator[pa.Table]:
    with pq.ParquetFile(segment, **options) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, use_threads=False)


def _remove(folder: Path) -> None:
    """Remove a day; renamed first, so that a kill never leaves a part of it in the log."""
    gone = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.is_dir():
        folder.rename(gone)
    drop(folder)
    shutil.rmtree(gone, ignore_errors=True)
    logger.info("%s is older than the retention; removed", folder)


def _remove_files(home: Path, before: datetime) -> None:
    """Remove damaged segments and tables of labels that are older than the retention.

    Labels that came so long ago are of rows that are gone.
    """
    root = log.log_root(home)
    for file in (*root.glob("damaged/*.parquet"), *root.glob("labels/model=*/*.parquet")):
        try:
            if file.stat().st_mtime < before.timestamp():
                drop(file)
        except FileNotFoundError:
            continue  # another process was first


def _tables(segments: Sequence[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """Rows of all segments in tables of about a row group, at most two of them in memory."""
    waiting: list[pa.Table] = []
    for segment in segments:
        for table in _row_groups(segment):
            waiting.append(fitted(table, schema))
            if sum(table.num_rows for table in waiting) >= segmenting.ROW_GROUP_ROWS:
                yield pa.concat_tables(waiting)
                waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of a schema, null where the table lacks one."""
    return pa.concat_tables([schema.empty_table(), table], promote_options="default")
