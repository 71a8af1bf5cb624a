"""Faults on demand change what they say, where and when they say it, and nothing else."""

from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows
from tasks.features.injection import (
    AMOUNTS,
    KINDS,
    Fault,
    FaultyRows,
    flip_labels,
    inject,
    parse_faults,
)
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.replay.landed import CONFIG, HISTORY, after, frames, landed

TABLE_KINDS = [kind for kind in KINDS if kind != "labels-flipped"]
TIMES = {"sales": "sold", "readings": "at"}
TWO_YEARS = TimeWindow(
    start=datetime.fromisoformat("2016-10-01T05:00Z"),
    end=datetime.fromisoformat("2018-10-01T05:00Z"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(store: ArtifactStore) -> LandedRows:
    return landed(store)


def one(text: str) -> Fault:
    (fault,) = parse_faults(text, HISTORY)
    return fault


def rows_of(landed: LandedRows, store: ArtifactStore) -> dict[str, pd.DataFrame]:
    return {t.name: pd.read_parquet(store.path(t.artifact)) for t in landed.tables}


def broken(text: str, whole: LandedRows, store: ArtifactStore) -> tuple[FaultyRows, pd.DataFrame]:
    """What a fault gives, and the rows of the table that it broke."""
    faulty = inject(whole, one(text), CONFIG, store, {})
    return faulty, rows_of(faulty.landed, store)[faulty.table]


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(TABLE_KINDS))
    start = after(draw(st.integers(24, 600)) + draw(st.sampled_from([0, 0.5])))
    length = draw(st.none() | st.integers(24, 200).map(lambda hours: timedelta(hours=hours)))
    amount = {"scale": 1.609, "timezone": draw(st.sampled_from([-5.0, 1.5, None]))}.get(kind)
    target = "readings.temp" if kind == "scale" else None
    end = start + length if length else None
    return Fault(kind=kind, start=start, end=end, amount=amount, target=target)


@settings(max_examples=25, deadline=None)
@given(fault=faults())
def test_rows_outside_of_the_faults_time_and_other_tables_are_equal_bit_by_bit(
    fault: Fault, store: ArtifactStore, whole: LandedRows
) -> None:
    faulty = inject(whole, fault, CONFIG, store, {})
    column = TIMES[faulty.table]
    for before, after_it in zip(whole.tables, faulty.landed.tables, strict=True):
        if before.name != faulty.table:
            assert before == after_it
            continue
        old, new = (pq.read_table(store.path(ref.artifact)) for ref in (before, after_it))
        assert new.schema.types == old.schema.types
        assert new.num_rows == after_it.num_rows

        def outside(rows: pd.Series) -> np.ndarray:
            return ((rows < fault.start) | (fault.end is not None and rows >= fault.end)).to_numpy()

        kept = [
            rows.filter(outside(rows[column].to_pandas())).combine_chunks() for rows in (old, new)
        ]
        assert kept[0].to_pydict().__repr__() == kept[1].to_pydict().__repr__()


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    moment=st.datetimes(datetime(2016, 10, 2), datetime(2018, 9, 29)),
    hours=st.none() | st.integers(1, 5000),
    target=st.none() | st.sampled_from(["weather.temp", "UA", "New York"]),
    zone=st.sampled_from(["UTC", "America/New_York", "Asia/Kolkata"]),
    share=st.floats(0.001, 1),
)
def test_a_faults_text_gives_the_same_fault(
    kind: str, moment: datetime, hours: int | None, target: str | None, zone: str, share: float
) -> None:
    amount = AMOUNTS[kind][1] * share if kind in AMOUNTS else None
    target = target or ("temp" if kind == "scale" else None)
    local = moment.replace(second=0, microsecond=0, tzinfo=ZoneInfo(zone))
    start = local.astimezone(ZoneInfo("UTC"))
    end = start + timedelta(hours=hours) if hours else None
    fault = Fault.model_validate(
        dict(kind=kind, start=start, end=end, amount=amount, target=target, zone=zone)
    )
    assert parse_faults(f"{fault}, {fault}", TWO_YEARS, zone) == (fault, fault)


def test_a_day_without_a_year_is_the_first_of_the_history() -> None:
    found = [f.start.year for f in parse_faults("celsius@11-01,celsius@07-10", TWO_YEARS)]
    assert found == [2016, 2017]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no fault"),
        ("celsius", "no fault"),
        ("flood@03-01", "kinds are celsius, scale"),
        ("celsius@07-10", "not in the history"),
        ("celsius@02-30", "not in the history"),
        ("celsius@2019-03-01", "not in the history"),
        ("celsius@03-01:2", "none for celsius"),
        ("freeze@03-01:36h:2d", "no fault"),
        ("freeze@03-01:soon", "no fault"),
        ("scale=temp@03-01", "has no amount; expected one from 1e-09"),
        ("scale=temp:nan@03-01", "no fault"),
        ("scale@03-01:2", "names no column"),
        ("labels-flipped@03-01", "one from 1e-09 to 1"),
        ("labels-flipped@03-01:1.5", "one from 1e-09 to 1"),
        ("timezone@03-01:0", "one from -24 to 24"),
        ("timezone@03-01:30", "one from -24 to 24"),
    ],
)
def test_nonsense_is_refused_with_what_would_do(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse_faults(text, HISTORY)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("celsius=wind@03-01", "one of sales.price"),
        ("scale=size@03-01:2", "finds no number"),
        ("category-split=Carol@03-01", "sales.shop"),
        ("station-missing=east@03-01", "readings.station"),
        ("freeze=clouds@02-20:1h", "changes no row"),
    ],
)
def test_a_target_that_is_not_there_is_refused(
    text: str, problem: str, whole: LandedRows, store: ArtifactStore
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        inject(whole, one(text), CONFIG, store, {})


def test_a_temperature_comes_in_celsius(whole: LandedRows, store: ArtifactStore) -> None:
    faulty, rows = broken("celsius@03-01", whole, store)
    old = frames()["readings"]
    later = (old["at"] >= one("celsius@03-01").start).to_numpy()
    np.testing.assert_allclose(rows["temp"][later], (old["temp"][later] - 32) / 1.8)
    spread = np.abs(rows["temp"] - old["temp"])[later].mean() / old["temp"].std()
    assert faulty.size == pytest.approx(spread)
    assert faulty.num_changed == old["temp"][later].notna().sum()


def test_declared_units_decide_which_columns_are_temperatures(
    whole: LandedRows, store: ArtifactStore
) -> None:
    units = {"sales.price": "fahrenheit", "readings.temp": "millibar"}
    faulty = inject(whole, one("celsius@03-01"), CONFIG, store, units)
    assert (faulty.table, faulty.columns) == ("sales", ("price",))


def test_kelvin_becomes_celsius_too(store: ArtifactStore) -> None:
    rows = frames()
    rows["readings"]["temp"] += 230
    faulty, new = broken("celsius@03-01", landed(store, rows), store)
    assert "instead of Kelvin" in faulty.described
    assert new["temp"].iloc[-9:].mean() < 60


def test_a_frozen_feed_repeats_each_stations_last_reading_but_not_its_clock(
    whole: LandedRows, store: ArtifactStore
) -> None:
    faulty, rows = broken("freeze@03-01:36h", whole, store)
    fault = one("freeze@03-01:36h")
    inside = rows[(rows["at"] >= fault.start) & (rows["at"] < fault.start + timedelta(hours=36))]
    before = rows[rows["at"] < fault.start].groupby("station").tail(1).set_index("station")
    assert faulty.table == "readings"  # sales come now and then
    assert faulty.columns == ("temp", "clouds")
    assert inside["hour"].nunique() == 24
    for station, values in inside.groupby("station"):
        assert values["temp"].nunique(dropna=False) == values["clouds"].nunique() == 1
        assert values["clouds"].iloc[0] == before["clouds"][station]


@pytest.mark.parametrize("hours", [-5, 1.5])
def test_a_time_off_by_hours_leaves_out_exactly_what_would_stand_twice(
    hours: float, whole: LandedRows, store: ArtifactStore
) -> None:
    text = f"timezone=readings@03-01:{hours}"
    _, rows = broken(text, whole, store)
    old, start = frames()["readings"], one(text).start
    times = old["at"][old["at"] >= start] + timedelta(hours=hours)
    kept = times[(times >= start) & (times < HISTORY.end)]
    assert list(rows["at"][rows["at"] >= start]) == list(kept)


def test_a_station_is_missing_for_its_time_alone(whole: LandedRows, store: ArtifactStore) -> None:
    faulty, rows = broken("station-missing@03-01:2d", whole, store)
    old = frames()["readings"]
    assert "'north'" in faulty.described  # of equally many rows the first by name
    assert len(rows) == len(old) - 48 == len(old) - faulty.num_changed
    _, rows = broken("station-missing=west@03-01:1d", whole, store)
    assert (rows["station"] == "west").sum() == (old["station"] == "west").sum() - 24


def test_the_most_frequent_category_is_spelled_otherwise(
    whole: LandedRows, store: ArtifactStore
) -> None:
    faulty, rows = broken("category-split@03-01", whole, store)
    later = rows[rows["sold"] >= one("category-split@03-01").start]
    assert faulty.size is None
    assert set(later["shop"].dropna()) == {"ann", "Bob"}
    _, rows = broken("category-split=Bob@03-01", whole, store)
    assert "bob" in set(rows["shop"])


def test_a_share_of_the_labels_is_turned_around_and_nothing_else(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    snapshot = builders.dataset(store).snapshot
    (fault,) = parse_faults("labels-flipped@09-01:0.1:30d", builders.YEAR)
    flipped = flip_labels(snapshot, fault, store)
    old, new = (pd.read_parquet(store.path(s.data)) for s in (snapshot, flipped))
    moment = old[builders.COLUMNS.event_time]
    inside = (moment >= fault.start) & (moment < fault.start + timedelta(days=30))
    differs = old["is_late"] != new["is_late"]
    assert differs.sum() == round(0.1 * inside.sum()) == differs[inside].sum()
    assert set(new["is_late"]) == {0, 1}
    pd.testing.assert_frame_equal(old.drop(columns="is_late"), new.drop(columns="is_late"))
    assert flip_labels(snapshot, fault, store) == flipped
