"""Point-in-time retrieval against a brute-force oracle and against Feast's own DuckDB store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.infra.offline_stores.duckdb import DuckDBOfflineStore
from feast.repo_config import RepoConfig
from feast.types import Float64, String
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import FeatureStoreError
from tasks.features.asof_store import AsofDuckDBOfflineStore

START = datetime(2013, 3, 10, tzinfo=UTC)  # the United States change their clocks on this day
MINUTES = st.integers(0, 60).map(lambda n: n * 10)  # coarse, so that times meet
KEYS = st.sampled_from(["a", "b", None])


@pytest.fixture(scope="module")
def feast_store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("feast")
    return FeatureStore(config=config_in(folder))


def config_in(folder: Path) -> RepoConfig:
    return RepoConfig(
        project="test",
        provider="local",
        registry={"registry_type": "sql", "path": f"sqlite:///{folder / 'registry.db'}"},
        entity_key_serialization_version=3,
        online_store=None,
        offline_store={
            "type": "tasks.features.asof_store.AsofDuckDBOfflineStore",
            "tables_path": str(folder),
            "spill_path": str(folder / "spill"),
        },
        repo_path=folder,
    )


def view_of(path: str, num_keys: int, ttl: timedelta) -> FeatureView:
    entities = [
        Entity(name=f"k{n}", join_keys=[f"k{n}"], value_type=ValueType.STRING)
        for n in range(num_keys)
    ]
    source = FileSource(
        name="values_table",
        path=path,
        timestamp_field="at",
        created_timestamp_column="created",
    )
    view = FeatureView(
        name="values",
        entities=entities,
        ttl=ttl,
        schema=[Field(name="value", dtype=Float64)],
        source=source,
    )
    view.entity_columns = [Field(name=e.name, dtype=String) for e in entities]  # as apply does
    return view


def oracle(
    entities: pd.DataFrame, rows: pd.DataFrame, keys: list[str], ttl: timedelta, cut_off: bool
) -> list[float | None]:
    """For each entity row the newest value that was known, by looking at every row."""
    found: list[float | None] = []
    for entity in entities.to_dict("records"):
        best: tuple[datetime, datetime, float] | None = None
        for row in rows.to_dict("records"):
            same = all(entity[k] == row[k] and entity[k] is not None for k in keys)
            known = row["at"] <= entity["event_timestamp"] and (
                not cut_off or row["created"] <= entity["event_timestamp"]
            )
            if same and known:
                best = max(
                    best or (row["at"], row["created"], row["value"]),
                    (row["at"], row["created"], row["value"]),
                )
        expired = best and ttl and best[0] < entity["event_timestamp"] - ttl
        found.append(None if best is None or expired else best[2])
    return found


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    num_keys = draw(st.integers(1, 2))
    keys = [f"k{n}" for n in range(num_keys)]
    varying = st.integers(-12, 24).map(lambda n: n * 10)
    lag = draw(st.sampled_from([st.just(0), st.just(20), varying]))
    row = st.tuples(*[KEYS] * num_keys, MINUTES, lag)
    # Rows equal in key and both times are left out: they have no defined winner.
    drawn = draw(st.lists(row, min_size=1, max_size=30, unique=True))
    rows = pd.DataFrame(drawn, columns=[*keys, "at", "lag"])
    rows["at"] = START + pd.to_timedelta(rows["at"], unit="min")
    rows["created"] = rows["at"] + pd.to_timedelta(rows.pop("lag"), unit="min")
    rows["value"] = range(len(rows))
    entity = st.tuples(*[st.sampled_from(["a", "b", "unknown", None])] * num_keys, MINUTES)
    asked = draw(st.lists(entity, min_size=1, max_size=15))  # repeated rows are allowed
    return {
        "keys": keys,
        "rows": rows.astype({"value": float}),
        "entities": pd.DataFrame(
            [(*e[:-1], START + timedelta(minutes=e[-1])) for e in asked],
            columns=[*keys, "event_timestamp"],
        ),
        "ttl": timedelta(minutes=draw(st.sampled_from([0, 30, 120]))),
        "cut_off": draw(st.booleans()),
    }


def retrieve(
    feast_store: FeatureStore, case: dict[str, Any], kind: type[DuckDBOfflineStore], folder: Path
) -> list[float | None]:
    utc = {c: "datetime64[us, UTC]" for c in ("at", "created")}
    rows = case["rows"].astype({**dict.fromkeys(case["keys"], "string"), **utc})
    rows.to_parquet(folder / "values.parquet", index=False)
    entities = case["entities"].astype(dict.fromkeys(case["keys"], "string"))
    entities["event_timestamp"] = entities["event_timestamp"].astype("datetime64[us, UTC]")
    entities["asked"] = range(len(entities))
    view = view_of(str(folder / "values.parquet"), len(case["keys"]), case["ttl"])
    job = kind.get_historical_features(
        feast_store.config,
        [view],
        ["values:value"],
        entities,
        feast_store.registry,
        "test",
        filter_by_created_timestamp=case["cut_off"],
    )
    result = job.to_df().sort_values("asked")
    assert list(result["asked"]) == list(range(len(entities)))
    return [None if pd.isna(v) else v for v in result["value"]]


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_row_gets_the_newest_value_that_was_known(
    feast_store: FeatureStore, case: dict[str, Any]
) -> None:
    with TemporaryDirectory() as folder:
        found = retrieve(feast_store, case, AsofDuckDBOfflineStore, Path(folder))
    expected = oracle(case["entities"], case["rows"], case["keys"], case["ttl"], case["cut_off"])
    assert found == expected


@pytest.mark.filterwarnings("ignore:.*fetch_arrow_table:DeprecationWarning")  # ibis on duckdb 2
@settings(max_examples=8, deadline=None)
@given(case=cases())
def test_results_equal_those_of_feasts_own_store(
    feast_store: FeatureStore, case: dict[str, Any]
) -> None:
    with TemporaryDirectory() as folder:
        ours = retrieve(feast_store, case, AsofDuckDBOfflineStore, Path(folder))
        theirs = retrieve(feast_store, case, DuckDBOfflineStore, Path(folder))
    assert ours == theirs


def a_case(**changes: Any) -> dict[str, Any]:
    rows = pd.DataFrame({"k0": ["a"], "at": [START], "created": [START], "value": [1.0]})
    entities = pd.DataFrame({"k0": ["a"], "event_timestamp": [START + timedelta(minutes=30)]})
    plain = {"keys": ["k0"], "rows": rows, "entities": entities, "ttl": timedelta(minutes=30)}
    return {**plain, "cut_off": True, **changes}


def test_a_value_is_still_valid_exactly_at_its_ttl(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    assert retrieve(feast_store, a_case(), AsofDuckDBOfflineStore, tmp_path) == [1.0]


def test_a_correction_made_later_is_not_shown_to_earlier_rows(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    rows = pd.DataFrame(
        {
            "k0": ["a", "a"],
            "at": [START, START],
            "created": [START, START + timedelta(minutes=45)],
            "value": [1.0, 9.0],
        }
    )
    asked = [START + timedelta(minutes=m) for m in (44, 45)]
    entities = pd.DataFrame({"k0": ["a", "a"], "event_timestamp": asked})
    case = a_case(rows=rows, entities=entities, ttl=timedelta(hours=5))
    assert retrieve(feast_store, case, AsofDuckDBOfflineStore, tmp_path) == [1.0, 9.0]


def test_shifting_event_times_later_hides_the_values(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    case = a_case()
    later = case["rows"].assign(at=case["rows"]["at"] + timedelta(hours=3))
    assert retrieve(feast_store, a_case(rows=later), AsofDuckDBOfflineStore, tmp_path) == [None]


def test_an_entity_frame_without_a_key_is_refused_with_its_name(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    case = a_case()
    case["rows"].to_parquet(tmp_path / "values.parquet")
    job = AsofDuckDBOfflineStore.get_historical_features(
        feast_store.config,
        [view_of(str(tmp_path / "values.parquet"), 1, timedelta(0))],
        ["values:value"],
        case["entities"].drop(columns="k0"),
        feast_store.registry,
        "test",
    )
    with pytest.raises(FeatureStoreError, match=r"view values needs column.* k0"):
        job.to_df()


def test_an_entity_frame_can_be_sql_and_a_result_can_stream_to_parquet(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    case = a_case()
    case["rows"].to_parquet(tmp_path / "values.parquet")
    job = AsofDuckDBOfflineStore.get_historical_features(
        feast_store.config,
        [view_of(str(tmp_path / "values.parquet"), 1, timedelta(0))],
        ["values:value"],
        "SELECT 'a' AS k0, TIMESTAMPTZ '2013-03-10 01:00:00+00' AS event_timestamp",
        feast_store.registry,
        "test",
        full_feature_names=True,
    )
    job.write_parquet(tmp_path / "out.parquet", ["event_timestamp"], 8192)
    assert pd.read_parquet(tmp_path / "out.parquet")["values__value"].tolist() == [1.0]
