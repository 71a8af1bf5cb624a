"""Retrieval without an entity frame: every key and moment that the views have seen."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
from feast import Entity, FeatureStore, ValueType
from hypothesis import given
from hypothesis import strategies as st

from tasks.kernel.errors import WindowError
from tests.support.data.asof import (
    START,
    VALUE,
    ask,
    feast_in,
    newest_known,
    values,
    view_of,
    write_rows,
)

MINUTES = st.integers(0, 20)
KEYS = st.sampled_from(["a", "b", None])


@pytest.fixture(scope="module")
def feast_store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return feast_in(tmp_path_factory.mktemp("feast"))


@st.composite
def source_rows(draw: st.DrawFn, keys: list[str]) -> pd.DataFrame:
    row = st.tuples(*[KEYS] * len(keys), MINUTES, st.integers(-5, 5))
    drawn = draw(st.lists(row, min_size=1, max_size=12, unique=True))
    rows = pd.DataFrame(drawn, columns=[*keys, "at", "created"])
    rows["created"] = START + pd.to_timedelta(rows["at"] + rows["created"], unit="min")
    rows["at"] = START + pd.to_timedelta(rows["at"], unit="min")
    return rows.assign(value=[float(n) for n in range(len(rows))])


def seen(rows: pd.DataFrame, keys: list[str], first: datetime, last: datetime) -> set[Any]:
    """(k0, k1, moment) of the rows in [first, last]; a key that the view lacks is null."""
    return {
        (row["k0"], row["k1"] if "k1" in keys else None, row["at"])
        for row in rows.to_dict("records")
        if first <= row["at"] <= last
    }


@given(
    one=source_rows(["k0"]),
    two=source_rows(["k0", "k1"]),
    ends=st.tuples(MINUTES, MINUTES).map(sorted),
    ttl=st.sampled_from([0, 3]),
    cut_off=st.booleans(),
)
def test_every_key_and_moment_of_the_range_comes_once_with_all_views_as_known_then(
    feast_store: FeatureStore,
    one: pd.DataFrame,
    two: pd.DataFrame,
    ends: list[int],
    ttl: int,
    cut_off: bool,
) -> None:
    first, last = (START + timedelta(minutes=m) for m in ends)
    frames = {"one": (one, ["k0"]), "two": (two, ["k0", "k1"])}
    lifetime = timedelta(minutes=ttl)
    with TemporaryDirectory() as folder:
        views = [
            view_of(
                write_rows(rows, Path(folder) / f"{name}.parquet", keys), keys, lifetime, name=name
            )
            for name, (rows, keys) in frames.items()
        ]
        result = ask(
            feast_store,
            views,
            None,
            ["one:value", "two:value"],
            full_feature_names=True,
            filter_by_created_timestamp=cut_off,
            start_date=first,
            end_date=last,
        ).to_df()
    expected = set()
    for key, other, moment in seen(one, ["k0"], first, last) | seen(two, ["k0", "k1"], first, last):
        entity = {"k0": key, "k1": other, "event_timestamp": moment}
        found = (
            newest_known(entity, rows, {k: k for k in keys}, lifetime, cut_off)
            for rows, keys in frames.values()
        )
        expected.add((key, other, moment, *found))
    columns = ["k0", "k1", "event_timestamp", "one__value", "two__value"]
    ours = [tuple(None if pd.isna(v) else v for v in row) for row in result[columns].to_numpy()]
    assert len(ours) == len(expected)
    assert set(ours) == expected


def test_the_range_starts_a_ttl_before_its_end_where_no_start_is_given(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    rows = values(("a", 0, 0, 1.0), ("a", 20, 20, 2.0), ("b", 40, 40, 3.0))
    view = view_of(write_rows(rows, tmp_path / "values.parquet"), ttl=timedelta(minutes=20))
    end = START.replace(tzinfo=None) + timedelta(minutes=40)  # without a time zone: UTC
    result = ask(feast_store, [view], None, end_date=end).to_df()
    assert sorted(result["value"]) == [2.0, 3.0]


def test_a_view_without_entities_is_seen_at_its_moments(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    rows = values((None, 0, 0, 1.0), (None, 0, 5, 2.0), (None, 20, 20, 3.0))
    view = view_of(write_rows(rows, tmp_path / "values.parquet"), keys=())
    job = ask(feast_store, [view], None, start_date=START, end_date=START + timedelta(minutes=30))
    result = job.to_df().sort_values("event_timestamp")
    assert list(result) == ["event_timestamp", "value"]
    assert result["value"].tolist() == [2.0, 3.0]


def test_feast_passes_the_range_on_and_saves_what_was_seen(tmp_path: Path) -> None:
    feast = feast_in(tmp_path)
    rows = values(("a", 0, 0, 1.0), ("a", 20, 20, 2.0), ("b", 40, 40, 3.0))
    view = view_of(write_rows(rows, tmp_path / "values.parquet"))
    feast.apply([Entity(name="k0", value_type=ValueType.STRING), view])
    job = feast.get_historical_features(
        features=[VALUE], start_date=START, end_date=START + timedelta(minutes=30)
    )
    result = job.to_df().sort_values("event_timestamp")
    assert list(result) == ["event_timestamp", "k0", "value"]
    assert result["value"].tolist() == [1.0, 2.0]
    assert job.metadata is not None
    assert job.metadata.keys == ["k0"]
    everything = feast.get_historical_features(
        features=[VALUE], start_date=datetime(2000, 1, 1, tzinfo=UTC)
    )
    assert everything.to_arrow().num_rows == 3


@pytest.mark.parametrize("naive", [False, True])
def test_a_reversed_range_is_refused(
    feast_store: FeatureStore, tmp_path: Path, naive: bool
) -> None:
    rows = pd.DataFrame({"k0": ["a"], "at": [START], "created": [START], "value": [1.0]})
    view = view_of(write_rows(rows, tmp_path / "one.parquet", ["k0"]), ["k0"], timedelta(0))
    start = START.replace(tzinfo=None) if naive else START
    with pytest.raises(WindowError, match="is reversed; expected start_date at or before"):
        ask(
            feast_store,
            [view],
            None,
            ["view:value"],
            start_date=start,
            end_date=start - timedelta(days=1),
        )
