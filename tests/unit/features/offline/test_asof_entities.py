"""Entity frames that are odd or wrong: taken as Feast takes them, or refused with a sentence."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from feast import FeatureStore
from feast.infra.offline_stores.duckdb import DuckDBOfflineStore

from tasks.features.offline.store import AsofDuckDBOfflineStore
from tasks.kernel.errors import ConfigurationError, FeatureStoreError
from tests.support.data.asof import START, ask, asked, feast_in, listed, values, view_of, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("entities")
    write_rows(values(("a", 0, 0, 1.0), ("b", 30, 30, 2.0)), folder / "values.parquet")
    return folder


@pytest.fixture(scope="module")
def feast_store(folder: Path) -> FeatureStore:
    return feast_in(folder)


@pytest.fixture(scope="module")
def strict_store(folder: Path) -> FeatureStore:
    return feast_in(folder, naive_times="refuse", coerce_tz_aware=False)


def found(feast: FeatureStore, entities: Any) -> list[float | None]:
    return listed(ask(feast, [view_of("values.parquet")], entities).to_df()["value"])


@pytest.mark.filterwarnings("ignore:.*fetch_arrow_table:DeprecationWarning")
def test_rows_without_a_key_or_a_moment_stay_without_values_as_in_feasts_own_store(
    folder: Path, feast_store: FeatureStore
) -> None:
    frame = asked(("a", 10), (None, 10), ("b", 40), ("unknown", 40), ("a", 20))
    frame.loc[4, "event_timestamp"] = pd.NaT
    view = view_of(folder / "values.parquet")
    ours, theirs = (
        ask(feast_store, [view], frame.assign(n=range(5)), kind=kind).to_df().sort_values("n")
        for kind in (AsofDuckDBOfflineStore, DuckDBOfflineStore)
    )
    assert listed(ours["value"]) == [1.0, None, 2.0, None, None]
    pd.testing.assert_series_equal(ours["value"], theirs["value"], check_index=False)


def test_a_key_column_of_nulls_alone_finds_nothing(feast_store: FeatureStore) -> None:
    assert found(feast_store, asked(("a", 1), ("b", 1)).assign(k0=None)) == [None, None]


def test_an_empty_frame_gives_an_empty_result(feast_store: FeatureStore) -> None:
    result = ask(feast_store, [view_of("values.parquet")], asked(("a", 1)).head(0)).to_df()
    assert result.empty
    assert list(result) == ["k0", "event_timestamp", "value"]


def test_the_only_time_of_a_frame_is_its_moment_as_in_feast(feast_store: FeatureStore) -> None:
    frame = asked(("a", 1)).rename(columns={"event_timestamp": "asked at"})
    assert found(feast_store, frame) == [1.0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: f.drop(columns="k0"), r"view values needs column\(s\) k0, which the entity"),
        (lambda f: f.drop(columns="event_timestamp"), "has no column event_timestamp; it has k0"),
        (
            lambda f: f.assign(event_timestamp=[1, 2]),
            "event_timestamp of the entity frame is BIGINT, expected a time",
        ),
        (
            lambda f: f.assign(event_timestamp=["2013-03-10T00:00:00Z", "yesterday"]),
            "cannot be read as a time .*yesterday.* such as 2013",
        ),
        (lambda f: f.assign(__row=1), "column __row of the entity frame is reserved"),
        (
            lambda f: pd.concat([f, f[["k0"]]], axis=1),
            "column k0 comes more than once in the entity frame",
        ),
        (lambda f: f.assign(value=0.0), "column value comes more than once in the result"),
        (
            lambda f: f.assign(k0=[1, 2]),
            "key k0 of the entity frame is Int64, feature view values has String",
        ),
        (
            lambda f: f.assign(n=pd.Series([1, "text"], dtype=object)),
            "the entity frame cannot be read .* expected one type in each column",
        ),
        (lambda f: "SELECT 1 AS", "the entity query cannot be run, .*expected one SELECT"),
        (lambda f: "SELECT 1; DROP TABLE x", "has 2 statements or is no SELECT"),
        (lambda f: "SELECT * FROM f", "the entity query cannot be run"),
    ],
)
def test_a_frame_that_cannot_be_meant_is_refused_with_a_sentence(
    feast_store: FeatureStore, change: Any, sentence: str
) -> None:
    with pytest.raises(FeatureStoreError, match=sentence):
        found(feast_store, change(asked(("a", 1), ("b", 2))))


def test_a_source_without_a_column_of_its_view_is_named(feast_store: FeatureStore) -> None:
    view = view_of("values.parquet", features=("value", "gust"))
    with pytest.raises(FeatureStoreError, match=r"source values_table .* has no column gust; it"):
        ask(feast_store, [view], asked(("a", 1)), ["values:value", "values:gust"]).to_df()


def test_a_retrieval_without_views_or_without_entity_rows_is_refused(
    feast_store: FeatureStore,
) -> None:
    for views, frame in ([], asked(("a", 1))), ([view_of("values.parquet")], None):
        with pytest.raises(FeatureStoreError, match="needs a feature view and an entity frame"):
            ask(feast_store, views, frame)


NAIVE = START.replace(tzinfo=None)


@pytest.mark.parametrize(
    "entities",
    [
        pd.DataFrame({"k0": ["a"], "event_timestamp": [NAIVE]}),
        pd.DataFrame({"k0": ["a"], "event_timestamp": ["2013-03-10T00:00:00"]}),
        pd.DataFrame({"k0": ["a", "a"], "event_timestamp": ["2013-03-10T00:00Z", "2013-03-10"]}),
        "SELECT 'a' AS k0, TIMESTAMP '2013-03-10 00:00:00' AS event_timestamp",
        "SELECT 'a' AS k0, DATE '2013-03-10' AS event_timestamp",
    ],
    ids=["datetime", "text", "one text of two", "SQL timestamp", "SQL date"],
)
def test_times_without_a_zone_are_utc_or_refused_as_configured(
    feast_store: FeatureStore, strict_store: FeatureStore, entities: Any
) -> None:
    assert set(found(feast_store, entities)) == {1.0}
    with pytest.raises(FeatureStoreError, match="times without a time zone, which could be local"):
        found(strict_store, entities)


@pytest.mark.parametrize(
    "text", ["2013-03-09 19:00:00-05", "2013-03-10T00:00Z", "2013-03-10 05:30:00+05:30"]
)
def test_times_with_a_zone_pass_where_those_without_are_refused(
    strict_store: FeatureStore, text: str
) -> None:
    assert found(strict_store, pd.DataFrame({"k0": ["a"], "event_timestamp": [text]})) == [1.0]
    assert found(strict_store, asked(("a", 0))) == [1.0]


def test_refusing_naive_times_needs_feast_to_leave_them_alone(folder: Path) -> None:
    feast = feast_in(folder, naive_times="refuse")
    with pytest.raises(ConfigurationError, match="set coerce_tz_aware: false"):
        found(feast, asked(("a", 0)))
    assert found(feast, "SELECT 'a' AS k0, TIMESTAMPTZ '2013-03-10 00:00+00' AS event_timestamp")
