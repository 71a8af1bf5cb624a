"""Batches as an engine tells of them, and logs written from them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from numpy.typing import NDArray

from serving.interfaces import Call, Served, ServedBatch, Track
from serving.log.prediction_log import PredictionLog
from tasks.contracts.conversion import Signature, tabular_signature
from tasks.predictions.config import PredictionLogConfig
from tasks.predictions.reading import LogQuery, ReadTally, read_rows
from tests.support.data.builders import COLUMNS
from tests.support.data.builders import frame as any_frame
from tests.support.evaluation.programs import LateRate

MODEL = "flight-delay"
SIGNATURE = tabular_signature(COLUMNS)
NOW = datetime(2090, 11, 20, 12, 0, tzinfo=UTC)
"""Of a day that no machine's clock shows as finished: its parts are merged when a test says so."""


def served(version: str = "1", track: Track = "stable") -> Served:
    return Served(MODEL, version, "onnx-fp32", track, "cpu")


def call(rows: int, request_id: str, **changes: Any) -> Call:
    return Call(MODEL, {}, rows, request_id, **changes)


def batch_of(
    frame: pd.DataFrame,
    ids: Sequence[str],
    by: Served | None = None,
    rows_each: int = 1,
    at: datetime = NOW,
    scores: NDArray[Any] | None = None,
    subject: str = "",
) -> ServedBatch:
    """One batch of calls with the rows of a frame, answered by the network of the tests."""
    categorical, numeric = COLUMNS.model_inputs(frame)
    if scores is None:
        with torch.inference_mode():
            answer = LateRate()(torch.from_numpy(categorical), torch.from_numpy(numeric))
        scores = answer.numpy().astype(np.float32)
    now = time.monotonic()
    calls = tuple(call(rows_each, name, subject=subject, arrived=now - 0.002) for name in ids)
    return ServedBatch(
        calls=calls,
        inputs={"categorical": categorical, "numeric": numeric},
        outputs={"score": scores},
        served=by or served(),
        started=now - 0.001,
        finished=now,
        finished_at=at.timestamp() + 0.002,
    )


def entity_batch(
    ids: Sequence[str],
    keys: Mapping[str, Sequence[Any]],
    at: datetime,
    by: Served | None = None,
    scores: NDArray[Any] | None = None,
) -> ServedBatch:
    """One batch of requests of a row each, by entity keys, that all arrived at one moment."""
    batch = batch_of(any_frame(50).sample(len(ids), replace=True, random_state=0), ids, by, 1, at)
    for number, one in enumerate(batch.calls):
        one.entities = {key: [values[number]] for key, values in keys.items()}
        one.arrived = batch.finished
    outputs = batch.outputs if scores is None else {"score": scores}
    return replace(batch, outputs=outputs, finished_at=at.timestamp())


def signature_of(model: str, version: str) -> Signature:
    """As an engine gives it."""
    return SIGNATURE


def fields(*keys: str, is_whole: bool = True) -> tuple[dict[str, set[str]], bool]:
    """What may be hidden: columns of the model, `subject`, and these keys."""
    columns = {name for spec in SIGNATURE.inputs for name in spec.columns}
    return {MODEL: columns | set(keys)}, is_whole


@contextmanager
def open_log(
    home: Path,
    known: Callable[[], Any] = fields,
    answering: Callable[..., Any] = lambda model, track: None,
    **changes: Any,
) -> Iterator[PredictionLog]:
    """A log that writes below a state folder, until the block ends."""
    config = PredictionLogConfig(**changes)
    log = PredictionLog(config, home, signature_of, known, answering)
    log.start()
    try:
        yield log
    finally:
        log.stop()


def rows_of(
    home: Path,
    columns: Sequence[str] | None = None,
    tally: ReadTally | None = None,
    model: str = MODEL,
    **query: Any,
) -> pd.DataFrame:
    """What the log holds, refused requests too where nothing else is said."""
    wanted = LogQuery(model, **{"answered": None, **query})
    tables = list(read_rows(home, wanted, columns, tally=tally))
    rows: pd.DataFrame = pa.concat_tables(tables).to_pandas() if tables else pd.DataFrame()
    return rows


def log_frame(
    home: Path, frame: pd.DataFrame, offset: timedelta, by: Served | None = None, size: int = 64
) -> int:
    """Log rows as if each was asked for at its event time, moved by `offset`; how many."""
    with open_log(home, retention_days=36_500) as log:
        for start in range(0, len(frame), size):
            some = frame.iloc[start : start + size]
            moment = some[COLUMNS.event_time].iloc[0].to_pydatetime() + offset
            ids = [f"r-{n}" for n in some[COLUMNS.row_id]]
            log.served(batch_of(some, ids, by, at=moment))
    counters = log.counters()
    assert counters["logged_rows"] == len(frame), counters
    return int(counters["logged_rows"])
