"""The pictures of one run, drawn from its record; page and Prefect artifacts show the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.contracts.data import MonitoredFeature, MonitoredView
from tasks.contracts.drift import FeatureDrift
from tasks.contracts.evaluation import (
    CurvePoint,
    EvaluationReport,
    Metric,
    MetricSet,
    Quality,
    RegressionMetrics,
    SliceMetrics,
)
from tasks.contracts.run import RunRecord
from tasks.reporting.charts import (
    Cell,
    Effect,
    Estimate,
    Latency,
    Mark,
    Series,
    calibration_chart,
    curve_chart,
    effect_chart,
    histogram,
    interval_chart,
    latency_chart,
    line_chart,
    multiples,
    scatter_square,
    windows_chart,
)
from tasks.reporting.conversion import trades
from tasks.reporting.drawing import limits
from tasks.reporting.facts import comparisons, features_by_drift, slices_by_column
from tasks.reporting.judgement import (
    digits_of_errors,
    is_regression,
    sized,
    with_label_unit,
    with_unit_of_errors,
)
from tasks.reporting.lineage import columns, lineage_chart
from tasks.reporting.quantities import (
    count,
    decimal,
    difference,
    estimate,
    is_shown,
    percent,
    plural,
    shortened,
    significant,
)

MOST_FEATURES = 20
MOST_SLICES = 24
HEADING_IN_ROWS = 5


@dataclass(frozen=True)
class SliceFigure:
    """The slices of one column; `shown` may be fewer than there are."""

    column: str
    drawing: Markup
    shown: int
    total: int


def feature_values(record: RunRecord) -> Markup | None:
    """Median of each monitored feature as a line, its middle nine tenths as a band."""
    seen = record.refresh.monitoring
    if seen is None or not seen.features:
        return None
    words = "; ".join(f"{f.view} {f.feature}: {_psi(f)}" for f in seen.features)
    cells = [_feature_cell(feature) for feature in seen.features]
    return multiples("Features over time", words, cells, seen.window)


def _feature_cell(feature: MonitoredFeature) -> Cell:
    def known(value: float | None) -> float:
        return value if is_shown(value) else math.nan

    band = [(known(p.low), known(p.high)) for p in feature.periods]
    low, high = limits(*(v for edges in band for v in edges), margin=0.0)
    return Cell(
        name=feature.feature,
        note=f"{shortened(feature.view, 17)} · {_psi(feature)}",
        tip=f"{feature.view}: {feature.feature}, {_psi(feature)}",
        band=band,
        line=[known(p.median) for p in feature.periods],
        bounds=(low, high),
        edges=(significant(low), significant(high)),
        bad=feature.drifted,
    )


def _psi(feature: MonitoredFeature) -> str:
    return "no PSI" if feature.psi is None else f"PSI {decimal(feature.psi, 2)}"


def view_health(record: RunRecord) -> Markup | None:
    """Share of nulls of each monitored view as an area, age of its newest row as a dashed line."""
    seen = record.refresh.monitoring
    if seen is None or not seen.views:
        return None
    words = "; ".join(f"{v.view}: {percent(v.null_rate)} nulls" for v in seen.views)
    return multiples("Views over time", words, [_view_cell(v) for v in seen.views], seen.window)


def _view_cell(view: MonitoredView) -> Cell:
    top = max([0.05, *(p.null_rate for p in view.periods)])
    ages = [age if is_shown(age) else math.nan for age in view.ages_hours]
    oldest = max((age for age in ages if is_shown(age)), default=None)
    note = "age not known" if oldest is None else f"age {_age(oldest)} (dashed)"
    return Cell(
        name=view.view,
        note=note,
        tip=f"{view.view}: nulls up to {percent(top)}, {note}",
        band=[(0.0, p.null_rate) for p in view.periods],
        line=ages,
        bounds=(0.0, top),
        edges=("0", f"{percent(top, 0)} null"),
        line_top=oldest or 1.0,
    )


def _age(hours: float) -> str:
    """Up to how much, in the unit that leaves a number to read: minutes, hours or days."""
    minutes = round(hours * 60)
    if minutes < 1:
        return "below 1 min"
    if minutes < 90:
        return f"up to {minutes} min"
    return f"up to {hours:.0f} h" if hours < 72 else f"up to {hours / 24:.0f} days"


def windows(record: RunRecord) -> Markup:
    """Which span of time served which purpose."""
    splits, drift = record.model.splits, record.drift
    spans = [
        ("all rows", record.dataset.snapshot.window),
        ("train", splits.train),
        ("validate", splits.validation),
        ("test", splits.test),
        ("drift reference", drift.reference),
        ("drift current", drift.current),
    ]
    if drift.performance_reference is not None:
        spans.insert(5, ("quality reference", drift.performance_reference))
    return windows_chart(spans)


def losses(record: RunRecord) -> Markup:
    """Training and validation loss by epoch."""
    epochs = record.model.epochs
    return line_chart(
        "Loss by epoch",
        [
            Series("validation", [(e.epoch, e.validation_loss) for e in epochs]),
            Series("training", [(e.epoch, e.train_loss) for e in epochs]),
        ],
        _epoch_title(record),
        "mean Huber loss of the standardised label"
        if is_regression(record)
        else "mean cross-entropy, nats",
        mark=_best_epoch(record),
    )


def validation_quality(record: RunRecord) -> Markup:
    """Validation AUC, or R2, by epoch."""
    name = record.evaluation.overall.primary_name
    points = [(e.epoch, e.quality) for e in record.model.epochs]
    return line_chart(
        f"Validation {name} by epoch",
        [Series("validation", points)],
        _epoch_title(record),
        name,
        mark=_best_epoch(record),
    )


def _epoch_title(record: RunRecord) -> str:
    counted_from_zero = any(e.epoch == 0 for e in record.model.epochs)
    return "epoch, counted from 0" if counted_from_zero else "epoch"


def _best_epoch(record: RunRecord) -> Mark:
    return Mark(record.model.best_epoch, f"kept: epoch {record.model.best_epoch}")


def curves(record: RunRecord) -> list[tuple[str, Markup]]:
    """What each picture of the candidate's quality asks, and the picture."""
    report = record.evaluation
    if not isinstance(report.overall, MetricSet):
        return [
            ("Predicted against observed: do predictions come true?", observed_chart(report)),
            ("Errors: how far off, and to which side?", residual_chart(report)),
        ]
    return [
        ("Calibration: do scores come true?", calibration(record)),
        ("ROC: true against false alarms", roc(report, report.overall)),
        ("Precision and recall", precision_recall(report, report.overall)),
    ]


def roc(report: EvaluationReport, overall: MetricSet) -> Markup:
    """ROC curve of the candidate."""
    return curve_chart(
        "ROC curve",
        _candidate(report.roc, overall.auc),
        "false positive rate",
        "true positive rate",
        baseline=((0, 0), (1, 1)),
        baseline_text="guessing",
    )


def precision_recall(report: EvaluationReport, overall: MetricSet) -> Markup:
    """Precision-recall curve of the candidate; guessing gives the base rate."""
    rate = overall.base_rate if is_shown(overall.base_rate) else 0.0
    return curve_chart(
        "Precision-recall curve",
        _candidate(report.precision_recall, overall.pr_auc),
        "recall",
        "precision",
        baseline=((0, rate), (1, rate)),
        baseline_text=f"guessing ({percent(overall.base_rate)})",
    )


def _candidate(points: tuple[CurvePoint, ...], area: Metric) -> Series:
    return Series(f"candidate, area {decimal(area.value)}", [(p.x, p.y) for p in points])


def calibration(record: RunRecord) -> Markup:
    """Observed rate by score of the candidate."""
    return calibration_chart("Calibration", record.evaluation.calibration)


def slices(record: RunRecord) -> list[SliceFigure]:
    """AUC, or mean absolute error, by slice: a chart for each column, of the largest slices."""
    found = []
    name, overall = slice_metric(record.evaluation.overall)
    for column, parts in slices_by_column(record).items():
        largest = sorted(parts, key=lambda p: -p.metrics.num_rows)[:MOST_SLICES]
        shown = [p for p in parts if p in largest]
        drawing = interval_chart(
            f"{name} by {column}",
            [_slice(p) for p in shown],
            f"{name} with 95 % interval",
            reference=overall.value,
            reference_text=f"all rows {sized(overall.value)}",
        )
        found.append(SliceFigure(column, drawing, len(shown), len(parts)))
    return found


def balanced(parts: Sequence[SliceFigure]) -> tuple[list[SliceFigure], list[SliceFigure]]:
    """The charts in two stacks of about equal height, in their order."""
    stacks: tuple[list[SliceFigure], list[SliceFigure]] = ([], [])
    heights = [0, 0]
    for part in parts:
        shorter = heights.index(min(heights))
        stacks[shorter].append(part)
        heights[shorter] += part.shown + HEADING_IN_ROWS
    return stacks


def _slice(part: SliceMetrics) -> Estimate:
    metrics = part.metrics
    name, shown = slice_metric(metrics)
    if isinstance(metrics, MetricSet):
        more = f"base rate {percent(metrics.base_rate)}"
    else:
        more = f"skill {estimate(metrics.skill)}"
    return Estimate(
        name=part.value or "(empty)",
        value=shown.value,
        low=shown.low,
        high=shown.high,
        note=f"{sized(shown.value)} · {count(metrics.num_rows)} rows",
        tip=f"{part.value}: {name} {estimate(shown)} on {plural(metrics.num_rows, 'row')}, {more}",
    )


def slice_metric(metrics: Quality) -> tuple[str, Metric]:
    """What slices are compared by. R2 says little of a slice whose labels hardly differ."""
    if isinstance(metrics, MetricSet):
        return metrics.primary_name, metrics.auc
    return "Mean absolute error", metrics.mae


def compared(record: RunRecord) -> tuple[tuple[str, Markup], ...]:
    """Candidate minus each other model, first metric and error, around zero; with captions."""
    found = comparisons(record)
    if not found:
        return ()
    name, error = record.evaluation.overall.primary_name, found[0].error_name
    short = with_unit_of_errors(error.split()[0] + " difference", record)
    sides = [
        (f"{name}: right of zero", f"{name} difference (right", [c.primary for c in found], 4),
        (
            f"{error}: left of zero",
            f"{short} (left",
            [c.error for c in found],
            digits_of_errors([c.error for c in found], record),
        ),
    ]
    return tuple(
        (
            f"Candidate minus the other, {caption} is better",
            interval_chart(
                f"{title} is better)",
                [
                    Estimate(c.against, m.value, m.low, m.high, difference(m, digits))
                    for c, m in zip(found, metrics, strict=True)
                ],
                f"{title} is better)",
                reference=0.0,
                reference_text="no difference",
                note_below=True,
            ),
        )
        for caption, title, metrics, digits in sides
    )


def latencies(record: RunRecord) -> Markup | None:
    """Latency by variant and batch size; None where nothing was measured."""
    rows = [
        Latency(v.name, m.batch_rows, m.p50_ms, m.p95_ms, m.ratio_to_eager, v.accepted)
        for v in record.variants
        for m in v.latencies
    ]
    return latency_chart("Latency by variant", rows) if rows else None


def drift(record: RunRecord) -> Markup | None:
    """The features that changed most; None where no feature was compared."""
    chosen = features_by_drift(record)[:MOST_FEATURES]
    chosen.sort(key=lambda f: -f.effect if is_shown(f.effect) else 1.0)
    if not chosen:
        return None
    return effect_chart(
        "Drift by feature",
        [_effect(f) for f in chosen],
        ("effect", "PSI", "missing"),
        threshold=record.drift.effect_threshold,
    )


def _effect(feature: FeatureDrift) -> Effect:
    missing = f"{percent(feature.missing_reference, 0)} → {percent(feature.missing_current, 0)}"
    return Effect(
        name=feature.feature,
        size=feature.effect,
        low=feature.effect_low,
        drifted=feature.drifted,
        columns=(decimal(feature.effect, 3), decimal(feature.psi, 3), missing),
        tip=f"{feature.feature} ({feature.kind}): {feature.evidence}",
    )


def observed_chart(report: EvaluationReport) -> Markup:
    """Labels by prediction: the mean of each bin, and where the middle four fifths are."""
    bands = [b for b in report.observed if all(map(is_shown, (b.x, b.low, b.high, b.mean)))]
    tips = [
        f"predicted {sized(b.x)}: observed {sized(b.mean)} on average, four in five from "
        f"{sized(b.low)} to {sized(b.high)}, {count(b.num_rows)} rows"
        for b in bands
    ]
    return scatter_square(
        "Predicted against observed",
        f"Mean label by prediction in {len(bands)} bins of equally many rows, with the middle four "
        "fifths of the labels; the dashed diagonal is perfect.",
        (with_label_unit("predicted", report), with_label_unit("observed", report)),
        bands,
        tips,
    )


def residual_chart(report: EvaluationReport) -> Markup:
    """How many rows have which error."""
    bars = [c for c in report.residuals if is_shown(c.x) and is_shown(c.weight)]
    overall = report.overall
    rmse, mean = None, None
    if isinstance(overall, RegressionMetrics):
        rmse = overall.rmse.value
        mean = Mark(overall.bias.value, f"mean {sized(overall.bias.value)}")
    return histogram(
        "Errors",
        f"Rows by error, prediction minus label. The root of the mean squared error is "
        f"{significant(rmse)}; the outermost bars hold all that is beyond.",
        with_label_unit("predicted minus observed", report),
        bars,
        [f"{count(c.weight)} rows with an error about {sized(c.x)}" for c in bars],
        mean,
    )


def gallery(record: RunRecord) -> dict[str, Markup]:
    """The pictures worth showing beside a run, by key; what was not measured is left out."""
    overall = record.evaluation.overall
    quality: dict[str, Markup | None] = {
        "observed": observed_chart(record.evaluation),
        "residuals": residual_chart(record.evaluation),
    }
    if isinstance(overall, MetricSet):
        quality = {
            "calibration": calibration(record),
            "roc": roc(record.evaluation, overall),
        }
    pictures = {
        **quality,
        "learning-curve": losses(record),
        "drift": drift(record),
        "latency": latencies(record),
        **{f"trade-{n}": drawing for n, (_, drawing) in enumerate(trades(record), start=1)},
        "lineage": lineage_chart(columns(record)),
        "features": feature_values(record),
    }
    return {key: drawing for key, drawing in pictures.items() if drawing is not None}
