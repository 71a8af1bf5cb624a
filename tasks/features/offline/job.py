"""Retrieval jobs of the ASOF offline store: run a query, prove no row was lost, hand it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir

import duckdb
import pandas as pd
import pyarrow as pa
from feast.data_format import ParquetFormat
from feast.infra.offline_stores.file_source import SavedDatasetFileStorage
from feast.infra.offline_stores.offline_store import RetrievalJob, RetrievalMetadata
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.repo_config import RepoConfig
from feast.saved_dataset import SavedDatasetStorage

from tasks.features.offline.duck import duckdb_session, names, sql_name, sql_text
from tasks.features.offline.entities import ROW
from tasks.features.offline.target import LocalTarget, RemoteTarget, target_of
from tasks.kernel.errors import FeatureStoreError, StorageError

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Query:
    """A query that is ready to run in its session."""

    sql: str
    num_rows: int | None = None
    """Entity rows, each of which must come out once with its number; None for a plain read."""
    before: tuple[str, ...] = ()
    """Statements that made the tables which the query reads."""


@dataclass
class AsofRetrievalJob(RetrievalJob):
    """A query that runs when its result is asked for, in a database of its own.

    Whatever the way out, a job for entity rows first proves that each of them comes out exactly
    once, and raises otherwise, before anything is handed out or written.
    """

    config: RepoConfig
    prepare: Callable[[duckdb.DuckDBPyConnection], Query]
    on_demand: list[OnDemandFeatureView]
    full_names: bool
    describe: Callable[[], RetrievalMetadata] | None = None
    unique: str | None = None
    """A column of the result whose values must be distinct and present."""
    _text: str | None = field(default=None, init=False)

    def with_unique(self, column: str) -> AsofRetrievalJob:
        """The same job, which also proves that no value of `column` repeats or is missing."""
        return replace(self, unique=column)

    @property
    def full_feature_names(self) -> bool:
        """Whether features are named `<view>__<feature>`."""
        return self.full_names

    @property
    def on_demand_feature_views(self) -> list[OnDemandFeatureView]:
        """Views that Feast computes from the result."""
        return self.on_demand

    @cached_property
    def metadata(self) -> RetrievalMetadata | None:
        """What was asked for."""
        return self.describe() if self.describe else None

    def to_sql(self) -> str:
        """Every statement of the retrieval in order, the query last; as it ran, where it ran."""
        if self._text is None:
            with self._session() as con:
                self._prepared(con)
        return str(self._text)

    @contextmanager
    def open_batches(self, batch_rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatchReader]:
        """Read the result in batches, without on-demand features; memory stays bounded.

        The reader is valid inside the `with` alone.
        """
        with self._session() as con:
            yield con.sql(self._checked(con).sql).to_arrow_reader(batch_rows)

    def write_parquet(
        self, target: Path, order: list[str], row_group_rows: int, unique: str | None = None
    ) -> None:
        """Write the result to one local Parquet file, sorted by `order`; whole or not at all.

        Streamed: no row becomes Python, unless on-demand features have to be computed.

        Args:
            unique: a column whose values must be distinct and present, see `with_unique`.

        Raises:
            FeatureStoreError: rows were lost or doubled.
            StorageError: the disk refused a write.
        """
        self.unique = unique or self.unique
        with self._rows() as (con, query):
            self._copy(
                con,
                replace(query, sql=f"SELECT * FROM ({query.sql}) ORDER BY {names(order)}"),
                LocalTarget(target),
                f"COMPRESSION zstd, ROW_GROUP_SIZE {row_group_rows}",
            )

    def persist(
        self,
        storage: SavedDatasetStorage,
        allow_overwrite: bool = False,
        timeout: int | None = None,
    ) -> None:
        """Stream the result to a saved dataset, on the disk or on S3; whole or not at all.

        Raises:
            FeatureStoreError: the storage is no Parquet file, exists already, or rows were lost.
            StorageError: the disk or the object store refused a write.
        """
        if not isinstance(storage, SavedDatasetFileStorage) or not isinstance(
            storage.file_options.file_format, ParquetFormat | None
        ):
            raise FeatureStoreError(
                f"a result of this store goes to a Parquet file, not to {type(storage).__name__}"
            )
        target = target_of(storage, self.config)
        target.check_free(allow_overwrite)
        with self._rows() as (con, query):
            if isinstance(target, LocalTarget):
                self._copy(con, query, target, "COMPRESSION zstd")
            else:
                self._upload(con, query, target)

    def _to_df_internal(self, timeout: int | None = None) -> pd.DataFrame:
        frame: pd.DataFrame = self._to_arrow_internal(timeout).to_pandas()
        return frame

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:
        with self._session() as con:
            query = self._checked(con)
            table = con.sql(query.sql).to_arrow_table()
        self._compare(query, table.num_rows)
        return table

    @contextmanager
    def _rows(self) -> Iterator[tuple[duckdb.DuckDBPyConnection, Query]]:
        """The checked result as a query, on-demand features included."""
        if not self.on_demand:
            with self._session() as con:
                yield con, self._checked(con)
            return
        table = self.to_arrow()
        with self._session() as con:
            con.register("computed", table)
            yield con, Query("SELECT * FROM computed", table.num_rows)

    def _prepared(self, con: duckdb.DuckDBPyConnection) -> Query:
        query = self.prepare(con)
        self._text = ";\n".join([*query.before, query.sql])
        return query

    def _checked(self, con: duckdb.DuckDBPyConnection) -> Query:
        """Prove that every entity row comes out once; return the query without their numbers."""
        query = self._prepared(con)
        if query.num_rows is None:
            return query
        ids = [ROW, *([self.unique] if self.unique else [])]
        distinct = ", ".join(f"count(DISTINCT {sql_name(column)})" for column in ids)
        rows, *counted = con.execute(f"SELECT count(*), {distinct} FROM ({query.sql})").fetchall()[
            0
        ]
        if not query.num_rows == rows == counted[0]:
            raise FeatureStoreError(
                f"{query.num_rows} entity rows went into a retrieval, {rows} came out with "
                f"{counted[0]} distinct numbers; expected each once. Nothing was handed out"
            )
        if counted[-1] != rows:
            raise FeatureStoreError(
                f"{rows} entity rows went into a retrieval, with {counted[-1]} distinct values of "
                f"{self.unique}; expected a value of its own in each. Nothing was handed out"
            )
        return replace(query, sql=f"SELECT * EXCLUDE ({ROW}) FROM ({query.sql})")

    def _copy(
        self, con: duckdb.DuckDBPyConnection, query: Query, target: LocalTarget, options: str
    ) -> None:
        with target.aside() as file:
            written = con.execute(
                f"COPY ({query.sql}) TO {sql_text(file)} (FORMAT parquet, {options})"
            ).fetchall()[0][0]
            self._compare(query, int(written))

    def _upload(self, con: duckdb.DuckDBPyConnection, query: Query, target: RemoteTarget) -> None:
        with target.aside() as upload:
            self._compare(query, upload(con.sql(query.sql).to_arrow_reader(BATCH_ROWS)))

    @contextmanager
    def _session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        store = self.config.offline_store
        with duckdb_session(
            Path(store.spill_path or gettempdir()),
            memory_limit_mb=store.memory_limit_mb,
            threads=store.threads,
        ) as con:
            con.execute("SET python_enable_replacements = false")  # a name is a table, no variable
            try:
                yield con
            except duckdb.OutOfMemoryException as exc:
                raise StorageError(
                    f"a retrieval needs more than {store.memory_limit_mb} MB and the space to "
                    f"spill ({_first_line(exc)}); raise memory_limit_mb of the offline store or "
                    "free disk space. Nothing is visible of the result"
                ) from exc
            except duckdb.IOException:
                raise  # the session explains it
            except duckdb.Error as exc:
                raise FeatureStoreError(
                    f"a retrieval failed ({_first_line(exc)}). Nothing is visible of the result"
                ) from exc

    def _compare(self, query: Query, num_rows: int) -> None:
        if query.num_rows not in (None, num_rows):
            raise FeatureStoreError(
                f"{query.num_rows} entity rows went into a retrieval, {num_rows} were written; "
                "expected each once. Nothing is visible of the result"
            )


def _first_line(exc: Exception) -> str:
    return str(exc).split("\n", 1)[0]
