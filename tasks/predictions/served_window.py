"""What one version answered in a window, as rows that a drift check compares with its reference.

The log holds features as the model took them: categories as codes. The reference has the words, so
each code is turned back by the words of the reference; one that none of them has is a category of
its own, `code:<number>`. A masked category is turned back in the same way, under the mask's key. A
masked number says nothing, and is left out with whatever the log lacks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, ValidatedDataset, ValidationResult, category_code
from tasks.contracts.drift import ServedWindow, TooFewPredictions
from tasks.contracts.release import RegisteredProgram
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, children, code_digest, content_key
from tasks.kernel.values import first_of
from tasks.predictions import reading
from tasks.predictions import schema as log
from tasks.predictions.labels import LABEL, JoinTally, labelled_rows

PREDICTED = "predicted"
SUITE = "prediction_log"
STABLE = "stable"
MISSING_CODE = 0
MOST_NAMED = 8


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
    name, version = model.version.name, str(model.version.version)
    logged = TimeWindow(start=window.start + offset, end=window.end + offset)
    query = reading.LogQuery(name, logged, versions=[version], tracks=[STABLE])
    rows, days = _count(home, query, offset)
    if rows < min_rows or days < min_days:
        return TooFewPredictions(
            window=window,
            logged=logged,
            version=version,
            num_rows=rows,
            num_days=days,
            reason=(
                f"the prediction log has {rows:,} rows on {days} UTC days that version {version} "
                f"of {name} answered as {STABLE} in {logged}; a result needs {min_rows:,} rows on "
                f"{min_days} days. Nothing was compared"
            ),
        )
    segments = [segment.name for segment in reading.logged_segments(home, name, logged)]
    labels = sorted(f.name for f in children(log.labels_folder(home, name)))
    key = content_key(
        *("served", code_digest(__file__), model, reference.snapshot.data.sha256, window),
        *(offset.total_seconds(), segments, labels, now if labels else None),
    )

    def build(folder: StagedFolder) -> ServedWindow:
        decoding = _decoding(home, query, model, reference, offset, store)
        return _write(folder, home, query, decoding, reference, window, now, model.program.sha256)

    return store.build_once("served", key, ServedWindow, build)


def count_served(home: Path, model: str, version: str, window: TimeWindow) -> int:
    """Rows that the stable track answered with a version."""
    query = reading.LogQuery(model, window, versions=[version], tracks=[STABLE])
    return sum(table.num_rows for table in reading.read_rows(home, query, [log.EVENT_TIME]))


def _count(home: Path, query: reading.LogQuery, offset: timedelta) -> tuple[int, int]:
    """Rows, and UTC days of the use case's time that have some."""
    rows, days = 0, set()
    for table in reading.read_rows(home, query, [log.EVENT_TIME]):
        rows += table.num_rows
        moments = _moved(table.column(log.EVENT_TIME), offset)
        days.update(pc.unique(pc.floor_temporal(moments, unit="day")).to_pylist())
    return rows, len(days)


@dataclass(frozen=True)
class _Decoding:
    """How logged rows become rows like those of the reference.

    Attributes:
        columns: of the reference, without the features that the log lacks or hides.
        words: of each category column, what is logged for a word; None for a missing one.
        left_out: features that the log lacks or hides.
        offset: from the use case's time to the server's clock.
    """

    columns: DatasetSchema
    words: dict[str, dict[str, str | None]]
    left_out: tuple[str, ...]
    offset: timedelta

    @property
    def features(self) -> list[str]:
        """Columns of the log."""
        return [log.FEATURE + name for name in (*self.columns.categorical, *self.columns.numeric)]

    def decoded(self, table: pa.Table, start: int) -> pa.Table:
        """Rows with ids from `start` on."""
        columns = self.columns
        return pa.table(
            {
                columns.row_id: pa.array(np.arange(start, start + table.num_rows)),
                columns.event_time: _moved(table.column(log.EVENT_TIME), self.offset),
                columns.label: table.column(LABEL),
                **self._scores(table),
                **{n: self._spelled(n, table.column(log.FEATURE + n)) for n in columns.categorical},
                **{n: table.column(log.FEATURE + n).cast(pa.float32()) for n in columns.numeric},
            }
        )

    def _scores(self, table: pa.Table) -> dict[str, pa.Array]:
        """Scores as those of a reference; of several classes the predicted one too."""
        classes = self.columns.classes
        if not classes:
            return {log.SCORE: table.column(log.SCORE)}
        each = _lists(table, len(classes))
        named = {
            n: pa.array(each[:, k]) for k, n in enumerate(self.columns.score_columns(log.SCORE))
        }
        return named | {PREDICTED: pa.array(np.array(classes, dtype=object)[each.argmax(axis=1)])}

    def _spelled(self, name: str, codes: pa.ChunkedArray) -> pa.Array:
        coded = pc.cast(codes, pa.string()).combine_chunks().dictionary_encode()
        words = self.words[name]
        spelled = [words.get(code, f"code:{code}") for code in coded.dictionary.to_pylist()]
        return pc.take(pa.array(spelled, pa.string()), coded.indices)

    def schemas(self) -> tuple[pa.Schema, pa.Schema]:
        """Of the rows, and of their scores."""
        columns = self.columns
        common = [
            (columns.row_id, pa.int64()),
            (columns.event_time, log.MOMENT_TYPE),
            (columns.label, pa.float64()),
        ]
        features = [(name, pa.string()) for name in columns.categorical]
        features += [(name, pa.float32()) for name in columns.numeric]
        baseline = [(columns.baseline, pa.float32())] if columns.baseline else []
        each = [(name, pa.float32()) for name in columns.score_columns(log.SCORE)]
        predicted = [(PREDICTED, pa.string())] if columns.classes else []
        scores = [*common, *each, *predicted, *baseline]
        return pa.schema([*common, *features]), pa.schema(scores)


def _decoding(
    home: Path,
    query: reading.LogQuery,
    model: RegisteredProgram,
    reference: ValidatedDataset,
    offset: timedelta,
    store: ArtifactStore,
) -> _Decoding:
    taken = model.raw_columns
    logged = reading.logged_columns(home, query.model, query.window)
    types = {
        f.name.removeprefix(log.FEATURE): f.type for f in logged if f.name.startswith(log.FEATURE)
    }
    numeric = tuple(n for n in taken.numeric if n in types and not pa.types.is_string(types[n]))
    categorical = tuple(n for n in taken.categorical if n in types)
    if not (categorical or numeric):
        raise DataContractError(
            f"the prediction log of {query.model} has none of the {len(taken.numeric)} numbers "
            f"and {len(taken.categorical)} categories of version {model.version.version}; "
            "expected some of them. Are all masked or left out? Nothing was compared"
        )
    own = reference.snapshot.columns
    baseline = own.baseline if own.baseline in numeric else None
    kept = {"categorical": categorical, "numeric": numeric, "baseline": baseline}
    rows = store.path(reference.snapshot.data)
    words = {name: _codes_of(rows, name) for name in categorical}
    for name in (n for n in categorical if pa.types.is_string(types[n])):
        mask = log.open_mask(home)
        words[name] = {mask.text(code): word for code, word in words[name].items()}
    hidden = {*taken.categorical, *taken.numeric} - {*categorical, *numeric}
    left_out = tuple(n for n in (*taken.categorical, *taken.numeric) if n in hidden)
    return _Decoding(own.model_copy(update=kept), words, left_out, offset)


def _codes_of(rows: Path, name: str) -> dict[str, str | None]:
    """Codes of a category's words in the reference; None for a missing one."""
    seen: set[str] = set()
    for batch in ds.dataset(rows, format="parquet").to_batches(columns=[name]):
        seen.update(pc.unique(batch.column(0).cast(pa.string())).drop_null().to_pylist())
    words: dict[str, str | None] = {str(category_code(w)): w for w in sorted(seen) if w}
    return words | {str(MISSING_CODE): None}


def _write(
    folder: StagedFolder,
    home: Path,
    query: reading.LogQuery,
    decoding: _Decoding,
    reference: ValidatedDataset,
    window: TimeWindow,
    now: datetime,
    program_sha256: str,
) -> ServedWindow:
    """Write rows and scores, and the value that names them."""
    joined, read = JoinTally(), reading.ReadTally()
    columns = [log.EVENT_TIME, log.SCORE, log.SCORES, *decoding.features]
    tables = labelled_rows(
        home, query, columns, known_by=now, tally=joined, read=read, shift=-decoding.offset
    )
    schema, scores = decoding.schemas()
    with (
        pq.ParquetWriter(folder.path / "data.parquet", schema) as data_file,
        pq.ParquetWriter(folder.path / "scores.parquet", scores) as score_file,
    ):
        start = 0
        for table in tables:
            _check_scores(table, query, len(decoding.columns.classes))
            rows = decoding.decoded(table, start)
            start += table.num_rows
            data_file.write_table(rows.select(schema.names).cast(schema))
            score_file.write_table(rows.select(scores.names).cast(scores))
    facts = {
        "checked": ["each score is a finite number", "each row was answered by this version"],
        **{"parts": read.parts, "rows": joined.rows, "damaged": read.damaged},
    }
    (folder.path / "validation.json").write_text(json.dumps(facts))
    of_served = {
        "data": folder.artifact("data.parquet"),
        "num_rows": joined.rows,
        "window": window,
        "tables_version": SUITE,
        "excluded": (),
        **dict.fromkeys(("positive_rate", "label_summary", "pins", "parts")),
    }
    like_reference = reference.snapshot.model_copy(update={"columns": decoding.columns})
    snapshot = like_reference.model_copy(update=of_served)
    validation = ValidationResult(
        suite=SUITE,
        subject="served",
        subject_sha256=snapshot.data.sha256,
        num_rows=joined.rows,
        num_expectations=2,
        result=folder.artifact("validation.json"),
        warnings=tuple(read.damaged),
    )
    assert query.window is not None
    return ServedWindow(
        dataset=ValidatedDataset(snapshot=snapshot, validation=validation),
        reference=reference.model_copy(update={"snapshot": like_reference}),
        scores=folder.artifact("scores.parquet"),
        program_sha256=program_sha256,
        logged=query.window,
        num_labelled=joined.labelled,
        left_out=decoding.left_out,
        told=_described(query, joined, read, decoding.left_out),
    )


def _lists(table: pa.Table, num_classes: int) -> NDArray[np.float32]:
    """Scores of several classes, shape (rows, classes); NaN where a row has not as many."""
    found = np.full((table.num_rows, num_classes), np.nan, dtype=np.float32)
    lengths = pc.fill_null(pc.list_value_length(table.column(log.SCORES)), 0).to_numpy()
    fits = lengths == num_classes
    flat = pc.list_flatten(table.column(log.SCORES).filter(pa.array(fits))).to_numpy()
    found[fits] = flat.reshape(-1, num_classes)
    return found


def _check_scores(table: pa.Table, query: reading.LogQuery, num_classes: int) -> None:
    finite = pc.sum(pc.is_finite(table.column(log.SCORE))).as_py() or 0
    if num_classes:
        finite = int(np.isfinite(_lists(table, num_classes)).all(axis=1).sum())
    if finite < table.num_rows:
        raise DataContractError(
            f"{table.num_rows - finite:,} answers of version {query.versions} of {query.model} in "
            f"{query.window} are no single finite number; expected one score a row, or "
            f"{num_classes} of classes. Nothing was compared"
        )


def _described(
    query: reading.LogQuery, joined: JoinTally, read: reading.ReadTally, left_out: Sequence[str]
) -> str:
    sentences = [
        f"the current rows are of the prediction log: {joined.rows:,} that version "
        f"{', '.join(query.versions or ())} answered as {STABLE} in {query.window}, "
        f"{joined.labelled:,} of them with a label"
    ]
    if left_out:
        hidden = first_of(left_out, MOST_NAMED)
        sentences.append(f"not compared, since the log hides them: {hidden}")
    if read.damaged:
        sentences.append(f"{len(read.damaged)} damaged part(s) of the log were left out")
    return "; ".join(sentences)


def _moved(moments: pa.ChunkedArray, offset: timedelta) -> pa.ChunkedArray:
    """Moments of the server's clock in the use case's time."""
    return pc.subtract(moments, pa.scalar(offset, pa.duration("us"))).cast(log.MOMENT_TYPE)
