"""The newest days by themselves: what a window of weeks dilutes, and what days have anyway."""

from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.drift import DriftReport, DriftResult
from tasks.evaluation.config import DriftConfig
from tasks.evaluation.drift.compare import compare_windows
from tasks.evaluation.drift.newest import MIN_EXCESS, NUM_DAYS, describe, find_sudden
from tasks.evaluation.drift.statistics import Histogram
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.windows import scored

DAY_ROWS = 40
MISSING = 0


def days(values: np.ndarray) -> np.ndarray:
    """Rows by day and bin of numbers from 0 to 1, shape (days, rows); NaN is missing."""
    bins = np.where(np.isnan(values), MISSING, np.floor(values * 20) + 1).astype(int)
    return np.array([np.bincount(day, minlength=23) for day in bins]).astype(float)


def usual(seed: int, num_days: int) -> np.ndarray:
    """Days that differ, as those of weather do."""
    draw = np.random.default_rng(seed)
    return np.clip(
        draw.normal(draw.normal(0.5, 0.1, (num_days, 1)), 0.1, (num_days, DAY_ROWS)), 0, 1
    )


def numbers(reference: np.ndarray, current: np.ndarray, ordered: bool = True) -> Histogram:
    return Histogram(days(reference), days(current), ordered, np.arange(23))


def moved(values: np.ndarray, by: float, num_days: int = NUM_DAYS) -> np.ndarray:
    """The newest days moved."""
    values = values.copy()
    values[-num_days:] = np.clip(values[-num_days:] + by, 0, 1)
    return values


@pytest.mark.parametrize("seed", range(5))
def test_a_feature_that_moved_in_the_newest_days_alone_is_named(seed: int) -> None:
    before, now = usual(seed, 90), usual(100 + seed, 28)
    found = find_sudden({"calm": numbers(before, now), "temp": numbers(before, moved(now, 0.4))})
    assert found is not None
    assert list(found) == ["temp"]
    assert MIN_EXCESS < found["temp"] < 1
    assert "temp" in describe(found)
    assert "calm" not in describe(found)


def test_undisturbed_days_in_any_order_are_not_noticed() -> None:
    alarms = 0
    for seed in range(100):
        values = usual(seed, 88)
        alarms += bool(find_sudden({"temp": numbers(values[:60], values[60:])}))
    assert alarms <= 1


def test_days_of_a_season_that_the_reference_has_are_not_noticed() -> None:
    year = 0.5 + 0.4 * np.sin(np.arange(393) * 2 * np.pi / 365)[:, None]
    values = np.clip(usual(1, 393) - 0.5 + year, 0, 1)
    summer = slice(62, 90)
    assert find_sudden({"temp": numbers(values[:365], values[365:])}) == {}
    assert find_sudden({"temp": numbers(values[:365], values[summer])}) == {}
    assert find_sudden({"temp": numbers(values[182:365], values[summer])}) != {}  # winter alone


def test_missing_values_and_categories_are_noticed_too() -> None:
    before, now = usual(0, 60), usual(1, 28)
    lost = now.copy()
    lost[-NUM_DAYS:, 4:] = np.nan
    kinds = np.random.default_rng(0).choice([0.01, 0.06, 0.11], (88, DAY_ROWS))
    other = kinds[60:].copy()
    other[-NUM_DAYS:, : DAY_ROWS // 2] = 0.16  # a category that the reference does not have
    found = find_sudden(
        {
            "gust": numbers(before, lost),
            "same": numbers(kinds[:60], kinds[60:], ordered=False),
            "carrier": numbers(kinds[:60], other, ordered=False),
        }
    )
    assert set(found or {}) == {"gust", "carrier"}
    assert list((found or {}).items()) == sorted((found or {}).items(), key=lambda each: -each[1])


def test_a_part_of_a_day_is_left_out() -> None:
    before, now = days(usual(0, 60)), days(usual(1, 29))
    now[-1] = 0
    now[-1, 20] = DAY_ROWS // 4  # one hour of one day, at one value
    assert find_sudden({"temp": Histogram(before, now, True, np.arange(23))}) == {}


def test_thin_days_at_the_end_are_not_skipped_for_older_ones() -> None:
    before, now = usual(0, 90), moved(usual(1, 28), 0.4)
    histogram = numbers(before, now)
    histogram.current[-2:] //= 4
    assert find_sudden({"temp": histogram}) is None


@pytest.mark.parametrize(("num_reference", "num_current"), [(27, 28), (60, NUM_DAYS - 1)])
def test_with_too_few_days_it_is_off_and_says_so(num_reference: int, num_current: int) -> None:
    now = moved(usual(1, num_current), 0.4)
    found = find_sudden({"temp": numbers(usual(0, num_reference), now)})
    assert found is None
    assert "not compared by themselves" in describe(found)


def test_a_check_watches_a_sudden_change_and_never_retrains_by_it(store: ArtifactStore) -> None:
    train, validation, window = builders.month(1, 6), builders.month(7, 2), builders.month(11)
    reports: list[DriftReport] = []
    for step in (0, 40):
        rows = builders.frame(20_000)
        new = rows["event_timestamp"].between(window.end - timedelta(days=4), window.end)
        rows["temp"] = rows["temp"].where(~new, rows["temp"] + step)
        data = builders.dataset(store, rows)
        before, now = (scored(store, data, each, auc=None) for each in (validation, window))
        every = data, train, data, window, before, now
        reports.append(compare_windows(*every, DriftConfig(), store))
    assert [each.result for each in reports] == [DriftResult.STABLE, DriftResult.WATCH]
    assert not any(feature.drifted for each in reports for feature in each.features)
    assert any(e.startswith("Sudden change") and "temp 0." in e for e in reports[1].evidence)
    assert pd.Series(reports[0].evidence).str.startswith("No feature lies further").any()
