"""Spark gives the rows that DuckDB gives: every query that is shipped, every function let through.

Real rows of the data sets, in small windows; `make test-cluster` runs these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from flows.config import read_pipeline_config
from tasks.contracts.base import TimeWindow
from tasks.features.config import FeatureConfig
from tasks.features.declared.queries import frame_query, table_query
from tasks.features.offline.duck import duckdb_session
from tasks.features.offline.spark_tables import SparkTables, started
from tasks.features.tables.build import Queries
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tests.support.data.declared import HABITS, features, write_rows, write_use_case
from tests.support.data.profiles import choose_spark
from tests.support.data.repository import days
from tests.support.data.shop import Shop
from tests.support.data.use_cases import third_use_case

pytest.importorskip("pyspark", reason="it is not in the lock: make test-cluster")
ALL_KINDS = {
    **HABITS,
    "aggregates": [
        *("count() over 7d, 4w", "sum(amount) over 7d", "mean(amount) over 7d, 4w"),
        *("min(amount) over 7d", "max(amount) over 7d", "std(amount) over 4w"),
        *("distinct(channel) over 4w", "first(channel) over 4w", "last(channel)", "last(gift)"),
        *("share(amount > 60) over 4w as large", "time_since_last() over 4w"),
        "share(returned) over 4w as sent_back",
    ],
}
DECLARED = [
    ALL_KINDS,
    {"name": "people", "from": "customers", "entity_keys": ["customer"]},
    {"name": "events", "from": "orders", "entity_keys": ["customer"], "known_after": "1h"},
]
FEW_DAYS = {
    # The clocks go back on the third of November.
    "flights": ("2013-11-02T00:00Z", "2013-11-05T00:00Z"),
    "traffic": ("2017-10-28T00:00Z", "2017-11-10T00:00Z"),
    "energy": ("2016-01-01T00:00Z", "2016-06-01T00:00Z"),
    "shop": ("2024-03-01T00:00Z", "2024-05-01T00:00Z"),
    "mail-order": ("2024-03-01T00:00Z", "2024-05-01T00:00Z"),
}
FUNCTIONS = (
    *("abs(n)", "ceil(x)", "floor(x)", "exp(x / 100)", "ln(abs(x) + 1)", "sqrt(abs(x))"),
    *("power(x, 2)", "n // 7", "n % 7", "n / 7", "n * x", "coalesce(m, n)", "nullif(n, 3)"),
    *("greatest(n, m)", "least(n, m)", "upper(s)", "lower(s)", "trim(s)", "length(s)"),
    *("left(s, 2)", "right(s, 2)", "s || '-' || n::VARCHAR", "concat_ws('-', s, m)"),
    *("dayname(t)", "strftime(t, '%Y-%m-%dT%H:%M:%S')", "timezone('Asia/Muscat', t)"),
    *("timezone('America/New_York', timezone('Asia/Muscat', t)::TIMESTAMP)", "epoch(t)"),
    *("epoch(t - u) / 60", "t + to_minutes(n)", "date_trunc('hour', t)", "date_trunc('week', t)"),
    *(f"extract({part} FROM t)" for part in ("hour", "day", "month", "year", "week", "doy")),
    *(
        "extract(quarter FROM t)",
        "(n > 3)::INTEGER",
        "x::FLOAT",
        "n BETWEEN 2 AND 5",
        "n IN (1, 2)",
    ),
    *("CASE WHEN n > 3 THEN 'much' END", "n IS DISTINCT FROM m", "t BETWEEN u AND t"),
    *(f"{f}(x) OVER ()" for f in ("avg", "sum", "min", "max", "stddev_pop", "stddev_samp")),
    *(f"{f}(x) OVER ()" for f in ("variance", "var_pop", "count")),
    *("lag(n) OVER by_time", "lead(n, 2) OVER by_time", "row_number() OVER by_time"),
    *(
        "first_value(n) OVER by_time",
        "last_value(n) OVER by_time",
        "count(DISTINCT s) OVER by_time",
    ),
    *("arg_min(n, x) OVER by_time", "arg_max(n, row(x, n)) OVER by_time"),
    *("arg_max(m, n) OVER ()", "x::INTEGER", "x::BIGINT", "(n / 8)::INTEGER"),
)
VALUES = """SELECT
    i AS n, CASE WHEN i % 4 > 0 THEN i * 3 END AS m, (i * 37 % 101) / 8 - 5 AS x,
    substr(' abcde ', i % 5 + 1, 3) AS s,
    TIMESTAMPTZ '2013-03-09 22:30:15+00' + to_minutes(i * 1234) AS t,
    TIMESTAMPTZ '2013-01-01 00:00:00+00' + to_minutes(i * 77) AS u,
FROM range(60) AS numbers(i)"""


@dataclass
class Engines:
    """Both engines, on the raw rows of one use case."""

    con: duckdb.DuckDBPyConnection
    spark: SparkTables
    window: TimeWindow

    def rows(self, text: str, origin: str, spark: SparkTables | None) -> str:
        """SQL of the query's rows, computed by Spark or not."""
        config: Any = None  # only the raw tables need it
        return Queries(self.con, config, Path(), spark).rows_of(text, self.window, origin)

    def check_equal(self, text: str, origin: str, compared: str = "*") -> int:
        """See that a query gives the same rows on both; how many."""
        ours, theirs = self.rows(text, origin, None), self.rows(text, origin, self.spark)
        self.con.execute(f"CREATE OR REPLACE TEMP TABLE ours AS FROM ({ours})")
        self.con.execute(f"CREATE OR REPLACE TEMP TABLE theirs AS FROM ({theirs})")
        shown = []
        for one, other in (("ours", "theirs"), ("theirs", "ours")):
            query = (
                f"SELECT {compared} FROM {one} EXCEPT ALL SELECT {compared} FROM {other} LIMIT 3"
            )
            shown += self.con.execute(query).fetchall()
        assert not shown, origin
        return int(self.con.execute("SELECT count(*) FROM ours").fetchall()[0][0])


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkTables]:
    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        choose_spark(patch, folder)
        yield SparkTables(started({}), None, folder)


def repository(name: str, folder: Path) -> tuple[Path, FeatureConfig]:
    """The feature repository of a use case, its raw rows beside it."""
    if name == "mail-order":
        repo = write_use_case(folder / name)
        write_rows(repo)
        return repo, features(feature_tables=DECLARED)
    if name == "shop":
        return (shop := Shop(folder)).repo, shop.config.features
    repo = third_use_case(folder) if name == "energy" else PROJECT_ROOT / "feature_repo" / name
    return repo, read_pipeline_config(repo).features


@pytest.mark.parametrize("name", FEW_DAYS)
def test_every_query_of_a_use_case_gives_the_same_rows_on_both(
    name: str, spark: SparkTables, tmp_path: Path
) -> None:
    repo, config = repository(name, tmp_path)
    start, end = map(datetime.fromisoformat, FEW_DAYS[name])
    window = TimeWindow(start=start, end=end)
    store = ArtifactStore(tmp_path / "store")
    reach = timedelta(hours=max(t.lookback_hours for t in config.feature_tables) + 48)
    wide = TimeWindow(start=start - reach, end=end + timedelta(days=30))
    landed = land_raw_rows(wide, config, repo, store)
    folders = {table.name: store.path(table.artifact) for table in landed.tables}
    with duckdb_session(tmp_path) as con:
        Queries(con, config, repo, spark).register_raw(folders)
        Queries(con, config, repo, None).register_raw(folders)
        engines = Engines(con, spark, window)
        for query in config.staging:
            assert engines.check_equal(f"SELECT * FROM {query.name}", query.sql)
        for table in config.feature_tables:
            assert engines.check_equal(table_query(repo, table, config), f"{name}, {table.name}")
        assert engines.check_equal(frame_query(repo, config), f"{name}, training set")


@pytest.fixture(scope="module")
def values(spark: SparkTables, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("values")
    with duckdb_session(folder) as con:
        con.execute(f"CREATE TABLE samples AS {VALUES}")
        con.execute(f"COPY samples TO '{folder}/samples.parquet'")
        spark.read("samples", folder / "samples.parquet")
        yield Engines(con, spark, days(68, 1))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_that_is_let_through_gives_the_same_values_on_both(
    function: str, values: Engines
) -> None:
    """To a rounding of the last digits, which the engines' libraries of mathematics have."""
    windows = "WINDOW by_time AS (PARTITION BY n % 3 ORDER BY t)"
    text = f"SELECT n, {function} AS y FROM samples {windows}"
    kind = values.con.execute(f"DESCRIBE {text}").fetchall()[1][1]
    y = "round(y, 11)" if kind == "DOUBLE" else "y"
    assert values.check_equal(text, function, f"n, {y}") == 60


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("SELECT n // (n - 3) AS y FROM samples", DataContractError, "DIVIDE_BY_ZERO"),
        (
            "SELECT sum(DISTINCT n) OVER (ORDER BY t) AS y FROM samples",
            ConfigurationError,
            "say it in words that both engines know",
        ),
    ],
)
def test_what_spark_cannot_compute_is_said_with_the_name_of_the_query(
    text: str, error: type[Exception], sentence: str, values: Engines
) -> None:
    with pytest.raises(error, match=f"query mine.sql.*{sentence}"):
        values.rows(text, "mine.sql", values.spark)
