"""The prediction log of a server: an observer that never waits, and a thread that writes.

    loop: served(batch) --deque, bounded--> thread: columns, a few times a second --> Parquet

The loop only appends what it was given. The thread turns batches into Arrow tables soon, so that
the calls themselves are let go of, and writes tables as segments when enough rows or seconds are
together. What finds no place is dropped and counted, with the reason.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from serving.errors import ServingError
from serving.interfaces import Call, ServedBatch, Track
from serving.log.columns import Layout, Refusal
from tasks.contracts.conversion import Signature
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.predictions.config import (
    FAULTS_PER_S,
    FLUSH_ROWS,
    QUEUE_BYTES,
    REFUSALS_PER_S,
    STOP_S,
    UPKEEP_S,
    PredictionLogConfig,
)
from tasks.predictions.schema import EVENT_TIME, SUBJECT, day_folder, open_mask
from tasks.predictions.segments import SegmentWriter
from tasks.predictions.upkeep import keep_up

NICE = 10
END_S = 2.0
"""What is being merged when the log ends is left as it was, and done by the next one."""


VersionOf = Callable[[str, Track], str | None]
"""Which version a model's track names; called on the loop."""

FAULTS = frozenset({"backend", "deadline", "internal", "not_computed", "not_ready"})
"""Reasons that may be a version's own fault: those are what releases are judged by."""


class Bucket:
    """Lets so many through a second on average, and as many at once."""

    def __init__(self, rate: float) -> None:
        self._rate = self._tokens = rate
        self._at = time.monotonic()

    def take(self, now: float) -> bool:
        """Whether one more may pass."""
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


Key = tuple[str, str, date]
"""Model, version and UTC day: the rows of one segment."""
logger = logging.getLogger(__name__)

LOOK_S, DRAIN_S, DRAIN_ROWS = 0.05, 0.5, 2000
"""The thread looks so often, and makes a table of so many rows, or of fewer after `DRAIN_S`.

A table costs half a millisecond beside its rows, and holds the interpreter while it is made: so
neither for each few rows, nor for very many at one time.
"""
RETRY_S = 5.0
"""After a refusal of the disk."""
CALL_BYTES = 1200
"""About what a call and its request take in memory beside their rows."""

SignatureOf = Callable[[str, str], Signature]
"""Model and version to signature; called on the loop, of versions that have just answered."""
EXPECTED_ERRORS = (OSError, FalajError, pa.ArrowException, ValueError, KeyError, TypeError)


class PredictionLog:
    """Writes what was served below `<home>/predictions`; see `tasks.predictions.schema`.

    `start` before the first call, `stop` after the last one.

    Args:
        config: what is logged and how.
        home: state folder.
        signature_of: of a model's version; how the features of a batch are named.
        version_of: which version a track names, for requests that are refused.

    Raises:
        ConfigurationError: the key for masked fields is spoilt, or open to others.
        StorageError: the folder cannot be written.
    """

    def __init__(
        self,
        config: PredictionLogConfig,
        home: Path,
        signature_of: SignatureOf,
        version_of: VersionOf = lambda model, track: None,
    ) -> None:
        self._config = config
        self._home = home
        self._signature_of = signature_of
        self._mask = open_mask(home) if config.masked else None
        self._layouts: dict[tuple[str, str], Layout] = {}
        self._plain = Layout(None, config, self._mask)
        self._queue: deque[tuple[ServedBatch, int, int]] = deque()
        self._refusals: deque[Refusal] = deque()
        self._limit_rows = config.queue_rows
        # Each number has one writer, the loop or the thread, so that none needs a lock.
        self._rows_in = self._rows_out = self._bytes_in = self._bytes_drained = 0
        self._dropped_by_loop: Counter[str] = Counter()
        self._dropped_by_thread: Counter[str] = Counter()
        self._version_of = version_of
        self._faults, self._others = Bucket(FAULTS_PER_S), Bucket(REFUSALS_PER_S)
        self._models: set[str] = set()
        """Models that are known: a name that a client made up makes no folder."""
        self._refused = 0
        self._rows_drained, self._drained_at = 0, 0.0
        self._pending: dict[Key, list[pa.Table]] = {}
        self._pending_since = 0.0
        self._written_rows = self._written_parts = self._written_bytes = self._failures = 0
        self._trouble = ""
        self._retry_at = 0.0
        self._stopping = threading.Event()
        self._cut_off = False
        self._thread: threading.Thread | None = None
        self._writer: SegmentWriter | None = None
        self._upkeep = threading.Thread(target=self._keep_up, name="prediction-upkeep", daemon=True)

    def check_names(
        self, signatures: Mapping[str, Signature], entity_keys: Mapping[str, Iterable[str]]
    ) -> None:
        """Refuse to hide a field that no model has: a misspelt name would be written openly.

        Args:
            signatures: of every model that is served.
            entity_keys: of the models that take entities.

        Raises:
            ConfigurationError: a name of `masked` or `left_out` is unknown.
        """
        self._models.update(signatures)
        known = {SUBJECT}
        for signature in signatures.values():
            known.update(name for spec in signature.inputs for name in spec.columns)
        for keys in entity_keys.values():
            known.update(keys)
        for setting in ("masked", "left_out"):
            unknown = sorted(set(getattr(self._config, setting)) - known)
            if unknown:
                raise ConfigurationError(
                    f"log.{setting} names {', '.join(map(repr, unknown))}, which no served model "
                    f"has; expected of {', '.join(sorted(known))}. Nothing is served, so that no "
                    "field that was to be hidden is written"
                )

    def start(self) -> None:
        """Begin to write; leftovers of processes that were killed are removed.

        Raises:
            StorageError: the folder cannot be written.
        """
        if not self._config.enabled:
            return
        self._writer = SegmentWriter(self._home)
        self._thread = threading.Thread(target=self._run, name="prediction-log", daemon=True)
        self._thread.start()
        self._upkeep.start()

    def stop(self, deadline_s: float = STOP_S) -> None:
        """Write what is left and end; what is not written by the deadline is dropped and counted.

        It waits, so an event loop has to call it on a thread.

        Args:
            deadline_s: seconds.
        """
        if self._thread is None or self._writer is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._upkeep.join(END_S)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._cut_off = True
        else:
            self._writer.close()
        left = self.queued_rows
        if left:
            self._dropped_by_loop["stopped"] += left
            logger.error("the server stopped before %d predictions were logged", left)

    def served(self, batch: ServedBatch) -> None:
        """Queue a batch; on the loop's thread, a microsecond."""
        rows = sum([call.num_rows for call in batch.calls])
        if not self._is_open(rows):
            return
        num_bytes = CALL_BYTES * len(batch.calls)
        for values in batch.inputs.values():
            num_bytes += 2 * values.nbytes
        if (
            self._rows_in - self._rows_out + rows > self._limit_rows
            or self._bytes_in - self._bytes_drained + num_bytes > QUEUE_BYTES
        ):
            self._dropped_by_loop[self._trouble or "queue_full"] += rows
            return
        key = (batch.served.model, batch.served.version)
        if key not in self._layouts:
            self._meet(*key)
        self._rows_in += rows
        self._bytes_in += num_bytes
        self._queue.append((batch, rows, num_bytes))

    def refused(self, call: Call, error: ServingError) -> None:
        """Queue a refusal where the rate allows it; on the loop's thread."""
        self._refused += 1
        if not self._is_open(1):
            return
        judged = self._judged(call, error)
        if isinstance(judged, str):
            self._dropped_by_loop[judged] += 1
        elif self.queued_rows + len(self._refusals) >= self._limit_rows:
            self._dropped_by_loop[self._trouble or "queue_full"] += 1
        else:
            self._refusals.append(judged)

    def _is_open(self, rows: int) -> bool:
        """Whether rows can be logged; else they are counted, where anybody asked for them."""
        if self._thread is not None and not self._stopping.is_set():
            return True
        if self._config.enabled:
            self._dropped_by_loop["not_running"] += rows
        return False

    def _judged(self, call: Call, error: ServingError) -> Refusal | str:
        """What is to be written of a call, or why nothing is; a flood is only counted."""
        if call.model not in self._models:
            return "refusal_unknown_model"
        now = time.monotonic()
        if not (self._faults if error.reason in FAULTS else self._others).take(now):
            return "refusal_rate"
        waited = now - call.arrived
        return Refusal(
            model=call.model,
            request_id=call.request_id,
            version=call.version or self._version_of(call.model, call.track) or "",
            track=call.track,
            subject=call.subject,
            num_rows=call.num_rows,
            error=error.reason,
            arrived_at=time.time() - waited,
            latency_us=round(waited * 1e6),
        )

    def unchecked(self, rows: int) -> None:
        """Count rows that were not handed over: a hidden field may be named wrongly."""
        self._dropped_by_loop["unchecked"] += rows

    @property
    def queued_rows(self) -> int:
        """Rows in memory that are not written yet."""
        return self._rows_in - self._rows_out

    def counters(self) -> dict[str, Any]:
        """Numbers for metrics; all but `queued_rows` and `failing` only grow.

        `dropped_rows` counts rows by reason, of refusals requests: `queue_full`, `disk` (the queue
        was full because the disk refuses), `error`, `stopped`, `not_running`, `unchecked` (see the
        method), `refusal_rate`, `refusal_unknown_model`.
        """
        dropped = Counter(self._dropped_by_loop)
        dropped.update(self._dropped_by_thread)
        return {
            "logged_rows": self._written_rows,
            "logged_parts": self._written_parts,
            "logged_bytes": self._written_bytes,
            "refused_requests": self._refused,
            "write_failures": self._failures,
            "queued_rows": self.queued_rows,
            "failing": float(bool(self._trouble)),
            "dropped_rows": dict(sorted(dropped.items())),
        }

    def _meet(self, model: str, version: str) -> None:
        """Remember how the features of a version are named, at its first batch."""
        self._models.add(model)
        try:
            signature = self._signature_of(model, version)
        except ServingError as exc:
            logger.warning(
                "%s version %s answered, and its signature is gone (%s): its predictions are "
                "logged without features",
                *(model, version, exc),
            )
            signature = None
        self._layouts[model, version] = Layout(signature, self._config, self._mask)

    # From here on: the thread.

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self._step(time.monotonic())
            except Exception:  # a log that ended in silence would be worse than a repeated line
                self._failures += 1
                logger.exception("the prediction log met something unforeseen; it goes on")
        while not self._cut_off:
            self._drain()
            if not self._pending:
                return
            if not self._flush(time.monotonic()):
                time.sleep(LOOK_S)

    def _step(self, now: float) -> None:
        waiting = self._rows_in - self._rows_drained
        rested = now - self._drained_at >= DRAIN_S
        if waiting >= DRAIN_ROWS or (rested and (waiting or self._refusals)):
            self._drain()
        if now >= self._retry_at and self._is_due(now):
            self._flush(now)

    def _is_due(self, now: float) -> bool:
        if not self._pending:
            return False
        rows = sum(_rows_of(tables) for tables in self._pending.values())
        is_old = now - self._pending_since >= self._config.flush_s - DRAIN_S
        return is_old or rows >= min(FLUSH_ROWS, self._limit_rows)

    def _drain(self) -> None:
        """Turn queued batches into tables."""
        groups: dict[tuple[str, str], list[ServedBatch]] = {}
        while self._queue:
            batch, rows, num_bytes = self._queue.popleft()
            groups.setdefault((batch.served.model, batch.served.version), []).append(batch)
            self._rows_drained += rows
            self._bytes_drained += num_bytes
        now = self._drained_at = time.monotonic()
        for key, batches in groups.items():
            self._take(key, batches, now)
        if self._refusals:
            self._take_refusals(now)

    def _take(self, key: tuple[str, str], batches: list[ServedBatch], now: float) -> None:
        """Keep a version's rows as a table. A batch that is no table costs itself."""
        try:
            table = self._layouts[key].table(batches)
        except EXPECTED_ERRORS as exc:
            if len(batches) > 1:
                for batch in batches:
                    self._take(key, [batch], now)
                return
            self._drop(sum(call.num_rows for call in batches[0].calls), "error")
            logger.error("a batch of %s version %s cannot be logged: %s", *key, exc)
            return
        self._keep(*key, table, now)

    def _keep(self, model: str, version: str, table: pa.Table, now: float) -> None:
        if not self._pending:
            self._pending_since = now
        days = pc.floor_temporal(table.column(EVENT_TIME), unit="day")
        for day in (found := pc.unique(days)):
            rows = table if len(found) == 1 else table.filter(pc.equal(days, day))
            self._pending.setdefault((model, version, day.as_py().date()), []).append(rows)

    def _take_refusals(self, now: float) -> None:
        by_model: dict[str, list[Refusal]] = {}
        while self._refusals:
            refusal = self._refusals.popleft()
            by_model.setdefault(refusal.model, []).append(refusal)
        for model, refusals in by_model.items():
            self._rows_out -= len(refusals)  # the loop did not count them in, and they wait now
            self._keep(model, "", self._plain.refused(refusals), now)

    def _drop(self, rows: int, reason: str) -> None:
        self._dropped_by_thread[reason] += rows
        self._rows_out += rows

    def _flush(self, now: float) -> bool:
        """Write all pending tables; False where the disk refused, and they are kept."""
        for key in sorted(self._pending, key=lambda key: (key[2], key[0], key[1])):
            tables = self._pending[key]
            rows = _rows_of(tables)
            try:
                self._write(key, tables)
            except OSError as exc:
                self._note_failure(exc, now)
                return False
            except (pa.ArrowException, ValueError, TypeError, KeyError) as exc:
                logger.error("rows of %s version %s of %s cannot be written: %s", *key, exc)
                self._drop(rows, "error")
            else:
                self._rows_out += rows
                self._written_rows += rows
                self._written_parts += 1
            del self._pending[key]
        if self._trouble:
            logger.warning("the prediction log is written again")
        self._trouble = ""
        return True

    def _write(self, key: Key, tables: list[pa.Table]) -> None:
        assert self._writer is not None
        model, _, day = key
        table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        file = self._writer.write(iter([table]), table.schema, day_folder(self._home, model, day))
        self._written_bytes += file.stat().st_size

    def _keep_up(self) -> None:
        """On a thread of its own: see to old days and small parts, at once and then often."""
        with suppress(OSError):  # where it may not, it works like any other thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopping.is_set():
            stops, now = self._stopping.is_set, datetime.now(UTC)
            try:
                with SegmentWriter(self._home) as writer:
                    keep_up(self._home, writer, self._config, now, stops)
            except (OSError, FalajError, pa.ArrowException) as exc:  # it costs no prediction
                logger.warning("the prediction log could not be seen to: %s", exc)
            self._stopping.wait(UPKEEP_S)

    def _note_failure(self, exc: OSError, now: float) -> None:
        self._failures += 1
        if not self._trouble:
            logger.error(
                "the prediction log cannot be written (%s): rows are kept in memory, %d at most, "
                "and then dropped and counted. Free space, or mend the folder's permissions",
                *(exc, self._config.queue_rows),
            )
        self._trouble = "disk"
        self._retry_at = now + RETRY_S


def _rows_of(tables: Iterable[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)
