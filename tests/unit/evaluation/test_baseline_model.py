import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from tasks.evaluation.baseline_model import CategoryEncoding, read_scores
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.data.builders import COLUMNS
from tests.support.evaluation.programs import Case, quick_baseline_model


def test_it_scores_the_test_rows_in_order_and_learns_something(case: Case) -> None:
    scores = read_scores(case.baseline_model, case.store)
    test = builders.frame()
    test = test[test["event_timestamp"].dt.month >= 9]
    assert scores["flight_id"].tolist() == test["flight_id"].tolist()
    assert roc_auc_score(test["is_late"], scores["yardstick_score"]) > 0.7
    assert "gradient boosting" in case.baseline_model.name


def test_equal_inputs_give_equal_scores(case: Case, store: ArtifactStore) -> None:
    again = quick_baseline_model(store, builders.dataset(store))
    assert again.scores.sha256 == case.baseline_model.scores.sha256


def test_the_test_window_decides_nothing(case: Case, store: ArtifactStore) -> None:
    data = builders.frame()
    test = data["event_timestamp"].dt.month >= 9
    data.loc[test, "is_late"] = 1 - data.loc[test, "is_late"]
    other = quick_baseline_model(store, builders.dataset(store, data))
    assert other.scores.sha256 == case.baseline_model.scores.sha256


def test_unknown_missing_and_rare_categories_are_missing() -> None:
    encoding = CategoryEncoding(COLUMNS)
    rows = builders.frame(900).assign(dest=[f"D{i}" for i in range(300)] * 3, carrier="AA")
    encoding.learn(rows)
    unseen = rows[:3].assign(dest=["D0", "never seen", None])
    matrix = encoding.matrix(unseen)
    assert encoding.matrix(rows)[:, 2][~np.isnan(encoding.matrix(rows)[:, 2])].max() == 253
    assert np.isnan(matrix[1:, 2]).all()
    assert not np.isnan(matrix[0, 2])
    assert matrix[:, 3] == pytest.approx(unseen["distance"].to_numpy())


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (pd.array([1, None, 0, 1] * 1000, dtype="Int8"), r"has 4\d\d nulls"),
        (np.zeros(4000, dtype=np.int8), r"0 nulls and the values \[0.0\]"),
        (np.arange(4000) % 3, r"the values \[0.0, 1.0, 2.0\]"),
    ],
)
def test_labels_that_are_not_both_0_and_1_are_refused(
    store: ArtifactStore, label: object, message: str
) -> None:
    dataset = builders.dataset(store, builders.frame().assign(is_late=label))
    with pytest.raises(DataContractError, match=message):
        quick_baseline_model(store, dataset)


@pytest.mark.parametrize("column", ["gust", "dest"])
def test_a_column_without_known_values_in_the_sample_does_not_stop_it(
    store: ArtifactStore, column: str
) -> None:
    data = builders.frame()
    data.loc[data["event_timestamp"].dt.month <= 6, column] = None
    other = quick_baseline_model(store, builders.dataset(store, data))
    assert read_scores(other, store)["yardstick_score"].notna().all()
