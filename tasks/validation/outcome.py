"""What one suite found on one table: the document `validation.json`, and failures in words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ArtifactError
from tasks.kernel.values import Described
from tasks.validation.suites import Severity

NUM_EXAMPLES = 3
Status = Literal["passed", "failed", "warned", "skipped"]


class CheckOutcome(Described):
    """One expectation: what it says and what was seen."""

    entry: int = Field(ge=1, description="Place of its rule in the suite, from 1.")
    type: str
    table: str
    columns: tuple[str, ...]
    says: str
    severity: Severity
    status: Status
    observed: str = Field(description="What was seen, in a few words.")
    sentence: str = Field(default="", description="The failure in words; empty where it holds.")


class SuiteOutcome(Described):
    """A whole suite on one table. Holds no clock and no run id: same data, same document."""

    suite: str
    subject: str
    subject_sha256: str
    window: TimeWindow
    num_rows: NonNegativeInt
    passed: bool
    great_expectations_version: str
    column_types: dict[str, str] = Field(description="Column to DuckDB type, as stored.")
    table_faults: tuple[str, ...]
    """What is wrong with the table as such; with any of these no value was judged."""
    looks_like: tuple[str, ...] = ()
    """Kinds of fault that the failures look like, in words."""
    checks: tuple[CheckOutcome, ...]
    results: tuple[dict[str, Any], ...]
    """The Great Expectations results, whole, one for each judged check."""

    @property
    def num_judged(self) -> int:
        """Checks that were judged, not skipped."""
        return sum(check.status != "skipped" for check in self.checks)

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the table was refused, a sentence each; none where it passed."""
        return (*self.table_faults, *(check.sentence for check in self.with_status("failed")))

    def rows(self) -> list[dict[str, str]]:
        """Every check for a table that a person reads."""
        return [
            {
                "expectation": check.type,
                "columns": ", ".join(check.columns) or check.table,
                "says": check.says,
                "observed": check.observed,
                "outcome": check.status,
            }
            for check in self.checks
        ]

    def with_status(self, status: Status) -> tuple[CheckOutcome, ...]:
        """The checks that ended so."""
        return tuple(check for check in self.checks if check.status == status)


def read_outcome(path: Path) -> SuiteOutcome:
    """Read a kept `validation.json`.

    Raises:
        ArtifactError: the file is no outcome of this version of the project.
    """
    try:
        return SuiteOutcome.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ArtifactError(
            f"{path} is no validation result of this version; run the validation again"
        ) from exc


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
        missing = ", ".join(map(shown, seen.get("partial_missing_list") or ()))
        expected = _bounds(kwargs, "at least", "at most", "")
        told = (
            f", expected {expected}" if expected else f"; {missing} are missing" if missing else ""
        )
        return f"{name} is {shown(seen.get('observed_value'))}{told}"
    count = seen["unexpected_count"]
    if config["type"] == "expect_column_values_to_not_be_null":
        total = _times(seen["element_count"], "row")
        return f"{name} has {_times(count, 'null')} in {total}{_tolerated(kwargs)}"
    if config["type"].endswith("_to_be_unique"):
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
    if isinstance(value, int) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        return f"[{', '.join(shown(item) for item in value)}]"
    return repr(value)


def _fault(kind: str, kwargs: Mapping[str, Any]) -> str:
    if bounds := _bounds(kwargs, "below", "above", "outside "):
        return bounds
    if kind == "expect_column_values_to_be_in_set":
        return f"not among {', '.join(shown(v) for v in kwargs['value_set'])}"
    if kind == "expect_column_values_to_match_regex":
        return f"not of the form {kwargs['regex']}"
    return f"against {kind}"


def _bounds(kwargs: Mapping[str, Any], low_word: str, high_word: str, both_word: str) -> str:
    low, high = kwargs.get("min_value"), kwargs.get("max_value")
    if low is None and high is None:
        return ""
    if high is None:
        return f"{low_word} {shown(low)}"
    if low is None:
        return f"{high_word} {shown(high)}"
    if low == high and both_word:
        return f"other than {shown(low)}"
    return f"{both_word}{shown(low)} to {shown(high)}"


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _tolerated(kwargs: Mapping[str, Any]) -> str:
    mostly = kwargs.get("mostly", 1)
    return f" (tolerated share {1 - mostly:.4g})" if mostly < 1 else ""


def _examples(seen: Mapping[str, Any]) -> str:
    """A few different unexpected values, each with what tells its row if the rule asks for it."""
    shows, rows = _unexpected(seen)
    distinct = dict.fromkeys(_example(row, shows) for row in rows)
    return f", for example {', '.join(list(distinct)[:NUM_EXAMPLES])}" if distinct else ""


def unexpected_values(result: Mapping[str, Any]) -> list[object]:
    """Some of the values that broke an expectation."""
    shows, rows = _unexpected(result["result"])
    if not shows:
        return rows
    return [value for row in rows for name, value in row.items() if name not in shows]


def _unexpected(seen: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Columns that tell which row it is, and values, or rows with those columns."""
    shows = seen.get("unexpected_index_column_names") or []
    rows = seen.get("partial_unexpected_index_list" if shows else "partial_unexpected_list")
    return shows, rows or []


def _example(row: object, shows: Sequence[str]) -> str:
    if not isinstance(row, dict):
        return shown(row)
    values = [value for name, value in row.items() if name not in shows]
    value = shown(values[0] if len(values) == 1 else values)
    told = ", ".join(f"{name} {shown(row[name])}" for name in shows)
    return f"{value} ({told})" if told else value
