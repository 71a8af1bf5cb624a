"""Training on new rows only, without forgetting: how many of the older rows come along, and which.

The rule: every row newer than the champion's training window, and so many older ones that they are
`share` of all. Which ones is a function of the row's id and the seed, so it does not depend on the
ranks, the order of the rows or the attempt. A share of 0 trains on new rows alone (and forgets), 1
is not offered: that is a training from all rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, DataSplits
from tasks.kernel.errors import WindowError, refused_writes_explained


def new_rows_window(train: TimeWindow, champion: TimeWindow) -> TimeWindow:
    """The part of the training window that the champion was not trained on.

    Raises:
        WindowError: there is none, or the champion was trained on later rows than these.
    """
    if champion.end >= train.end:
        raise WindowError(
            f"the champion was trained on rows up to {champion.end:%FT%RZ}, the training window "
            f"{train} has none after that; nothing new is there to learn. Move the window on"
        )
    return TimeWindow(start=max(train.start, champion.end), end=train.end)


def replay_probability(num_new: int, num_old: int, share: float) -> float:
    """Probability with which an older row comes along.

    Args:
        num_new: rows newer than the champion's training window, over all ranks.
        num_old: older rows, over all ranks.
        share: of older rows among all rows that are trained on, in [0, 1).

    Returns:
        In [0, 1]; 1 where there are fewer older rows than the share asks for.
    """
    if not num_old:
        return 0.0
    return min(1.0, share / (1.0 - share) * num_new / num_old)


def replayed(row_ids: pa.ChunkedArray, probability: float, seed: int) -> NDArray[np.bool_]:
    """Which of the older rows come along, shape as `row_ids`: a hash of id and seed decides."""
    named = pc.binary_join_element_wise(row_ids.cast(pa.string()), str(seed), "/")
    texts = named.to_numpy(zero_copy_only=False)
    hashes = np.asarray(pd.util.hash_array(texts, categorize=False), dtype=np.uint64)
    return (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53 < probability


def write_replayed(
    snapshot: Path,
    target: Path,
    columns: DatasetSchema,
    splits: DataSplits,
    champion: TimeWindow,
    share: float,
    seed: int,
) -> str:
    """Write the rows of a continued training, a row group at a time; returns a line about it.

    Args:
        snapshot: all rows, Parquet.
        target: file to write; takes the rows of the rule above, and all rows outside the training
            window as they are.
        columns: which column is what.
        splits: which rows are for training.
        champion: the champion's training window.
        share: of older rows among all that are trained on.
        seed: decides which older rows come along.

    Raises:
        WindowError: nothing is new.
        StorageError: the disk refused the write.
    """
    new = new_rows_window(splits.train, champion)
    with pq.ParquetFile(snapshot) as source:
        times = source.read([columns.event_time])[columns.event_time]
        num_new, num_all = _num_inside(times, new), _num_inside(times, splits.train)
        probability = replay_probability(num_new, num_all - num_new, share)
        num_old = 0
        with refused_writes_explained(target), pq.ParquetWriter(target, source.schema_arrow) as out:
            for group in range(source.num_row_groups):
                table = source.read_row_group(group)
                older = _inside(table[columns.event_time], splits.train) & ~_inside(
                    table[columns.event_time], new
                )
                chosen = replayed(table[columns.row_id], probability, seed)
                num_old += int((older & chosen).sum())
                out.write_table(table.filter(pa.array(~older | chosen)))
    return (
        f"training continues the champion's with {num_new} rows of {new} and {num_old} of "
        f"{num_all - num_new} older ones (replay_share={share:g})"
    )


def _inside(times: pa.ChunkedArray, window: TimeWindow) -> NDArray[np.bool_]:
    inside = pc.and_(pc.greater_equal(times, window.start), pc.less(times, window.end))
    return np.asarray(pc.fill_null(inside, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _num_inside(times: pa.ChunkedArray, window: TimeWindow) -> int:
    return int(_inside(times, window).sum())
