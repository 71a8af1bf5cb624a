from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from tasks.evaluation.drift.compare import (
    ExaminedColumn,
    Windows,
    examine_categories,
    examine_numbers,
)
from tasks.evaluation.drift.faults import UNIT_CHANGES, UnitChange, UnitGuess, judge_guesses
from tests.support.evaluation.windows import window_of

DAY_ROWS = 40


def season(first_day: int, num_days: int, seed: int = 0) -> np.ndarray:
    """Hourly-like temperatures in Fahrenheit over the year: seasons, weather, day and night."""
    rng = np.random.default_rng([seed, first_day])
    day = first_day + np.arange(num_days)
    weather = np.convolve(rng.normal(0, 5, num_days + 2), np.ones(3) / 3**0.5, "valid")
    mean = 55 - 25 * np.cos(2 * np.pi * (day - 20) / 365) + weather
    hours = np.arange(DAY_ROWS) / DAY_ROWS
    return (mean[:, None] + 8 * np.sin(2 * np.pi * hours) + rng.normal(0, 2, (1, DAY_ROWS))).ravel()


def examined(
    folder: Path, before: np.ndarray, lead_in: np.ndarray | None, now: np.ndarray
) -> ExaminedColumn:
    """A numeric column with `DAY_ROWS` rows a day."""
    parts = [
        None if v is None else window_of(folder, {"x": v}, len(v) // DAY_ROWS)
        for v in (before, now, lead_in)
    ]
    return examine_numbers("x", Windows(*parts))


@pytest.mark.parametrize("first_day", range(180, 335, 30))
def test_a_change_of_season_is_no_fault(tmp_path: Path, first_day: int) -> None:
    before, lead_in, now = season(0, 180), season(first_day - 30, 30), season(first_day, 30)
    assert examined(tmp_path, before, lead_in, now).faults == ()
    assert examined(tmp_path, before, lead_in, now).guess is None


@pytest.mark.parametrize("first_day", range(180, 335, 30))
def test_fahrenheit_that_becomes_celsius_is_a_fault_in_any_season(
    tmp_path: Path, first_day: int
) -> None:
    lead_in, now = season(first_day - 30, 30), (season(first_day, 30) - 32) * 5 / 9
    guess = examined(tmp_path, season(0, 180), lead_in, now).guess
    assert "Fahrenheit to Celsius" in guess.names
    faults, remarks = judge_guesses({"x": guess}, ["x"])
    assert faults == [f"x: {guess.told}"]
    assert remarks == []


@pytest.mark.parametrize("change", UNIT_CHANGES, ids=lambda change: change.name)
def test_every_known_change_of_unit_is_found_in_steady_values(
    tmp_path: Path, change: UnitChange
) -> None:
    rng = np.random.default_rng(0)
    before, lead_in, now = (rng.gamma(36, 3, days * DAY_ROWS) for days in (90, 30, 30))
    guess = examined(tmp_path, before, lead_in, now * change.scale + change.offset).guess
    assert change.name in guess.names


def test_an_abrupt_step_that_no_unit_explains_is_drift_and_no_fault(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before, lead_in, now = (rng.normal(100, 5, days * DAY_ROWS) for days in (90, 30, 30))
    assert examined(tmp_path, before, lead_in, now + 37).guess is None
    assert examined(tmp_path, before, lead_in, now + 37).faults == ()


def test_a_count_that_grows_by_the_share_of_a_mile_is_no_fault(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before, lead_in, now = (rng.gamma(40, 0.225, days * DAY_ROWS) for days in (90, 30, 30))
    guess = examined(tmp_path, before, lead_in, now * 1.609344).guess
    faults, remarks = judge_guesses({"ratings": guess}, ["distance"])
    assert faults == []
    assert len(remarks) == 1
    assert "280 rows before" in remarks[0]


def test_columns_that_agree_are_a_fault_without_a_declared_unit() -> None:
    day = date(2013, 3, 1)
    miles = UnitGuess(
        ("miles to kilometres", "feet to metres"), day, 300, "looks converted", lasts=True
    )
    alike = {name: miles for name in ("a", "b", "c")}
    other = {
        "a": miles,
        "b": replace(miles, day=date(2013, 3, 2)),
        "c": replace(miles, names=("percent to share",)),
        "d": replace(miles, num_rows=50),
        "e": replace(miles, lasts=False),
    }
    assert len(judge_guesses(alike, [])[0]) == 3
    assert judge_guesses(other, [])[0] == []
    assert len(judge_guesses(other, [])[1]) == 5


def test_a_storm_of_three_days_is_no_lasting_change_and_a_new_unit_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before, lead_in, now = (rng.gamma(36, 3, days * DAY_ROWS) for days in (90, 30, 30))
    storm = now.copy()
    storm[-3 * DAY_ROWS :] *= 3.28
    found = [examined(tmp_path, before, lead_in, each).guess for each in (storm, now * 3.28)]
    assert [guess.lasts for guess in found] == [False, True]


def test_a_feed_that_repeats_one_value_for_days_is_a_fault(tmp_path: Path) -> None:
    now = season(200, 30)
    now[10 * DAY_ROWS : 15 * DAY_ROWS] = 71.0
    (fault,) = examined(tmp_path, season(0, 180), season(170, 30), now).faults
    assert "one value in all 200 known rows of 5 days (2013-01-11 to 2013-01-15)" in fault


def test_dry_days_are_no_fault_of_a_rain_gauge(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wet = np.where(rng.random(180) < 0.3, rng.gamma(2, 1, 180), 0).repeat(DAY_ROWS)
    assert examined(tmp_path, wet, None, np.zeros(30 * DAY_ROWS)).faults == ()


def test_a_column_that_is_mostly_missing_by_nature_may_be_missing_more_in_a_calm_month(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    share = np.concatenate([np.full(60, 0.6), np.full(30, 0.9), np.full(60, 0.6)])
    gust = np.where(rng.random((150, DAY_ROWS)) < share[:, None], np.nan, rng.gamma(9, 3, (150, 1)))
    calm = np.where(rng.random(30 * DAY_ROWS) < 0.95, np.nan, rng.gamma(9, 3, 30 * DAY_ROWS))
    assert examined(tmp_path, gust.ravel(), None, calm).faults == ()
    (fault,) = examined(tmp_path, gust.ravel(), None, np.full(30 * DAY_ROWS, np.nan)).faults
    assert fault.startswith("missing in 100.0%")


@pytest.mark.parametrize(("rows", "is_fault"), [(14, False), (140, True)])
def test_a_few_rows_without_a_value_or_with_a_new_category_are_no_fault(
    tmp_path: Path, rows: int, is_fault: bool
) -> None:
    """A third is missing and a fifth is new, of one row a day and of ten."""
    rng = np.random.default_rng(0)
    known = rng.normal(0, 1, 90 * DAY_ROWS)
    gaps = np.where(np.arange(rows) % 3 == 0, np.nan, rng.normal(0, 1, rows))
    usual = rng.choice(["a", "b"], 90 * DAY_ROWS).tolist()
    new = ["new" if n % 5 == 0 else "ab"[n % 2] for n in range(rows)]
    before, now = (
        window_of(tmp_path, {"x": x, "c": c}, days)
        for x, c, days in ((known, usual, 90), (gaps, new, 14))
    )
    windows = Windows(before, now, None)
    assert bool(examine_numbers("x", windows).faults) == is_fault
    assert bool(examine_categories("c", windows).faults) == is_fault
