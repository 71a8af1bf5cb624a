"""A query of DuckDB's in Spark's words, by `sqlglot`: the same rows, or a refusal.

What `sqlglot` passes on by name may mean something else to Spark (`dayname` gives `Mon` there), so
only functions that tests hold equal on both are let through; all others are refused by name and
line. Moments are `TIMESTAMP` to Spark, clock times `TIMESTAMP_NTZ`; its session is in UTC.
"""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta

from sqlglot import exp, parse_one
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ErrorLevel, ParseError, UnsupportedError

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError

EQUAL = (
    *(exp.Abs, exp.And, exp.ArgMax, exp.ArgMin, exp.Avg, exp.Case, exp.Cast, exp.Ceil),
    *(exp.Coalesce, exp.ConcatWs, exp.Count, exp.DPipe, exp.Exp, exp.FirstValue, exp.Floor),
    *(exp.Greatest, exp.If, exp.IntDiv, exp.Lag, exp.LastValue, exp.Lead, exp.Least, exp.Left),
    *(exp.Length, exp.Ln, exp.Lower, exp.Max, exp.Min, exp.Nullif, exp.Or, exp.Pow, exp.Right),
    *(exp.RowNumber, exp.Sqrt, exp.StddevPop, exp.StddevSamp, exp.Struct, exp.Sum),
    *(exp.TimestampTrunc, exp.Trim, exp.Upper, exp.Variance, exp.VariancePop, exp.Columns),
)
"""Functions that are in Spark what `sqlglot` makes of them."""
IN_OTHER_WORDS = {
    "getvariable": "CAST('{}' AS TIMESTAMP)",
    "ln": "if({0} <= 0, raise_error('logarithm of zero or less'), ln({0}))",
    "sqrt": "if({0} < 0, raise_error('square root of a negative number'), sqrt({0}))",
    "row": "struct({}, {})",
    "timezone": "CAST(from_utc_timestamp({1}, {0}) AS TIMESTAMP_NTZ)",
    "timezone of a clock": "to_utc_timestamp(CAST({1} AS TIMESTAMP), {0})",
    "to_minutes": "make_dt_interval(0, 0, CAST({} AS INT))",
    "dayname": "date_format({}, 'EEEE')",
    "time_to_unix": "(unix_micros({}) / 1e6D)",
    "time_to_unix of a span": "((unix_micros({}) - unix_micros({})) / 1e6D)",
    "explode": "explode({})",
    "generate_series": "sequence({}, {}, {})",
}
"""The others that can be said, by the name that `sqlglot` gives them."""
SPANS = ("microseconds", "seconds", "minutes", "hours", "days", "weeks")
WHOLE = ("tinyint", "smallint", "int", "bigint")
CODES = {"%Y", "%m", "%d", "%H", "%M", "%S"}
PARTS = ("hour", "minute", "day", "month", "year", "week", "quarter", "doy")
CURE = "say it otherwise, or build the tables in profile local or server. Nothing was changed"


def to_spark(
    text: str, window: TimeWindow | None, origin: str, columns_of: Callable[[str], Sequence[str]]
) -> str:
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
        for function in tree.find_all(exp.Func, exp.Extract, exp.IntDiv, exp.Like, exp.ILike):
            if (what := _unknown(function, text)) is not None:
                line = next((part.meta["line"] for part in function.walk() if part.meta), "?")
                raise ConfigurationError(
                    f"query {origin}, line {line}: {what} has no equal in Spark that a test holds "
                    f"equal; {CURE}"
                )
        for select in list(tree.find_all(exp.Select)):
            _name_columns(select, columns_of)
        for node in reversed(list(tree.walk())):  # what stands inside first
            if (said := _said(node, window)) is not None:
                node.replace(said)
        return str(tree.sql(dialect=Spark, unsupported_level=ErrorLevel.RAISE, comments=False))
    except (ParseError, UnsupportedError) as exc:
        raise ConfigurationError(
            f"query {origin} cannot be said in Spark's SQL: {' '.join(str(exc).split())}; {CURE}"
        ) from exc


def _name(node: exp.Expr) -> str:
    if isinstance(node, exp.Func):
        return (node.name if isinstance(node, exp.Anonymous) else node.sql_name()).lower()
    return ""


def _unknown(node: exp.Expr, text: str) -> str | None:
    """What of a function Spark may take for something else; None where nothing."""
    if isinstance(node, exp.Extract):
        return None if node.name.lower() in PARTS else f"extract({node.name.lower()} ...)"
    if isinstance(node, exp.TimeToStr):
        others = set(re.findall("%-?.", node.args["format"].name)) - CODES
        return f"strftime with {', '.join(sorted(others))}" if others else None
    if isinstance(node, exp.Like | exp.ILike):  # the escape of Spark, no more than a sign of DuckDB
        pattern = node.expression
        is_plain = isinstance(pattern, exp.Literal) and "\\" not in pattern.name
        return None if is_plain else "LIKE with a backslash or a pattern that is no text"
    if isinstance(node, exp.Left | exp.Right) and not isinstance(node.expression, exp.Literal):
        return f"{_name(node)} with a length that is no plain number"
    if isinstance(node, exp.IntDiv) and any(map(_is_fraction, node.walk())):
        return "// of what is no whole number"
    if isinstance(node, EQUAL) or _name(node) in IN_OTHER_WORDS:
        return None
    return text[node.meta["start"] : node.meta["end"] + 1] if node.meta else _name(node)


def _is_fraction(node: exp.Expr) -> bool:
    if isinstance(node, exp.Cast):
        return node.is_type(*exp.DataType.REAL_TYPES)
    return isinstance(node, exp.Div) or (isinstance(node, exp.Literal) and "." in node.name)


def _said(node: exp.Expr, window: TimeWindow | None) -> exp.Expr | None:
    """What stands in the place of a part of the query; None where it stays."""
    if (
        isinstance(node, exp.Interval)
        and (unit := f"{node.text('unit').lower().rstrip('s')}s") in SPANS
    ):
        micros = timedelta(**{unit: int(node.name)}) // timedelta(microseconds=1)
        text = f"INTERVAL '{micros // 10**6}.{micros % 10**6:06}' SECOND"
        return parse_one(text, read=Spark)  # of one type, as the bounds of a frame have to be
    if isinstance(node, exp.ArgMax | exp.ArgMin):  # DuckDB skips a value that is missing
        value, key = (node.args[part].sql(Spark) for part in ("this", "expression"))
        best = node.copy()
        best.set("expression", parse_one(f"IF({value} IS NOT NULL, {key}, NULL)", read=Spark))
        return best
    if isinstance(node, exp.Cast) and node.is_type(*WHOLE):
        rounded = node.copy()  # as DuckDB does; Spark cuts off. Doubles do not hold each BIGINT
        said = "bround({})" if node.is_type("bigint") else "rint(CAST({} AS DOUBLE))"
        rounded.set("this", parse_one(said.format(node.this.sql(Spark)), read=Spark))
        return rounded
    name, parts = _name(node), [node.args.get("this"), *node.expressions]
    if isinstance(node, exp.TimeToStr):
        known, pieces = Spark.INVERSE_TIME_MAPPING, re.split("(%-?.)", node.args["format"].name)
        pattern = "".join(known.get(p) or re.sub("([A-Za-z]+)", r"'\1'", p) for p in pieces)
        return exp.Anonymous(
            this="date_format", expressions=[node.this, exp.Literal.string(pattern)]
        )
    if isinstance(node, exp.Window) and isinstance(node.this, exp.Count):
        if not isinstance(node.this.this, exp.Distinct):
            return None
        values = node.copy()  # Spark counts distinct values over no window
        values.set("this", exp.func("collect_set", *node.this.this.expressions))
        return exp.func("size", values)
    if name not in IN_OTHER_WORDS:
        return None
    if isinstance(node, exp.Anonymous):
        parts = node.expressions
    if name == "getvariable" and window:
        parts = [{"window_start": window.start, "window_end": window.end}[parts[0].name]]
    elif name == "timezone" and isinstance(parts[1], exp.Cast):
        name += " of a clock" * parts[1].is_type(exp.DataType.Type.TIMESTAMPNTZ)
    elif isinstance(node, exp.TimeToUnix) and isinstance(node.this.unnest(), exp.Sub):
        name, parts = f"{name} of a span", list(node.this.unnest().iter_expressions())
    elif isinstance(node, exp.GenerateSeries):
        parts = [node.args[part] for part in ("start", "end", "step")]
    texts = [part.sql(Spark) if isinstance(part, exp.Expr) else str(part) for part in parts]
    return parse_one(IN_OTHER_WORDS[name].format(*texts), read=Spark)


def _name_columns(select: exp.Select, columns_of: Callable[[str], Sequence[str]]) -> None:
    """Replace `COLUMNS(...)` by the names that it stands for."""
    named: list[exp.Expr] = []
    for each in select.expressions:
        if not isinstance(each, exp.Columns):
            named.append(each)
            continue
        source = select.args["from_"].this.name
        inner = {cte.alias: cte.this.named_selects for cte in select.ctes}
        texts = [text.name for text in each.find_all(exp.Literal)]
        by_pattern = isinstance(each.this, exp.Literal)
        for column in inner.get(source) or columns_of(source):
            if re.search(texts[0], column) if by_pattern else column not in texts:
                named.append(exp.column(column, quoted=True))
    select.set("expressions", named)
