"""Failed expectations in words."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.validation.wording import failure_in_words, observed_in_words


def result(kind: str, kwargs: dict[str, Any], **seen: Any) -> dict[str, Any]:
    return {"expectation_config": {"type": kind, "kwargs": kwargs}, "result": seen}


def counted(kind: str, kwargs: dict[str, Any], count: int, *examples: Any) -> dict[str, Any]:
    return result(
        kind,
        kwargs,
        element_count=48120,
        unexpected_count=count,
        partial_unexpected_list=list(examples),
    )


BETWEEN = "expect_column_values_to_be_between"


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (
            counted(BETWEEN, {"column": "delay", "min_value": -120.0}, 312, -300.0, -240.5, -300.0),
            "delay has 312 values below -120, for example -300, -240.5",
        ),
        (
            counted(BETWEEN, {"column": "delay", "max_value": 9}, 1, 10),
            "delay has 1 value above 9, for example 10",
        ),
        (
            counted(BETWEEN, {"column": "off", "min_value": 0, "max_value": 0}, 1200, -5.0),
            "off has 1,200 values other than 0, for example -5",
        ),
        (
            counted(BETWEEN, {"column": "a", "min_value": 1, "max_value": 2, "mostly": 0.99}, 9, 3),
            "a has 9 values outside 1 to 2 (tolerated share 0.01), for example 3",
        ),
        (
            counted("expect_column_values_to_not_be_null", {"column": "zone"}, 9, None),
            "zone has 9 nulls in 48,120 rows",
        ),
        (
            counted(
                "expect_column_values_to_be_in_set", {"column": "c", "value_set": ["A"]}, 2, "B"
            ),
            "c has 2 values not among 'A', for example 'B'",
        ),
        (
            counted(
                "expect_column_values_to_be_in_set", {"column": "lost", "value_set": [False]}, 1
            ),
            "lost is true in 1 row",
        ),
        (
            counted("expect_column_values_to_be_unique", {"column": "id"}, 2, 7, 7),
            "id repeats in 2 rows, for example 7",
        ),
        (
            counted(
                "expect_compound_columns_to_be_unique",
                {"column_list": ["carrier", "flight"]},
                2,
                {"carrier": "UA", "flight": 5},
            ),
            "(carrier, flight) repeats in 2 rows, for example ['UA', 5]",
        ),
        (
            counted("expect_column_values_to_match_regex", {"column": "d", "regex": "^x"}, 1, "y"),
            "d has 1 value not of the form ^x, for example 'y'",
        ),
        (
            counted("expect_column_pair_values_to_be_equal", {"column_A": "a", "column_B": "b"}, 3),
            "(a, b) has 3 values against expect_column_pair_values_to_be_equal",
        ),
        (
            result(
                "expect_column_mean_to_be_between",
                {"column": "m", "min_value": 1},
                observed_value=0.5,
            ),
            "m is 0.5, expected at least 1",
        ),
        (
            result(
                "expect_column_mean_to_be_between",
                {"column": "m", "max_value": 1},
                observed_value=None,
            ),
            "m is None, expected at most 1",
        ),
        (
            result(
                "expect_table_row_count_to_be_between",
                {"min_value": 5, "max_value": 9},
                observed_value=2,
            ),
            "the number of rows is 2, expected 5 to 9",
        ),
        (
            result(
                "expect_column_distinct_values_to_contain_set",
                {"column": "c", "value_set": ["A", "B"]},
                observed_value=["A"],
                partial_missing_list=["B"],
            ),
            "c is ['A']; 'B' are missing",
        ),
    ],
)
def test_a_failure_reads_as_a_sentence(failed: dict[str, Any], words: str) -> None:
    assert failure_in_words(failed) == words


def test_examples_say_which_row_they_are_from_where_the_rule_asks() -> None:
    failed = result(
        BETWEEN,
        {"column": "auc", "max_value": 0.75},
        element_count=3,
        unexpected_count=1,
        unexpected_index_column_names=["feature"],
        partial_unexpected_index_list=[{"auc": 0.92, "feature": "dep_delay"}],
    )

    assert failure_in_words(failed) == (
        "auc has 1 value above 0.75, for example 0.92 (feature 'dep_delay')"
    )


def test_what_was_seen_fits_a_table_cell() -> None:
    assert observed_in_words(counted(BETWEEN, {}, 0)) == "none of 48,120 unexpected"
    assert observed_in_words(counted(BETWEEN, {}, 3)) == "3 of 48,120 unexpected"
    assert observed_in_words(result("x", {}, observed_value=0.123456789)) == "observed 0.123457"
    assert observed_in_words(result("x", {}, observed_value={"quantiles": [0.5]})) == (
        "observed quantiles [0.5]"
    )
