"""One column in all windows: counted for the statistics, and searched for signs of a fault."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tasks.evaluation.drift.config import DriftConfig
from tasks.evaluation.drift.faults import (
    UnitGuess,
    find_frozen,
    find_missing,
    find_unit_change,
    find_unseen,
    largest_day_step,
    longest_frozen_run,
)
from tasks.evaluation.drift.histograms import Histogram, count_categories, count_numbers
from tasks.evaluation.drift.window import Float64Array, WindowColumns


@dataclass(frozen=True)
class Windows:
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
    guess: UnitGuess | None = None


def examine_numbers(name: str, windows: Windows, config: DriftConfig) -> ExaminedColumn:
    """Count a numeric column; look for another unit and for a value that never changes."""
    before, now = (rows.numbers(name) for rows in (windows.reference, windows.current))
    lead_in = [rows.numbers(name) for rows in (windows.lead_in,) if rows is not None]
    histogram = count_numbers(before, now, config.num_bins, config.psi_bins)
    converted = find_unit_change(
        largest_day_step(before), largest_day_step(*lead_in, now), config.unit_changes
    )
    frozen = _frozen(windows, before.values, now.values, config)
    examined = _examined(name, histogram, frozen, find_missing(histogram, config))
    return replace(examined, guess=converted)


def examine_categories(name: str, windows: Windows, config: DriftConfig) -> ExaminedColumn:
    """Count a category column; look for unknown categories and for one that never changes."""
    before, now = windows.reference.categories(name), windows.current.categories(name)
    histogram = count_categories(
        (windows.reference, before), (windows.current, now), config.max_categories
    )
    numbers = {value: number for number, value in enumerate({**before.sizes, **now.sizes})}
    frozen = _frozen(windows, before.numbered(numbers), now.numbered(numbers), config)
    unseen, missing = find_unseen(histogram, config), find_missing(histogram, config)
    return _examined(name, histogram, unseen, frozen, missing)


def _frozen(
    windows: Windows, before: Float64Array, now: Float64Array, config: DriftConfig
) -> str | None:
    run = longest_frozen_run(windows.current, now)
    if run.num_days < config.min_frozen_days:
        return None
    usual = longest_frozen_run(windows.reference, before)
    known = before[~np.isnan(before)]
    share = float(np.mean(known == run.value)) if len(known) else 0.0
    return find_frozen(usual, run, share, config)


def _examined(name: str, histogram: Histogram, *faults: str | None) -> ExaminedColumn:
    return ExaminedColumn(name, histogram, tuple(fault for fault in faults if fault is not None))
