"""What follows from a use case's columns: its training columns, feature views and tables' shapes.

Columns and types of a query are found without data: DuckDB describes it over empty tables of the
declared columns, with staging queries as views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path

import duckdb
from pydantic import ValidationError

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ColumnKind, TableShape
from tasks.features.config import FeatureConfig, FeatureTable, TrainingSet
from tasks.features.declared.queries import frame_query, read_query, row_key, table_query
from tasks.features.offline.duck import NUMBERS, set_window, sql_name
from tasks.features.tables.build import run_query
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import USE_CASE_FILE

Types = dict[str, str]
"""Column to DuckDB's type of it, as a Parquet file gives it back."""

MOMENTS = ("event_timestamp", "created")
NO_REASONS = "excluded"
"""Column of reasons that a query may leave out."""
WIDE = ("HUGEINT", "UHUGEINT")
TEXTS, TIMES = ("VARCHAR", "BOOLEAN"), ("TIMESTAMP", "DATE", "TIME")
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

    use_case: str
    question: str
    service: str
    views: tuple[DescribedView, ...]

    def content(self) -> dict[str, object]:
        """All of it as plain data, for a digest."""
        return asdict(self)


def read_features(repo: Path) -> tuple[dict[str, object], FeatureConfig]:
    """What `use_case.yaml` says, and its features with what follows from their columns.

    Raises:
        ConfigurationError: the file is missing, or says something of features that cannot be.
    """
    try:
        described = read_yaml(repo / USE_CASE_FILE, USE_CASE_FILE)
        config = FeatureConfig.model_validate(described.get("features"))
    except FileNotFoundError as exc:
        raise ConfigurationError(
            f"{repo / USE_CASE_FILE} does not exist; write it, or name another project"
        ) from exc
    except ValidationError as exc:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise ConfigurationError(f"{USE_CASE_FILE}, features: {told}") from exc
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
    if not {"row_id", "categorical", "numeric"} <= spec.model_fields_set:
        found |= _inputs(config, frame_columns(config, repo))
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
    seen = {c: kind for c, kind in columns.items() if c not in hidden | set(spec.ignore)}
    return {
        "row_id": row_id,
        "categorical": tuple(c for c, kind in seen.items() if kind in TEXTS),
        "numeric": tuple(c for c, kind in seen.items() if is_number(kind)),
    }


def is_number(kind: str) -> bool:
    """True for DuckDB's types of numbers."""
    return kind in NUMBERS or kind.startswith("DECIMAL")


def frame_columns(config: FeatureConfig, repo: Path) -> Types:
    """Columns of the entity frame.

    Raises:
        ConfigurationError: a query is missing or wrong.
    """
    with _empty_tables(config, repo) as con:
        spec = config.training_set
        return described(con, plain_frame(con, frame_query(repo, config), spec), spec.origin)


def plain_frame(con: duckdb.DuckDBPyConnection, text: str, spec: TrainingSet) -> str:
    """The query of an entity frame, with values in types that files and models take.

    A label that is true or false becomes 1 or 0, a category that is one a text, and a decimal
    number a binary one. A query without the column of reasons gets one without any.
    """
    types, casts = described(con, text, spec.origin), {}
    for column, kind in types.items():
        if kind == "BOOLEAN":
            is_number = column in (spec.label_column, *spec.numeric)
            casts[column] = "TINYINT" if is_number else "VARCHAR"
        elif kind.startswith("DECIMAL"):
            casts[column] = "DOUBLE"
    is_there = spec.exclusion in types or spec.exclusion != NO_REASONS
    if not casts and is_there:
        return text
    replaced = ", ".join(f"{sql_name(c)}::{kind} AS {sql_name(c)}" for c, kind in casts.items())
    added = "" if is_there else f", NULL::VARCHAR AS {sql_name(spec.exclusion)}"
    replacing = f" REPLACE ({replaced})" if casts else ""
    return f"SELECT *{replacing}{added} FROM (\n{text.strip().rstrip(';')}\n)"


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
    return "VARCHAR" if kind.startswith("ENUM") else kind


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

    Raises:
        ConfigurationError: a query is missing or wrong, or gives a column of a kind that no model
            takes.
    """
    use_case, config = read_features(repo)
    with _empty_tables(config, repo) as con:
        views = tuple(_view(con, table, config, repo) for table in config.feature_tables)
    return DescribedFeatures(
        use_case=str(use_case["name"]),
        question=str(use_case.get("question", "")),
        service=config.training_set.feature_service,
        views=views,
    )


def _view(
    con: duckdb.DuckDBPyConnection, table: FeatureTable, config: FeatureConfig, repo: Path
) -> DescribedView:
    text = table_query(repo, table, config)
    columns = described(con, text, table.origin)
    needed = (*table.entity_keys, *MOMENTS)
    if missing := [name for name in needed if name not in columns]:
        raise ConfigurationError(
            f"query {table.origin} gives no column {', '.join(missing)}; a feature table needs its "
            f"keys, event_timestamp and created. It gives {', '.join(columns)}. Nothing was run"
        )
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
    spec = config.training_set
    with _empty_tables(config, repo) as con:
        views = {t.name: _view(con, t, config, repo) for t in config.feature_tables}
        frame = described(con, plain_frame(con, frame_query(repo, config), spec), spec.origin)
    frame.pop(spec.exclusion, None)
    prefixed = {f"{v.name}__{c}": kind for v in views.values() for c, kind in v.features.items()}
    shapes = {
        f"raw_{table.name}": TableShape(
            row=f"a row of {table.name}, as it came",
            columns=_kinds(table.columns, f"raw table {table.name}"),
            key=table.key,
            present=(*table.key, *([table.time_column] if table.time_column else [])),
            time_column=table.time_column,
            stays_in_window=table.time_column is not None,
        )
        for table in config.raw_tables
    }
    shapes |= {
        f"feature_{table.name}": TableShape(
            row=f"{table.name} of one {' and '.join(table.entity_keys)} at one moment",
            columns=_kinds(views[table.name].columns, table.origin),
            key=(*table.entity_keys, MOMENTS[0]),
            present=(*table.entity_keys, *MOMENTS),
            time_column=None if table.static else MOMENTS[0],
        )
        for table in config.feature_tables
    }
    kinds = _kinds({**frame, **prefixed}, spec.origin)
    shapes["training_set"] = TableShape(
        row="one prediction, with what was known at its moment",
        # Retrieval may widen whole numbers, where some are missing.
        columns={c: "number" if kind == "integer" else kind for c, kind in kinds.items()},
        key=(spec.row_id,),
        present=(spec.row_id, MOMENTS[0], spec.label_column),
        time_column=MOMENTS[0],
        stays_in_window=True,
        label=spec.label_column,
        task=spec.task,
    )
    return shapes


def _kinds(columns: Mapping[str, str], what: str) -> dict[str, ColumnKind]:
    return {column: _kind(kind, column, what) for column, kind in columns.items()}


def _kind(kind: str, column: str, what: str) -> ColumnKind:
    if is_number(kind):
        return "number" if kind in ("FLOAT", "DOUBLE") or "DECIMAL" in kind else "integer"
    named: dict[str, ColumnKind] = {
        "VARCHAR": "text",
        "BOOLEAN": "boolean",
        "TIMESTAMPTZ": "timestamp",
        "TIMESTAMP WITH TIME ZONE": "timestamp",
    }
    if kind not in named:
        raise ConfigurationError(
            f"{what} gives {column} as {kind}; expected a text, a number, true or false, or a "
            f"moment with its time zone. Cast it there, such as {column}::VARCHAR"
        )
    return named[kind]
