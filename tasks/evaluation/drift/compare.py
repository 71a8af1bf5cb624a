"""Comparison of a current window with the reference a model was trained on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from pydantic import Field, PositiveInt

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.contracts.drift import DayErrors, DriftReport, FeatureDrift
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.config import DriftConfig
from tasks.evaluation.drift import faults as fault_rules
from tasks.evaluation.drift.newest import describe as describe_newest
from tasks.evaluation.drift.newest import find_sudden
from tasks.evaluation.drift.result import decide, explain, performance_change
from tasks.evaluation.drift.slow import describe, find_slow_change, join_days, score_days
from tasks.evaluation.drift.statistics import (
    BlockDraws,
    Change,
    Histogram,
    count_categories,
    count_numbers,
    draw_blocks,
    measure_changes,
)
from tasks.evaluation.drift.window import Float64Array, WindowColumns
from tasks.kernel.errors import DataContractError, WindowError
from tasks.kernel.settings import ArtifactStore

logger = logging.getLogger(__name__)

READ_TOGETHER = 16
"""Columns of a window in memory at once."""
SCORE, PREDICTED = "score", "predicted"


class SeenFeatures(Contract):
    """What the features of two windows showed, whatever model is asked about."""

    features: tuple[FeatureDrift, ...]
    faults: tuple[str, ...]
    remarks: tuple[str, ...] = Field(description="What only looks like a fault.")
    sudden: dict[str, float] | None = Field(description="See `find_sudden`.")
    num_reference_rows: PositiveInt
    num_current_rows: PositiveInt


def compare_windows(
    reference: ValidatedDataset,
    reference_window: TimeWindow,
    current: ValidatedDataset,
    current_window: TimeWindow,
    scored_reference: ScoredWindow,
    scored_current: ScoredWindow,
    config: DriftConfig,
    store: ArtifactStore,
    with_unit: Collection[str] = (),
    earlier: Sequence[DayErrors] = (),
    seen: SeenFeatures | None = None,
) -> DriftReport:
    """Compare features, predictions and performance of a current window with the reference.

    Args:
        reference: snapshot the model was trained on.
        reference_window: rows to compare features with, usually the training window.
        current: snapshot with the current rows; may be the same.
        current_window: rows in question.
        scored_reference: the model's scores on rows it was not trained on, such as the validation
            window: the reference of predictions and performance.
        scored_current: the same model's scores on the current window.
        config: limits.
        store: holds the snapshots and scores.
        with_unit: numeric columns that are declared to have a unit.
        earlier: days that earlier checks saw the same model score.
        seen: what the features of these two windows showed, where that is known already.

    Raises:
        DataContractError: the scores are not of one model and of these rows, or a column is absent.
        WindowError: a window has too few days to judge.
        ArtifactError: an artifact is absent or damaged.
    """
    programs = scored_reference.program_sha256, scored_current.program_sha256
    snapshots = current.snapshot.data.sha256, scored_current.snapshot_sha256
    spans = current_window, scored_current.window
    if any(one != other for one, other in (programs, snapshots, spans)):
        raise DataContractError(
            f"the rows in question are of {current_window} in snapshot {snapshots[0][:12]}, their "
            f"scores of {spans[1]} in {snapshots[1][:12]} by program "
            f"{programs[1][:12]}, those of the reference by {programs[0][:12]}; expected these "
            "rows, scored by the same model"
        )
    columns = reference.snapshot.columns
    if seen is None:
        windows = open_windows(reference, reference_window, current, current_window, config, store)
        seen = compare_features(columns, windows, config, with_unit)
    features, faults = seen.features, seen.faults
    prediction = _prediction(columns, scored_reference, scored_current, config, store)
    performance = performance_change(scored_reference, scored_current)
    both = scored_reference, scored_current
    then, days = (score_days(scored, columns, store) for scored in both)
    slow = find_slow_change(then, join_days(earlier, days), config)
    result = decide(features, prediction, performance, faults, config, slow, seen.sudden or ())
    logger.info("drift of %s: %s", current_window, result)
    return DriftReport(
        reference=reference_window,
        current=current_window,
        num_reference_rows=seen.num_reference_rows,
        num_current_rows=seen.num_current_rows,
        features=features,
        prediction=prediction,
        reference_performance=scored_reference.metrics,
        current_performance=scored_current.metrics,
        **(performance.fields() if performance else {"auc_change": None}),
        performance_reference=scored_reference.window,
        effect_threshold=config.min_effect,
        days=days,
        slow_change=slow,
        result=result,
        evidence=(
            *explain(features, prediction, performance, faults, both, config),
            *([describe(slow)] if slow else []),
            describe_newest(seen.sudden),
            *(f"Look at {remark}." for remark in seen.remarks),
        ),
        compared=(
            reference.snapshot.data,
            current.snapshot.data,
            scored_reference.scores,
            scored_current.scores,
        ),
    )


def open_windows(
    reference: ValidatedDataset,
    reference_window: TimeWindow,
    current: ValidatedDataset,
    current_window: TimeWindow,
    config: DriftConfig,
    store: ArtifactStore,
) -> Windows:
    """Open the rows of both windows, and those just before the current one.

    Raises:
        DataContractError: a file lacks the event time.
        WindowError: a window has too few days to judge.
    """
    event_time = reference.snapshot.columns.event_time
    before, now = (
        WindowColumns(store.path(dataset.snapshot.data), event_time, window)
        for dataset, window in ((reference, reference_window), (current, current_window))
    )
    _check_days(before, reference_window, "reference", config)
    _check_days(now, current_window, "current", config)
    length = current_window.end - current_window.start
    just_before = TimeWindow(start=current_window.start - length, end=current_window.start)
    for dataset in (current, reference):  # either may hold the rows between the two windows
        lead_in = WindowColumns(store.path(dataset.snapshot.data), event_time, just_before)
        if lead_in.num_rows:
            return Windows(before, now, lead_in)
    return Windows(before, now, None)


def _check_days(rows: WindowColumns, window: TimeWindow, name: str, config: DriftConfig) -> None:
    if rows.num_days < config.min_days:
        raise WindowError(
            f"the {name} window {window} has {rows.num_rows:,} rows on {rows.num_days} UTC days, "
            f"expected at least {config.min_days} days: rows of one day resemble each other, so "
            "fewer days look like drift where there is none. Choose a longer window"
        )


def compare_features(
    columns: DatasetSchema, windows: Windows, config: DriftConfig, with_unit: Collection[str]
) -> SeenFeatures:
    """Change of each feature, numbers first, the signs of faults, and what only looks like one."""
    examined = []
    for examine, names in (
        (examine_numbers, columns.numeric),
        (examine_categories, columns.categorical),
    ):
        for first in range(0, len(names), READ_TOGETHER):
            some = names[first : first + READ_TOGETHER]
            for window in filter(None, windows):
                window.load(some)
            examined += [examine(name, windows) for name in some]
    changes = measure_changes(
        [column.histogram for column in examined], *_draws(windows.reference, windows.current)
    )
    features = tuple(
        _feature(column.name, column.histogram, change, config)
        for column, change in zip(examined, changes, strict=True)
    )
    guesses = {column.name: column.guess for column in examined if column.guess is not None}
    converted, remarks = fault_rules.judge_guesses(guesses, with_unit)
    faults = [f"{column.name}: {fault}" for column in examined for fault in column.faults]
    return SeenFeatures(
        features=features,
        faults=(*converted, *faults),
        remarks=tuple(remarks),
        sudden=find_sudden({column.name: column.histogram for column in examined}),
        num_reference_rows=windows.reference.num_rows,
        num_current_rows=windows.current.num_rows,
    )


def _prediction(
    columns: DatasetSchema,
    scored_reference: ScoredWindow,
    scored_current: ScoredWindow,
    config: DriftConfig,
    store: ArtifactStore,
) -> FeatureDrift:
    """Change of the scores; of several classes, of how often each is the predicted one."""
    before, now = (
        WindowColumns(store.path(scored.scores), columns.event_time, scored.window)
        for scored in (scored_reference, scored_current)
    )
    _check_days(before, scored_reference.window, "performance reference", config)
    if columns.classes:
        sides = ((window, window.categories(PREDICTED)) for window in (before, now))
        histogram = count_categories(*sides)
    else:
        histogram = count_numbers(before.numbers(SCORE), now.numbers(SCORE))
    (change,) = measure_changes([histogram], *_draws(before, now))
    return _feature("prediction", histogram, change, config)


def _draws(reference: WindowColumns, current: WindowColumns) -> tuple[BlockDraws, BlockDraws]:
    generator = np.random.default_rng(0)
    return draw_blocks(reference.num_days, generator), draw_blocks(current.num_days, generator)


def _feature(name: str, histogram: Histogram, change: Change, config: DriftConfig) -> FeatureDrift:
    drifted = change.effect_low > config.min_effect
    distance = "KS" if histogram.ordered else "total variation"
    verb = "drifted" if drifted else "no drift for certain"
    return FeatureDrift(
        feature=name,
        kind="numeric" if histogram.ordered else "categorical",
        **asdict(change),
        drifted=drifted,
        evidence=(
            f"{verb}: {distance} distance {change.effect:.3f}, surely at least "
            f"{change.effect_low:.3f} (limit {config.min_effect}); PSI {change.psi:.3f}, "
            f"{change.psi_noise:.3f} by sampling alone"
        ),
    )


class Windows(NamedTuple):
    """The rows of one comparison.

    Args:
        reference: what is compared with.
        current: the rows in question.
        lead_in: as much time just before the current window, None where its rows are not at hand.
    """

    reference: WindowColumns
    current: WindowColumns
    lead_in: WindowColumns | None


@dataclass(frozen=True)
class ExaminedColumn:
    """What one feature showed, small enough to be kept for all features."""

    name: str
    histogram: Histogram
    faults: tuple[str, ...]
    guess: fault_rules.UnitGuess | None = None


def examine_numbers(name: str, windows: Windows) -> ExaminedColumn:
    """Count a numeric column; look for another unit and for a value that never changes."""
    before, now = windows.reference.numbers(name), windows.current.numbers(name)
    lead_in = [] if windows.lead_in is None else [windows.lead_in.numbers(name)]
    guess = fault_rules.find_unit_change(
        fault_rules.largest_day_step(before), fault_rules.largest_day_step(*lead_in, now)
    )
    return _examined(name, count_numbers(before, now), windows, before.values, now.values, guess)


def examine_categories(name: str, windows: Windows) -> ExaminedColumn:
    """Count a category column; look for unknown categories and for one that never changes."""
    before, now = windows.reference.categories(name), windows.current.categories(name)
    histogram = count_categories((windows.reference, before), (windows.current, now))
    numbers = {value: number for number, value in enumerate({**before.sizes, **now.sizes})}
    return _examined(name, histogram, windows, before.numbered(numbers), now.numbered(numbers))


def _examined(
    name: str,
    histogram: Histogram,
    windows: Windows,
    before: Float64Array,
    now: Float64Array,
    guess: fault_rules.UnitGuess | None = None,
) -> ExaminedColumn:
    frozen = fault_rules.find_frozen((windows.reference, before), (windows.current, now))
    found = (fault_rules.find_unseen(histogram), frozen, fault_rules.find_missing(histogram))
    return ExaminedColumn(name, histogram, tuple(fault for fault in found if fault), guess)
