"""Windows and gates: rows and labels of each split, and gates that no candidate could pass."""

from datetime import UTC, datetime, timedelta
from typing import Any

from falaj.onboarding.findings import Severity
from falaj.onboarding.queries import Sample
from tasks.contracts.base import TimeWindow
from tasks.evaluation.config import MONTH
from tasks.features.entities import EVENT_TIME
from tasks.features.offline.duck import inside, sql_name

LEAST_KNOWN = 0.5
"""Share of a split's rows that have a label; with fewer something is amiss with the windows."""


def check_windows(sample: Sample) -> list[dict[str, Any]]:
    """Find splits without rows, labels or days, and gates that stay closed whatever the model is.

    Args:
        sample: of all raw rows: a label may lie in another row than the one it is of.

    Returns:
        Of each split and of `current` its name, `rows` with a label, `unlabelled` rows, `positives`
        among the labels, how many different `labels`, their `mean`, `days` and `newest` moment.
    """
    config = sample.config
    sample.read_raw()
    column = config.features.training_set.label_column
    sample.compute_frame(config.window, "counted", (column, EVENT_TIME, *config.evaluation.slices))
    label, moment = sql_name(column), sql_name(EVENT_TIME)
    counts = []
    for name, window in (*config.splits, ("current", config.current)):
        rows, unlabelled, positives, labels, mean, days, newest = sample.con.execute(
            f"SELECT count({label}), count(*) - count({label}), count(*) FILTER ({label} > 0), "
            f"count(DISTINCT {label}), avg({label}), "
            f"count(DISTINCT {moment}::DATE) FILTER ({label} IS NOT NULL), "
            f"max({moment}) FILTER ({label} IS NOT NULL) "
            f"FROM counted WHERE {inside(EVENT_TIME, window)}"
        ).fetchall()[0]
        split = {"name": name, "rows": rows, "unlabelled": unlabelled, "positives": positives}
        split["labels"] = labels
        counts.append({**split, "mean": float(mean or 0), "days": days, "newest": newest})
        _check_split(sample, counts[-1], window)
    oldest, end = config.promotion.max_age_days, config.splits.test.end
    if oldest and end < datetime.now(UTC) - timedelta(days=oldest):
        place = sample.findings.at("promotion", "max_age_days")
        sample.findings.add("too-old", place, end=end, days=oldest)
    if next(split["rows"] for split in counts if split["name"] == "test"):
        _check_slices(sample)
    return counts


def _check_split(sample: Sample, split: dict[str, Any], window: TimeWindow) -> None:
    config, findings, name = sample.config, sample.findings, split["name"]
    own = name == "current" and name in config.model_fields_set
    place = findings.at(name) if own else findings.at("splits", name)
    values = {**split, "total": split["rows"] + split["unlabelled"]}
    if not split["rows"]:
        times = sample.con.execute(f"SELECT min({EVENT_TIME}), max({EVENT_TIME}) FROM counted")
        span = " to ".join(f"{t.astimezone(UTC):%Y-%m-%d}" for t in times.fetchall()[0] if t)
        findings.add("empty-split", place, **values, window=window, span=span)
        return
    if split["rows"] < LEAST_KNOWN * values["total"]:
        findings.add("few-labels", place, **values)
    is_class = config.features.training_set.task == "classification"
    grave: Severity = "warning" if name == "current" else "error"
    if is_class and not 0 < split["positives"] < split["rows"]:
        findings.add("one-label", place, severity=grave, **values)
    classes = config.features.training_set.class_names
    if split["labels"] < len(classes):
        findings.add("class-missing", place, severity=grave, **values, classes=", ".join(classes))
    setting = {"test": "evaluation", "current": "drift"}.get(name)
    if setting and split["days"] < (least := getattr(config, setting).min_days):
        findings.add("few-days", place, **values, least=least, setting=setting)


def _check_slices(sample: Sample) -> None:
    """See that one slice of the test rows is large enough to be judged."""
    config, spec = sample.config, sample.config.features.training_set
    label, (rows, rarer) = sql_name(spec.label_column), (0, 0)
    limits, is_class = config.evaluation, spec.task != "regression"
    labels = [f"{label} = {k}" for k in range(len(spec.classes))]
    labels = labels or ([f"{label} > 0", f"{label} <= 0"] if is_class else ["TRUE"])
    each = ", ".join(f"count(*) FILTER ({is_it})" for is_it in labels)
    columns = {row[0] for row in sample.con.execute("DESCRIBE counted").fetchall()}
    for name in config.evaluation.slices:
        by = f"strftime({EVENT_TIME}, '%Y-%m')" if name == MONTH else sql_name(name)
        if name != MONTH and name not in columns:
            continue
        slices = sample.con.execute(
            f"SELECT count(*), least({each}) FROM counted WHERE {label} IS NOT NULL AND "
            f"{inside(EVENT_TIME, config.splits.test)} GROUP BY {by} "
            "ORDER BY 2 DESC, 1 DESC LIMIT 1"
        ).fetchall()
        rows, rarer = max((rows, rarer), *slices, key=lambda pair: (pair[1], pair[0]))
    if rows < limits.min_slice_rows or (is_class and rarer < limits.min_slice_positives):
        setting = f"min_slice_rows: {max(2, rows // 2)}"
        seen, least = f"{rows:,} rows", f"{limits.min_slice_rows:,} rows"
        if is_class:
            setting += f", min_slice_positives: {max(1, rarer // 2)}"
            seen += f", {rarer:,} of the rarest label"
            least += f" and {limits.min_slice_positives:,} of each label"
        sample.findings.add(
            "no-slice", sample.findings.at("evaluation"), largest=seen, least=least, setting=setting
        )
