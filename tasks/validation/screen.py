"""The rules of a suite by SQL: the same verdicts as Great Expectations, for sweeps and diagnosis.

Great Expectations takes some milliseconds for each expectation. A sweep over a year of days, or a
search through dozens of possible repairs of a refused table, asks for hundreds of thousands. The
tests hold the two against each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tasks.validation.expectations import Check
from tasks.validation.subject import Subject

_ROW_COUNTS = ("expect_table_row_count_to_be_between", "expect_table_row_count_to_equal")


def failing(checks: Sequence[Check], subject: Subject) -> list[Check]:
    """The checks that do not hold; those whose table has too few rows are left out.

    Raises:
        ValueError: a check is of a type that has no SQL here.
    """
    by_table: dict[str, list[Check]] = defaultdict(list)
    for check in checks:
        by_table[check.rule.table].append(check)
    found: list[Check] = []
    for table, together in by_table.items():
        counts = ", ".join(f"({_facts(check)})" for check in together)
        [row] = subject.query(f"SELECT count(*), {counts} FROM {_q(table)}")
        num_rows = _number(row[0])
        found += [
            check
            for check, holds in zip(together, row[1:], strict=True)
            if num_rows >= check.rule.min_rows and num_rows > 0 and holds is False
        ]
    order = {id(check): place for place, check in enumerate(checks)}
    return sorted(found, key=lambda check: order[id(check)])


def can_screen(check: Check) -> bool:
    """True where a check has its SQL here."""
    try:
        _facts(check)
    except ValueError:
        return False
    return True


def _facts(check: Check) -> str:
    """SQL that is false where the check does not hold; null or true where it does."""
    kind, kwargs = check.rule.type, check.rule.kwargs
    names = [_q(name) for name in check.columns]
    if kind in _ROW_COUNTS:
        value = kwargs.get("value")
        low, high = (value, value) if value is not None else _bounds(kwargs)
        return _between("count(*)", low, high)
    if kind == "expect_column_mean_to_be_between":
        return f"coalesce({_between(f'avg({names[0]})', *_bounds(kwargs))}, false)"
    if kind in ("expect_column_values_to_be_unique", "expect_compound_columns_to_be_unique"):
        known = " OR ".join(f"{name} IS NOT NULL" for name in names)  # nulls are alike in a key
        key = f"row({', '.join(names)})"
        return f"count(DISTINCT {key}) FILTER ({known}) = count(*) FILTER ({known})"
    mostly = float(str(kwargs.get("mostly", 1)))
    if kind == "expect_column_values_to_not_be_null":
        return f"count({names[0]}) >= {mostly!r} * count(*) - 1e-9"
    if kind == "expect_column_values_to_be_null":
        return f"count(*) - count({names[0]}) >= {mostly!r} * count(*) - 1e-9"
    good = _good_value(kind, names[0], check)
    return f"count(*) FILTER ({good}) >= {mostly!r} * count({names[0]}) - 1e-9"


def _good_value(kind: str, name: str, check: Check) -> str:
    kwargs = check.rule.kwargs
    if kind == "expect_column_values_to_be_between":
        return f"{name} IS NOT NULL AND {_between(name, *_bounds(kwargs))}"
    if kind == "expect_column_values_to_match_regex":
        return f"regexp_matches({name}, {_literal(kwargs['regex'])})"
    if kind == "expect_column_values_to_be_in_set":
        values = kwargs["value_set"]
        assert isinstance(values, list)
        return f"{name} IN ({', '.join(_literal(value) for value in values)})"
    raise ValueError(f"{kind} has no SQL")


def _bounds(kwargs: Mapping[str, object]) -> tuple[object, object]:
    return kwargs.get("min_value"), kwargs.get("max_value")


def _between(value: str, low: object, high: object) -> str:
    sides = [
        *([f"{value} >= {_literal(low)}"] if low is not None else []),
        *([f"{value} <= {_literal(high)}"] if high is not None else []),
    ]
    return " AND ".join(sides) or "true"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return "'" + str(value).replace("'", "''") + "'"


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
