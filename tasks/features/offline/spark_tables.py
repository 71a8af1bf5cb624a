"""Queries of feature tables and entity frames computed by Spark, for profiles with its store.

Where state has a location, Spark reads tables there by content, a row group a task, and puts its
results there: its machines need no disk in common, this package and the variables `AWS_*`, and no
library of Java's for S3. Without a location, all of them see the state folder. Results come to this
machine a file at a time, so neither reads more than a part of a table into memory at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pyarrow.fs import FileSystem

from tasks.contracts.base import TimeWindow
from tasks.features.access.profile import profile_file
from tasks.features.offline.duck import parquet, sql_moment, sql_name
from tasks.kernel.errors import ConfigurationError, DataContractError, FalajError, TransientError
from tasks.kernel.files import scratch_folder
from tasks.kernel.location import Location, object_name, s3_access
from tasks.kernel.settings import ArtifactStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STORE = "tasks.features.offline.spark_store.GuardedSparkOfflineStore"
COMPUTED = "computed"
"""Folder of the location in which a result waits until it was brought from there."""
FIXED = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",  # a number that does not fit is an error, as to DuckDB
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
OF_A_VALUE = re.compile(r"DIVIDE_BY_ZERO|CAST_INVALID|OVERFLOW|CANNOT_PARSE|INVALID_(?!TEMP)")


@dataclass(frozen=True)
class SparkTables:
    """Raw tables that Spark reads, and what queries over them give."""

    session: SparkSession
    location: Location | None
    scratch: Path

    @classmethod
    @contextmanager
    def chosen(cls, repo: Path, store: ArtifactStore) -> Iterator[SparkTables | None]:
        """Spark where the profile's offline store is Spark's; None where DuckDB computes."""
        if STORE not in (text := profile_file(repo).read_text()):
            yield None
            return
        settings = yaml.safe_load(text)["offline_store"].get("spark_conf") or {}
        session = started(settings).newSession()  # with views of its own
        with scratch_folder(".spark", store.root) as scratch:
            yield cls(configured(session), store.location, scratch)
        session.catalog.clearCache()  # of staging rows

    def read(
        self, name: str, folder: Path, time_column: str | None = None, since: Any = None
    ) -> None:
        """Make the Parquet files of a folder readable by name; rows before `since` are left out."""
        files = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
        if self.location is None:
            rows = self.session.read.parquet(*map(str, files))
        else:
            sent = {file: object_name(self.location.send_content(file)[0]) for file in files}
            numbers = {file: range(pq.read_metadata(file).num_row_groups) for file in files}
            groups = [(sent[file], number) for file in files for number in numbers[file]]
            asked = self.session.sparkContext.parallelize(groups, max(1, len(groups)))
            schema = self.session.read.parquet(str(files[0])).schema
            names = self.session.createDataFrame(asked, "name string, number int")
            rows = names.mapInArrow(partial(_read, self.location.url), schema)
        if time_column and since:
            rows = rows.where(f"`{time_column}` >= {sql_moment(since).partition('::')[0]}")
        rows.createOrReplaceTempView(name)

    def stage(self, name: str, text: str, origin: str) -> None:
        """Make a staging query readable by name.

        Raises:
            ConfigurationError: Spark does not know something that it says.
        """
        with _explained(origin):
            self._said(text, None, origin).persist().createOrReplaceTempView(name)

    def rows(self, text: str, window: TimeWindow, origin: str, kinds: Mapping[str, str]) -> str:
        """Compute a query; SQL by which DuckDB reads its rows.

        Args:
            text: the query, in DuckDB's SQL.
            window: what it is asked for.
            origin: its name in errors.
            kinds: DuckDB's type of each of its columns, which the rows get.

        Raises:
            ConfigurationError: Spark does not know something that it says.
            DataContractError: it met a value that it cannot work with.
            TransientError: Spark lost the machines that it ran on.
        """
        folder = self.scratch / uuid4().hex
        with _explained(origin):
            self.bring(self._said(text, window, origin), folder)
        columns = ", ".join(f"{sql_name(n)}::{kind} AS {sql_name(n)}" for n, kind in kinds.items())
        return f"SELECT {columns} FROM {parquet(folder)}"

    def bring(self, rows: DataFrame, folder: Path) -> None:
        """Write rows into Parquet files of a folder here, whose names keep their order."""
        if self.location is None:
            rows.write.parquet(str(folder))
            return
        prefix = f"{COMPUTED}/{folder.name}"
        folder.mkdir(parents=True)
        try:
            send = partial(_send, self.location, prefix)
            for sent in (found := rows.mapInArrow(send, "name string").collect()):
                self.location.bring(sent.name, folder / Path(sent.name).name)
            if not found:  # a file for the columns
                pq.write_table(rows.limit(0).toArrow(), folder / "none.parquet")
        finally:
            self.location.remove(self.location.entries(prefix))

    def _said(self, text: str, window: TimeWindow | None, origin: str) -> DataFrame:
        from tasks.features.offline.spark_sql import to_spark

        columns_of = lambda table: self.session.table(table).columns  # noqa: E731
        return self.session.sql(to_spark(text, window, origin, columns_of))


def started(settings: Mapping[str, str]) -> SparkSession:
    """The session that is active, as Feast's own store takes it; started if there is none."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    return configured(active or SparkSession.builder.config(map=dict(settings)).getOrCreate())


def configured(session: SparkSession) -> SparkSession:
    """The session, computing in the ways that equal rows need."""
    for name, value in FIXED.items():
        session.conf.set(name, value)
    return session


@contextmanager
def _explained(origin: str) -> Iterator[None]:
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except PySparkException as exc:
        reason = " ".join(str(exc).split())[:500]
        kind: type[FalajError] = TransientError
        if isinstance(exc, AnalysisException):  # of which one that cannot be read is one too
            reason, kind = f"{reason}; say it in words that both engines know", ConfigurationError
        elif OF_A_VALUE.search(reason):
            reason, kind = f"it met a value it cannot work with: {reason}", DataContractError
        raise kind(f"Spark did not compute query {origin}: {reason}. Nothing was changed") from exc


def _read(url: str, asked: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on Spark's workers: the row groups that are asked for, in parts of their objects."""
    region = s3_access(os.environ).get("region", "us-east-1")
    is_folder = url.startswith("file:")
    system, folder = FileSystem.from_uri(url if is_folder else f"{url}?region={region}")
    for group in (group for batch in asked for group in batch.to_pylist()):
        with system.open_input_file(f"{folder}/{group['name']}") as stream:
            yield from pq.ParquetFile(stream).iter_batches(row_groups=[group["number"]])


def _send(
    location: Location, prefix: str, rows: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs on Spark's workers: one partition's rows to one object, the same if it runs again."""
    from pyspark import TaskContext

    if (first := next(rows, None)) is None:
        return
    name = f"{prefix}/{TaskContext.get().partitionId():06}.parquet"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
            for batch in chain([first], rows):
                writer.write_batch(batch)
        location.write(name, file)
    yield pa.RecordBatch.from_pydict({"name": [name]})
