"""Results in words: what a failed expectation saw, for the person who reads the message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NUM_EXAMPLES = 3


def observed_in_words(result: Mapping[str, Any]) -> str:
    """What an expectation saw, in a few words for a table."""
    seen = result["result"]
    if "unexpected_count" in seen:
        count, total = seen["unexpected_count"], seen["element_count"]
        return f"{count:,} of {total:,} unexpected" if count else f"none of {total:,} unexpected"
    return f"observed {shown(seen.get('observed_value'))}"


def failure_in_words(result: Mapping[str, Any]) -> str:
    """A sentence's worth about a failed expectation: what, how often, for example, against what."""
    config, seen = result["expectation_config"], result["result"]
    kwargs = config["kwargs"]
    name = subject_of(kwargs)
    if "unexpected_count" not in seen:
        return f"{name} is {shown(seen.get('observed_value'))}{_expected_value(kwargs, seen)}"
    count = seen["unexpected_count"]
    if config["type"] == "expect_column_values_to_not_be_null":
        total = _times(seen["element_count"], "row")
        return f"{name} has {_times(count, 'null')} in {total}{_tolerated(kwargs)}"
    if config["type"] in (
        "expect_compound_columns_to_be_unique",
        "expect_column_values_to_be_unique",
    ):
        return f"{name} repeats in {_times(count, 'row')}{_examples(seen)}"
    if config["type"] == "expect_column_values_to_be_null":
        return f"{name} is not as it was{_examples(seen)}"
    if kwargs.get("value_set") == [False]:
        return f"{name} is true in {_times(count, 'row')}"
    fault = _fault(config["type"], kwargs)
    return f"{name} has {_times(count, 'value')} {fault}{_tolerated(kwargs)}{_examples(seen)}"


def subject_of(kwargs: Mapping[str, Any]) -> str:
    """Name of the column, or columns, that an expectation is about."""
    if "column" in kwargs:
        return str(kwargs["column"])
    if "column_list" in kwargs:
        return f"({', '.join(kwargs['column_list'])})"
    if "column_A" in kwargs:
        return f"({kwargs['column_A']}, {kwargs['column_B']})"
    return "the number of rows"


def shown(value: object) -> str:
    """A value as a person writes it: no trailing zeros, text in quotes."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        return f"[{', '.join(shown(item) for item in value)}]"
    return repr(value)


def _fault(kind: str, kwargs: Mapping[str, Any]) -> str:
    low, high = kwargs.get("min_value"), kwargs.get("max_value")
    if low is not None or high is not None:
        return _outside(low, high)
    if kind == "expect_column_values_to_be_in_set":
        return f"not among {', '.join(shown(v) for v in kwargs['value_set'])}"
    if kind == "expect_column_values_to_match_regex":
        return f"not of the form {kwargs['regex']}"
    return f"against {kind}"


def _outside(low: object, high: object) -> str:
    if high is None:
        return f"below {shown(low)}"
    if low is None:
        return f"above {shown(high)}"
    return f"other than {shown(low)}" if low == high else f"outside {shown(low)} to {shown(high)}"


def _expected_value(kwargs: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    low, high = kwargs.get("min_value"), kwargs.get("max_value")
    if low is not None and high is not None:
        return f", expected {shown(low)} to {shown(high)}"
    if low is not None:
        return f", expected at least {shown(low)}"
    if high is not None:
        return f", expected at most {shown(high)}"
    missing = seen.get("partial_missing_list")
    return f"; {', '.join(shown(v) for v in missing)} are missing" if missing else ""


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _tolerated(kwargs: Mapping[str, Any]) -> str:
    mostly = kwargs.get("mostly", 1)
    return f" (tolerated share {1 - mostly:.4g})" if mostly < 1 else ""


def _examples(seen: Mapping[str, Any]) -> str:
    """A few different unexpected values, each with what tells its row if the rule asks for it."""
    shows = seen.get("unexpected_index_column_names")
    rows = seen.get("partial_unexpected_index_list" if shows else "partial_unexpected_list") or []
    distinct = dict.fromkeys(_example(row, shows or []) for row in rows)
    return f", for example {', '.join(list(distinct)[:NUM_EXAMPLES])}" if distinct else ""


def unexpected_values(result: Mapping[str, Any]) -> list[object]:
    """Some of the values that broke an expectation."""
    seen = result["result"]
    shows = seen.get("unexpected_index_column_names")
    if not shows:
        return list(seen.get("partial_unexpected_list") or [])
    rows = seen.get("partial_unexpected_index_list") or []
    return [value for row in rows for name, value in row.items() if name not in shows]


def _example(row: object, shows: Sequence[str]) -> str:
    if not isinstance(row, dict):
        return shown(row)
    values = [value for name, value in row.items() if name not in shows]
    value = shown(values[0] if len(values) == 1 else values)
    told = ", ".join(f"{name} {shown(row[name])}" for name in shows)
    return f"{value} ({told})" if told else value
