"""What one version answered in a window, as rows that a drift check compares with its reference.

The log holds features as the model took them: categories as codes. The reference has the words, so
each code is turned back by the words of the reference; one that none of them has is a category of
its own, `code:<number>`. A masked category is turned back in the same way, under the mask's key. A
masked number says nothing, and is left out with whatever the log lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import (
    DatasetSchema,
    FeatureSnapshot,
    ValidatedDataset,
    ValidationResult,
    category_code,
)
from tasks.contracts.drift import ServedWindow, TooFewPredictions
from tasks.contracts.release import RegisteredProgram
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.predictions.joining import JoinTally, labelled_rows
from tasks.predictions.labels import LABEL, labels_folder
from tasks.predictions.reading import (
    LogQuery,
    ReadTally,
    logged_columns,
    logged_parts,
    read_rows,
)
from tasks.predictions.schema import EVENT_TIME, FEATURE, MOMENT_TYPE, SCORE, open_mask

SUITE = "prediction_log"
STABLE = "stable"
MISSING_CODE = 0


def take_served_window(
    home: Path,
    model: RegisteredProgram,
    reference: ValidatedDataset,
    window: TimeWindow,
    offset: timedelta,
    min_rows: int,
    min_days: int,
    store: ArtifactStore,
    now: datetime,
) -> ServedWindow | TooFewPredictions:
    """Rows that the stable track answered with one version in a window, with their labels.

    Args:
        home: state folder with the log.
        model: the version; only what it answered itself is taken.
        reference: rows that it was trained on.
        window: in the use case's time.
        offset: from the use case's time to the server's clock; other than 0 where recorded data is
            played.
        min_rows, min_days: with fewer rows, or UTC days with rows, there is no result.
        store: takes the rows.
        now: labels that became known later are left out.

    Raises:
        DataContractError: the log has no feature of the model, or scores that are no numbers.
        StorageError: the disk refused a write.
    """
    logged = TimeWindow(start=window.start + offset, end=window.end + offset)
    query = LogQuery(
        model.version.name, logged, versions=[str(model.version.version)], tracks=[STABLE]
    )
    rows, days = _count(home, query, offset)
    if rows < min_rows or days < min_days:
        return TooFewPredictions(
            window=window,
            logged=logged,
            version=str(model.version.version),
            num_rows=rows,
            num_days=days,
            reason=(
                f"the prediction log has {rows:,} rows on {days} UTC days that version "
                f"{model.version.version} of {model.version.name} answered as {STABLE} in "
                f"{logged}; a result needs {min_rows:,} rows on {min_days} days. Nothing was "
                "compared"
            ),
        )
    parts = [part.name for part in logged_parts(home, query.model, logged)]
    labels = sorted(f.name for f in labels_folder(home, query.model).glob("*.parquet"))
    key = content_key(
        *("served", code_digest(__file__), model, reference.snapshot.data.sha256, window),
        *(offset.total_seconds(), parts, labels, now if labels else None),
    )

    def build(folder: StagedFolder) -> ServedWindow:
        rows = _ServedRows(home, model, reference, query, offset, store)
        return rows.write(folder, window, now)

    return store.build_once("served", key, ServedWindow, build)


def count_served(home: Path, model: str, version: str, window: TimeWindow) -> int:
    """Rows that the stable track answered with a version."""
    query = LogQuery(model, window, versions=[version], tracks=[STABLE])
    return sum(table.num_rows for table in read_rows(home, query, [EVENT_TIME]))


def _count(home: Path, query: LogQuery, offset: timedelta) -> tuple[int, int]:
    """Rows, and UTC days of the use case's time that have some."""
    rows, days = 0, set()
    for table in read_rows(home, query, [EVENT_TIME]):
        rows += table.num_rows
        moments = _moved(table.column(EVENT_TIME), offset)
        days.update(pc.unique(pc.floor_temporal(moments, unit="day")).to_pylist())
    return rows, len(days)


class _ServedRows:
    """Writes the rows of one window."""

    def __init__(
        self,
        home: Path,
        model: RegisteredProgram,
        reference: ValidatedDataset,
        query: LogQuery,
        offset: timedelta,
        store: ArtifactStore,
    ) -> None:
        self._home, self._model, self._reference = home, model, reference
        self._query, self._offset = query, offset
        taken = model.raw_columns
        types = logged_columns(home, query.model, query.window)
        self._types = {f.name.removeprefix(FEATURE): f.type for f in types}
        numeric = tuple(n for n in taken.numeric if self._holds_numbers(n))
        categorical = tuple(n for n in taken.categorical if FEATURE + n in types.names)
        kept = (*categorical, *numeric)
        if not kept:
            raise DataContractError(
                f"the prediction log of {query.model} has none of the {len(taken.numeric)} numbers "
                f"and {len(taken.categorical)} categories of version {model.version.version}; "
                "expected some of them. Are all masked or left out? Nothing was compared"
            )
        self._left_out = tuple(n for n in (*taken.categorical, *taken.numeric) if n not in kept)
        own = reference.snapshot.columns
        self._columns = own.model_copy(
            update={
                "categorical": categorical,
                "numeric": numeric,
                "baseline": own.baseline if own.baseline in numeric else None,
            }
        )
        snapshot = store.path(reference.snapshot.data)
        self._words = {name: self._words_of(name, snapshot) for name in categorical}
        self._features = [FEATURE + name for name in kept]

    def write(self, folder: StagedFolder, window: TimeWindow, now: datetime) -> ServedWindow:
        """Write rows and scores, and the value that names them."""
        joined, read = JoinTally(), ReadTally()
        tables = labelled_rows(
            self._home,
            self._query,
            [EVENT_TIME, SCORE, *self._features],
            known_by=now,
            tally=joined,
            read=read,
            shift=-self._offset,
        )
        num_rows = self._write_files(tables, folder.path)
        dataset = self._dataset(folder, num_rows, window, read)
        snapshot = self._reference.snapshot.model_copy(update={"columns": self._columns})
        assert self._query.window is not None
        return ServedWindow(
            dataset=dataset,
            reference=self._reference.model_copy(update={"snapshot": snapshot}),
            scores=folder.artifact("scores.parquet"),
            program_sha256=self._model.program.sha256,
            logged=self._query.window,
            num_labelled=joined.labelled,
            left_out=self._left_out,
            told=self._described(joined, read),
        )

    def _write_files(self, tables: Iterator[pa.Table], folder: Path) -> int:
        columns, start = self._columns, 0
        schema, scores = _schemas(columns)
        with (
            pq.ParquetWriter(folder / "data.parquet", schema) as data_file,
            pq.ParquetWriter(folder / "scores.parquet", scores) as score_file,
        ):
            for table in tables:
                rows = self._decoded(table, start)
                start += table.num_rows
                data_file.write_table(rows.select(schema.names).cast(schema))
                score_file.write_table(rows.select(scores.names).cast(scores))
        return start

    def _decoded(self, table: pa.Table, start: int) -> pa.Table:
        columns = self._columns
        score = table.column(SCORE)
        finite = pc.sum(pc.is_finite(score)).as_py() or 0
        if finite < table.num_rows:
            raise DataContractError(
                f"{table.num_rows - finite:,} answers of version {self._model.version.version} of "
                f"{self._query.model} in {self._query.window} are no single finite number; "
                "expected one score a row. Nothing was compared"
            )
        return pa.table(
            {
                columns.row_id: pa.array(np.arange(start, start + table.num_rows)),
                columns.event_time: _moved(table.column(EVENT_TIME), self._offset),
                columns.label: table.column(LABEL),
                SCORE: score,
                **{n: self._spelled(n, table.column(FEATURE + n)) for n in columns.categorical},
                **{n: table.column(FEATURE + n).cast(pa.float32()) for n in columns.numeric},
            }
        )

    def _spelled(self, name: str, codes: pa.ChunkedArray) -> pa.Array:
        """Words of a category column; null for a missing one."""
        coded = pc.cast(codes, pa.string()).combine_chunks().dictionary_encode()
        words = self._words[name]
        told = [words.get(code, f"code:{code}") for code in coded.dictionary.to_pylist()]
        return pc.take(pa.array(told, pa.string()), coded.indices)

    def _words_of(self, name: str, snapshot: Path) -> dict[str, str | None]:
        """What is logged for a category, and its word in the reference; None for a missing one."""
        seen: set[str] = set()
        for batch in ds.dataset(snapshot, format="parquet").to_batches(columns=[name]):
            seen.update(pc.unique(batch.column(0).cast(pa.string())).drop_null().to_pylist())
        codes: dict[str, str | None] = {str(category_code(w)): w for w in sorted(seen) if w}
        codes[str(MISSING_CODE)] = None
        if pa.types.is_string(self._types[name]):
            mask = open_mask(self._home)
            return {mask.text(code): word for code, word in codes.items()}
        return codes

    def _holds_numbers(self, name: str) -> bool:
        kind = self._types.get(name)
        return kind is not None and (pa.types.is_floating(kind) or pa.types.is_integer(kind))

    def _dataset(
        self, folder: StagedFolder, num_rows: int, window: TimeWindow, read: ReadTally
    ) -> ValidatedDataset:
        facts = {
            "checked": ["each score is a finite number", "each row was answered by this version"],
            "parts": read.parts,
            "rows": num_rows,
            "damaged": read.damaged,
        }
        (folder.path / "validation.json").write_text(json.dumps(facts))
        snapshot = FeatureSnapshot(
            data=folder.artifact("data.parquet"),
            num_rows=num_rows,
            window=window,
            columns=self._columns,
            feature_service=self._reference.snapshot.feature_service,
            feature_views=self._reference.snapshot.feature_views,
            tables_version=SUITE,
            label_definition=self._reference.snapshot.label_definition,
            positive_rate=None,
            excluded=(),
        )
        validation = ValidationResult(
            suite=SUITE,
            subject="served",
            subject_sha256=snapshot.data.sha256,
            num_rows=num_rows,
            num_expectations=2,
            result=folder.artifact("validation.json"),
            warnings=tuple(read.damaged),
        )
        return ValidatedDataset(snapshot=snapshot, validation=validation)

    def _described(self, joined: JoinTally, read: ReadTally) -> str:
        parts = [
            f"the current rows are of the prediction log: {joined.rows:,} that version "
            f"{self._model.version.version} answered as {STABLE} in {self._query.window}, "
            f"{joined.labelled:,} of them with a label"
        ]
        if self._left_out:
            parts.append(f"not compared, since the log hides them: {_some(self._left_out)}")
        if read.damaged:
            parts.append(f"{len(read.damaged)} damaged part(s) of the log were left out")
        return "; ".join(parts)


def _schemas(columns: DatasetSchema) -> tuple[pa.Schema, pa.Schema]:
    """Of the rows, and of their scores."""
    common = [
        (columns.row_id, pa.int64()),
        (columns.event_time, MOMENT_TYPE),
        (columns.label, pa.float64()),
    ]
    texts = [(name, pa.string()) for name in columns.categorical]
    numbers = [(name, pa.float32()) for name in columns.numeric]
    baseline = [(columns.baseline, pa.float32())] if columns.baseline else []
    return (
        pa.schema([*common, *texts, *numbers]),
        pa.schema([*common, (SCORE, pa.float32()), *baseline]),
    )


def _moved(moments: pa.ChunkedArray, offset: timedelta) -> pa.ChunkedArray:
    """Moments of the server's clock in the use case's time."""
    return pc.subtract(moments, pa.scalar(offset, pa.duration("us"))).cast(MOMENT_TYPE)


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
