from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tasks.evaluation.drift.window import WindowColumns
from tasks.kernel.errors import DataContractError
from tests.support.evaluation.windows import TIME, days, window_of


def test_only_rows_of_the_window_are_read_in_order_of_their_day(tmp_path: Path) -> None:
    times = ["2013-01-03T01:00", "2013-01-01T23:00", "2013-01-02T00:00", "2012-12-31T23:59"]
    rows = pd.DataFrame({TIME: pd.to_datetime(times, utc=True), "x": [3, 1, 2, 0]})
    rows.to_parquet(tmp_path / "rows.parquet")
    window = WindowColumns(tmp_path / "rows.parquet", TIME, days(2))
    assert window.numbers("x").tolist() == [1, 2]
    assert (window.num_rows, window.num_days) == (2, 2)


def test_a_day_is_a_utc_day(tmp_path: Path) -> None:
    times = pd.to_datetime(["2013-01-01T22:00-05:00", "2013-01-02T04:00+00:00"], utc=True)
    pd.DataFrame({TIME: times, "x": [1.0, 2.0]}).to_parquet(tmp_path / "rows.parquet")
    window = WindowColumns(tmp_path / "rows.parquet", TIME, days(5))
    assert window.num_days == 1
    assert [known.tolist() for _, known in window.known_by_day(window.numbers("x"))] == [[1, 2]]


def test_columns_that_are_absent_or_no_numbers_are_named(tmp_path: Path) -> None:
    window = window_of(tmp_path, {"c": ["a", "b"]}, 2)
    with pytest.raises(DataContractError, match="lack column 'gust'"):
        window.numbers("gust")
    with pytest.raises(DataContractError, match="column 'c' holds string, expected numbers"):
        window.numbers("c")
    with pytest.raises(DataContractError, match="lacks the event time 'when'"):
        WindowColumns(tmp_path / "0.parquet", "when", days(2))


def test_a_window_without_rows_has_no_days(tmp_path: Path) -> None:
    window_of(tmp_path, {"x": np.arange(4.0)}, 2)
    window = WindowColumns(tmp_path / "0.parquet", TIME, days(3, first=100))
    assert (window.num_rows, window.num_days) == (0, 0)


def test_categories_are_numbered_alike_in_both_windows(tmp_path: Path) -> None:
    before = window_of(tmp_path, {"c": ["b", None, "a", "b"]}, 2).categories("c")
    assert before.sizes == {"b": 2, "a": 1}
    assert before.numbered({"a": 0, "b": 1})[[0, 2, 3]].tolist() == [1, 0, 1]
    assert np.isnan(before.numbered({"a": 0, "b": 1})[1])
    assert before.numbered({"a": 0}, default=9)[0] == 9
