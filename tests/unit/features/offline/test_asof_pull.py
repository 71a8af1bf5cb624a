"""Reading sources for materialization: newest rows, all rows, and what makes either go wrong."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from feast import FeatureStore, FileSource
from feast.data_format import DeltaFormat
from feast.data_source import PushSource
from feast.infra.offline_stores.duckdb import DuckDBOfflineStore
from hypothesis import given
from hypothesis import strategies as st

from tasks.features.offline.store import AsofDuckDBOfflineStore
from tasks.kernel.errors import FeatureStoreError
from tests.support.data.asof import START, feast_in, in_times, values, view_of, write_rows

MINUTES = st.integers(0, 20)
KEYS = st.sampled_from(["a", "b", None])


@pytest.fixture(scope="module")
def feast_store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return feast_in(tmp_path_factory.mktemp("feast"))


def at(minute: float) -> datetime:
    return START + timedelta(minutes=minute)


def pull(
    feast: FeatureStore,
    path: Path | str,
    method: str = "pull_latest_from_table_or_query",
    kind: type[DuckDBOfflineStore] = AsofDuckDBOfflineStore,
    **changes: Any,
) -> pd.DataFrame:
    arguments: dict[str, Any] = {
        "data_source": view_of(path).batch_source,
        "join_key_columns": ["k0"],
        "feature_name_columns": ["value"],
        "timestamp_field": "at",
        "created_timestamp_column": "created",
        "start_date": at(0),
        "end_date": at(1000),
    }
    result = getattr(kind, method)(config=feast.config, **{**arguments, **changes}).to_df()
    return result.sort_values("value", ignore_index=True) if "value" in result else result


@st.composite
def rows(draw: st.DrawFn) -> pd.DataFrame:
    row = st.tuples(KEYS, MINUTES, st.one_of(st.none(), st.integers(-3, 3)))
    drawn = draw(st.lists(row, min_size=1, max_size=20))
    frame = values(*((k, m, m + (lag or 0), n) for n, (k, m, lag) in enumerate(drawn)))
    frame.loc[[lag is None for _, _, lag in drawn], "created"] = pd.NaT
    return frame.astype({"value": float})


@given(frame=rows(), ends=st.tuples(MINUTES, MINUTES).map(sorted))
def test_the_newest_row_of_every_key_is_pulled_and_ties_have_a_winner(
    feast_store: FeatureStore,
    tmp_path_factory: pytest.TempPathFactory,
    frame: pd.DataFrame,
    ends: list[int],
) -> None:
    file = write_rows(frame, tmp_path_factory.mktemp("pull") / "values.parquet")
    first, last = (at(minute) for minute in ends)
    inside = frame[(frame["at"] >= first) & (frame["at"] <= last)]
    # Latest event, then latest creation (none being the oldest), then last in the file.
    order = inside.sort_values(["at", "created"], na_position="first", kind="stable")
    expected = order.groupby("k0", dropna=False).tail(1)["value"]
    newest = pull(feast_store, file, start_date=first, end_date=last)
    assert newest["value"].tolist() == sorted(expected)
    every = pull(feast_store, file, "pull_all_from_table_or_query", start_date=first, end_date=last)
    assert every["value"].tolist() == sorted(inside["value"])


def test_all_columns_come_where_no_feature_is_named(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    """Views with a transformation ask so; Feast's own store then leaves the features out."""
    file = write_rows(values(("a", 0, 0, 1.0)).assign(extra=2.0), tmp_path / "values.parquet")
    for method in ("pull_latest_from_table_or_query", "pull_all_from_table_or_query"):
        result = pull(feast_store, file, method, feature_name_columns=[])
        assert list(result) == ["k0", "at", "created", "value", "extra"]
        assert len(result) == 1


@pytest.mark.parametrize("kind", ["datetime64[ns, UTC]", "datetime64[ns]", "datetime64[us]"])
def test_bounds_hold_for_naive_and_nanosecond_times(
    feast_store: FeatureStore, tmp_path: Path, kind: str
) -> None:
    frame = values(("a", 0, 0, 1.0), ("b", 10, 10, 2.0), ("c", 20, 20, 3.0))
    in_times(frame, kind).to_parquet(tmp_path / "values.parquet")
    for method in ("pull_latest_from_table_or_query", "pull_all_from_table_or_query"):
        found = pull(
            feast_store, tmp_path / "values.parquet", method, start_date=at(10), end_date=at(20)
        )
        assert found["value"].tolist() == [2.0, 3.0]
    newest = pull(feast_store, tmp_path / "values.parquet", end_date=at(19).replace(tzinfo=None))
    assert newest["value"].tolist() == [1.0, 2.0]


def test_ends_that_are_not_given_are_open(feast_store: FeatureStore, tmp_path: Path) -> None:
    frame = values(("a", -10_000, 0, 1.0), ("b", 0, 0, 2.0), ("c", 10_000, 0, 3.0))
    file = write_rows(frame, tmp_path / "values.parquet")
    method = "pull_all_from_table_or_query"
    assert len(pull(feast_store, file, method, start_date=None, end_date=None)) == 3
    assert len(pull(feast_store, file, method, start_date=None, end_date=at(0))) == 2
    assert len(pull(feast_store, file, method, start_date=at(0), end_date=None)) == 2


def test_folders_and_patterns_of_files_are_one_source(tmp_path: Path) -> None:
    feast = feast_in(tmp_path)
    (tmp_path / "table" / "day=1").mkdir(parents=True)
    write_rows(values(("a", 0, 0, 1.0)), tmp_path / "table" / "one.parquet")
    write_rows(values(("b", 0, 0, 2.0)), tmp_path / "table" / "two.parquet")
    write_rows(values(("c", 0, 0, 3.0)), tmp_path / "table" / "day=1" / "three.parquet")
    assert pull(feast, "table")["value"].tolist() == [1.0, 2.0]
    assert pull(feast, "table/*.parquet")["value"].tolist() == [1.0, 2.0]
    assert pull(feast, "table/*/*.parquet")["value"].tolist() == [3.0]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            FileSource(name="t", path="gone", timestamp_field="at"),
            "feature table gone is not there",
        ),
        (
            FileSource(name="t", path="gs://b/k.parquet", timestamp_field="at"),
            "no place that this store reads",
        ),
        (
            FileSource(name="t", path="x", timestamp_field="at", file_format=DeltaFormat()),
            "source t has DeltaFormat; this store reads Parquet",
        ),
        (PushSource(name="p", batch_source=FileSource(path="x")), "source p is a PushSource"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_with_a_sentence(
    feast_store: FeatureStore, source: Any, sentence: str
) -> None:
    with pytest.raises(FeatureStoreError, match=sentence):
        pull(feast_store, "", data_source=source)


def test_a_column_that_the_source_lacks_is_named(feast_store: FeatureStore, tmp_path: Path) -> None:
    file = write_rows(values(("a", 0, 0, 1.0)), tmp_path / "values.parquet")
    with pytest.raises(FeatureStoreError, match="has no column gust; it has k0"):
        pull(feast_store, file, feature_name_columns=["gust"])


def test_results_are_arrow_tables_of_the_sources_types(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    file = write_rows(values(("a", 0, 0, 1.0)), tmp_path / "values.parquet")
    job = AsofDuckDBOfflineStore.pull_all_from_table_or_query(
        feast_store.config, view_of(file).batch_source, ["k0"], ["value"], "at", "created"
    )
    utc = pa.timestamp("us", tz="UTC")
    assert job.to_arrow().schema.types == [pa.string(), pa.float64(), utc, utc]
