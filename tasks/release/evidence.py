"""Reading what two versions did, from the prediction log, and what came of it, from labels.

A row of the log is one row of an answered request, or one refused request. Rows of the stable
version (track `stable`), of the candidate (track `candidate`; alone, track `stable`) and of its
copies (track `shadow`) are found by version and track, and paired by `request_id` and
`request_row`. A label is one of such a pair, so that it holds for all tracks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tasks.contracts.rollout import Period
from tasks.release.records import Release

STABLE, CANDIDATE, SHADOW = "stable", "candidate", "shadow"
KEY = ["request", "request_row"]
_OF_LABELS = [*KEY, "label", "labelled_at"]
COLUMNS = (
    "request_id",
    "request_row",
    "event_timestamp",
    "version",
    "slot",
    "subject",
    "score",
    "scores",
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


class RequestLog(Protocol):
    """The prediction log, and what came of its requests."""

    def rows(self, release: Release, until: datetime) -> pa.Table:
        """Logged rows of both versions since the release began, with `COLUMNS`.

        Raises:
            DataContractError: a segment of the log is damaged.
        """

    def labels(self, release: Release, now: datetime) -> pd.DataFrame:
        """Labels of the release's rows that are known now, as `no_labels` has columns.

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
        labels: columns `request`, `request_row`, `label`, `labelled_at`.
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
        if found["scores"].notna().any():  # of several classes: 1, and the true one's probability
            each = zip(found["scores"], found["label"], strict=True)
            true = [of[int(k)] if of is not None and 0 <= k < len(of) else None for of, k in each]
            found = found.assign(label=1.0, score=np.array(true, float)).dropna(subset=["score"])
        return found.sort_values(["labelled_at", *KEY], kind="stable", ignore_index=True)

    def _once(
        self, kind: str, who: str, period: int | None, make: Callable[[], pd.DataFrame]
    ) -> pd.DataFrame:
        """Made once: each metric asks for the same rows again."""
        key = (kind, who, period)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def observe(rows: pa.Table, release: Release, labels: pd.DataFrame, until: datetime) -> Observed:
    """Everything that was logged of a release until a moment before now.

    Args:
        rows: of the log, with `COLUMNS`; one that was logged twice counts once.
        release: its versions and periods.
        labels: as `RequestLog.labels` gives them, one for each row of a request.
        until: rows that arrived before are all there.
    """
    place = rows.schema.get_field_index("score")
    rows = rows.set_column(place, "score", _one_score(rows))
    known = rows.append_column("is_no_number", _without_number(rows.column("score")))
    frame = _with_digest(known.to_pandas(categories=["version", "slot"])).drop_duplicates(
        [*KEY, "version", "slot"]
    )
    frame = frame.sort_values(["event_timestamp", *KEY], kind="stable", ignore_index=True)
    return Observed(_assigned(frame, release, until), _with_digest(labels)[_OF_LABELS], until)


def _with_digest(rows: pd.DataFrame) -> pd.DataFrame:
    """With the column `request`: numbers are compared and joined much faster than ids."""
    ids = rows["request_id"].astype(str).to_numpy(dtype=object)
    return rows.assign(request=pd.util.hash_array(ids, categorize=False))


def _one_score(rows: pa.Table) -> pa.ChunkedArray:
    """The score of each row; of several classes the probability of the predicted one."""
    several = rows.column("scores").combine_chunks()
    if several.null_count == len(several):
        return rows.column("score")
    most = [None if of is None else float(np.max(of)) for of in several.to_pandas()]
    return pc.coalesce(rows.column("score"), pa.array(most, pa.float64(), from_pandas=False))


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


def no_labels() -> pd.DataFrame:
    """Labels before the first one: numbers, and the moments from which they were known."""
    kinds: dict[str, Any] = {"request_id": str, "request_row": "int32", "label": float}
    known = pd.Series(dtype="datetime64[us, UTC]")
    return pd.DataFrame({n: pd.Series(dtype=k) for n, k in kinds.items()}).assign(labelled_at=known)
