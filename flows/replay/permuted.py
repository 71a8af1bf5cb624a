"""Histories with their days in a random order: nothing drifts, so a retraining is a false one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flows.candidate import with_encoded
from flows.config import suites_of
from flows.replay.history import History
from tasks.contracts.data import FeatureSnapshot
from tasks.kernel.settings import StagedFolder, content_key
from tasks.validation.runner import validate_snapshot

DAY_US = 86_400_000_000
ROW_GROUP_ROWS = 8192


def permuted(history: History, seed: int) -> History:
    """The same rows, each UTC day on the date of another one; all rows of a day stay together.

    The rows are validated like any others before anything is trained on them.

    Raises:
        DataContractError: a suite of the use case asks for what such a history cannot have.
        StorageError: the disk refused a write.
    """
    dataset, store = history.dataset, history.store
    snapshot, settings = dataset.snapshot, history.settings
    key = content_key("permuted", snapshot.data.sha256, seed)

    def build(folder: StagedFolder) -> FeatureSnapshot:
        table = pq.read_table(store.path(snapshot.data))
        moved = with_days_permuted(table, snapshot.columns.event_time, seed)
        pq.write_table(moved, folder.path / "data.parquet", row_group_size=ROW_GROUP_ROWS)
        made = {"data": folder.artifact("data.parquet"), "parts": folder.parts("data.parquet")}
        return snapshot.model_copy(update={**made, "pins": None})

    mixed = store.build_once("permuted", key, FeatureSnapshot, build)
    suite = with_encoded(suites_of(history.config, settings.feature_repo).training_set, mixed)
    return replace(history, dataset=validate_snapshot(mixed, suite, store), in_memory={})


def with_days_permuted(table: pa.Table, event_time: str, seed: int) -> pa.Table:
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
