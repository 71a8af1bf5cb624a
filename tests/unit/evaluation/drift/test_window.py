from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluation.drift.window import Numbers, WindowColumns
from tasks.kernel.errors import DataContractError
from tests.support.evaluation.windows import TIME, days, window_of


def test_only_rows_of_the_window_are_read_in_order_of_their_day(tmp_path: Path) -> None:
    times = ["2013-01-03T01:00", "2013-01-01T23:00", "2013-01-02T00:00", "2012-12-31T23:59"]
    rows = pd.DataFrame({TIME: pd.to_datetime(times, utc=True), "x": [3, 1, 2, 0]})
    rows.to_parquet(tmp_path / "rows.parquet")
    window = WindowColumns(tmp_path / "rows.parquet", TIME, days(2))
    assert window.numbers("x").values.tolist() == [1, 2]
    assert (window.num_rows, window.num_days) == (2, 2)


def test_columns_that_are_absent_or_no_numbers_are_named(tmp_path: Path) -> None:
    window = window_of(tmp_path, {"c": ["a", "b"]}, 2)
    with pytest.raises(DataContractError, match="lack column 'gust'"):
        window.numbers("gust")
    with pytest.raises(DataContractError, match="column 'c' holds string, expected numbers"):
        window.numbers("c")
    with pytest.raises(DataContractError, match="lacks the event time 'when'"):
        WindowColumns(tmp_path / "0.parquet", "when", days(2))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(width=32)), min_size=1, max_size=60),
    st.sampled_from([np.float32, np.float64]),
)
def test_rows_are_sorted_once_and_every_order_is_read_off_it(
    rows: list[tuple[int, float]], kind: type[np.floating[Any]]
) -> None:
    class Window:
        days = np.array([day for day, _ in rows])
        dates, num_days = np.arange(6) + 15_000, 6

    values = np.array([value for _, value in rows], kind)
    numbers = Numbers(Window(), values)
    known = ~np.isnan(values)
    np.testing.assert_array_equal(numbers.ranked, np.sort(values[known]))
    pairs = sorted(zip(numbers.ranked_days, numbers.ranked, strict=True))
    assert pairs == sorted(zip(Window.days[known], values[known], strict=True))
    finite = np.isfinite(values)
    of_days, sizes = numbers.by_day()
    for day, part in enumerate(np.split(of_days, np.cumsum(sizes)[:-1])):
        np.testing.assert_array_equal(part, np.sort(values[finite & (Window.days == day)]))


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_are_found_in_many_row_groups(tmp_path: Path, shuffled: bool) -> None:
    times = pd.date_range("2013-01-01", periods=500, freq="h", tz="UTC")
    rows = pd.DataFrame({TIME: times, "x": np.arange(500.0)})
    if shuffled:
        rows = rows.sample(frac=1, random_state=1)
    rows.to_parquet(tmp_path / "rows.parquet", row_group_size=37, index=False)
    numbers = WindowColumns(tmp_path / "rows.parquet", TIME, days(6, first=4)).numbers("x")
    assert numbers.ranked.tolist() == list(range(96, 240))
    assert numbers.by_day()[1].tolist() == [24] * 6
