"""Raw counts of the second use case, on windows of any length that is asked for."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from flows.config import read_pipeline_config
from tasks.contracts.base import TimeWindow
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.runner import validate_table
from tasks.validation.suites import read_suite
from tests.support.data.tables import store_table
from tests.support.data.use_cases import TRAFFIC

FEATURES = read_pipeline_config(TRAFFIC).features
EVENING = datetime.fromisoformat("2017-11-19T18:00:00+00:00")


def check(hours: int, folder: Path, lost: int = 0) -> None:
    """Land a window, lose the first of its counts, and ask the suite."""
    store = ArtifactStore(folder / "artifacts")
    window = TimeWindow(start=EVENING - timedelta(hours=hours), end=EVENING)
    (table,) = land_raw_rows(window, FEATURES, TRAFFIC, store).tables
    rows = pd.read_parquet(store.path(table.artifact))
    rows.loc[rows.index[:lost], ["traffic_volume", "temp"]] = None
    suite = read_suite(TRAFFIC, FEATURES.raw_tables[0].suite)
    validate_table(store_table(store, rows), suite, window, store, "Nothing")


@pytest.mark.parametrize("hours", [1, 48, 167, 168, 336])
def test_counts_of_a_window_of_any_length_pass(tmp_path: Path, hours: int) -> None:
    """An hourly refresh looks at two days; a share of a week's hours says nothing of them."""
    check(hours, tmp_path)


def test_a_week_that_was_hardly_counted_is_refused(tmp_path: Path) -> None:
    check(168, tmp_path / "whole", lost=20)
    with pytest.raises(DataContractError, match="of a week's hours at least four in five"):
        check(168, tmp_path / "lost", lost=60)
