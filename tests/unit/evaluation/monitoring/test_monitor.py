"""Features over time: statistics are kept, faults are told, clean weeks stay silent."""

from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureMonitoring
from tasks.evaluation.config import MonitoringConfig
from tasks.evaluation.monitoring.alerts import read_alerts
from tasks.evaluation.monitoring.monitor import monitor_tables
from tasks.kernel.settings import ArtifactStore
from tests.support.data.stations import CONFIG, KEYS, LATER, START, Change, after, tables


def kept(store: ArtifactStore, feature: str) -> pd.DataFrame:
    """What was kept of one feature, in order of time."""
    (file,) = store.root.glob("monitoring/*/feature_days.parquet")
    rows = pd.read_parquet(file)
    return rows[rows["feature"] == feature]


def monitored(
    tmp_path: Path, store: ArtifactStore, change: Change, config: MonitoringConfig = CONFIG
) -> FeatureMonitoring:
    return monitor_tables(tables(store, change), LATER, KEYS, config, tmp_path / "home", store)


def test_clean_weeks_give_statistics_and_no_alert(tmp_path: Path, store: ArtifactStore) -> None:
    seen = monitored(tmp_path, store, lambda data: data)

    assert seen.alerts == ()
    [view] = seen.views
    assert view.num_rows == 28 * 24 * 6
    assert view.lag_minutes == 5
    assert view.age_hours == 1
    assert view.highest_psi < view.psi_bound
    levels = kept(store, "level")
    assert len(levels) == 28
    assert levels.iloc[0]["mean"] == pytest.approx(50, abs=3)
    assert kept(store, "state")["null_rate"].max() == 0


def test_a_finished_monitoring_is_read_and_multiplies_neither_statistics_nor_alerts(
    tmp_path: Path, store: ArtifactStore
) -> None:
    stale, *_ = FAULTS["a view that stopped"]
    first = monitored(tmp_path, store, stale)
    builds = store.num_builds
    again = monitored(tmp_path, store, stale)

    assert first.num_new_alerts == len(first.alerts) > 0
    assert again == first.model_copy(update={"num_new_alerts": 0})
    assert store.num_builds == builds
    assert len(read_alerts(tmp_path / "home")) == len(first.alerts)
    assert len(kept(store, "level")) == 26


FAULTS: dict[str, tuple[Change, str, str]] = {
    "a view that stopped": (
        lambda d: d[d["event_timestamp"] < after(26)], "freshness", "stations is 25 h old at",
    ),
    "days without rows": (
        lambda d: d[(d["event_timestamp"] < after(9)) | (d["event_timestamp"] >= after(10))],
        "volume", "stations has 0 rows on 2013-02-21",
    ),
    "a day twice": (
        lambda d: pd.concat(
            [d, d[d["event_timestamp"].between(after(3), after(4))]], ignore_index=True
        ),
        "volume", "the days of the baseline have 144 to 144",
    ),
    "nulls": (
        lambda d: d.assign(level=d["level"].where(d["event_timestamp"] < after(20))),
        "null_rate", "level of stations missing in 100% of the 144 rows of 2013-03-04",
    ),
    "rain that is always there": (
        lambda d: d.assign(rain=d["rain"].where(d["event_timestamp"] < after(14), d["rain"] + 1)),
        "drift", "rain of stations drifted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_once_with_its_kind(
    fault: str, tmp_path: Path, store: ArtifactStore
) -> None:
    change, kind, words = FAULTS[fault]

    monitored(tmp_path, store, change)

    events = [e for e in read_alerts(tmp_path / "home") if e.kind == kind]
    assert [words in event.sentence for event in events] == [True]


def sparse(data: pd.DataFrame) -> pd.DataFrame:
    """A shop: of every four days two are empty, on the others there are one or two rows."""
    day = (data["event_timestamp"] - START).dt.days
    kept = data[(day % 4 < 2) & (data["event_timestamp"].dt.hour % 19 == 5)]
    return kept.groupby(kept["event_timestamp"].dt.date).head(2)


def test_days_without_rows_are_part_of_a_baseline(tmp_path: Path, store: ArtifactStore) -> None:
    seen = monitored(tmp_path, store, sparse)

    assert seen.alerts == ()
    assert seen.num_alerts == 0


def test_a_day_is_judged_over_the_week_before_it(tmp_path: Path, store: ArtifactStore) -> None:
    halved: Change = lambda d: d.assign(  # noqa: E731
        level=d["level"].where(d["event_timestamp"] < after(14), d["level"] / 2)
    )
    made = tables(store, halved)

    for day in range(14, 24):
        window = TimeWindow(start=after(day), end=after(day + 1))
        monitor_tables(made, window, KEYS, CONFIG, tmp_path / "home", store)

    assert [event.kind for event in read_alerts(tmp_path / "home")] == ["drift"]
