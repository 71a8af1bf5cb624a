"""What follows from a use case's columns: its training columns, feature views and tables' shapes.

Columns and types of a query are found without data: DuckDB describes it over empty tables of the
declared columns, with staging queries as views.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ColumnKind, TableShape
from tasks.features.config import FeatureConfig, FeatureTable, TrainingSet
from tasks.features.declared.queries import frame_query, read_query, row_key, table_query
from tasks.features.offline.duck import NUMBERS, set_window, sql_name, sql_text
from tasks.features.tables.build import check_columns, run_query
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of, read_yaml
from tasks.kernel.settings import USE_CASE_FILE
from tasks.kernel.values import checked

Types = dict[str, str]
"""Column to DuckDB's type of it, as a Parquet file gives it back."""

PERMISSIONS_FILE = "permissions.py"
MOMENTS = ("event_timestamp", "created")
NO_REASONS = "excluded"
"""Column of reasons that a query may leave out."""
WIDE = ("HUGEINT", "UHUGEINT")
TIMES = ("TIMESTAMP", "DATE", "TIME")
KINDS: dict[str, ColumnKind] = {
    **dict.fromkeys(NUMBERS, "integer"),
    **dict.fromkeys(("FLOAT", "DOUBLE", "DECIMAL"), "number"),
    **dict.fromkeys(("TIMESTAMPTZ", "TIMESTAMP WITH TIME ZONE"), "timestamp"),
    "VARCHAR": "text",
    "BOOLEAN": "boolean",
}
ANY_WINDOW = TimeWindow(
    start=datetime(2000, 1, 1, tzinfo=UTC), end=datetime(2000, 1, 2, tzinfo=UTC)
)


@dataclass(frozen=True)
class DescribedView:
    """One feature view: the columns of its table, of which times are no features."""

    name: str
    keys: tuple[str, ...]
    columns: Types
    ttl: timedelta
    description: str

    @property
    def features(self) -> Types:
        """The columns that are values of an entity."""
        others = (*self.keys, *MOMENTS)
        return {
            column: kind
            for column, kind in self.columns.items()
            if column not in others and not kind.startswith(TIMES)
        }


@dataclass(frozen=True)
class DescribedFeatures:
    """What Feast is told of a use case that holds no definitions of its own."""

    question: str
    service: str
    views: tuple[DescribedView, ...]


def read_features(repo: Path) -> tuple[dict[str, object], FeatureConfig]:
    """What `use_case.yaml` says, and its features with what follows from their columns.

    Raises:
        ConfigurationError: the file is missing, or says something of features that cannot be.
    """
    absent = f"{repo / USE_CASE_FILE} does not exist; write it, or name another project"
    described = read_yaml(repo / USE_CASE_FILE, USE_CASE_FILE, absent)
    where, undone = f"{USE_CASE_FILE}, features", "Nothing was run"
    config = checked(FeatureConfig, described.get("features"), where, undone)
    return described, completed(config, str(described.get("name")), repo)


def completed(config: FeatureConfig, use_case: str, repo: Path) -> FeatureConfig:
    """The features of a use case with everything that it leaves to be read off its columns.

    Raises:
        ConfigurationError: a query is missing or wrong, or gives no key of a feature table.
    """
    spec = config.training_set
    words = f"{spec.label} is true" if spec.task == "classification" else spec.label
    found: dict[str, object] = {
        "feature_service": f"{use_case.replace('-', '_')}_v1",
        "label_definition": words,
    }
    if spec.encoded or not {"row_id", "categorical", "numeric"} <= spec.model_fields_set:
        with _empty_tables(config, repo) as con:
            columns = _frame(con, config, repo)
        _check_encoded(spec, columns)
        found |= _inputs(config, columns)
    missing = {name: value for name, value in found.items() if name not in spec.model_fields_set}
    return config.model_copy(update={"training_set": spec.model_copy(update=missing)})


def _inputs(config: FeatureConfig, columns: Types) -> dict[str, object]:
    spec = config.training_set
    if missing := [key for key in config.entity_keys if key not in columns]:
        raise ConfigurationError(
            f"{spec.origin} gives no column {', '.join(missing)}, by which feature tables are "
            f"found; it gives {', '.join(columns)}. Add it there. Nothing was run"
        )
    first = "row_id" if "row_id" in columns else next(iter(columns))
    row_id = spec.row_id or (row_key(config) if spec.source else first)
    hidden = {row_id, spec.label_column, spec.exclusion, *MOMENTS, *config.entity_keys}
    hidden |= spec.encoded.keys()
    seen = {c: KINDS.get(_plain(kind)) for c, kind in columns.items()}
    left = [c for c in seen if c not in hidden | set(spec.ignore)]
    return {
        "row_id": row_id,
        "categorical": tuple(c for c in left if seen[c] in ("text", "boolean")),
        "numeric": tuple(c for c in left if seen[c] in ("integer", "number")),
    }


def feast_files(repo: Path) -> list[Path]:
    """Python files beside `use_case.yaml` that import Feast; others may be models or programs."""
    return [
        file
        for file in sorted(repo.glob("*.py"))
        if re.search(rb"(?m)^\s*(from|import)\s+feast\b", file.read_bytes())
    ]


def defining_files(repo: Path) -> list[Path]:
    """Python files that define entities, views and services; without any they are derived."""
    return [file for file in feast_files(repo) if file.name != PERMISSIONS_FILE]


def _check_encoded(spec: TrainingSet, columns: Types) -> None:
    texts = [column for column, kind in columns.items() if kind == "VARCHAR"]
    for column in spec.encoded:
        if column not in texts:
            seen = f"is {columns[column]}" if column in columns else "is no column"
            raise ConfigurationError(
                f"encoded of training_set (declared in {USE_CASE_FILE}) names {column}, which "
                f"{seen} of {spec.sql or spec.source}; expected a text, or paths of images: "
                f"{', '.join(texts) or 'there are none'}. Mend the name, or cast it in a query, "
                f"such as {column}::VARCHAR. Nothing was run"
            )


def plain_frame(con: duckdb.DuckDBPyConnection, text: str, spec: TrainingSet) -> str:
    """The query of an entity frame, with values in types that files and models take.

    A label that is true or false becomes 1 or 0, one of several classes its number (-1 where it is
    none of them), a category that is one a text, and a decimal number a binary one. A query without
    the column of reasons gets one without any.
    """
    types = described(con, text, spec.origin)
    numbers = {"BOOLEAN": "TINYINT", "DECIMAL": "DOUBLE"}
    others = {**numbers, "BOOLEAN": "VARCHAR"}
    wanted = dict.fromkeys((spec.label_column, *spec.numeric), numbers)
    casts = {c: wanted.get(c, others).get(_plain(kind)) for c, kind in types.items()}
    is_there = spec.exclusion in types or spec.exclusion != NO_REASONS
    values = {c: f"{sql_name(c)}::{k}" for c, k in casts.items() if k}
    if spec.classes and spec.label_column in types:
        values[spec.label_column] = class_number(spec)
    replaced = ", ".join(f"{value} AS {sql_name(c)}" for c, value in values.items())
    if not replaced and is_there:
        return text
    added = "" if is_there else f", NULL::VARCHAR AS {sql_name(spec.exclusion)}"
    replacing = f" REPLACE ({replaced})" if replaced else ""
    return f"SELECT *{replacing}{added} FROM (\n{text.strip().rstrip(';')}\n)"


def class_number(spec: TrainingSet) -> str:
    """SQL of the number of a label's class; -1 of another value, null where there is no label."""
    label, are_numbers = sql_name(spec.label_column), all(isinstance(c, int) for c in spec.classes)
    kind = "DOUBLE" if are_numbers else "VARCHAR"
    classes = ", ".join(sql_text(name) for name in spec.class_names)
    place = f"list_position([{classes}]::{kind}[], TRY_CAST({label} AS {kind}))"
    return f"CASE WHEN {label} IS NOT NULL THEN coalesce({place}, 0) - 1 END"


def _frame(con: duckdb.DuckDBPyConnection, config: FeatureConfig, repo: Path) -> Types:
    """Columns of the entity frame."""
    spec = config.training_set
    return described(con, plain_frame(con, frame_query(repo, config), spec), spec.origin)


def described(con: duckdb.DuckDBPyConnection, text: str, name: str) -> Types:
    """Columns that a query gives.

    Raises:
        ConfigurationError: the query is wrong.
    """
    run_query(con, f"DESCRIBE {text}", name)
    return {str(row[0]): _stored(str(row[1])) for row in con.fetchall()}


def _stored(kind: str) -> str:
    if kind in WIDE:
        return "DOUBLE"  # so DuckDB writes them into Parquet
    return "VARCHAR" if _plain(kind) == "ENUM" else kind


@contextmanager
def _empty_tables(config: FeatureConfig, repo: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with the raw tables, without rows, and the staging queries over them."""
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        set_window(con, ANY_WINDOW)
        for table in config.raw_tables:
            typed = ", ".join(f"{sql_name(c)} {kind}" for c, kind in table.columns.items())
            con.execute(f"CREATE TABLE {sql_name(table.name)} ({typed})")
        for query in config.staging:
            text = read_query(repo, query.sql)
            run_query(con, f"CREATE TEMP VIEW {sql_name(query.name)} AS {text}", query.sql)
        yield con


def described_features(repo: Path) -> DescribedFeatures:
    """What Feast is told of a use case that holds no definitions of its own.

    Worked out again only where the configuration or a query has changed.

    Raises:
        ConfigurationError: a query is missing or wrong, or gives a column of a kind that no model
            takes.
    """
    files = (repo / USE_CASE_FILE, *sorted(repo.rglob("*.sql")))
    digests = tuple((each, digest_of(each)) for each in files if each.exists())
    return _described_features(repo, digests)


@lru_cache(4)
def _described_features(repo: Path, _files: tuple[tuple[Path, str], ...]) -> DescribedFeatures:
    use_case, config = read_features(repo)
    with _empty_tables(config, repo) as con:
        views = tuple(_view(con, table, config, repo) for table in config.feature_tables)
    return DescribedFeatures(
        question=str(use_case.get("question", "")),
        service=config.training_set.feature_service,
        views=views,
    )


def _view(
    con: duckdb.DuckDBPyConnection, table: FeatureTable, config: FeatureConfig, repo: Path
) -> DescribedView:
    text = table_query(repo, table, config)
    columns = described(con, text, table.origin)
    check_columns(table, columns)
    comment = takewhile(lambda line: line.startswith("--"), text.splitlines())
    return DescribedView(
        name=table.name,
        keys=table.entity_keys,
        columns=columns,
        ttl=table.ttl,
        description=" ".join(line.removeprefix("--").strip() for line in comment),
    )


def table_shapes(config: FeatureConfig, repo: Path) -> dict[str, TableShape]:
    """What is known of every table before any of its rows is seen, by the suite's default name.

    Raises:
        ConfigurationError: as `described_features`.
    """
    spec, shapes = config.training_set, {}
    for raw in config.raw_tables:
        columns, moment = _kinds(raw.columns, f"raw table {raw.name}"), raw.time_column
        present = (*raw.key, moment) if moment else raw.key
        shapes[f"raw_{raw.name}"] = TableShape(
            columns=columns, key=raw.key, present=present, time_column=moment
        )
    with _empty_tables(config, repo) as con:
        seen = _frame(con, config, repo)
        for table in config.feature_tables:
            view = _view(con, table, config, repo)
            seen |= {f"{table.name}__{column}": kind for column, kind in view.features.items()}
            shapes[f"feature_{table.name}"] = TableShape(
                columns=_kinds(view.columns, table.origin),
                key=(*table.entity_keys, MOMENTS[0]),
                present=(*table.entity_keys, *MOMENTS),
                time_column=None if table.static else MOMENTS[0],
            )
    seen.pop(spec.exclusion, None)
    kinds = _kinds(seen, spec.origin)
    shapes["training_set"] = TableShape(
        # Retrieval may widen whole numbers, where some are missing.
        columns={c: "number" if kind == "integer" else kind for c, kind in kinds.items()},
        key=(spec.row_id,),
        present=(spec.row_id, MOMENTS[0], spec.label_column),
        time_column=MOMENTS[0],
        label=spec.label_column,
        task=spec.task,
        num_labels=len(spec.classes) or 2,
    )
    return shapes


def _kinds(columns: Mapping[str, str], what: str) -> dict[str, ColumnKind]:
    if other := {c: kind for c, kind in columns.items() if _plain(kind) not in KINDS}:
        raise ConfigurationError(
            f"{what} gives {', '.join(f'{c} as {kind}' for c, kind in other.items())}; expected a "
            "text, a number, true or false, or a moment with its time zone. Cast it there, such as "
            f"{next(iter(other))}::VARCHAR"
        )
    return {column: KINDS[_plain(kind)] for column, kind in columns.items()}


def _plain(kind: str) -> str:
    """A type without its precision or values."""
    return kind.partition("(")[0]
