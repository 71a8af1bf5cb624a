"""Aggregates as a use case declares them: `mean(amount) over 1h, 7d`, read and named.

The grammar is `function(expression) over duration, ... as name`. An expression is SQL over the
columns of one row; a duration is a number of minutes, hours, days or weeks.
"""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
DURATION = r"[0-9]+[mhdw]"
FUNCTIONS = {
    "count": "count({value})",
    "sum": "sum({value})",
    "mean": "avg({value})",
    "min": "min({value})",
    "max": "max({value})",
    "std": "stddev_samp({value})",
    "distinct": "count(DISTINCT {value})",
    # Of events of one moment the smallest or largest value, or chance would choose.
    "first": "arg_min({value}, row({time}, {value}))",
    "last": "arg_max({value}, row({time}, {value}))",
    "share": "avg(({value})::INTEGER)",
    "time_since_last": "max({time})",
}
"""What can be declared, and its SQL over a window of `{time}`."""

_AGGREGATE = re.compile(
    rf"(?P<function>[a-z_]+)\s*\((?P<expression>.*)\)"
    rf"(?:\s+over\s+(?P<over>{DURATION}(?:\s*,\s*{DURATION})*))?"
    r"(?:\s+as\s+(?P<name>[a-z][a-z0-9_]*))?",
    re.DOTALL,
)
_EXAMPLE = "expected such as `mean(amount) over 1h, 7d` or `share(amount > 100) over 4w as large`"


def span(text: str) -> timedelta:
    """The time that a duration such as `15m`, `6h`, `7d` or `4w` names."""
    return timedelta(**{UNITS[text[-1]]: int(text[:-1])})


def interval(time: timedelta) -> str:
    """The time as a SQL interval in its largest whole unit, such as `INTERVAL 7 DAYS`."""
    for word in ("days", "hours", "minutes"):
        if not time % (unit := timedelta(**{word: 1})):
            return f"INTERVAL {time // unit} {word.upper().removesuffix('S' * (time == unit))}"
    return f"INTERVAL {time // timedelta(microseconds=1)} MICROSECOND"


def _is_a_duration(text: str) -> str:
    if not re.fullmatch(DURATION, text):
        raise ValueError(f"{text!r} is no duration; expected such as 15m, 6h, 7d or 4w")
    return text


Duration = Annotated[
    str,
    AfterValidator(_is_a_duration),
    WithJsonSchema({"type": "string", "pattern": f"^{DURATION}$"}),
]


@dataclass(frozen=True)
class Aggregate:
    """One feature: a function of an expression over the events of a time up to each event."""

    function: str
    expression: str
    over: str | None
    """None: of the event itself."""
    name: str


def parse_aggregate(text: str) -> tuple[Aggregate, ...]:
    """The features that a declaration names, one for each duration.

    Raises:
        ValueError: it is no declaration of an aggregate, or its function is not known.
    """
    match = _AGGREGATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no aggregate; {_EXAMPLE}")
    function, expression = match["function"], " ".join(match["expression"].split())
    if function not in FUNCTIONS:
        raise ValueError(
            f"{text!r}: there is no function {function!r}; there are {', '.join(FUNCTIONS)}"
        )
    if bool(expression) == (function == "time_since_last") and function != "count":
        wanted = "nothing" if expression else "a column or an expression"
        raise ValueError(f"{text!r}: {function} takes {wanted} in its parentheses; {_EXAMPLE}")
    over = re.findall(DURATION, match["over"] or "")
    if not over and function != "last":
        raise ValueError(f"{text!r} does not say over which time; {_EXAMPLE}")
    if zero := [each for each in over if not span(each)]:
        raise ValueError(f"{text!r}: {zero[0]} is no time at all; {_EXAMPLE}")
    stem = match["name"] or _name(function, expression)
    return tuple(
        Aggregate(function, expression, each, f"{stem}_{each}" if each else stem)
        for each in over or [None]
    )


def _name(function: str, expression: str) -> str:
    """Such as `amount_mean`, of the words in an expression."""
    words = re.sub(r"[^a-z0-9]+", "_", expression.lower()).strip("_")
    known = "hours_since_last" if function == "time_since_last" else function
    return f"{words}_{known}" if words else known


def words_of(expression: str) -> set[str]:
    """Every word of a SQL expression: names of columns, functions and what stands in texts."""
    return set(re.findall(r"[a-z_][a-z0-9_]*", expression.lower()))
