"""Windows and gates: rows and labels of each split, and gates that no candidate could pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from falaj.onboarding.findings import Finding, Severity, found
from falaj.onboarding.queries import Sample
from tasks.evaluation.config import MONTH
from tasks.features.entities import EVENT_TIME
from tasks.features.offline.duck import inside, sql_name
from tasks.kernel.settings import USE_CASE_FILE

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
    labels: int
    """Different ones."""
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
    counts = []
    for name, window in (*config.splits, ("current", config.current)):
        rows, unlabelled, mean, positives, labels, days, newest = sample.con.execute(
            f"SELECT count({label}), count(*) - count({label}), avg({label}), "
            f"count(*) FILTER ({label} > 0), count(DISTINCT {label}), "
            f"count(DISTINCT {moment}::DATE) FILTER "
            f"({label} IS NOT NULL), max({moment}) FILTER ({label} IS NOT NULL) "
            f"FROM counted WHERE {inside(EVENT_TIME, window)}"
        ).fetchall()[0]
        rows, unlabelled, positives = (int(n / share) for n in (rows, unlabelled, positives))
        counts.append(
            SplitCounts(name, rows, unlabelled, float(mean or 0), positives, labels, days, newest)
        )
    return counts


def split_findings(sample: Sample, counts: list[SplitCounts]) -> Iterator[Finding]:
    """Splits without rows, with one label, without enough days, or whose labels are not known."""
    config, is_class = sample.config, sample.config.features.training_set.task == "classification"
    times = sample.con.execute(f"SELECT min({EVENT_TIME}), max({EVENT_TIME}) FROM counted")
    span = " to ".join(f"{t.astimezone(UTC):%Y-%m-%d}" for t in times.fetchall()[0] if t)
    for split in counts:
        window, at = dict(config.splits).get(split.name), sample.places.line("splits", split.name)
        if window is None:
            window, at = config.current, sample.places.first("current", "splits")
        values = {**asdict(split), "split": split.name, "window": window, "span": span}
        values["total"] = split.rows + split.unlabelled
        if not split.rows:
            yield found("empty-split", USE_CASE_FILE, at, **values)
            continue
        if split.rows < LEAST_KNOWN * (split.rows + split.unlabelled):
            yield found("few-labels", USE_CASE_FILE, at, **values)
        if is_class and not 0 < split.positives < split.rows:
            grave: Severity = "warning" if split.name == "current" else "error"
            yield found("one-label", USE_CASE_FILE, at, severity=grave, **values)
        if split.labels < len(config.features.training_set.classes):
            values["classes"] = ", ".join(config.features.training_set.class_names)
            rank: Severity = "warning" if split.name == "current" else "error"
            yield found("class-missing", USE_CASE_FILE, at, severity=rank, **values)
        least = {"test": config.evaluation.min_days, "current": config.drift.min_days}
        if split.days < least.get(split.name, 0):
            setting = "evaluation" if split.name == "test" else "drift"
            values |= {"least": least[split.name], "setting": setting}
            yield found("few-days", USE_CASE_FILE, at, **values)


def gate_findings(sample: Sample, counts: list[SplitCounts]) -> Iterator[Finding]:
    """Gates that stay closed whatever the model is."""
    config, spec = sample.config, sample.config.features.training_set
    test = next(split for split in counts if split.name == "test")
    oldest = config.promotion.max_age_days
    if oldest and config.splits.test.end < datetime.now(UTC) - timedelta(days=oldest):
        line = sample.places.line("promotion", "max_age_days")
        yield found("too-old", USE_CASE_FILE, line, end=config.splits.test.end, days=oldest)
    if not test.rows:
        return
    rows, positives = _largest_slice(sample)
    limits, is_class = config.evaluation, spec.task != "regression"
    if rows < limits.min_slice_rows or (is_class and positives < limits.min_slice_positives):
        wanted = {"min_slice_rows": max(2, rows // 2)}
        if is_class:
            wanted["min_slice_positives"] = max(1, positives // 2)
        setting = ", ".join(f"{name}: {number}" for name, number in wanted.items())
        yield found(
            "no-slice",
            USE_CASE_FILE,
            sample.places.line("evaluation"),
            rows=rows,
            rarer=positives,
            least=limits.min_slice_rows,
            least_rarer=limits.min_slice_positives,
            setting=setting,
        )


def _largest_slice(sample: Sample) -> tuple[int, int]:
    """Rows of the largest slice of the test rows, and those of its rarer label."""
    spec, config = sample.config.features.training_set, sample.config
    label, best = sql_name(spec.label_column), (0, 0)
    columns = [row[0] for row in sample.con.execute("DESCRIBE counted").fetchall()]
    labels = [f"{label} = {k}" for k in range(len(spec.classes))] or [
        f"{label} > 0",
        f"{label} <= 0",
    ]
    rarest = ", ".join(f"count(*) FILTER ({is_it})" for is_it in labels)
    for name in config.evaluation.slices:
        by = f"strftime({EVENT_TIME}, '%Y-%m')" if name == MONTH else sql_name(name)
        if name != MONTH and name not in columns:
            continue
        slices = sample.con.execute(
            f"SELECT count(*), least({rarest}) FROM counted WHERE {label} IS NOT NULL AND "
            f"{inside(EVENT_TIME, config.splits.test)} GROUP BY {by} "
            "ORDER BY 2 DESC, 1 DESC LIMIT 1"
        ).fetchall()
        best = max(best, *(tuple(row) for row in slices), key=lambda pair: (pair[1], pair[0]))
    return best
