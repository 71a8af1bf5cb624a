"""Failed expectations in words: which column, how often, for example, against which bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.validation.outcome import failure_in_words

BETWEEN = "expect_column_values_to_be_between"
MEAN = "expect_column_mean_to_be_between"
KEY = "expect_compound_columns_to_be_unique"


def result(kind: str, kwargs: dict[str, Any], **seen: Any) -> dict[str, Any]:
    return {"expectation_config": {"type": kind, "kwargs": kwargs}, "result": seen}


def counted(kind: str, kwargs: dict[str, Any], count: int, *examples: Any) -> dict[str, Any]:
    seen = {"unexpected_count": count, "partial_unexpected_list": list(examples)}
    return result(kind, kwargs, element_count=48120, **seen)


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (
            counted(BETWEEN, {"column": "delay", "min_value": -120.0}, 312, -300.0, -240.5, -300.0),
            "delay has 312 values below -120, for example -300, -240.5",
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
            counted(KEY, {"column_list": ["carrier", "no"]}, 2, {"carrier": "UA", "no": 5}),
            "(carrier, no) repeats in 2 rows, for example ['UA', 5]",
        ),
        (
            result(MEAN, {"column": "m", "min_value": 1}, observed_value=0.5),
            "m is 0.5, expected at least 1",
        ),
        (
            result(
                BETWEEN,
                {"column": "auc", "max_value": 0.75},
                unexpected_count=1,
                unexpected_index_column_names=["feature"],
                partial_unexpected_index_list=[{"auc": 0.92, "feature": "dep_delay"}],
            ),
            "auc has 1 value above 0.75, for example 0.92 (feature 'dep_delay')",
        ),
    ],
)
def test_a_failure_reads_as_a_sentence(failed: dict[str, Any], words: str) -> None:
    assert failure_in_words(failed) == words
