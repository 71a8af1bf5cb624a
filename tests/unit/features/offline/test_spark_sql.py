"""What a query may not say, if Spark is to run it: named with its line, before anything runs."""

import pytest

from tasks.features.offline.spark_sql import to_spark
from tasks.kernel.errors import ConfigurationError
from tests.support.data.repository import days


def said(text: str) -> str:
    return to_spark(text, days(0, 31), "sql/mine.sql", {"raw": ["a", "b_1h", "c_1h"]}.__getitem__)


@pytest.mark.parametrize(
    ("construct", "named"),
    [
        ("median(a)", "median"),
        ("list_sort(a)", "list_sort"),
        ("regexp_matches(a, 'x')", "regexp_matches"),
        ("strftime(a, '%j')", "strftime with %j"),
        ("extract(dow FROM a)", r"extract\(dow ...\)"),
        ("extract(epoch FROM a)", r"extract\(epoch ...\)"),
        ("random()", "random"),
        ("left(a, -1)", "left with a length .*number"),
        ("a::DOUBLE // 2", "// of what is no whole number"),
        (r"a LIKE 'b\_c'", "LIKE with a backslash .*text"),
    ],
)
def test_what_no_test_holds_equal_is_refused_by_its_name(construct: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"sql/mine.sql.*{named} has no equal"):
        said(f"SELECT\n    {construct} AS y\nFROM raw")


def test_a_refusal_names_the_line() -> None:
    with pytest.raises(ConfigurationError, match=r"query sql/mine\.sql, line 3: median"):
        said("SELECT\n    a,\n    median(a) OVER () AS y\nFROM raw")


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sql/mine\.sql cannot be said"):
        said("SELECT (a FROM raw")


def test_what_spark_would_take_otherwise_is_said_in_its_words() -> None:
    asked = "a::INTEGER, TRY_CAST(a AS BIGINT), arg_max(a, b_1h), a // 100, ln(a)"
    assert said(f"SELECT {asked} FROM raw") == (
        "SELECT CAST(RINT(CAST(a AS DOUBLE)) AS INT), TRY_CAST(BROUND(a) AS BIGINT), MAX_BY(a, "
        "IF(NOT a IS NULL, b_1h, NULL)), a DIV 100, "
        "IF(a <= 0, RAISE_ERROR('logarithm of zero or less'), LN(a)) FROM raw"
    )


def test_columns_by_a_pattern_or_a_list_are_named() -> None:
    assert said("SELECT a, COLUMNS('_1h$') FROM raw") == "SELECT a, `b_1h`, `c_1h` FROM raw"
    chosen = said("SELECT COLUMNS(lambda c: c NOT IN ('b_1h')) FROM raw")
    assert chosen == "SELECT `a`, `c_1h` FROM raw"


def test_the_window_stands_in_the_query_as_two_moments() -> None:
    text = said("SELECT a FROM raw WHERE a >= getvariable('window_start')")
    assert text.endswith("WHERE a >= CAST('2013-01-01 05:00:00+00:00' AS TIMESTAMP)")
