"""SQL of a use case: files of its repository, or compiled from what it declares.

A compiled query is leak-free: each row is an event, and what it holds is made of that event and
earlier ones, never of a later one, nor of a label that is not known yet.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.features.config import FeatureConfig, FeatureTable
from tasks.features.declared.aggregates import FUNCTIONS, Aggregate, interval, span
from tasks.features.offline.duck import sql_name, sql_text
from tasks.kernel.errors import ConfigurationError

ADDED = ("label_of_row", "label_is_known")
"""Columns that only a compiled query sees."""


def table_query(repo: Path, table: FeatureTable, config: FeatureConfig) -> str:
    """SQL that gives the rows of a feature table.

    Raises:
        ConfigurationError: its file is missing or no text.
    """
    if table.sql:
        return read_query(repo, table.sql, table.parameters)
    time = config.time_of(table.source)
    of_label = _columns_of_label(config) if table.source == config.training_set.source else ()
    windows: dict[str, str] = {}
    kind = "static" if table.static else "aggregates" if table.aggregates else "events"
    return _compiled(
        kind,
        source=table.source,
        keys=table.entity_keys,
        key=config.key_of(table.source),
        time=_name(time or ""),
        known_after=span(table.known_after),
        longest=table.longest,
        others=_others(table.source, config, (*table.entity_keys, time, *of_label)),
        features={a.name: _value(a, table, config, windows) for a in table.declared},
        windows=windows,
    )


def frame_query(repo: Path, config: FeatureConfig) -> str:
    """SQL that gives the entity frame: whom to predict for, when, and the label.

    Raises:
        ConfigurationError: its file is missing or no text.
    """
    spec = config.training_set
    if spec.sql:
        return read_query(repo, spec.sql)
    row_id, time = row_key(config), config.time_of(spec.source)
    hidden = (row_id, time, *_columns_of_label(config), *spec.ignore)
    return _compiled(
        "predictions",
        source=spec.source,
        time=_name(time or ""),
        row_id=row_id,
        parts=config.key_of(spec.source) if row_id == "row_id" else [row_id],
        others=_others(spec.source, config, hidden),
        label=spec.label,
        label_column=spec.label_column,
        label_known_after=spec.label_known_after and span(spec.label_known_after),
        predict_after=span(spec.predict_after),
        exclusion=spec.exclusion,
    )


def read_query(repo: Path, name: str, parameters: Mapping[str, str] | None = None) -> str:
    """Text of a query file of the feature repository, its parameters replaced by their texts.

    Raises:
        ConfigurationError: there is no such file, or it is no UTF-8.
    """
    try:
        text = (repo / name).read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigurationError(
            f"query {name} of the feature repository is no text in UTF-8 ({exc}); save it as UTF-8"
        ) from exc
    except FileNotFoundError as exc:
        raise ConfigurationError(
            f"the feature repository has no file {name!r}; write it, or change use_case.yaml"
        ) from exc
    for parameter, value in (parameters or {}).items():
        text = text.replace(f"${{{parameter}}}", value)
    return text


def row_key(config: FeatureConfig) -> str:
    """Column that names a row of a training set `from` a table: its key, where that is one column.

    A key that also names an entity keeps its own type, and stands beside the row's name.
    """
    spec, key = config.training_set, config.key_of(config.training_set.source)
    if spec.row_id:
        return spec.row_id
    return key[0] if len(key) == 1 and key[0] not in config.entity_keys else "row_id"


def _value(
    aggregate: Aggregate, table: FeatureTable, config: FeatureConfig, windows: dict[str, str]
) -> str:
    """SQL of one feature; the window that it is over is added to `windows`."""
    time, over = _name(str(config.time_of(table.source))), aggregate.over
    least = interval(timedelta(microseconds=1))
    if over is None:
        window, frame = "moment", "CURRENT ROW AND CURRENT ROW"
    elif aggregate.function == "time_since_last":
        window = f"before_{over}"
        frame = f"{interval(span(over))} PRECEDING AND {least} PRECEDING"
    else:  # without its first moment: seven hourly rows are seven hours
        wait = config.label_wait(table, aggregate)
        window = f"{'known' if wait else 'last'}_{over}"
        until = f"{interval(wait)} PRECEDING" if wait else "CURRENT ROW"
        frame = f"{interval(span(over))} - {least} PRECEDING AND {until}"
    windows[window] = frame
    function = FUNCTIONS[aggregate.function].format(value=aggregate.expression or "*", time=time)
    value = f"{function} OVER {window}"
    if aggregate.function == "time_since_last":
        value = f"epoch({time} - {value}) / 3600"
    if aggregate.function not in ("min", "max", "first", "last"):
        return f"({value})::FLOAT"
    is_yes_or_no = (config.columns_of(table.source) or {}).get(aggregate.expression) == "BOOLEAN"
    return f"({value})::VARCHAR" if is_yes_or_no else value


def _others(source: str, config: FeatureConfig, hidden: Iterable[str | None]) -> list[str]:
    """The columns of a table that are not hidden; of a staging table only DuckDB knows them.

    What is true or false is a category to a model, and so a text.
    """
    left_out, known = {*filter(None, hidden), *ADDED}, config.columns_of(source)
    if known is None:
        return [f"COLUMNS(lambda c: c NOT IN ({', '.join(map(sql_text, sorted(left_out)))}))"]
    return [
        f"{_name(column)}::VARCHAR AS {_name(column)}" if kind == "BOOLEAN" else _name(column)
        for column, kind in known.items()
        if column not in left_out
    ]


def _columns_of_label(config: FeatureConfig) -> tuple[str, ...]:
    """Columns that the label is made of: whoever knows them knows the label."""
    spec = config.training_set
    spared = {*config.entity_keys, config.time_of(spec.source)}
    known = config.columns_of(spec.source) or spec.label_words
    return tuple(sorted((set(known) & spec.label_words) - spared))


def _compiled(template: str, **parts: Any) -> str:
    return _templates().get_template(f"{template}.sql.j2").render(parts)


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "name": _name,
        "names": lambda columns: ", ".join(map(_name, columns)),
        "present": lambda keys: "\n  AND ".join(f"{_name(key)} IS NOT NULL" for key in keys),
        "later": lambda time: f" + {interval(time)}" if time else "",
        "earlier": lambda time: f" - {interval(time)}" if time else "",
    }
    return made


def _name(column: str) -> str:
    """A column's name, in quotes where SQL means something else by it."""
    return sql_name(column) if column in _reserved() else column


@cache
def _reserved() -> frozenset[str]:
    with duckdb.connect() as con:
        rows = con.execute(
            "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'"
        ).fetchall()
    return frozenset(row[0] for row in rows)
