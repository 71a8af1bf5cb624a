"""Histories with their days in a random order: nothing drifts, so a retraining is a false one."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flows.replay.history import History
from tasks.contracts.data import FeatureSnapshot, ValidatedDataset, ValidationResult
from tasks.features.snapshot import ROW_GROUP_ROWS
from tasks.kernel.settings import StagedFolder, content_key

DAY_US = 86_400_000_000


def permuted(history: History, seed: tuple[int, int]) -> History:
    """The same rows, each UTC day on the date of another one; all rows of a day stay together.

    No suite vouches for such a history: it is one that cannot be, with flights of June in winter.

    Raises:
        StorageError: the disk refused a write.
    """
    dataset, store = history.dataset, history.store
    snapshot = dataset.snapshot
    key = content_key("permuted", snapshot.data.sha256, seed)

    def build(folder: StagedFolder) -> FeatureSnapshot:
        table = pq.read_table(store.path(snapshot.data))
        moved = with_days_permuted(table, snapshot.columns.event_time, seed)
        pq.write_table(moved, folder.path / "data.parquet", row_group_size=ROW_GROUP_ROWS)
        made = {"data": folder.artifact("data.parquet"), "parts": folder.parts("data.parquet")}
        return snapshot.model_copy(update={**made, "pins": None})

    mixed = store.build_once("permuted", key, FeatureSnapshot, build)
    return replace(history, dataset=unjudged(mixed), in_memory={})


def unjudged(snapshot: FeatureSnapshot) -> ValidatedDataset:
    """A training set that was changed on purpose, in the form that scoring and training take."""
    result = ValidationResult(
        suite="none",
        subject="snapshot",
        subject_sha256=snapshot.data.sha256,
        num_rows=snapshot.num_rows,
        num_expectations=1,
        result=snapshot.data,
        warnings=("changed on purpose for a replay; no suite vouches for these rows",),
    )
    return ValidatedDataset(snapshot=snapshot, validation=result)


def with_days_permuted(table: pa.Table, event_time: str, seed: tuple[int, int]) -> pa.Table:
    """Rows in order of their new time: the time of day stays, the days are exchanged at random."""
    kind = table.schema.field(event_time).type
    times = table[event_time].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    days, number = np.unique(times // DAY_US, return_inverse=True)
    others = np.random.default_rng(seed).permutation(days)
    moved = times + (others - days)[number] * DAY_US
    order = np.argsort(moved, kind="stable")
    column = pa.array(moved[order]).cast(pa.timestamp("us", "UTC")).cast(kind)
    rows = table.take(pa.array(order))
    return rows.set_column(rows.schema.get_field_index(event_time), event_time, column)
