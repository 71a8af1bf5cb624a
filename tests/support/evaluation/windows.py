"""Windows of made-up columns, and scores of a model that nobody trained."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.drift.statistics import (
    Change,
    Histogram,
    count_categories,
    count_numbers,
    draw_blocks,
    measure_changes,
)
from tasks.evaluation.drift.window import WindowColumns
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key
from tests.support.data.builders import COLUMNS, metric, metric_set

START = datetime(2013, 1, 1, tzinfo=UTC)
TIME = "event_timestamp"


def days(num_days: int, first: int = 0) -> TimeWindow:
    """A window of whole days, counted from the beginning of 2013."""
    return TimeWindow(
        start=START + timedelta(days=first), end=START + timedelta(days=first + num_days)
    )


Columns = dict[str, np.ndarray | list[str | None]]


def window_of(folder: Path, columns: Columns, num_days: int) -> WindowColumns:
    """Columns of equal length, spread evenly and in order over so many days."""
    num_rows = len(next(iter(columns.values())))
    times = np.datetime64("2013-01-01T00:00:00.000000") + (
        np.arange(num_rows) * (num_days * 86_400_000_000) // num_rows
    ).astype("timedelta64[us]")
    table = pa.table(
        {TIME: pa.array(times, pa.timestamp("us", "UTC"))}
        | {name: pa.array(values, from_pandas=True) for name, values in columns.items()}
    )
    path = folder / f"{len(list(folder.iterdir()))}.parquet"
    pq.write_table(table, path)
    return WindowColumns(path, TIME, days(num_days))


def changes(folder: Path, reference: Columns, current: Columns) -> list[Change]:
    """Change of every column; the names of categories begin with c."""
    before, now = window_of(folder, reference, 60), window_of(folder, current, 30)
    generator = np.random.default_rng(0)
    draws = [draw_blocks(rows.num_days, generator) for rows in (before, now)]
    return measure_changes([_count(name, before, now) for name in reference], draws[0], draws[1])


def _count(name: str, before: WindowColumns, now: WindowColumns) -> Histogram:
    if name.startswith("c"):
        return count_categories((before, before.categories(name)), (now, now.categories(name)))
    return count_numbers(before.numbers(name), now.numbers(name))


def scored(
    store: ArtifactStore,
    dataset: ValidatedDataset,
    window: TimeWindow,
    auc: float | None = 0.75,
    excess: float = 0.0,
    shift: float = 0.0,
    follows: float = 0.0,
) -> ScoredWindow:
    """Scores of a window's rows; `auc` None stands for no labels.

    Logits are moved by `shift`, and by `follows` where the label is 1.
    """
    rows = pd.read_parquet(store.path(dataset.snapshot.data))
    rows = rows[rows[TIME].between(window.start, window.end, inclusive="left")]
    logits = np.random.default_rng(len(rows)).normal(-1 + shift, 1, len(rows))
    logits += follows * rows[COLUMNS.label].fillna(0).to_numpy(float)
    scores = pd.DataFrame(
        {
            COLUMNS.row_id: rows[COLUMNS.row_id],
            TIME: rows[TIME],
            COLUMNS.label: rows[COLUMNS.label],
            "score": (1 / (1 + np.exp(-logits))).astype(np.float32),
        }
    )

    def build(folder: StagedFolder) -> ScoredWindow:
        scores.to_parquet(folder.path / "scores.parquet", index=False)
        quality = None if auc is None else metric_set(auc, num_rows=len(rows))
        return ScoredWindow(
            program_sha256="a" * 64,
            snapshot_sha256=dataset.snapshot.data.sha256,
            window=window,
            num_rows=len(rows),
            scores=folder.artifact("scores.parquet"),
            metrics=quality,
            excess_brier=None if auc is None else metric(excess, 0.005),
            unjudged="no label is known" if auc is None else None,
        )

    key = content_key(dataset.snapshot.data.sha256, window, auc, excess, shift, follows)
    return store.build_once("scores", key, ScoredWindow, build)
