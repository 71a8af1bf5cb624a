"""The prediction log of a server: an observer that never waits, and a thread that writes.

    loop: served(batch) --deque, bounded--> thread: columns, a few times a second --> Parquet

The loop only appends what it was given. The thread turns batches into Arrow tables soon, so that
the calls themselves are let go of, and writes tables as segments when enough rows or seconds are
together. What finds no place is dropped and counted, with the reason.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from serving.errors import ServingError
from serving.interfaces import Call, ServedBatch, Track
from serving.log.columns import Layout, Refusal
from serving.security.config import Rate
from serving.security.guard import Buckets
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

logger = logging.getLogger(__name__)
NICE = 10
END_S = 2.0
"""What is being merged when the log ends is left as it was, and done by the next one."""
LOOK_S, DRAIN_S, DRAIN_ROWS = 0.05, 0.5, 2000
"""The thread looks so often, and makes a table of so many rows, or of fewer after `DRAIN_S`.

A table costs half a millisecond beside its rows, and holds the interpreter while it is made: so
neither for each few rows, nor for very many at one time.
"""
RETRY_S = 5.0
"""After a refusal of the disk."""
CALL_BYTES = 1200
"""About what a call and its request take in memory beside their rows."""
FAULTS = frozenset({"backend", "deadline", "internal", "not_computed", "not_ready"})
"""Reasons that may be a version's own fault: those are what releases are judged by."""
RATES = {"fault": Rate(per_s=FAULTS_PER_S, burst=int(FAULTS_PER_S))}
UNWRITABLE = (pa.ArrowException, FalajError, ValueError, KeyError, TypeError)
"""Of rows that are no table."""
Key = tuple[str, str, date]
"""Model, version and UTC day: the rows of one segment."""
SignatureOf = Callable[[str, str], Signature]
"""Model and version to signature; called on the loop, of versions that have just answered."""
VersionOf = Callable[[str, Track], str | None]
"""Which version a model's track names; called on the loop."""
FieldsOf = Callable[[], tuple[Mapping[str, Iterable[str]], bool]]
"""Fields of each model that is ready, keys of entities too; whether these are all there are."""


class PredictionLog:
    """Writes what was served below `<home>/predictions`; see `tasks.predictions.schema`.

    `start` before the first call, `stop` after the last one.

    Nothing is written before it is known that each hidden field is one of a served model: a
    misspelt name would be written openly. A process may start before any model is registered, so
    this is looked at when the first batch comes, at the latest.

    Args:
        config: what is logged and how.
        home: state folder.
        signature_of: of a model's version; how the features of a batch are named.
        fields_of: what may be hidden; a name that a client made up as a model makes no folder.
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
        fields_of: FieldsOf = lambda: ({}, True),
        version_of: VersionOf = lambda model, track: None,
    ) -> None:
        self._config, self._home = config, home
        self._signature_of, self._fields_of, self._version_of = signature_of, fields_of, version_of
        self._mask = open_mask(home) if config.masked else None
        self._layouts: dict[tuple[str, str], Layout] = {}
        self._plain = Layout(None, config, self._mask)
        self._models: set[str] = set()
        self._checked: bool | None = None
        """Whether the hidden fields are known; None where that has to be asked yet."""
        self._buckets = Buckets(Rate(per_s=REFUSALS_PER_S, burst=int(REFUSALS_PER_S)), 2, RATES)
        self._queue: deque[tuple[ServedBatch, int, int]] = deque()
        self._refusals: deque[Refusal] = deque()
        # Each number has one writer, the loop or the thread, so that none needs a lock.
        self._rows_in = self._rows_drained = self._rows_out = 0
        self._bytes_in = self._bytes_drained = 0
        self._dropped_by_loop: Counter[str] = Counter()
        self._dropped_by_thread: Counter[str] = Counter()
        self._refused = 0
        self._drained_at = self._pending_since = self._retry_at = 0.0
        self._pending: dict[Key, list[pa.Table]] = {}
        self._written_rows = self._written_parts = self._written_bytes = self._failures = 0
        self._trouble = ""
        self._stopping, self._cut_off = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._writer: SegmentWriter

    def check(self) -> None:
        """Refuse to hide a field that no model has, once their fields are known.

        Raises:
            ConfigurationError: a name of `masked` or `left_out` is unknown.
        """
        fields, is_whole = self._fields_of()
        if not (fields or is_whole):
            return
        self._models.update(fields)
        known = {SUBJECT}.union(*fields.values())
        for setting in ("masked", "left_out"):
            if unknown := sorted(set(getattr(self._config, setting)) - known):
                if not is_whole:
                    return
                self._checked = False
                raise ConfigurationError(
                    f"log.{setting} names {', '.join(map(repr, unknown))}, which no served model "
                    f"has; expected of {', '.join(sorted(known))}. Nothing is logged, so that no "
                    "field that was to be hidden is written"
                )
        self._checked = True

    def start(self) -> None:
        """Begin to write; leftovers of processes that were killed are removed.

        Raises:
            StorageError: the folder cannot be written.
        """
        if not self._config.enabled:
            return
        self._writer = SegmentWriter(self._home)
        self._thread = threading.Thread(target=self._run, name="prediction-log", daemon=True)
        self._upkeep = threading.Thread(target=self._keep_up, name="prediction-upkeep", daemon=True)
        self._thread.start()
        self._upkeep.start()

    def stop(self, deadline_s: float = STOP_S) -> None:
        """Write what is left and end; what is not written by the deadline is dropped and counted.

        It waits, so an event loop has to call it on a thread.
        """
        if self._thread is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._upkeep.join(END_S)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._cut_off = True
        else:
            self._writer.close()
        if left := self.queued_rows:
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
            self.queued_rows + rows > self._config.queue_rows
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
        """Queue a refusal where the rate allows it; on the loop's thread. A flood is counted."""
        self._refused += 1
        if not self._is_open(1):
            return
        now = time.monotonic()
        if call.model not in self._models:
            self._dropped_by_loop["refusal_unknown_model"] += 1
        elif self._buckets.take("fault" if error.reason in FAULTS else "other"):
            self._dropped_by_loop["refusal_rate"] += 1
        elif self.queued_rows + len(self._refusals) >= self._config.queue_rows:
            self._dropped_by_loop[self._trouble or "queue_full"] += 1
        else:
            version = call.version or self._version_of(call.model, call.track) or ""
            # The queue is bounded by rows, and arrays of one call may be large: they are let go.
            kept = replace(call, inputs={}, entities=None, features=None)
            self._refusals.append(Refusal(kept, version, error.reason, time.time(), now))

    def _is_open(self, rows: int) -> bool:
        """Whether rows can be logged; else they are counted, where anybody asked for them."""
        if self._thread is None or self._stopping.is_set():
            if self._config.enabled:
                self._dropped_by_loop["not_running"] += rows
            return False
        if self._checked is None:
            try:
                self.check()
            except ConfigurationError as exc:
                logger.error("no prediction is logged: %s", exc)
        if not self._checked:
            self._dropped_by_loop["unchecked"] += rows
        return bool(self._checked)

    @property
    def queued_rows(self) -> int:
        """Rows in memory that are not written yet."""
        return self._rows_in - self._rows_out

    def counters(self) -> dict[str, Any]:
        """Numbers for metrics; all but `queued_rows` and `failing` only grow.

        `dropped_rows` counts rows by reason, of refusals requests: `queue_full`, `disk` (the queue
        was full because the disk refuses), `error`, `stopped`, `not_running`, `unchecked` (a hidden
        field may be named wrongly), `refusal_rate`, `refusal_unknown_model`.
        """
        dropped = self._dropped_by_loop + self._dropped_by_thread
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
        signature = None
        try:
            signature = self._signature_of(model, version)
        except ServingError as exc:
            text = "%s version %s is logged without features: its signature is gone (%s)"
            logger.warning(text, model, version, exc)
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
            self._drain(time.monotonic())
            if not self._pending:
                return
            if not self._flush(time.monotonic()):
                time.sleep(LOOK_S)

    def _step(self, now: float) -> None:
        waiting = self._rows_in - self._rows_drained
        rested = now - self._drained_at >= DRAIN_S
        if waiting >= DRAIN_ROWS or (rested and (waiting or self._refusals)):
            self._drain(now)
        rows = sum(_rows_of(tables) for tables in self._pending.values())
        is_due = rows >= min(FLUSH_ROWS, self._config.queue_rows) or (
            rows and now - self._pending_since >= self._config.flush_s - DRAIN_S
        )
        if is_due and now >= self._retry_at:
            self._flush(now)

    def _drain(self, now: float) -> None:
        """Turn queued batches and refusals into tables."""
        groups: dict[tuple[str, str], list[ServedBatch]] = {}
        while self._queue:
            batch, rows, num_bytes = self._queue.popleft()
            groups.setdefault((batch.served.model, batch.served.version), []).append(batch)
            self._rows_drained += rows
            self._bytes_drained += num_bytes
        self._drained_at = now
        for key, batches in groups.items():
            self._take(key, batches, now)
        refusals: dict[str, list[Refusal]] = {}
        while self._refusals:
            refusal = self._refusals.popleft()
            refusals.setdefault(refusal.call.model, []).append(refusal)
        for model, some in refusals.items():
            self._rows_out -= len(some)  # the loop did not count them in, and they wait now
            self._keep(model, "", self._plain.refused(some), now)

    def _take(self, key: tuple[str, str], batches: list[ServedBatch], now: float) -> None:
        """Keep a version's rows as a table. A batch that is no table costs itself."""
        try:
            self._keep(*key, self._layouts[key].table(batches), now)
        except UNWRITABLE as exc:
            if len(batches) > 1:
                for batch in batches:
                    self._take(key, [batch], now)
                return
            self._drop(sum(call.num_rows for call in batches[0].calls))
            logger.error("a batch of %s version %s cannot be logged: %s", *key, exc)

    def _keep(self, model: str, version: str, table: pa.Table, now: float) -> None:
        if not self._pending:
            self._pending_since = now
        days = pc.floor_temporal(table.column(EVENT_TIME), unit="day")
        for day in (found := pc.unique(days)):
            rows = table if len(found) == 1 else table.filter(pc.equal(days, day))
            self._pending.setdefault((model, version, day.as_py().date()), []).append(rows)

    def _drop(self, rows: int) -> None:
        self._dropped_by_thread["error"] += rows
        self._rows_out += rows

    def _flush(self, now: float) -> bool:
        """Write all pending tables; False where the disk refused, and they are kept."""
        for key in sorted(self._pending, key=lambda key: (key[2], key[0], key[1])):
            rows = _rows_of(self._pending[key])
            try:
                self._write(key, self._pending[key])
            except (OSError, FalajError) as exc:
                self._note_failure(exc, now)
                return False
            except UNWRITABLE as exc:
                logger.error("rows of %s version %s of %s cannot be written: %s", *key, exc)
                self._drop(rows)
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
        model, _, day = key
        table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        file = self._writer.write(iter([table]), table.schema, day_folder(self._home, model, day))
        self._written_bytes += file.stat().st_size

    def _note_failure(self, exc: Exception, now: float) -> None:
        is_new = not self._trouble
        # Before it is counted: who sees a failure in the counters sees that the log is failing.
        self._trouble, self._retry_at = "disk", now + RETRY_S
        self._failures += 1
        if is_new:
            logger.error(
                "the prediction log cannot be written (%s): rows are kept in memory, %d at most, "
                "and then dropped and counted. Free space, or mend the folder's permissions",
                *(exc, self._config.queue_rows),
            )

    def _keep_up(self) -> None:
        """On a thread of its own: see to old days and small parts, at once and then often."""
        with suppress(OSError):  # where it may not, it works like any other thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopping.is_set():
            try:
                with SegmentWriter(self._home) as writer:
                    now = datetime.now(UTC)
                    keep_up(self._home, writer, self._config, now, self._stopping.is_set)
            except (OSError, FalajError, pa.ArrowException) as exc:  # it costs no prediction
                logger.warning("the prediction log could not be seen to: %s", exc)
            self._stopping.wait(UPKEEP_S)


def _rows_of(tables: Iterable[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)
