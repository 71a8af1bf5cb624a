"""What no model can learn from is refused before training: column, window and cure are named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.data import DataSplits
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.runner import validate_snapshot
from tests.support.data import builders
from tests.support.data.builders import month
from tests.support.data.tables import SNAPSHOT_SUITE


def refusal(store: ArtifactStore, rows: pd.DataFrame, splits: DataSplits | None = None) -> str:
    snapshot = builders.dataset(store, rows).snapshot
    assert validate_snapshot(snapshot, SNAPSHOT_SUITE, store).snapshot == snapshot
    with pytest.raises(DataContractError) as refused:
        validate_snapshot(snapshot, SNAPSHOT_SUITE, store, splits=splits or builders.splits())
    return str(refused.value)


def months(rows: pd.DataFrame) -> pd.Series:
    return rows["event_timestamp"].dt.month


def test_rows_that_can_be_learned_from_pass(store: ArtifactStore) -> None:
    snapshot = builders.dataset(store).snapshot
    validate_snapshot(snapshot, SNAPSHOT_SUITE, store, splits=builders.splits())


@pytest.mark.parametrize(
    ("column", "nothing"), [("gust", np.nan), ("dest", None), ("dest", ""), ("temp", None)]
)
def test_a_feature_without_a_known_value_in_training(
    store: ArtifactStore, column: str, nothing: object
) -> None:
    rows = builders.frame()
    rows.loc[months(rows) <= 6, column] = nothing
    told = refusal(store, rows)
    assert f"{column} have no known value in any of the" in told
    assert "ttl" in told


def test_a_label_of_one_value_in_a_window(store: ArtifactStore) -> None:
    rows = builders.frame()
    rows.loc[months(rows).isin([7, 8]), "is_late"] = 0
    told = refusal(store, rows)
    assert "label is_late is 0 in all" in told
    assert "of the validation window" in told


def test_a_window_without_rows(store: ArtifactStore) -> None:
    rows = builders.frame()
    splits = DataSplits(train=month(1, 6), validation=month(7), test=month(8))
    assert "move splits.test" in refusal(store, rows[months(rows) < 8], splits)
