"""The rules by SQL say what Great Expectations says."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pandas as pd
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tasks.validation.expectations import can_screen, compile_suite, failing, run_checks
from tasks.validation.subject import open_subject
from tasks.validation.suites import Rule
from tests.support.data.tables import WEEK, people, suite
from tests.support.suite.examples import examples


def rule(kind: str, **kwargs: Any) -> Rule:
    return Rule(type=kind, kwargs=kwargs, says="so it is")


RULES = (
    rule("expect_column_values_to_be_between", column="age", min_value=20, max_value=59),
    rule("expect_column_values_to_be_between", column="age", min_value=30, mostly=0.6),
    rule("expect_column_values_to_not_be_null", column="age"),
    rule("expect_column_values_to_not_be_null", column="age", mostly=0.7),
    rule("expect_column_values_to_be_null", column="town"),
    rule("expect_column_values_to_be_in_set", column="town", value_set=["Nizwa", "Sur"]),
    rule("expect_column_values_to_match_regex", column="name", regex="^person[0-9]{2}$"),
    rule("expect_column_values_to_be_unique", column="name"),
    rule("expect_compound_columns_to_be_unique", column_list=["name", "town"]),
    rule("expect_column_mean_to_be_between", column="age", min_value=25, max_value=45),
    rule("expect_table_row_count_to_be_between", min_value=10, max_value=39),
)


def both(rows: pd.DataFrame) -> tuple[list[int], list[int]]:
    """Entries that fail by SQL, and those that fail by Great Expectations."""
    path = Path(mkdtemp(prefix="falaj-screen-")) / "people.parquet"
    rows.to_parquet(path, index=False)
    checked = suite(*RULES)
    with open_subject(path, "people", checked, WEEK) as subject:
        checks = compile_suite(checked, subject.derive())
        judged = run_checks(checks, subject, checked)
        by_sql = [check.entry for check in failing(checks, subject)]
    return by_sql, [j.check.entry for j in judged if j.result and not j.result["success"]]


@settings(examples(8), derandomize=True, phases=[Phase.generate])
@given(
    ages=st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=40, max_size=40),
    towns=st.lists(st.sampled_from(["Nizwa", "Sur", "sur ", None]), min_size=40, max_size=40),
    repeated=st.integers(0, 3),
)
def test_sql_and_great_expectations_agree(
    ages: list[float | None], towns: list[str | None], repeated: int
) -> None:
    rows = people().assign(
        age=pd.Series(ages, dtype="float64"), town=pd.Series(towns, dtype="object")
    )
    rows.loc[rows.index < repeated, "name"] = "person39"

    by_sql, by_gx = both(rows)

    assert by_sql == by_gx


def test_clean_rows_fail_only_what_is_wrong() -> None:
    by_sql, by_gx = both(people())

    assert by_sql == by_gx == [5, 11]


def test_a_type_without_sql_is_known_as_such(tmp_path: Path) -> None:
    people().to_parquet(tmp_path / "people.parquet", index=False)
    odd = suite(rule("expect_column_value_lengths_to_equal", column="name", value=8))
    with open_subject(tmp_path / "people.parquet", "people", odd, WEEK) as subject:
        [check] = compile_suite(odd, subject.derive())
        assert not can_screen(check)
        with pytest.raises(ValueError, match="has no SQL"):
            failing([check], subject)
