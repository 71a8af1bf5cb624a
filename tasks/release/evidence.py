"""Reading what two versions did, from the prediction log, and what came of it, from labels.

A row of the log is one row of an answered request, or one refused request. Rows of the stable
version (track `stable`), of the candidate (track `candidate`; alone, track `stable`) and of its
copies (track `shadow`) are found by version and track, and paired by `request_id` and
`request_row`. A label is one of such a pair, so that it holds for all tracks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.kernel.errors import DataContractError, TransientError
from tasks.release.records import Period, Release

STABLE, CANDIDATE, SHADOW = "stable", "candidate", "shadow"
KEY = ["request", "request_row"]
COLUMNS = (
    "request_id",
    "request_row",
    "event_timestamp",
    "version",
    "slot",
    "subject",
    "score",
    "error",
    "latency_us",
    "compute_us",
    "batch_rows",
)
NOT_A_VERSIONS_FAULT = frozenset(
    {"unauthorized", "forbidden", "unknown_model", "too_large", "rate_limited", "client_gone"}
)
"""Refusals before a version was asked; every other one counts as a failure of the version that the
request was for, also where the request may have been at fault: the other version refuses that too,
and what strikes both alike is held against none."""
MAYBE_THE_REQUESTS = frozenset({"bad_request", "features_refused"})
"""Counted only where both versions are compared, not against a fixed bound."""
DROPPED_COPIES = frozenset({"overloaded", "deadline"})
"""Copies are computed last and dropped first where a server is busy, and one that was not begun in
its client's time was not either: no failures of the copied version."""
PART, REPLACES = "part", b"falaj.replaces"


class Labels(Protocol):
    """The side of what came of requests; it finds by itself which row has which label."""

    def of_release(self, release: Release, now: datetime) -> pd.DataFrame:
        """Labels of a release's rows that are known now, as `observe` takes them.

        Raises:
            DataContractError: a table of labels is damaged, or there are too many.
        """


@dataclass(frozen=True)
class Observed:
    """Rows of one release, each with the version that it counts for.

    Attributes:
        rows: columns of `COLUMNS`, `request` (64 bits of a digest of the id), `who` (`stable`,
            `candidate`, `shadow`), `period` (its number) and `failed` (refused by a fault of the
            version, or answered by no number); `failed_surely`: the request is not to blame; in
            the order of arrival.
        labels: columns `request`, `request_row`, `label`, and where known `labelled_at`.
        seen_until: rows that arrived before are all there.
    """

    rows: pd.DataFrame
    labels: pd.DataFrame
    seen_until: datetime
    _known: dict[tuple[str, str, int | None], pd.DataFrame] = field(
        default_factory=dict, compare=False, repr=False
    )

    def of(self, who: str, period: int | None = None) -> pd.DataFrame:
        """Rows that count for one of the three, of all periods or one."""
        return self._once("rows", who, period, lambda: self._of(who, period))

    def requests(self, who: str, period: int | None = None) -> pd.DataFrame:
        """One row for each request; it failed where one of its rows did."""
        return self._once("requests", who, period, lambda: _by_request(self.of(who, period)))

    def labelled(self, who: str, period: int | None = None) -> pd.DataFrame:
        """Answered rows with their label, in the order in which labels became known."""
        return self._once("labelled", who, period, lambda: self._labelled(who, period))

    def _of(self, who: str, period: int | None) -> pd.DataFrame:
        wanted = self.rows["who"] == who
        return self.rows[wanted if period is None else wanted & (self.rows["period"] == period)]

    def _labelled(self, who: str, period: int | None) -> pd.DataFrame:
        answered = self.of(who, period).dropna(subset=["score"])
        found = self.labels.merge(answered, on=KEY, how="inner", sort=False)
        known = "labelled_at" if "labelled_at" in found else "event_timestamp"
        return found.sort_values([known, *KEY], kind="stable", ignore_index=True)

    def _once(
        self, kind: str, who: str, period: int | None, make: Callable[[], pd.DataFrame]
    ) -> pd.DataFrame:
        """Made once: each metric asks for the same rows again."""
        key = (kind, who, period)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def observe(home: Path, release: Release, labels: pd.DataFrame, now: datetime) -> Observed:
    """Everything that was logged of a release until a moment before now.

    Args:
        home: the state folder.
        release: its versions and periods.
        labels: columns `request_id`, `label` (a number), `request_row` (0 where absent) and
            `labelled_at` where labels do not come in the order of their requests.
        now: this moment, UTC.

    Raises:
        DataContractError: the log or the labels lack a column.
        TransientError: a part of the log vanished while it was read.
    """
    until = now - timedelta(seconds=release.config.settle_s)
    rows = read_rows(
        home, release.model, (release.stable, release.candidate), release.opened_at, until
    )
    return Observed(_assigned(rows, release, until), check_labels(labels), until)


def read_rows(
    home: Path, model: str, versions: Sequence[str], start: datetime, end: datetime
) -> pd.DataFrame:
    """Rows of some versions of a model that arrived in a window, each once, the oldest first.

    Raises:
        DataContractError: a part lacks a column, or holds another type.
        TransientError: a part vanished while it was read.
    """
    folder = home / "predictions" / f"model={quote(model, safe='')}"
    days = pd.date_range(start.date(), end.date(), freq="D", tz=None)
    files = [  # what is being written has another name until it is whole
        path
        for day in days
        for path in sorted((folder / f"day={day:%Y-%m-%d}").glob("*.parquet"))
        if not path.name.startswith(".")
    ]
    tables = [_read_part(file, versions, start, end) for file in _without_replaced(files)]
    if not tables:
        names = (*COLUMNS, "is_no_number")
        return _with_digest(pd.DataFrame({name: pd.Series(dtype=object) for name in names}))
    rows: pd.DataFrame = pa.concat_tables(tables).to_pandas(categories=["version", "slot"])
    rows = _with_digest(rows)
    rows = rows.drop_duplicates([*KEY, "version", "slot"])
    return rows.sort_values(["event_timestamp", *KEY], kind="stable", ignore_index=True)


def _with_digest(rows: pd.DataFrame) -> pd.DataFrame:
    """With the column `request`: numbers are compared and joined much faster than ids."""
    ids = rows["request_id"].astype(str).to_numpy(dtype=object)
    return rows.assign(request=pd.util.hash_array(ids, categorize=False))


def _without_replaced(files: Sequence[Path]) -> list[Path]:
    """Parts that no other part was made of; a merge lies beside its parts for a moment."""
    replaced: set[str] = set()
    for file in files:
        if not file.name.startswith("part-"):
            told = _metadata(file).get(REPLACES, b"").decode()
            replaced.update(name for name in told.split(",") if name)
    return [file for file in files if file.name not in replaced]


def _metadata(file: Path) -> dict[bytes, bytes]:
    try:
        return pq.read_schema(file).metadata or {}
    except FileNotFoundError:
        return {}


def _read_part(file: Path, versions: Sequence[str], start: datetime, end: datetime) -> pa.Table:
    when = ds.field("event_timestamp")
    bounds = [pa.scalar(moment, pa.timestamp("us", "UTC")) for moment in (start, end)]
    wanted = ds.field("version").isin(list(versions)) & (when >= bounds[0]) & (when < bounds[1])
    try:
        rows = ds.dataset(file, format="parquet").to_table(columns=list(COLUMNS), filter=wanted)
        return rows.append_column("is_no_number", _without_number(rows.column("score")))
    except FileNotFoundError as exc:
        raise TransientError(
            f"{file.name} of the prediction log vanished while it was read, as when parts are "
            "merged; look again"
        ) from exc
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as exc:
        raise DataContractError(
            f"{file}: {str(exc).splitlines()[0]}; expected a part of the prediction log with "
            f"columns {', '.join(COLUMNS)}. Nothing was decided; move the file away"
        ) from exc


def _without_number(scores: pa.ChunkedArray) -> pa.ChunkedArray:
    """Answers that are no number; a score that is absent is no answer, or several."""
    return pc.fill_null(pc.invert(pc.is_finite(scores.cast(pa.float64()))), False)


def _assigned(rows: pd.DataFrame, release: Release, until: datetime) -> pd.DataFrame:
    """Say for whom each row counts, in which period; rows between periods are left out."""
    parts = []
    wait = timedelta(seconds=release.config.settle_s)
    for number, period in enumerate(release.periods):
        start, end = period.since + wait, min(period.until or until, until)
        moments = rows["event_timestamp"]
        part = rows[(moments >= pd.Timestamp(start)) & (moments < pd.Timestamp(end))]
        who = _who(part, release, period)
        parts.append(part.assign(who=who, period=number)[who.notna()])
    found = pd.concat(parts, ignore_index=True) if parts else rows.assign(who=None, period=0)
    reason = found["error"].astype(object).where(found["error"].notna(), "").astype(str)
    word = reason.str.split(r"[:\s]", n=1, regex=True).str[0] if len(found) else reason
    is_dropped = (found["who"] == SHADOW) & word.isin(DROPPED_COPIES)
    has_failed = (reason != "") & ~word.isin(NOT_A_VERSIONS_FAULT) & ~is_dropped
    has_failed |= found["is_no_number"].astype(bool)
    return found.assign(
        failed=has_failed, failed_surely=has_failed & ~word.isin(MAYBE_THE_REQUESTS)
    )


def _by_request(rows: pd.DataFrame) -> pd.DataFrame:
    found = rows.drop_duplicates("request")
    if len(found) == len(rows):
        return found
    failed = {
        name: found["request"].isin(rows.loc[rows[name].astype(bool), "request"])
        for name in ("failed", "failed_surely")
    }
    return found.assign(**failed)


def _who(rows: pd.DataFrame, release: Release, period: Period) -> pd.Series[Any]:
    track, version = rows["slot"], rows["version"]
    is_candidate = version == release.candidate
    alone = not period.split
    who = pd.Series(None, index=rows.index, dtype=object)
    who[(track == STABLE) & (version == release.stable)] = STABLE
    who[is_candidate & ((track == CANDIDATE) | (alone & (track == STABLE)))] = CANDIDATE
    who[is_candidate & (track == SHADOW)] = SHADOW
    return who


def check_labels(labels: pd.DataFrame) -> pd.DataFrame:
    """One label for each row of a request, and when it became known where that was told.

    Raises:
        DataContractError: a column is missing or a label is no number.
    """
    if missing := {"request_id", "label"} - set(labels.columns):
        raise DataContractError(
            f"labels lack the column {', '.join(sorted(missing))}; expected request_id, label, "
            "and where requests have several rows request_row. Nothing was decided"
        )
    known = labels if "request_row" in labels else labels.assign(request_row=0)
    try:
        known = known.assign(label=known["label"].astype(float))
    except (TypeError, ValueError) as exc:
        raise DataContractError(
            f"a label is no number ({exc}); expected 0 and 1, or a measured value. Nothing was "
            "decided"
        ) from exc
    known = _with_digest(known)
    columns = [*KEY, "label", *(["labelled_at"] if "labelled_at" in known else [])]
    if "labelled_at" in known:  # of several labels of a row the one that became known last holds
        known = known.sort_values("labelled_at", ascending=False, kind="stable")
    checked: pd.DataFrame = known[np.isfinite(known["label"])].drop_duplicates(KEY)[columns]
    return checked


def no_labels() -> pd.DataFrame:
    """Labels before the first one."""
    return pd.DataFrame(
        {
            "request_id": pd.Series(dtype=str),
            "request_row": pd.Series(dtype="int32"),
            "label": pd.Series(dtype=float),
        }
    )
