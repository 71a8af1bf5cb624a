"""Skew: features as they were served, against what retrieval later gives for the same moments.

Training on logged moments sees what historical retrieval gives for them: with the created-time
cut-off and the TTL. Serving saw what was online. Where the two differ, the log tells why:

- *behind*: the served value is the one that retrieval gives for the event time logged with it, so
  it was right once and the store had not been brought up to date; or it was blanked because what
  was stored was older than the TTL;
- *early*: all served values of the view are those of its newest row by event time, which retrieval
  does not know yet, because it was created later: training would have seen an older one; or they
  were blanked because they lay after the moment of the read, as in a replay;
- *missing*: the store did not have the entity;
- *unexplained*: neither. Something computes or stores the feature in another way than training.

The verdict is `clean` where no feature differs in more than the allowed share of its rows, `skewed`
where the unexplained values of one exceed that share, else `early` where its early values do, else
`stale`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from feast import FeatureService, FeatureStore
from numpy.typing import NDArray

from tasks.features.checks.equality import equal_values, numbers_of, retrieved_column
from tasks.features.checks.reports import FeatureSkew, SkewReport
from tasks.features.checks.serving_log import (
    MOMENT_TYPE,
    REQUEST_TIME,
    age_column,
    read_log,
    state_column,
)
from tasks.features.config import OnlineConfig, SkewConfig
from tasks.features.online.answer import Freshness
from tasks.features.online.plan import FLOATS, PlannedFeature, PlannedView, ReadPlan, plan_read
from tasks.kernel.errors import FeatureStoreError

logger = logging.getLogger(__name__)

ROW = "skew_row"


@dataclass(frozen=True)
class _AskedAgain:
    """Differing rows of a view, and what retrieval gives for them without the created cut-off."""

    rows: NDArray[np.intp]
    at_event: pa.Table  # at the event time that was logged
    at_request: pa.Table  # at the moment of the request


@dataclass
class _Tally:
    """What the comparison of one feature has met so far."""

    view: PlannedView
    feature: PlannedFeature
    rows: int = 0
    differing: int = 0
    behind: int = 0
    early: int = 0
    missing: int = 0
    gap: float = 0.0
    gap_rows: int = 0
    age_sum_s: float = 0.0  # of the values that were behind

    def result(self) -> FeatureSkew:
        """The tally as a contract."""
        return FeatureSkew(
            feature=self.feature.output,
            view=self.view.name,
            num_rows=self.rows,
            num_differing=self.differing,
            num_explained_by_age=self.behind,
            num_early=self.early,
            num_missing_online=self.missing,
            differing_share=self.differing / self.rows if self.rows else 0.0,
            mean_absolute_difference=self.gap / self.gap_rows if self.gap_rows else None,
        )


def compare_log(
    log: Path, store: FeatureStore, service: FeatureService, config: SkewConfig | None = None
) -> SkewReport:
    """Compare a log of served features with historical retrieval; see the module's docstring.

    Args:
        log: Parquet file or folder with the columns of `serving_log.log_schema`.
        store: opened store, whose offline store holds the feature tables by now.
        service: feature service that was served.
        config: the bound, and how many rows are compared at one time.

    Raises:
        DataContractError: the log lacks a column.
        FeatureStoreError: retrieval lost rows.
    """
    config = config or SkewConfig()
    plan = plan_read(store, service, OnlineConfig())
    tallies = [_Tally(plan.views[f.view], f) for f in plan.features]
    num_rows, first, last = 0, None, None
    for rows in read_log(log, plan, config.batch_rows):
        num_rows += rows.num_rows
        ends = pc.min_max(rows.column(REQUEST_TIME)).as_py()
        first = ends["min"] if first is None else min(first, ends["min"])
        last = ends["max"] if last is None else max(last, ends["max"])
        _compare_batch(rows, store, service, plan, tallies)
    return _report(service, num_rows, first, last, tallies, config)


def _compare_batch(
    rows: pa.Table,
    store: FeatureStore,
    service: FeatureService,
    plan: ReadPlan,
    tallies: Sequence[_Tally],
) -> None:
    offline = _retrieve(rows, rows.column(REQUEST_TIME), store, service, plan, cut_off=True)
    served, unequal = {}, {}
    differs = np.zeros((len(plan.views), rows.num_rows), bool)
    for tally in tallies:
        feature = tally.feature
        retrieved = retrieved_column(offline, tally.view, feature)
        served[feature.output] = _served(rows, feature)
        equal, _ = equal_values(served[feature.output], retrieved, feature.value_type)
        unequal[feature.output] = ~equal
        differs[feature.view] |= ~equal
        _add_gap(tally, served[feature.output], retrieved)
    again = _ask_again(rows, differs, store, service, plan)
    newest = [
        _are_newest(view, served, asked) for view, asked in zip(plan.views, again, strict=True)
    ]
    for tally in tallies:
        name, view = tally.feature.output, tally.feature.view
        _explain(tally, rows, served[name], unequal[name], again[view], newest[view])


def _are_newest(view: PlannedView, served: dict[str, Any], again: _AskedAgain) -> NDArray[np.bool_]:
    """For each row asked again, whether the served values of a view are all of its newest row.

    One feature alone may be equal by chance: a count of 0 often is.
    """
    equal = np.ones(again.rows.size, bool)
    for feature in view.features if again.rows.size else ():
        at_request = retrieved_column(again.at_request, view, feature)
        some = _take(served[feature.output], again.rows)
        equal &= equal_values(some, at_request, feature.value_type)[0]
    return equal


def _explain(
    tally: _Tally,
    rows: pa.Table,
    served: Any,
    differs: NDArray[np.bool_],
    again: _AskedAgain,
    newest: NDArray[np.bool_],
) -> None:
    """Count one feature's differing rows of a batch by their cause."""
    state = np.array(rows.column(state_column(tally.view.name)).to_pylist(), object)
    missing = differs & (state == Freshness.MISSING.label)
    blanked = differs & _is_null(served)
    early = blanked & (state == Freshness.AHEAD.label)
    behind = blanked & (state == Freshness.STALE.label)
    if again.rows.size:
        at_event = retrieved_column(again.at_event, tally.view, tally.feature)
        was_right, _ = equal_values(_take(served, again.rows), at_event, tally.feature.value_type)
        early[again.rows] |= newest
        behind[again.rows] |= was_right
    early &= differs & ~missing & (state != Freshness.STALE.label)
    behind &= differs & ~missing & ~early
    tally.rows += differs.size
    tally.differing += int(differs.sum())
    tally.missing += int(missing.sum())
    tally.early += int(early.sum())
    tally.behind += int(behind.sum())
    tally.age_sum_s += float(rows.column(age_column(tally.view.name)).to_numpy()[behind].sum())


def _ask_again(
    rows: pa.Table,
    differs: NDArray[np.bool_],
    store: FeatureStore,
    service: FeatureService,
    plan: ReadPlan,
) -> list[_AskedAgain]:
    """Ask for the differing rows of each view without the created-time cut-off.

    At its own event time a row is not known yet under the cut-off. All views are asked in one
    retrieval; `differs` has the shape (views, rows).
    """
    served_at = rows.column(REQUEST_TIME).cast(pa.int64()).to_numpy()
    asked, events_us = [], []
    for view, some in zip(plan.views, differs, strict=True):
        age_s = rows.column(age_column(view.name)).to_numpy()
        known = np.flatnonzero(some & ~np.isnan(age_s))
        asked.append(known)
        events_us.append(served_at[known] - np.round(age_s[known] * 1e6).astype(np.int64))
    every = np.concatenate(asked)
    moments_us = np.concatenate([*events_us, served_at[every]])
    found = _retrieve(
        rows.take(pa.array(np.tile(every, 2))),
        pa.array(moments_us, pa.timestamp("us")).cast(MOMENT_TYPE),
        store,
        service,
        plan,
        cut_off=False,
    )
    starts = np.cumsum([0, *map(len, asked)])[:-1]
    return [
        _AskedAgain(
            known, found.slice(start, len(known)), found.slice(len(every) + start, len(known))
        )
        for known, start in zip(asked, starts, strict=True)
    ]


def _retrieve(
    rows: pa.Table,
    moments: Any,
    store: FeatureStore,
    service: FeatureService,
    plan: ReadPlan,
    *,
    cut_off: bool,
) -> pa.Table:
    """Features of the rows' entities at the given moments, in the order of the rows."""
    frame = rows.select(list(plan.request_columns))
    frame = frame.append_column(REQUEST_TIME, moments)
    frame = frame.append_column(ROW, pa.array(np.arange(rows.num_rows)))
    if not rows.num_rows:
        return frame
    found = (
        store.get_historical_features(
            entity_df=frame.to_pandas(types_mapper=_nullable),
            features=service,
            full_feature_names=True,
            filter_by_created_timestamp=cut_off,
        )
        .to_arrow()
        .sort_by(ROW)
    )
    if found.column(ROW).to_pylist() != list(range(rows.num_rows)):
        raise FeatureStoreError(
            f"retrieval of {service.name}: {rows.num_rows} rows went in, {found.num_rows} came "
            "out; expected each once. Nothing was compared"
        )
    return found


def _nullable(kind: pa.DataType) -> Any:
    """Pandas types that keep a column of nulls typed."""
    if pa.types.is_string(kind):
        return pd.StringDtype()
    return pd.Int64Dtype() if pa.types.is_integer(kind) else None


def _served(rows: pa.Table, feature: PlannedFeature) -> Any:
    column = rows.column(feature.output)
    if feature.value_type in FLOATS:
        return numbers_of(column, FLOATS[feature.value_type])
    return column.to_pylist()


def _add_gap(tally: _Tally, served: Any, retrieved: pa.ChunkedArray) -> None:
    """Add to the mean absolute difference where both sides are numbers."""
    kind = retrieved.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        return
    ours = np.array([np.nan if v is None else v for v in served], np.float64)
    gap = np.abs(ours - numbers_of(retrieved, "float64"))
    known = ~np.isnan(gap)
    tally.gap += float(gap[known].sum())
    tally.gap_rows += int(known.sum())


def _is_null(values: Any) -> NDArray[np.bool_]:
    if isinstance(values, list):
        return np.array([value is None for value in values], bool)
    return np.asarray(np.isnan(values))


def _take(values: Any, rows: NDArray[np.intp]) -> Any:
    return [values[row] for row in rows] if isinstance(values, list) else values[rows]


def _report(
    service: FeatureService,
    num_rows: int,
    first: datetime | None,
    last: datetime | None,
    tallies: Sequence[_Tally],
    config: SkewConfig,
) -> SkewReport:
    features = tuple(tally.result() for tally in tallies)
    over = [f for f in features if f.differing_share > config.max_differing_share]
    wrong = [f for f in over if f.num_unexplained > config.max_differing_share * f.num_rows]
    early = [f for f in over if f.num_early > config.max_differing_share * f.num_rows]
    if not num_rows:
        verdict = "no rows"
    else:
        verdict = "skewed" if wrong else "early" if early else "stale" if over else "clean"
    report = SkewReport(
        feature_service=service.name,
        num_rows=num_rows,
        first=first.astimezone(UTC) if first else None,
        last=last.astimezone(UTC) if last else None,
        max_differing_share=config.max_differing_share,
        features=features,
        verdict=verdict,
        evidence=tuple(_sentences(tallies, {f.feature for f in over})),
    )
    logger.info("skew of %s served rows of %s: %s", num_rows, service.name, verdict)
    return report


def _sentences(tallies: Sequence[_Tally], over: set[str]) -> list[str]:
    """One sentence for each feature over the bound."""
    said = []
    for tally in tallies:
        found = tally.result()
        if found.feature not in over:
            continue
        parts = []
        if found.num_explained_by_age:
            age_h = tally.age_sum_s / found.num_explained_by_age / 3600
            parts.append(
                f"{found.num_explained_by_age} because the store was behind (mean age of view "
                f"{found.view} {age_h:.1f} h)"
            )
        if found.num_early:
            parts.append(f"{found.num_early} because training would not have known them yet")
        if found.num_missing_online:
            parts.append(f"{found.num_missing_online} because the store lacked the entity")
        if found.num_unexplained:
            parts.append(f"{found.num_unexplained} without an explanation")
        said.append(
            f"{found.feature}: {found.num_differing} of {found.num_rows} served values differ from "
            f"retrieval, {', '.join(parts)}"
        )
    return said
