"""SQL of a use case: files of its repository, or compiled from what it declares.

A compiled query is leak-free: each row is an event, and what it holds is made of that event and
earlier ones, never of a later one, nor of a label that is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path

import duckdb

from tasks.features.config import FeatureConfig, FeatureTable
from tasks.features.declared.aggregates import Aggregate, interval, span, words_of
from tasks.features.offline.duck import sql_name, sql_text
from tasks.kernel.errors import ConfigurationError

START, END = "getvariable('window_start')", "getvariable('window_end')"
LABEL = "label_of_row"
LONG_AGO = "TIMESTAMPTZ '1970-01-01 00:00:00+00'"
"""From when on a row of a table without history counts as known."""

WINDOWED = {
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
OF_ITS_OWN_TYPE = ("min", "max", "first", "last")


def table_query(repo: Path, table: FeatureTable, config: FeatureConfig) -> str:
    """SQL that gives the rows of a feature table.

    Raises:
        ConfigurationError: its file is missing or no text.
    """
    if table.sql:
        return read_query(repo, table.sql, table.parameters)
    if table.static:
        return _as_they_are(table, config)
    return _aggregated(table, config) if table.aggregates else _at_each_event(table, config)


def frame_query(repo: Path, config: FeatureConfig) -> str:
    """SQL that gives the entity frame: whom to predict for, when, and the label.

    Raises:
        ConfigurationError: its file is missing or no text.
    """
    spec = config.training_set
    return read_query(repo, spec.sql) if spec.sql else _predictions(config)


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


def _as_they_are(table: FeatureTable, config: FeatureConfig) -> str:
    return f"""\
-- Rows of {table.source}, which has no history: each counts as known since long ago.
SELECT
    {_list(table.entity_keys)},
    {LONG_AGO} AS event_timestamp,
    {LONG_AGO} AS created,
    {_others(table.source, config, table.entity_keys)}
FROM {_name(table.source)}
WHERE {_has_keys(table)}
"""


def _at_each_event(table: FeatureTable, config: FeatureConfig) -> str:
    time = str(config.time_of(table.source))
    is_predicted = table.source == config.training_set.source
    hidden = (*table.entity_keys, time, *(_columns_of_label(config) if is_predicted else ()))
    key = config.key_of(table.source)
    latest = f"QUALIFY {_one_of_a_moment(table, time, key)}\n" if key else ""
    return f"""\
-- Rows of {table.source} as they are, each from its own moment on.
SELECT
    {_list(table.entity_keys)},
    {_moments(table, time)}
    {_others(table.source, config, hidden)}
FROM {_name(table.source)}
WHERE {_name(time)} >= {START}
  AND {_name(time)} < {END}
  AND {_has_keys(table)}
{latest}"""


def _aggregated(table: FeatureTable, config: FeatureConfig) -> str:
    time = str(config.time_of(table.source))
    windows: dict[str, str] = {}
    features = [_feature(a, table, config, windows) for a in table.declared]
    order = f"PARTITION BY {_list(table.entity_keys)} ORDER BY {_name(time)}"
    named = [f"{name} AS ({order}\n        {frame})" for name, frame in windows.items()]
    since = f" - {interval(table.longest)}" if table.longest else ""
    return f"""\
-- What is known of each {" and ".join(table.entity_keys)} at each row of {table.source}, of this \
row and those before.
SELECT
    {_list(table.entity_keys)},
    {_moments(table, time)}
    {_lines(features)},
FROM {_name(table.source)}
WHERE {_name(time)} >= {START}{since}
  AND {_name(time)} < {END}
  AND {_has_keys(table)}
WINDOW
    {_lines(named)}
QUALIFY {_name(time)} >= {START}
  AND {_one_of_a_moment(table, time, config.key_of(table.source))}
"""


def _feature(
    aggregate: Aggregate, table: FeatureTable, config: FeatureConfig, windows: dict[str, str]
) -> str:
    """SQL of one feature; the window that it is over is added to `windows`."""
    time = _name(str(config.time_of(table.source)))
    least, over = interval(timedelta(microseconds=1)), aggregate.over
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
    windows[window] = f"RANGE BETWEEN {frame}"
    function = WINDOWED[aggregate.function].format(value=aggregate.expression or "*", time=time)
    value = f"{function} OVER {window}"
    if aggregate.function == "time_since_last":
        value = f"epoch({time} - {value}) / 3600"
    if aggregate.function not in OF_ITS_OWN_TYPE:
        value = f"({value})::FLOAT"
    return f"{value} AS {_name(aggregate.name)}"


def _predictions(config: FeatureConfig) -> str:
    spec, key = config.training_set, row_key(config)
    time = str(config.time_of(spec.source))
    shown, after = _name(time), span(spec.predict_after)
    moment = f"{shown} + {interval(after)}" if after else shown
    parts = config.key_of(spec.source) if key == "row_id" and not spec.row_id else (key,)
    texts = ", ".join(f"{_name(part)}::VARCHAR" for part in parts)
    hidden = (key, time, *_columns_of_label(config), *spec.ignore)
    label, reasons = LABEL, []
    if spec.label_known_after:
        waits = (
            f"{shown} + {interval(span(spec.label_known_after))}\n"
            f"            > greatest({END}, (SELECT max({shown}) FROM {_name(spec.source)}))"
        )
        label = f"CASE\n        WHEN NOT {waits}\n            THEN {LABEL}\n    END"
        reasons = [f"        WHEN {waits}\n            THEN 'the label is not known yet'\n"]
    reasons.append(f"        WHEN {LABEL} IS NULL THEN 'no label'\n")
    return f"""\
-- Whom to predict for, and when: each row of {spec.source}.
WITH labelled AS (
    SELECT
        *,
        {spec.label} AS {LABEL},
    FROM {_name(spec.source)}
)

SELECT
    {texts if len(parts) == 1 else f"concat_ws('-', {texts})"} AS {_name(key)},
    {moment} AS event_timestamp,
    {_others(spec.source, config, hidden)}
    {label} AS {_name(spec.label_column)},
    CASE
{"".join(reasons)}    END AS {_name(spec.exclusion)},
FROM labelled
WHERE {moment} >= {START}
  AND {moment} < {END}
"""


def _moments(table: FeatureTable, time: str) -> str:
    lag = span(table.known_after)
    created = f"{_name(time)} + {interval(lag)}" if lag else _name(time)
    return f"{_name(time)} AS event_timestamp,\n    {created} AS created,"


def _others(source: str, config: FeatureConfig, hidden: Iterable[str]) -> str:
    """The columns of a table that are not hidden; of a staging table only DuckDB knows them."""
    known = config.columns_of(source)
    if known is None:
        return f"COLUMNS(c -> c NOT IN ({', '.join(map(sql_text, (*hidden, LABEL)))})),"
    return "".join(f"{_name(c)},\n    " for c in known if c not in hidden).rstrip()


def _columns_of_label(config: FeatureConfig) -> tuple[str, ...]:
    """Columns that the label is made of: whoever knows them knows the label."""
    spec, words = config.training_set, words_of(config.training_set.label)
    known = config.columns_of(spec.source) or words
    spared = {*config.entity_keys, config.time_of(spec.source)}
    return tuple(sorted((set(known) & words) - spared))


def _has_keys(table: FeatureTable) -> str:
    return "\n  AND ".join(f"{_name(key)} IS NOT NULL" for key in table.entity_keys)


def _one_of_a_moment(table: FeatureTable, time: str, key: Iterable[str]) -> str:
    """Condition that holds for one row of an entity at a moment, the last by its key."""
    parts = f"PARTITION BY {_list((*table.entity_keys, time))}"
    order = ", ".join(f"{_name(part)} DESC" for part in key)
    return f"row_number() OVER ({parts}{f' ORDER BY {order}' if order else ''}) = 1"


def _lines(parts: Iterable[str]) -> str:
    return ",\n    ".join(parts)


def _list(columns: Iterable[str]) -> str:
    return ", ".join(map(_name, columns))


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
