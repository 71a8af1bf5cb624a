"""Rules as Great Expectations expectations."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.kernel.errors import ConfigurationError
from tasks.validation.expectations import Judged, compile_suite, run_checks
from tasks.validation.suites import Rule, Suite
from tests.support.data.tables import between, opened, people, suite
from tests.support.suite.examples import examples

BETWEEN = "expect_column_values_to_be_between"


def judge(frame: pd.DataFrame, checked: Suite) -> list[Judged]:
    with TemporaryDirectory() as folder, opened(frame, checked, Path(folder)) as subject:
        return run_checks(compile_suite(checked, subject.derive()), subject, checked)


def rule(kind: str, **kwargs: object) -> Rule:
    return Rule.model_validate({"type": kind, "kwargs": kwargs, "says": "it holds"})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (rule(BETWEEN, column="age", min_valeu=1), "extra fields not permitted"),
        (rule("expect_table_columns_to_match_set", column_set=["age"]), "type is not for suites"),
        (
            rule("expect_column_values_to_be_unique", column="age", row_condition="age > 1"),
            "row_condition is not for suites",
        ),
        (rule(BETWEEN, column="town", min_value=1), "cannot be applied"),
    ],
)
def test_a_wrong_expectation_names_file_entry_and_reason(wrong: Rule, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        judge(people(), suite(between("age", 0, 120), wrong))

    where = f"suite file expectations/people.yaml, expectation 2 ({wrong.type}): "
    assert str(caught.value).startswith(where)
    assert "\n" not in str(caught.value)


def test_a_column_that_an_aggregate_lacks_is_named() -> None:
    wrong = between("mean", 0, 1, table="towns")

    with pytest.raises(ConfigurationError, match=r"expectation 1 .* names column\(s\) mean, which"):
        judge(people(), suite(wrong, aggregates={"towns": "SELECT town FROM subject"}))


def test_a_pattern_stands_for_one_expectation_a_column() -> None:
    everywhere = Rule(
        type="expect_column_values_to_not_be_null", for_columns=("*o*", "age"), says="nothing lacks"
    )

    judged = judge(people(), suite(everywhere))

    assert [item.check.columns for item in judged] == [("born",), ("town",), ("age",)]


COLUMNS = [f"c{n}" for n in range(9)]


@examples(8)
@given(
    wanted=st.lists(
        st.tuples(st.sampled_from(COLUMNS), st.integers(-3, 3), st.booleans()),
        min_size=1,
        max_size=14,
    ),
    seed=st.integers(0, 1000),
)
def test_grouping_changes_neither_order_nor_counts(
    wanted: Sequence[tuple[str, int, bool]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-5, 6, (30, len(COLUMNS))).astype(float)
    values[rng.random(values.shape) < 0.1] = np.nan
    frame = pd.DataFrame(values, columns=COLUMNS)
    rules = [
        between(column, low, 9, shows=("c0",) if shown else ()) for column, low, shown in wanted
    ]

    judged = judge(frame, suite(*rules, columns={"number": COLUMNS}))

    assert [item.check.columns for item in judged] == [(column,) for column, _, _ in wanted]
    counts = [item.result["result"]["unexpected_count"] for item in judged if item.result]
    assert counts == [int((frame[column] < low).sum()) for column, low, _ in wanted]
