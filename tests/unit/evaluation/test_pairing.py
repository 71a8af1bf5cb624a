"""Two models on the same rows of a window."""

import pytest

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.metrics import compare_scored
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data.builders import YEAR, dataset, frame
from tests.support.evaluation import windows


@pytest.fixture
def data(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store, frame(2000))


def scored(
    store: ArtifactStore, data: ValidatedDataset, follows: float, auc: float | None = 0.75
) -> ScoredWindow:
    """Scores of all rows; the more they follow the label, the better."""
    return windows.scored(store, data, YEAR, auc, follows=follows)


def test_the_one_that_errs_less_is_below_zero_for_certain(
    store: ArtifactStore, data: ValidatedDataset
) -> None:
    good, bad = scored(store, data, 3.0), scored(store, data, 1.0)
    columns = data.snapshot.columns
    better = compare_scored(good, bad, columns, store)
    worse = compare_scored(bad, good, columns, store)
    same = compare_scored(good, good, columns, store)
    assert better.error.high < 0 < worse.error.low
    assert same.error.value == same.error.low == same.error.high == 0


def test_without_enough_labels_nothing_is_said(
    store: ArtifactStore, data: ValidatedDataset
) -> None:
    known, unknown = scored(store, data, 3.0), scored(store, data, 1.0, auc=None)
    assert compare_scored(known, unknown, data.snapshot.columns, store) is None


def test_numbers_are_compared_by_their_error(store: ArtifactStore, data: ValidatedDataset) -> None:
    good, bad = scored(store, data, 3.0), scored(store, data, 1.0)
    columns = data.snapshot.columns.model_copy(update={"task": "regression", "unit": "minutes"})
    better = compare_scored(good, bad, columns, store)
    assert (better.error_name, better.error.high < 0) == ("RMSE", True)


def test_scores_of_other_rows_are_refused(store: ArtifactStore, data: ValidatedDataset) -> None:
    one = scored(store, data, 3.0)
    other = one.model_copy(update={"snapshot_sha256": "b" * 64})
    with pytest.raises(DataContractError, match="score the same rows first"):
        compare_scored(one, other, data.snapshot.columns, store)
