"""A query of DuckDB's in Spark's words, by `sqlglot`: the same rows, or a refusal.

What `sqlglot` passes on by name may mean something else to Spark (`dayname` gives `Mon` there), so
only functions that tests hold equal on both are let through; all others are refused by name and
line. Moments are `TIMESTAMP` to Spark, clock times `TIMESTAMP_NTZ`; its session is in UTC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from sqlglot import exp, parse_one
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ErrorLevel, ParseError, UnsupportedError

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError

EQUAL = (
    *(exp.Abs, exp.ArgMax, exp.ArgMin, exp.Avg, exp.Case, exp.Cast, exp.Ceil, exp.Coalesce),
    *(exp.ConcatWs, exp.Count, exp.DPipe, exp.Extract, exp.Exp, exp.FirstValue, exp.Floor),
    *(exp.Greatest, exp.If, exp.IntDiv, exp.Lag, exp.LastValue, exp.Lead, exp.Least, exp.Left),
    *(exp.Length, exp.Ln, exp.Lower, exp.Max, exp.Min, exp.Nullif, exp.Pow, exp.Right),
    *(exp.RowNumber, exp.Sqrt, exp.Stddev, exp.StddevPop, exp.StddevSamp, exp.Struct, exp.Sum),
    *(exp.TimestampTrunc, exp.Trim, exp.Upper, exp.Variance, exp.VariancePop),
    *(exp.And, exp.Or, exp.Xor, exp.Not),
)
"""Functions that are what they are called in both; `REWRITTEN` has the others."""
SPARKS = {
    "from_utc_timestamp",
    "to_utc_timestamp",
    "make_dt_interval",
    "unix_micros",
    "date_format",
}
SPARKS |= {"collect_set", "size", "explode", "sequence"}
PARTS = ("hour", "minute", "day", "month", "year", "week", "quarter", "doy")

MOMENT, CLOCK = exp.DataType.Type.TIMESTAMPTZ, exp.DataType.Type.TIMESTAMPNTZ

Node = exp.Expression
ColumnsOf = Callable[[str], Sequence[str]]


def to_spark(text: str, window: TimeWindow | None, origin: str, columns_of: ColumnsOf) -> str:
    """The query in Spark's SQL.

    Args:
        text: a query of one statement, in DuckDB's SQL.
        window: what `getvariable('window_start')` and `window_end` are; None for a query without.
        origin: name of the query, for whoever reads an error.
        columns_of: columns of a table that the query may read, for `COLUMNS(...)`.

    Raises:
        ConfigurationError: it says something that has no equal in Spark, by what is known here.
    """
    try:
        tree = parse_one(text, read="duckdb")
        for select in tree.find_all(exp.Select):
            _name_columns(select, columns_of)
        for node in reversed(list(tree.walk())):  # what stands inside first
            if (said := _rewritten(node, window)) is not node:
                node.replace(said)
        for function in tree.find_all(exp.Func):
            _check(function)
        return str(tree.sql(dialect=Spark, unsupported_level=ErrorLevel.RAISE, comments=False))
    except _RefusedError as exc:
        what, cure = exc.args
        lines = [n for n, line in enumerate(text.splitlines(), 1) if exc.word in line.lower()]
        raise ConfigurationError(
            f"query {origin}{f', line {lines[0]}' if lines else ''}: {what} has no equal in Spark "
            f"that is held equal by a test; {cure}. Nothing was changed"
        ) from None
    except (ParseError, UnsupportedError) as exc:
        reason = " ".join(str(exc).split())
        raise ConfigurationError(
            f"query {origin} cannot be said in Spark's SQL: {reason}. Say it otherwise, or build "
            "the tables in profile local or server. Nothing was changed"
        ) from exc


class _RefusedError(Exception):
    """What is refused, and what to do; `word` finds its line."""

    def __init__(self, word: str, cure: str, what: str = "") -> None:
        super().__init__(what or word, cure)
        self.word = word.lower()


def _call(name: str, *arguments: Node) -> Node:
    return exp.Anonymous(this=name, expressions=list(arguments))


def _check(node: exp.Func) -> None:
    name = node.name if isinstance(node, exp.Anonymous) else node.sql_name()
    if isinstance(node, exp.Anonymous) and name in SPARKS:
        return
    if isinstance(node, exp.Extract) and node.name.lower() not in PARTS:
        raise _RefusedError(node.name, f"extract one of {', '.join(PARTS)}", f"extract {node.name}")
    if not isinstance(node, EQUAL):
        raise _RefusedError(
            name, "write it with other functions, or build the tables in profile local or server"
        )


def _rewritten(node: Node, window: TimeWindow | None) -> Node:
    name = node.name.lower() if isinstance(node, exp.Anonymous) else ""
    if name == "getvariable" and window:
        moment = {"window_start": window.start, "window_end": window.end}[node.expressions[0].name]
        return exp.cast(exp.Literal.string(moment.isoformat()), MOMENT)
    if name in REWRITTEN:
        return REWRITTEN[name](node)
    return next((REWRITTEN[kind](node) for kind in REWRITTEN if _is(node, kind)), node)


def _is(node: Node, kind: object) -> bool:
    return isinstance(kind, type) and type(node) is kind


def _clock(node: Node) -> Node:
    """`timezone(zone, clock::TIMESTAMP)` is a moment; of anything else, the clock at a moment."""
    zone, time = node.expressions
    if isinstance(time, exp.Cast) and time.is_type(CLOCK):
        return _call("to_utc_timestamp", exp.cast(time.this, MOMENT), zone)
    return exp.cast(_call("from_utc_timestamp", time, zone), CLOCK)


def _text_of_time(node: Node) -> Node:
    pieces = re.split(r"(%-?[A-Za-z])", node.args["format"].name)
    known = Spark.INVERSE_TIME_MAPPING
    for piece in pieces[1::2]:
        if piece not in known:
            raise _RefusedError(piece, "use %Y, %m, %d, %H, %M or %S", f"{piece} of strftime")
    quoted = [
        known[piece] if n % 2 else re.sub(r"([A-Za-z]+)", r"'\1'", piece)
        for n, piece in enumerate(pieces)
    ]
    return _call("date_format", node.this, exp.Literal.string("".join(quoted)))


def _seconds(node: Node) -> Node:
    span = node.this.unnest()
    sides = [span.this, span.expression] if isinstance(span, exp.Sub) else [span]
    micros = [_call("unix_micros", side) for side in sides]
    total = exp.paren(exp.Sub(this=micros[0], expression=micros[1])) if micros[1:] else micros[0]
    return exp.Div(this=exp.cast(total, "double"), expression=exp.Literal.number("1e6"))


def _minutes(node: Node) -> Node:
    zero = exp.Literal.number(0)
    return _call("make_dt_interval", zero, zero.copy(), exp.cast(node.expressions[0], "int"))


def _number_of_distinct(node: Node) -> Node:
    counted = node.this
    if isinstance(counted, exp.Count) and isinstance(counted.this, exp.Distinct):
        values = node.copy()
        values.set("this", _call("collect_set", *counted.this.expressions))
        return _call("size", values)
    return node


def _row(node: Node) -> Node:
    return exp.Struct(expressions=[e.copy() for e in node.expressions])


def _unnested(node: Node) -> Node:
    return _call("explode", node.this)


def _series(node: Node) -> Node:
    return _call("sequence", *(node.args[part] for part in ("start", "end", "step")))


REWRITTEN: Mapping[object, Callable[[Node], Node]] = {
    "timezone": _clock,
    "to_minutes": _minutes,
    "row": _row,
    exp.Dayname: lambda node: _call("date_format", node.this, exp.Literal.string("EEEE")),
    exp.TimeToStr: _text_of_time,
    exp.TimeToUnix: _seconds,
    exp.Window: _number_of_distinct,
    exp.Explode: _unnested,
    exp.GenerateSeries: _series,
}


def _name_columns(select: exp.Select, columns_of: ColumnsOf) -> None:
    """Replace `COLUMNS(...)` by the names that it stands for."""
    for columns in [e for e in select.expressions if isinstance(e, exp.Columns)]:
        source = select.args["from_"].this
        ctes = {cte.alias: cte.this.named_selects for cte in select.ctes}
        present = ctes.get(source.name) or columns_of(source.name)
        asked = columns.this
        if isinstance(asked, exp.Literal):
            chosen = [c for c in present if re.search(asked.name, c)]
        else:
            left_out = {text.name for text in asked.find_all(exp.Literal)}
            chosen = [c for c in present if c not in left_out]
        place = select.expressions.index(columns)
        names = [exp.column(c, quoted=True) for c in chosen]
        select.set(
            "expressions", [*select.expressions[:place], *names, *select.expressions[place + 1 :]]
        )
