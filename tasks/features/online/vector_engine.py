"""Feast compute engine that materializes whole columns instead of cell by cell.

A plug-in by Feast's own extension point: name it as `batch_engine.type`. Feast's local engine makes
a Python object of every value; here Arrow batches from the offline store become the online store's
own bytes. The Redis and SQLite stores of this project are written so. All else takes Feast's way,
and how much did is counted: rows of views that need it, cells of types without a layout here.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa
from feast import BatchFeatureView, StreamFeatureView
from feast.feature_view import DUMMY_ENTITY_ID
from feast.infra.common.materialization_job import MaterializationJobStatus, MaterializationTask
from feast.infra.compute_engines.dag.context import ColumnInfo
from feast.infra.compute_engines.local.compute import LocalComputeEngine
from feast.infra.compute_engines.local.feature_builder import LocalFeatureBuilder
from feast.infra.compute_engines.local.job import LocalMaterializationJob
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.infra.registry.base_registry import BaseRegistry
from feast.repo_config import FeastConfigBaseModel
from feast.utils import _validate_vector_field_lengths

from tasks.features.online import newer_wins
from tasks.features.online.encoding import EncodedRows, encode_rows

logger = logging.getLogger(__name__)

DEFAULT_BATCH_ROWS = 10_000
STORES = ("offline_store", "online_store")
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


class VectorComputeEngineConfig(FeastConfigBaseModel):
    """Settings under `batch_engine`."""

    type: Literal["tasks.features.online.vector_engine.VectorComputeEngine"] = (
        "tasks.features.online.vector_engine.VectorComputeEngine"
    )
    backend: str | None = "pandas"
    """Data frames of the views that take Feast's way: `pandas` or `polars`."""


@dataclass(frozen=True)
class ViewWrite:
    """What one materialization did for one view.

    Attributes:
        num_rows: entities that the offline store gave.
        num_written: entities that got these values.
        num_kept: entities that kept a value as new or newer.
        num_taken_back: entities whose row in the window an earlier materialization wrote, and the
            source no longer has.
        num_feast_cells: cells that Feast's own code converted, having no layout here.
        num_feast_rows: rows that took Feast's way altogether.
        reason: why they did; empty where none did.
    """

    num_rows: int = 0
    num_written: int = 0
    num_kept: int = 0
    num_taken_back: int = 0
    num_feast_cells: int = 0
    num_feast_rows: int = 0
    reason: str = ""


class VectorComputeEngine(LocalComputeEngine):
    """Local engine whose materialization is vectorised; the rest is Feast's.

    Asks the offline store for the newest row of each key, whatever `pull_latest_features` says, and
    holds two batches of `online_write_batch_size` rows at most.

    Values are written as Feast writes them, byte for byte, but for two cases in which Feast's own
    way changes one: an integer beyond 2^53 keeps its digits beside a null, and a row without a join
    key is rejected with a clear error. What replaces what is said in `newer_wins.py`.
    """

    def __init__(self, **options: Any) -> None:
        given = {name: options.pop(name) for name in ("repo_config", *STORES)}
        self.config = VectorComputeEngineConfig(**options)  # Feast would swallow a misspelt one
        super().__init__(backend=self.config.backend, **given)
        self.writes: dict[str, ViewWrite] = {}  # by view: what its latest materialization did
        self.takes_back = True
        """Look for values that the source no longer has; false where it is known to have grown
        only. A materialization of all history always does."""

    def _materialize_one(
        self, registry: BaseRegistry, task: MaterializationTask, **kwargs: Any
    ) -> LocalMaterializationJob:
        view = task.feature_view
        newer_wins.check_without_function(view)
        self.writes.pop(view.name, None)
        reason = _reason_for_feasts_way(view, task, self.online_store)
        builder = LocalFeatureBuilder(registry, task, backend=self._backend)
        if reason:  # what `LocalComputeEngine` does; how many values were newer, it does not say
            with newer_wins.written_by(_origin(task)):
                context = self.get_execution_context(registry, task)
                rows = builder.build().execute(context).data.num_rows
            write = ViewWrite(num_rows=rows, num_written=rows, num_feast_rows=rows, reason=reason)
        else:
            write = self._write(builder.get_column_info(view), task)
        self.writes[view.name] = write
        _log(view.name, write)
        job_id = f"{view.name}-{task.start_time}-{task.end_time}"
        return LocalMaterializationJob(job_id, MaterializationJobStatus.SUCCEEDED)

    def _write(self, columns: ColumnInfo, task: MaterializationTask) -> ViewWrite:
        """Write the window's newest rows; what the source no longer has there is taken back.

        An entity may have an older row, before the window: all rows are written before anything is
        removed, so that no reader finds it blank meanwhile. A window without any row takes nothing
        back: a source that was lost is no correction.
        """
        origin = _origin(task)
        write = self._write_window(columns, task, origin)
        looked_for = self.takes_back or task.start_time <= BEGINNING
        if not write.num_rows or not looked_for or task.disable_event_timestamp:
            return write
        store, config, view = self.online_store, self.repo_config, task.feature_view
        window = (origin.began_us, newer_wins.micros(task.start_time), origin.end_us)
        meant = newer_wins.Removal("left behind", window)
        behind = store.remove_values(config, view, replace(meant, count_only=True))
        if behind:
            if task.start_time > BEGINNING:
                write = self._write_window(columns, replace(task, start_time=BEGINNING), origin)
            store.remove_values(config, view, meant)
        return replace(write, num_taken_back=behind)

    def _write_window(
        self, columns: ColumnInfo, task: MaterializationTask, origin: newer_wins.Origin
    ) -> ViewWrite:
        seen: list[tuple[int, int]] = []
        rows = self._encoded(columns, task, seen)
        written = self.online_store.write_rows(self.repo_config, task.feature_view, rows, origin)
        num_rows = sum(count for count, _ in seen)
        return ViewWrite(
            num_rows=num_rows,
            num_written=written,
            num_kept=num_rows - written,
            num_feast_cells=sum(cells for _, cells in seen),
        )

    def _encoded(
        self, columns: ColumnInfo, task: MaterializationTask, seen: list[tuple[int, int]]
    ) -> Iterator[EncodedRows]:
        """Encoded batches; rows of each, and cells that Feast converted, are added to `seen`."""
        view = task.feature_view
        join_keys = {c.name: c.dtype.to_value_type() for c in view.entity_columns}
        features = {f.name: f.dtype.to_value_type() for f in view.features}
        moments = columns.timestamp_column, columns.created_timestamp_column
        for batch in self._batches(columns, task):
            _validate_vector_field_lengths(batch, view)
            rows = encode_rows(_with_dummy_key(batch, join_keys), join_keys, features, *moments)
            seen.append((len(rows), rows.num_converted_by_feast))
            yield rows

    def _batches(self, columns: ColumnInfo, task: MaterializationTask) -> Iterator[pa.RecordBatch]:
        """Newest row of each key, batch by batch, with the columns' names in the view."""
        job = self.offline_store.pull_latest_from_table_or_query(
            config=self.repo_config,
            data_source=task.feature_view.batch_source,
            join_key_columns=columns.join_keys,
            feature_name_columns=columns.feature_cols,
            timestamp_field=columns.ts_col,
            created_timestamp_column=columns.created_ts_col,
            start_date=BEGINNING if task.disable_event_timestamp else task.start_time,
            end_date=datetime.now(UTC) if task.disable_event_timestamp else task.end_time,
        )
        size = self.repo_config.materialization_config.online_write_batch_size
        mapping = columns.field_mapping or {}
        for batch in _stream(job, size or DEFAULT_BATCH_ROWS):
            if batch.num_rows:
                yield batch.rename_columns([mapping.get(n, n) for n in batch.schema.names])


def _reason_for_feasts_way(view: Any, task: MaterializationTask, online: object) -> str:
    """Why a view cannot be written column by column; empty where it can."""
    more = ("offline", "source_views", "aggregations", "filter", "enable_validation")
    named_engine = isinstance(view, BatchFeatureView) and view.batch_engine
    is_table = getattr(view, "batch_source", None) and not isinstance(view, StreamFeatureView)
    reasons = {
        "the view is not written online": not view.online,
        "the view does more than copy its table": not is_table
        or named_engine
        or any(getattr(view, name, None) for name in more),
        "all rows are asked for": not task.only_latest,
        f"the online store is a {type(online).__name__}": not isinstance(
            online, newer_wins.NewerWinsOnlineStore
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _origin(task: MaterializationTask) -> newer_wins.Origin:
    now = datetime.now(UTC)
    return newer_wins.Origin(
        newer_wins.micros(now),
        newer_wins.micros(now if task.disable_event_timestamp else task.end_time),
    )


def _stream(job: RetrievalJob, num_rows: int) -> Iterator[pa.RecordBatch]:
    """The result in batches; read as a stream where the offline store can."""
    if hasattr(job, "open_batches"):  # the stores of this project
        with job.open_batches(num_rows) as batches:
            yield from batches
    else:
        yield from job.to_arrow().to_batches(max_chunksize=num_rows)


def _with_dummy_key(batch: pa.RecordBatch, join_keys: dict[str, Any]) -> pa.RecordBatch:
    """Rows of a view without entities have one key, which the source need not hold."""
    if DUMMY_ENTITY_ID not in join_keys or DUMMY_ENTITY_ID in batch.schema.names:
        return batch
    return batch.append_column(DUMMY_ENTITY_ID, pa.array([""] * batch.num_rows))


def _log(view: str, write: ViewWrite) -> None:
    counts = (write.num_rows, write.num_written, write.num_kept, write.num_taken_back)
    logger.info("%s: %d entities, %d written, %d kept as newer, %d taken back", view, *counts)
    if write.num_feast_rows:
        count, reason = write.num_feast_rows, write.reason
        logger.warning("%s: %d rows took Feast's slower way: %s", view, count, reason)
    if write.num_feast_cells:
        count = write.num_feast_cells
        logger.warning(
            "%s: %d cells of types without a layout here went through Feast", view, count
        )
