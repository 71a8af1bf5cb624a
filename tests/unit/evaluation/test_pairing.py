"""Two models on the same rows of a window."""

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.metrics import compare_scored
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.data.builders import dataset, frame, metric


@pytest.fixture
def data(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store, frame(2000))


def scored(
    store: ArtifactStore, data: ValidatedDataset, noise: float, *, judged: bool = True
) -> ScoredWindow:
    """Scores that follow the label, the less the more noise."""
    from tasks.contracts.evaluation import MetricSet

    columns = data.snapshot.columns
    rows = pd.read_parquet(store.path(data.snapshot.data))
    generator = np.random.default_rng(int(noise * 100))
    labels = rows[columns.label].fillna(0).to_numpy()
    score = np.clip(0.2 + 0.6 * labels + generator.normal(0, noise, len(rows)), 0.01, 0.99)
    kept = rows[[columns.row_id, columns.event_time, columns.label]].assign(
        score=score.astype("float32")
    )

    def build(folder: StagedFolder) -> ScoredWindow:
        kept.to_parquet(folder.path / "scores.parquet", index=False)
        names = ("auc", "pr_auc", "brier", "log_loss", "calibration_error")
        metrics = MetricSet(num_rows=len(rows), base_rate=0.2, **dict.fromkeys(names, metric(0.5)))
        return ScoredWindow(
            program_sha256="a" * 64,
            snapshot_sha256=data.snapshot.data.sha256,
            window=data.snapshot.window,
            num_rows=len(rows),
            scores=folder.artifact("scores.parquet"),
            metrics=metrics if judged else None,
            excess_brier=None,
        )

    return store.build_once("scores", f"{noise}-{judged}", ScoredWindow, build)


def test_the_one_that_errs_less_is_below_zero_for_certain(
    store: ArtifactStore, data: ValidatedDataset
) -> None:
    good, bad = scored(store, data, 0.05), scored(store, data, 0.5)
    columns = data.snapshot.columns
    better = compare_scored(good, bad, columns, store)
    worse = compare_scored(bad, good, columns, store)
    same = compare_scored(good, good, columns, store)
    assert better.error.high < 0 < worse.error.low
    assert same.error.value == same.error.low == same.error.high == 0


def test_without_enough_labels_nothing_is_said(
    store: ArtifactStore, data: ValidatedDataset
) -> None:
    known, unknown = scored(store, data, 0.05), scored(store, data, 0.5, judged=False)
    assert compare_scored(known, unknown, data.snapshot.columns, store) is None


def test_numbers_are_compared_by_their_error(store: ArtifactStore, data: ValidatedDataset) -> None:
    good, bad = scored(store, data, 0.05), scored(store, data, 0.5)
    columns = data.snapshot.columns.model_copy(update={"task": "regression", "unit": "minutes"})
    better = compare_scored(good, bad, columns, store)
    assert (better.error_name, better.error.high < 0) == ("RMSE", True)


def test_scores_of_other_rows_are_refused(store: ArtifactStore, data: ValidatedDataset) -> None:
    one = scored(store, data, 0.05)
    other = one.model_copy(update={"snapshot_sha256": "b" * 64})
    with pytest.raises(DataContractError, match="score the same rows first"):
        compare_scored(one, other, data.snapshot.columns, store)
