"""Retrieval jobs of the ASOF offline store: run a query, prove no row was lost, hand it out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import gettempdir

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
from feast.infra.offline_stores.file_source import SavedDatasetFileStorage
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.repo_config import RepoConfig
from feast.saved_dataset import SavedDatasetStorage

from tasks.features.offline.duck import duckdb_session, first_line, sql_text
from tasks.features.offline.entities import ROW
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.files import replacing

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Rows:
    """What a job reads, batch by batch; one batch at least."""

    batches: Iterator[pa.RecordBatch]
    num_rows: Callable[[], int] | None = None
    """Entity rows read so far, each to come out once with its number; None for a plain read."""


@dataclass
class AsofRetrievalJob(RetrievalJob):
    """A query that runs when its result is asked for.

    Whatever the way out, a job for entity rows first proves that each of them comes out exactly
    once, and raises otherwise, before anything is handed out or can be seen.
    """

    config: RepoConfig
    read: Callable[[Sequence[str]], AbstractContextManager[Rows]]
    """Opens the rows, sorted by the columns that are given; in any order without one."""
    text: str
    on_demand_feature_views: Sequence[OnDemandFeatureView] = ()
    """Views that Feast computes from the result."""
    full_feature_names: bool = False
    """Whether features are named `<view>__<feature>`."""
    metadata = None
    """Of saved datasets in the registry, which this store does not make."""

    def to_sql(self) -> str:
        """The query of the entity rows, and in words what is joined to them."""
        return self.text

    @contextmanager
    def open_batches(self, batch_rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatchReader]:
        """Read the result in batches, without on-demand features.

        A plain read is streamed; what entity rows found is complete before the first batch. The
        reader is valid inside the `with` alone.
        """
        with self._open() as (reader, is_streamed):
            if not is_streamed:
                reader = reader.read_all().to_reader()
            pieces = (
                batch.slice(start, batch_rows)
                for batch in reader
                for start in range(0, batch.num_rows, batch_rows)
            )
            yield pa.RecordBatchReader.from_batches(reader.schema, pieces)

    def write_parquet(self, target: Path, order: list[str], row_group_rows: int) -> None:
        """Write the result to one local Parquet file, sorted by `order`; whole or not at all.

        Streamed: no row becomes Python, unless on-demand features have to be computed.

        Args:
            target: the file.
            order: columns of the entity rows.
            row_group_rows: of the file.

        Raises:
            FeatureStoreError: rows were lost or doubled.
            StorageError: the disk refused a write.
        """
        store = self.config.offline_store
        spill, limit_mb = Path(store.spill_path or gettempdir()), int(store.memory_limit_mb)
        with self._complete(order) as reader, replacing(target) as file:
            try:
                with duckdb_session(spill, memory_limit_mb=limit_mb, threads=1) as con:
                    con.register("rows", reader)
                    con.execute(
                        f"COPY rows TO {sql_text(file)} "
                        f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {row_group_rows})"
                    )
            except duckdb.Error as exc:
                raise FeatureStoreError(
                    f"a retrieval failed ({first_line(exc)}). Nothing is visible of the result"
                ) from exc

    def persist(
        self,
        storage: SavedDatasetStorage,
        allow_overwrite: bool = False,
        timeout: int | None = None,
    ) -> None:
        """Stream the result to a local Parquet file; whole or not at all.

        Raises:
            FeatureStoreError: the storage is no such file, exists already, or rows were lost.
            StorageError: the disk refused a write.
        """
        is_file = isinstance(storage, SavedDatasetFileStorage)
        target = Path(storage.file_options.uri if is_file else "")
        if target.suffix != ".parquet" or not target.is_absolute():
            raise FeatureStoreError(
                f"a result of this store goes to a Parquet file named by its whole path, not to "
                f"{target if is_file else type(storage).__name__}. Nothing was written"
            )
        if target.exists() and not allow_overwrite:
            raise FeatureStoreError(
                f"{target} exists; allow overwriting or choose another name. Nothing was written"
            )
        self.write_parquet(target, [], BATCH_ROWS)

    def _to_df_internal(self, timeout: int | None = None) -> pd.DataFrame:
        frame: pd.DataFrame = self._to_arrow_internal(timeout).to_pandas()
        return frame

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:
        with self._open() as (reader, _):
            return reader.read_all()

    @contextmanager
    def _complete(self, order: Sequence[str] = ()) -> Iterator[pa.RecordBatchReader]:
        """The result, on-demand features included."""
        if self.on_demand_feature_views:
            yield self.to_arrow().sort_by([(column, "ascending") for column in order]).to_reader()
            return
        with self._open(order) as (reader, _):
            yield reader

    @contextmanager
    def _open(self, order: Sequence[str] = ()) -> Iterator[tuple[pa.RecordBatchReader, bool]]:
        failures: list[Exception] = []

        def noted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            try:
                yield from batches
            except Exception as exc:
                failures.append(exc)
                raise

        with self.read(order) as rows:
            batches = _proved(rows)
            first = next(batches)
            stream = noted(chain([first], batches))
            try:
                yield pa.RecordBatchReader.from_batches(first.schema, stream), rows.num_rows is None
            except Exception:
                if failures:  # who reads a stream knows its errors by their text alone
                    raise failures[0] from None
                raise


def _proved(rows: Rows) -> Iterator[pa.RecordBatch]:
    """The rows without their numbers; ends with an error unless each came exactly once."""
    if rows.num_rows is None:
        yield from rows.batches
        return
    numbers = []
    for batch in rows.batches:
        numbers.append(batch[ROW].to_numpy())
        yield batch.drop_columns([ROW])
    num_rows, came = rows.num_rows(), np.concatenate(numbers)
    distinct = int(np.count_nonzero(np.bincount(came)))
    if not num_rows == len(came) == distinct:
        raise FeatureStoreError(
            f"{num_rows} entity rows went into a retrieval, {len(came)} came out with {distinct} "
            "distinct numbers; expected each once. Nothing is visible of the result"
        )
