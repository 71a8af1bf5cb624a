"""Tables of the prediction log from batches: whole columns at a time, never row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from serving.interfaces import Array, Call, Served, ServedBatch
from tasks.contracts.conversion import Signature
from tasks.features.online.answer import LABELS
from tasks.predictions import schema as log
from tasks.predictions.config import MAX_ANSWER_VALUES, PredictionLogConfig

Columns = dict[str, pa.Array]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that was not answered, without what it brought; by which version and why.

    Attributes:
        at: seconds since 1970 of the refusal; `moment` is the same on `time.monotonic()`.
    """

    call: Call
    version: str
    error: str
    at: float
    moment: float


class Layout:
    """Which columns the rows of one version have, and how each is made.

    Args:
        signature: of the version; None where it is not known: then there are no features.
        config: what is masked and left out.
        mask: makes digests; may be None where nothing is masked.
    """

    def __init__(
        self, signature: Signature | None, config: PredictionLogConfig, mask: log.Mask | None
    ) -> None:
        self._left_out = frozenset(config.left_out)
        self._hidden = frozenset(config.masked)
        self._mask = mask
        self._inputs = [spec for spec in (signature.inputs if signature else ()) if spec.columns]
        self._output = signature.output.name if signature else None

    def table(self, batches: Sequence[ServedBatch]) -> pa.Table:
        """The rows of batches of this version, in order."""
        calls = [call for batch in batches for call in batch.calls]
        rows = np.fromiter((_rows(batch) for batch in batches), np.int64, len(batches))
        spread = _Spread(batches, calls, int(rows.sum()))
        columns: Columns = {
            **_served(batches, rows),
            **_times(batches, rows, spread),
            log.REQUEST_ID: spread.over([call.request_id for call in calls], pa.string()),
            log.REQUEST_ROW: pa.array(spread.row_in_call),
            **self._shown(log.SUBJECT, spread.over([call.subject for call in calls], pa.string())),
            **self._scores(batches),
            **self._features(batches),
        }
        if any(call.entities is not None for call in calls):
            columns |= self._entities(calls)
        return _ordered(columns, spread.num_rows)

    def refused(self, refusals: Sequence[Refusal]) -> pa.Table:
        """One row for each refused request."""
        calls = [refusal.call for refusal in refusals]
        waited = [r.moment - r.call.arrived for r in refusals]
        moments = [round((r.at - late) * 1e6) for r, late in zip(refusals, waited, strict=True)]
        columns: Columns = {
            log.EVENT_TIME: pa.array(moments, pa.int64()).cast(log.MOMENT_TYPE),
            log.REQUEST_ID: pa.array([call.request_id for call in calls], pa.string()),
            log.REQUEST_ROW: pa.array(np.zeros(len(calls), np.int32)),
            log.MODEL: pa.array([call.model for call in calls], pa.string()),
            log.VERSION: pa.array([r.version or None for r in refusals], pa.string()),
            log.TRACK: pa.array([call.track for call in calls], pa.string()),
            **self._shown(log.SUBJECT, pa.array([call.subject for call in calls], pa.string())),
            log.ERROR: pa.array([r.error for r in refusals], pa.string()),
            log.LATENCY_US: pa.array([round(late * 1e6) for late in waited], pa.int64()),
            log.BATCH_ROWS: pa.array([call.num_rows for call in calls], pa.int32()),
        }
        return _ordered(columns, len(refusals))

    def _shown(self, name: str, values: pa.Array, prefix: str = "") -> Columns:
        """The values of a field as they may be written; nothing where they may not."""
        if name in self._left_out:
            return {}
        if name in self._hidden:
            assert self._mask is not None
            values = self._mask.column(values)
        return {prefix + name: values}

    def _features(self, batches: Sequence[ServedBatch]) -> Columns:
        columns: Columns = {}
        for spec in self._inputs:
            rows = _joined([batch.inputs[spec.name] for batch in batches])
            by_column = np.ascontiguousarray(rows.T)  # each in one piece of memory
            for name, values in zip(spec.columns, by_column, strict=True):
                columns |= self._shown(name, pa.array(values), log.FEATURE)
        return columns

    def _scores(self, batches: Sequence[ServedBatch]) -> Columns:
        name = self._output or next(iter(batches[0].outputs))
        values = _joined([batch.outputs[name] for batch in batches])
        flat = values.reshape(len(values), -1)
        if flat.shape[1] == 1:
            return {log.SCORE: pa.array(flat[:, 0].astype(np.float64))}
        if flat.shape[1] > MAX_ANSWER_VALUES:
            return {}
        offsets = np.arange(len(flat) + 1, dtype=np.int32) * flat.shape[1]
        numbers = pa.array(flat.astype(np.float32).reshape(-1))
        return {log.SCORES: pa.ListArray.from_arrays(pa.array(offsets), numbers)}

    def _entities(self, calls: Sequence[Call]) -> Columns:
        """Keys, ages and states of the calls that named entities; null for the others."""
        given = [(_entity_columns(call), call.num_rows) for call in calls]
        columns: Columns = {}
        for name in dict.fromkeys(name for some, _ in given for name in some):
            values: list[Any] = []
            for some, num_rows in given:
                values.extend(some.get(name) or [None] * num_rows)
            # NaN is null: nothing stored.
            made = pa.array(values, log.typed(name), from_pandas=True)
            if name.startswith(log.ENTITY):
                columns |= self._shown(name.removeprefix(log.ENTITY), made, log.ENTITY)
            else:
                columns[name] = made
        return columns


class _Spread:
    """Rows of each call, to spread what is known of a call over its rows."""

    def __init__(self, batches: Sequence[ServedBatch], calls: Sequence[Call], rows: int) -> None:
        self.num_rows = rows
        self._index: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.row_in_call = np.zeros(rows, np.int32)
        if len(calls) != rows:
            counts = np.fromiter((call.num_rows for call in calls), np.int64, len(calls))
            if int(counts.sum()) != rows:
                raise ValueError(
                    f"the calls of {len(batches)} batches have {int(counts.sum())} rows together, "
                    f"their answers {rows}"
                )
            self._index = np.repeat(np.arange(len(calls)), counts)
            starts = np.cumsum(counts) - counts
            self.row_in_call = (np.arange(rows) - starts[self._index]).astype(np.int32)

    def over(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        made = pa.array(values, kind)
        return made if self._index is None else made.take(pa.array(self._index))

    def numbers(self, values: Array) -> Array:
        return values if self._index is None else values[self._index]


def _rows(batch: ServedBatch) -> int:
    for values in batch.outputs.values():
        return len(values)
    raise ValueError("a batch was served without any output")


def _joined(arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


_OF_SERVED = {
    name: attrgetter("track" if name == log.TRACK else name)
    for name in (log.MODEL, log.VERSION, log.VARIANT, log.TRACK, log.HARDWARE)
}


def _served(batches: Sequence[ServedBatch], rows: Array) -> Columns:
    """What answered, as dictionaries: a few values that very many rows share."""
    known: dict[Served, int] = {}
    met: dict[int, int] = {}  # by identity first: hashing costs more, and most are one object
    positions = np.empty(len(batches), np.int32)
    for number, batch in enumerate(batches):
        position = met.get(id(batch.served))
        if position is None:
            position = met[id(batch.served)] = known.setdefault(batch.served, len(known))
        positions[number] = position
    index = pa.array(np.repeat(positions, rows))
    return {
        name: pa.DictionaryArray.from_arrays(index, pa.array(map(value, known), pa.string()))
        for name, value in _OF_SERVED.items()
    }


def _times(batches: Sequence[ServedBatch], rows: Array, spread: _Spread) -> Columns:
    per_batch = [(b.started, b.finished, b.finished_at, len(b.calls)) for b in batches]
    started, finished, finished_at, num_calls = np.array(per_batch, np.float64).T
    arrived = np.array([call.arrived for batch in batches for call in batch.calls])
    of_call = np.repeat(np.arange(len(batches)), num_calls.astype(np.int64))
    waited = finished[of_call] - arrived
    event_us = np.rint((finished_at[of_call] - waited) * 1e6).astype(np.int64)
    compute_us = np.rint((finished - started) * 1e6).astype(np.int64)
    return {
        log.EVENT_TIME: pa.array(spread.numbers(event_us)).cast(log.MOMENT_TYPE),
        log.LATENCY_US: pa.array(spread.numbers(np.rint(waited * 1e6).astype(np.int64))),
        log.COMPUTE_US: pa.array(np.repeat(compute_us, rows)),
        log.BATCH_ROWS: pa.array(np.repeat(rows, rows).astype(np.int32)),
    }


def _entity_columns(call: Call) -> dict[str, list[Any]]:
    """Lists of one call, by column; nothing where it named no entities."""
    if call.entities is None:
        return {}
    columns: dict[str, list[Any]] = {
        log.ENTITY + key: [None if value is None else str(value) for value in values]
        for key, values in call.entities.items()
    }
    answer = getattr(call.features, "answer", call.features)
    for position, view in enumerate(getattr(answer, "view_names", ())):
        columns[log.AGE + view] = [float(age) for age in answer.age_s[position]]
        columns[log.STATE + view] = [LABELS[int(code)] for code in answer.state[position]]
    return columns


def _ordered(columns: Columns, num_rows: int) -> pa.Table:
    """All fixed columns, null where nothing was given, and the others behind them."""
    for field in log.FIXED:
        if field.name not in columns:
            columns[field.name] = pa.nulls(num_rows, field.type)
    names = log.in_order(columns)
    return pa.table([columns[name] for name in names], names=names)
