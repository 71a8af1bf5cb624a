"""Baselines: bands come from the clean days, and hold against days that are not like them."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.baseline import Baseline
from tasks.validation.outcome import read_outcome
from tasks.validation.profiling import NOT_REVIEWED, profile_table, write_baseline
from tasks.validation.runner import validate_table
from tasks.validation.suites import FOLDER, read_suite, with_baseline
from tests.support.data.tables import REPO, between, store_table, suite

START = datetime(2013, 3, 1, tzinfo=UTC)
CLEAN = TimeWindow(start=START, end=START + timedelta(days=20))
NEXT = TimeWindow(start=CLEAN.end, end=CLEAN.end + timedelta(days=3))

SUITE = suite(
    suite="meters",
    columns={
        "text": ["meter", "town"],
        "number": ["temp", "reading", "price"],
        "timestamp": ["at"],
    },
    units={"fahrenheit": ["temp"]},
    profiling={"time_column": "at", "relations": {"price": ["town"]}},
    expectations=[between("price", 0, 1000)],
)


def readings(window: TimeWindow, seed: int = 0) -> pd.DataFrame:
    """Hourly readings of four meters."""
    rng = np.random.default_rng(seed)
    hours = pd.date_range(window.start, window.end, freq="h", inclusive="left")
    at = np.repeat(hours, 4)
    town = np.tile(["Nizwa", "Sur", "Sohar", "Bidiya"], len(hours))
    tenths_celsius = np.round(rng.normal(220, 30, len(at)))
    return pd.DataFrame(
        {
            "meter": np.tile(["m1", "m2", "m3", "m4"], len(hours)),
            "town": town,
            "temp": 32 + 0.18 * tenths_celsius,
            "reading": np.where(rng.random(len(at)) < 0.1, np.nan, rng.gamma(2, 10, len(at))),
            "price": pd.Series(town).map({"Nizwa": 10.0, "Sur": 12, "Sohar": 14, "Bidiya": 16}),
            "at": pd.Series(at).astype("datetime64[us, UTC]"),
        }
    )


@pytest.fixture
def baseline(store: ArtifactStore) -> Baseline:
    return profile_table(store_table(store, readings(CLEAN), "meters"), SUITE, CLEAN, store)


def refusal(baseline: Baseline, store: ArtifactStore, rows: pd.DataFrame) -> str:
    table = store_table(store, rows, "meters")
    with pytest.raises(DataContractError) as caught:
        validate_table(table, with_baseline(SUITE, baseline), NEXT, store, "Nothing")
    return str(caught.value)


def test_clean_days_after_the_baseline_pass(baseline: Baseline, store: ArtifactStore) -> None:
    table = store_table(store, readings(NEXT, seed=1), "meters")

    result = validate_table(table, with_baseline(SUITE, baseline), NEXT, store, "Nothing")

    outcome = read_outcome(store.path(result.result))
    assert {check.table for check in outcome.checks} == {"subject", "baseline_days"}


def test_the_grid_of_the_readings_and_the_relations_are_found(baseline: Baseline) -> None:
    assert baseline.grids["temp"].step == 0.18
    assert baseline.relations["price"].values == {
        "Bidiya": 16.0, "Nizwa": 10.0, "Sohar": 14.0, "Sur": 12.0,
    }  # fmt: skip
    assert baseline.categories["town"].keys() == {"Nizwa", "Sur", "Sohar", "Bidiya"}
    assert baseline.num_periods == 20
    assert baseline.reviewed == NOT_REVIEWED


def test_missing_and_repeated_rows_new_categories_and_nulls_are_told_apart(
    baseline: Baseline, store: ArtifactStore
) -> None:
    rows = readings(NEXT, seed=1)
    first = rows["at"] < NEXT.start + timedelta(days=1)
    spoiled = {
        "truncated or doubled file": rows[~(first & (rows["at"].dt.hour > 4))],
        "new category": rows.assign(town=rows["town"].where(~first, "Muscat")),
        "null burst": rows.assign(temp=rows["temp"].where(~first)),
        "constant, frozen or rounded column": rows.assign(temp=rows["temp"].where(~first, 75.2)),
        "mixed units, or rows shifted against each other": rows.assign(
            price=rows["price"].where(~first, 99.0)
        ),
    }

    for fault, changed in spoiled.items():
        assert fault in refusal(baseline, store, changed)


def test_too_few_days_can_be_no_baseline(store: ArtifactStore) -> None:
    short = TimeWindow(start=START, end=START + timedelta(days=5))
    table = store_table(store, readings(short), "meters")

    with pytest.raises(DataContractError, match="5 whole days in 2013-03-01T00:00Z to"):
        profile_table(table, SUITE, short, store)


def test_a_written_file_is_read_beside_the_hand_written_one_and_leaves_it_alone(
    tmp_path: Path,
) -> None:
    shutil.copytree(REPO / FOLDER, tmp_path / FOLDER)
    before = read_suite(REPO, "raw_weather")
    hand_written = (tmp_path / FOLDER / "raw_weather.yaml").read_text()
    assert before.baseline is not None
    other = before.baseline.model_copy(update={"reviewed": "by two people"})

    path = write_baseline(other, tmp_path)

    assert "# Generated by" in path.read_text()
    assert (tmp_path / FOLDER / "raw_weather.yaml").read_text() == hand_written
    again = read_suite(tmp_path, "raw_weather")
    assert again.baseline == other
    assert again.expectations == before.expectations


def test_a_file_of_an_earlier_version_is_read_where_it_is(tmp_path: Path) -> None:
    shutil.copytree(REPO / FOLDER, tmp_path / FOLDER)
    (tmp_path / FOLDER / "baseline").rename(tmp_path / FOLDER / "blessed")

    assert read_suite(tmp_path, "raw_weather") == read_suite(REPO, "raw_weather")
