"""Point-in-time retrieval against a brute-force oracle and against Feast's own DuckDB store."""

from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feast import Entity, FeatureStore, Field, ValueType
from feast.infra.offline_stores.duckdb import DuckDBOfflineStore
from feast.on_demand_feature_view import on_demand_feature_view
from feast.transformation.pandas_transformation import PandasTransformation
from feast.types import Float64
from hypothesis import given
from hypothesis import strategies as st

from tasks.features.offline.store import AsofDuckDBOfflineStore
from tasks.kernel.errors import FeatureStoreError
from tests.support.data.asof import (
    START,
    UTC_TIMES,
    VALUE,
    ask,
    asked,
    feast_in,
    found,
    listed,
    newest_known,
    sabotaged,
    values,
    view_of,
    write_rows,
)
from tests.support.suite.examples import examples
from tests.support.suite.promises import Promise, proves

MINUTES = st.integers(0, 60).map(lambda n: n * 10)  # coarse, so that times meet
KEYS = st.sampled_from(["a", "b", None])
ASKED_KEYS = st.sampled_from(["a", "b", "unknown", None])
UNITS = st.sampled_from(["min", "us"])

stock_store = pytest.mark.filterwarnings("ignore:.*fetch_arrow_table:DeprecationWarning")


@pytest.fixture(scope="module")
def feast_store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return feast_in(tmp_path_factory.mktemp("feast"))


@st.composite
def cases(draw: st.DrawFn, ties: bool = False) -> dict[str, Any]:
    keys = [f"k{n}" for n in range(draw(st.integers(1, 2)))]
    unit = draw(UNITS)
    varying = st.integers(-12, 24).map(lambda n: n * 10)
    lag = draw(st.sampled_from([st.just(0), st.just(20), varying]))
    row = st.tuples(*[KEYS] * len(keys), MINUTES, lag)
    # Feast's store has no defined winner among rows equal in key and both times.
    drawn = draw(st.lists(row, min_size=1, max_size=30, unique=not ties))
    rows = pd.DataFrame(drawn, columns=[*keys, "at", "lag"])
    rows["at"] = START + pd.to_timedelta(rows["at"], unit=unit)
    rows["created"] = rows["at"] + pd.to_timedelta(rows.pop("lag"), unit=unit)
    rows["value"] = [float(n) for n in range(len(rows))]
    entity = st.tuples(*[ASKED_KEYS] * len(keys), MINUTES)
    entities = pd.DataFrame(
        draw(st.lists(entity, min_size=1, max_size=15)),  # repeated rows are allowed
        columns=[*keys, "event_timestamp"],
    )
    moments = START + pd.to_timedelta(entities["event_timestamp"], unit=unit)
    return {
        "keys": keys,
        "rows": rows,
        "entities": entities.assign(event_timestamp=moments),
        "ttl": draw(st.sampled_from([0, 30, 120])) * pd.Timedelta(1, unit=unit).to_pytimedelta(),
        "cut_off": draw(st.booleans()),
    }


def retrieve(
    feast_store: FeatureStore, case: dict[str, Any], kind: type[DuckDBOfflineStore], folder: Path
) -> list[float | None]:
    file = write_rows(case["rows"], folder / "values.parquet", case["keys"])
    kinds = {**dict.fromkeys(case["keys"], "string"), "event_timestamp": UTC_TIMES}
    entities = case["entities"].astype(kinds).assign(asked=range(len(case["entities"])))
    view = view_of(file, case["keys"], case["ttl"])
    job = ask(feast_store, [view], entities, kind=kind, filter_by_created_timestamp=case["cut_off"])
    result = job.to_df().sort_values("asked")
    assert list(result["asked"]) == list(range(len(entities)))
    return listed(result["value"])


def expected(case: dict[str, Any]) -> list[float | None]:
    keys = {k: k for k in case["keys"]}
    return [
        newest_known(entity, case["rows"], keys, case["ttl"], case["cut_off"])
        for entity in case["entities"].to_dict("records")
    ]


@proves(Promise.NO_FUTURE, "values of later are not seen")
@given(case=cases(ties=True))
def test_every_row_gets_the_newest_value_that_was_known(
    feast_store: FeatureStore, case: dict[str, Any]
) -> None:
    with TemporaryDirectory() as folder:
        result = retrieve(feast_store, case, AsofDuckDBOfflineStore, Path(folder))
    assert result == expected(case)


@stock_store
@examples(8)
@given(case=cases())
def test_results_equal_those_of_feasts_own_store(
    feast_store: FeatureStore, case: dict[str, Any]
) -> None:
    with TemporaryDirectory() as folder:
        ours = retrieve(feast_store, case, AsofDuckDBOfflineStore, Path(folder))
        theirs = retrieve(feast_store, case, DuckDBOfflineStore, Path(folder))
    assert ours == theirs


@st.composite
def routes(draw: st.DrawFn) -> pd.DataFrame:
    drawn = draw(st.lists(st.tuples(ASKED_KEYS, ASKED_KEYS, MINUTES), min_size=1, max_size=10))
    frame = pd.DataFrame(drawn, columns=["from key", 'to"key', "event_timestamp"])
    frame["event_timestamp"] = START + pd.to_timedelta(frame["event_timestamp"], unit="min")
    return frame


@stock_store
@pytest.mark.parametrize("full_names", [True, False])
@examples(8)
@given(case=cases(), frame=routes())
def test_one_view_joins_twice_under_other_names_keys_and_columns(
    feast_store: FeatureStore, case: dict[str, Any], frame: pd.DataFrame, full_names: bool
) -> None:
    """Aliases, join-key maps, a field mapping, names that need quotes, with and without full."""
    rows = case["rows"].drop(columns="k1", errors="ignore").drop_duplicates(["k0", "at", "created"])
    maps = {"start": {"k0": "from key"}, "end": {"k0": 'to"key'}}
    kinds = {"from key": "string", 'to"key': "string", "event_timestamp": UTC_TIMES}
    entities = frame.astype(kinds).assign(asked=range(len(frame)))
    with TemporaryDirectory() as folder:
        source = rows.rename(columns={"value": "raw value"}).assign(other=-rows["value"])
        file = write_rows(source, Path(folder) / "values.parquet")
        features = ("value", "other")
        view = view_of(file, ttl=case["ttl"], mapping={"raw value": "value"}, features=features)
        # Without full names two projections of a feature would clash: each asks for another one.
        wanted = {"start": "value", "end": "value" if full_names else "other"}
        views = [view.with_name(alias).with_join_key_map(m) for alias, m in maps.items()]
        refs = [f"{alias}:{feature}" for alias, feature in wanted.items()]
        results = [
            ask(feast_store, views, entities, refs, kind, full_feature_names=full_names)
            .to_df()
            .sort_values("asked", ignore_index=True)
            for kind in (AsofDuckDBOfflineStore, DuckDBOfflineStore)
        ]
    pd.testing.assert_frame_equal(results[0], results[1][list(results[0])], check_dtype=False)
    for alias, keys in maps.items():
        name = f"{alias}__{wanted[alias]}" if full_names else wanted[alias]
        known = [newest_known(e, rows, keys, case["ttl"], False) for e in frame.to_dict("records")]
        sign = 1 if wanted[alias] == "value" else -1
        assert listed(results[0][name]) == [v if v is None else v * sign for v in known]


@pytest.mark.parametrize(
    "written",
    [
        lambda t: t.dt.tz_convert("America/New_York"),
        lambda t: t.dt.tz_convert("Asia/Kolkata").astype("datetime64[ns, Asia/Kolkata]"),
        lambda t: t.astype("datetime64[s, UTC]"),
        lambda t: t.dt.tz_localize(None),
        lambda t: t.map(lambda m: m.tz_convert("America/New_York").isoformat()),
        lambda t: t.dt.strftime("%Y-%m-%d %H:%M:%S"),
        lambda t: pd.Series([m.to_pydatetime() for m in t], dtype=object),
    ],
    ids=["New York", "Kolkata ns", "seconds", "naive", "text with offset", "naive text", "objects"],
)
def test_a_moment_is_the_same_in_every_time_zone_and_type(
    feast_store: FeatureStore, tmp_path: Path, written: Any
) -> None:
    file = write_rows(values(("a", 0, 0, 1.0), ("a", 120, 120, 2.0)), tmp_path / "values.parquet")
    # In New York the clock goes from 2 to 3 at 07:00 UTC: the moments lie on both sides of it.
    frame = asked(("a", 0), ("a", 119), ("a", 120), ("a", 419), ("a", 421))
    frame["event_timestamp"] = written(frame["event_timestamp"])
    job = ask(feast_store, [view_of(file, ttl=timedelta(minutes=300))], frame)
    assert found(job) == [1.0, 1.0, 2.0, 2.0, None]
    assert job.to_df()["event_timestamp"].min() == START


def test_a_value_is_valid_exactly_until_its_ttl_to_the_microsecond(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    file = write_rows(values(("a", 0, 0, 1.0)), tmp_path / "values.parquet")
    ttl, micro = timedelta(seconds=1, milliseconds=500), timedelta(microseconds=1)
    moments = [START + ttl - 3 * micro, START + ttl, START + ttl + micro]
    frame = pd.DataFrame({"k0": ["a"] * 3, "event_timestamp": moments})
    assert found(ask(feast_store, [view_of(file, ttl=ttl)], frame)) == [1.0, 1.0, None]


@pytest.mark.parametrize(("cut_off", "known"), [(True, 1.0), (False, 2.0)])
def test_a_row_of_unknown_creation_is_not_known_to_anyone_under_the_cut_off(
    feast_store: FeatureStore, tmp_path: Path, cut_off: bool, known: float
) -> None:
    rows = values(("a", 0, 0, 1.0), ("a", 10, 10, 2.0))
    rows.loc[1, "created"] = pd.NaT
    file = write_rows(rows, tmp_path / "values.parquet")
    job = ask(feast_store, [view_of(file)], asked(("a", 30)), filter_by_created_timestamp=cut_off)
    assert found(job) == [known]


def test_a_view_without_entities_gives_its_newest_value_to_every_row(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    file = write_rows(values((None, 0, 0, 1.0), (None, 60, 60, 2.0)), tmp_path / "values.parquet")
    view = view_of(file, keys=(), ttl=timedelta(minutes=30))
    frame = asked(("a", 10), (None, 60), ("b", 45))
    assert found(ask(feast_store, [view], frame)) == [1.0, None, 2.0]


def test_registered_views_may_map_times_and_keys_and_have_no_entity(tmp_path: Path) -> None:
    feast = feast_in(tmp_path)
    mapping = {"moment": "at", "made": "created", "name": "k0", "number": "value"}
    rows = values(("a", 0, 5, 1.0), ("a", 10, 15, 2.0))
    rows.rename(columns={new: old for old, new in mapping.items()}).to_parquet(tmp_path / "mapped")
    mapped = view_of("mapped", mapping=mapping)
    everyone = view_of("mapped", keys=(), mapping=mapping, name="everyone")
    feast.apply([Entity(name="k0", value_type=ValueType.STRING), mapped, everyone])
    job = feast.get_historical_features(
        entity_df=asked(("a", 14), ("b", 15)),
        features=[VALUE, "everyone:value"],
        full_feature_names=True,
        filter_by_created_timestamp=True,
    )
    assert found(job, "values__value") == [1.0, None]
    assert found(job, "everyone__value") == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:On demand feature view is an experimental:RuntimeWarning")
def test_on_demand_features_are_computed_and_saved_with_the_others(tmp_path: Path) -> None:
    feast = feast_in(tmp_path)
    view = view_of(write_rows(values(("a", 0, 0, 2.0)), tmp_path / "values.parquet"))

    @on_demand_feature_view(sources=[view], schema=[Field(name="twice", dtype=Float64)])
    def doubled(rows: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"twice": rows["value"] * 2})

    feast.apply([Entity(name="k0", value_type=ValueType.STRING), view, doubled])
    job = feast.get_historical_features(
        entity_df=asked(("a", 1), ("b", 2)), features=[VALUE, "doubled:twice"]
    )
    assert found(job, "twice") == [4.0, None]
    job.write_parquet(tmp_path / "out.parquet", ["event_timestamp"], 8192)
    assert listed(pd.read_parquet(tmp_path / "out.parquet")["twice"]) == [4.0, None]


def test_an_entity_frame_can_be_sql_and_a_result_can_stream_to_parquet(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    file = write_rows(values(("a", 0, 0, 1.0)), tmp_path / "values.parquet")
    query = """
        WITH given AS (SELECT 'a' AS k0, TIMESTAMPTZ '2013-03-10 01:00:00+00' AS event_timestamp)
        SELECT * FROM given -- every row"""
    job = ask(feast_store, [view_of(file)], query, full_feature_names=True)
    job.write_parquet(tmp_path / "out.parquet", ["event_timestamp"], 8192)
    assert pd.read_parquet(tmp_path / "out.parquet")["values__value"].tolist() == [1.0]


@pytest.mark.parametrize("way_out", ["to_df", "to_arrow", "open_batches", "write_parquet"])
@pytest.mark.parametrize(
    "harm",
    [
        lambda rows: rows.slice(1),
        lambda rows: rows.take([0, 0, 1, 2]),
        lambda rows: rows.take([0, 0, 2]),
    ],
    ids=["lost", "doubled", "swapped"],
)
def test_a_result_that_lost_or_doubled_rows_is_refused_whatever_the_way_out(
    feast_store: FeatureStore, tmp_path: Path, way_out: str, harm: Any
) -> None:
    file = write_rows(values(("a", 0, 0, 1.0)), tmp_path / "values.parquet")
    job = ask(feast_store, [view_of(file)], asked(("a", 1), ("b", 1), (None, 2)))
    bad, target = sabotaged(job, harm), tmp_path / "out.parquet"
    ways: dict[str, Any] = {
        "to_df": bad.to_df,
        "to_arrow": bad.to_arrow,
        "open_batches": lambda: bad.open_batches().__enter__(),
        "write_parquet": lambda: bad.write_parquet(target, ["event_timestamp"], 8192),
    }
    with pytest.raises(FeatureStoreError, match="3 entity rows went into a retrieval"):
        ways[way_out]()
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("ordered", [True, False])
def test_many_blocks_give_what_one_gives(
    feast_store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """Each block reads what it could know of the sources, in whatever order the rows come."""
    rows = values(*(("ab"[n % 2], n, n + 3 * (n % 5), float(n)) for n in range(0, 200, 3)))
    view = view_of(
        write_rows(rows, tmp_path / "values.parquet"), ttl=timedelta(minutes=9), name="values"
    )
    frame = asked(*(("abc"[n % 3], (n * 37) % 200) for n in range(200))).assign(n=range(200))

    def result() -> pa.Table:
        job = ask(feast_store, [view], frame, filter_by_created_timestamp=True)
        if not ordered:
            return job.to_arrow().sort_by("n")
        job.write_parquet(tmp_path / "out.parquet", ["k0", "n"], 8192)
        return pq.read_table(tmp_path / "out.parquet")

    whole = result()
    monkeypatch.setattr("tasks.features.offline.entities.BLOCK_ROWS", 7)
    assert result().equals(whole)
    assert 0 < whole["value"].null_count < 200


@pytest.mark.parametrize("zone", ["UTC", None])
@pytest.mark.parametrize(("known", "given"), [(1_000_000_600, None), (1_000_000_000, 7.0)])
def test_nothing_is_known_a_fraction_of_a_microsecond_early(
    feast_store: FeatureStore, tmp_path: Path, zone: str | None, known: int, given: float | None
) -> None:
    """Both moments would round to the same microsecond; the entity's is the earlier one."""
    at = pd.to_datetime([known]).tz_localize(zone)
    rows = pd.DataFrame({"k0": ["a"], "at": at, "created": at, "value": [7.0]})
    rows.to_parquet(tmp_path / "rows.parquet")
    frame = pd.DataFrame(
        {"k0": ["a"], "event_timestamp": pd.to_datetime([1_000_000_500]).tz_localize(zone)}
    )
    result = ask(feast_store, [view_of(tmp_path / "rows.parquet")], frame).to_arrow()
    assert result["value"].to_pylist() == [given]
    assert result["event_timestamp"].cast("int64").to_pylist() == [1_000_000]


def test_a_view_with_a_function_is_refused_for_its_values_would_differ_online(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    view = view_of(write_rows(values(("a", 0, 0, 1.0)), tmp_path / "rows.parquet"))
    view.feature_transformation = PandasTransformation(lambda rows: rows, "lambda rows: rows")
    with pytest.raises(FeatureStoreError, match="values transforms its rows by a function"):
        ask(feast_store, [view], asked(("a", 1)))
