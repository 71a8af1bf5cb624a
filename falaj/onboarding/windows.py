"""Windows and gates: rows and labels of each split, and gates that no candidate could pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from falaj.onboarding.findings import Finding
from falaj.onboarding.queries import Sample
from tasks.evaluation.config import MONTH
from tasks.features.entities import EVENT_TIME
from tasks.features.offline.duck import inside, sql_name
from tasks.kernel.settings import USE_CASE_FILE

CHECK = "splits"
GATES = "gates"
LEAST_KNOWN = 0.5
"""Share of a split's rows that have a label; with fewer something is amiss with the windows."""


@dataclass(frozen=True)
class SplitCounts:
    """Rows of one window, as the sample tells them of all."""

    name: str
    rows: int
    """Rows with a label."""
    unlabelled: int
    mean: float
    positives: int
    days: int
    newest: datetime | None


def count_splits(sample: Sample, share: float) -> list[SplitCounts]:
    """Labelled rows of each split and of `current`.

    Args:
        share: share of all rows that the sample holds.
    """
    spec, config = sample.config.features.training_set, sample.config
    sample.compute_frame(config.window, "counted")
    label, moment = sql_name(spec.label_column), sql_name(EVENT_TIME)
    found = []
    for name, window in (*config.splits, ("current", config.current)):
        rows, unlabelled, mean, positives, days, newest = sample.con.execute(
            f"SELECT count({label}), count(*) - count({label}), avg({label}), "
            f"count(*) FILTER ({label} > 0), count(DISTINCT {moment}::DATE) FILTER "
            f"({label} IS NOT NULL), max({moment}) FILTER ({label} IS NOT NULL) "
            f"FROM counted WHERE {inside(EVENT_TIME, window)}"
        ).fetchall()[0]
        rows, unlabelled, positives = (int(n / share) for n in (rows, unlabelled, positives))
        found.append(SplitCounts(name, rows, unlabelled, float(mean or 0), positives, days, newest))
    return found


def split_findings(sample: Sample, counts: list[SplitCounts]) -> Iterator[Finding]:
    """Splits without rows, with one label, without enough days, or whose labels are not known."""
    config, is_class = sample.config, sample.config.features.training_set.task == "classification"
    found = partial(Finding, check=CHECK, kind="configuration", file=USE_CASE_FILE)
    times = sample.con.execute(f"SELECT min({EVENT_TIME}), max({EVENT_TIME}) FROM counted")
    span = " to ".join(f"{t.astimezone(UTC):%Y-%m-%d}" for t in times.fetchall()[0] if t)
    for split in counts:
        window, at = dict(config.splits).get(split.name), sample.places.line("splits", split.name)
        if window is None:
            window, at = config.current, sample.places.first("current", "splits")
        if not split.rows:
            yield found(
                line=at,
                seen=f"{split.name} ({window}) holds no row with a label, of {split.unlabelled:,}",
                expected=f"some; there are rows from {span}",
                action="move the windows to where rows with known labels are",
            )
            continue
        if split.unlabelled > split.rows * (1 / LEAST_KNOWN - 1):
            yield found(
                line=at,
                seen=f"{split.name}: {split.unlabelled:,} of {split.rows + split.unlabelled:,} "
                f"rows have no label, and none after {split.newest:%Y-%m-%d}",
                action="end the windows earlier, or see why labels are missing",
                severity="warning",
            )
        if is_class and not 0 < split.positives < split.rows:
            yield found(
                line=at,
                seen=f"{split.name}: all {split.rows:,} labels are {split.mean:.0f}",
                expected="rows of both labels",
                action="move the windows, or mend the label",
                severity="warning" if split.name == "current" else "error",
            )
        least = {"test": config.evaluation.min_days, "current": config.drift.min_days}
        if split.days < least.get(split.name, 0):
            setting = "evaluation" if split.name == "test" else "drift"
            yield found(
                line=at,
                seen=f"{split.name} has rows on {split.days} day(s)",
                expected=f"at least {least[split.name]} ({setting}.min_days): intervals draw days",
                action=f"make {split.name} longer, or set {setting}: {{min_days: {split.days}}}",
            )


def gate_findings(sample: Sample, counts: list[SplitCounts]) -> Iterator[Finding]:
    """Gates that stay closed whatever the model is."""
    config, spec = sample.config, sample.config.features.training_set
    found = partial(Finding, check=GATES, kind="configuration", file=USE_CASE_FILE)
    test = next(split for split in counts if split.name == "test")
    oldest = config.promotion.max_age_days
    if oldest and config.splits.test.end < datetime.now(UTC) - timedelta(days=oldest):
        yield found(
            line=sample.places.line("promotion", "max_age_days"),
            seen=f"the test window ends {config.splits.test.end:%Y-%m-%d}",
            expected=f"an end in the last {oldest} days (promotion.max_age_days)",
            action="bring newer rows and move the windows, or raise the limit",
        )
    if not test.rows:
        return
    rows, positives = _largest_slice(sample)
    limits, is_class = config.evaluation, spec.task == "classification"
    if rows < limits.min_slice_rows or (is_class and positives < limits.min_slice_positives):
        wanted = {"min_slice_rows": max(2, rows // 2)}
        if is_class:
            wanted["min_slice_positives"] = max(1, positives // 2)
        setting = ", ".join(f"{name}: {number}" for name, number in wanted.items())
        yield found(
            line=sample.places.line("evaluation"),
            seen="no slice of the test rows is large enough to be judged: the largest has "
            f"{rows:,} rows{f', {positives:,} of the rarer label' if is_class else ''}",
            expected=f"{limits.min_slice_rows:,} rows"
            + (f" and {limits.min_slice_positives:,} of either label" if is_class else "")
            + ", or the gate `worst-slice` stays closed",
            action=f"lengthen the test window, or set evaluation: {{{setting}}}",
        )


def _largest_slice(sample: Sample) -> tuple[int, int]:
    """Rows of the largest slice of the test rows, and those of its rarer label."""
    spec, config = sample.config.features.training_set, sample.config
    label, best = sql_name(spec.label_column), (0, 0)
    columns = [row[0] for row in sample.con.execute("DESCRIBE counted").fetchall()]
    for name in config.evaluation.slices:
        by = f"strftime({EVENT_TIME}, '%Y-%m')" if name == MONTH else sql_name(name)
        if name != MONTH and name not in columns:
            continue
        found = sample.con.execute(
            f"SELECT count(*), least(count(*) FILTER ({label} > 0), count(*) FILTER "
            f"({label} <= 0)) FROM counted WHERE {label} IS NOT NULL AND "
            f"{inside(EVENT_TIME, config.splits.test)} GROUP BY {by} "
            "ORDER BY 2 DESC, 1 DESC LIMIT 1"
        ).fetchall()
        best = max(best, *(tuple(row) for row in found), key=lambda pair: (pair[1], pair[0]))
    return best
