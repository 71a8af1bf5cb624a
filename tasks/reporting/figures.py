"""The pictures of one run, drawn from its record; page and Prefect artifacts show the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from markupsafe import Markup

from tasks.contracts.data import MonitoredFeature, MonitoredView
from tasks.contracts.evaluation import CurvePoint, Metric, MetricSet, Quality, SliceMetrics
from tasks.contracts.release import ModelVariant
from tasks.contracts.run import RunRecord
from tasks.reporting.charts import (
    Cell,
    Estimate,
    Series,
    calibration_chart,
    curve_chart,
    drift_chart,
    interval_chart,
    latency_chart,
    line_chart,
    multiples,
    observed_chart,
    residual_chart,
    trade_chart,
    windows_chart,
)
from tasks.reporting.drawing import limits
from tasks.reporting.facts import comparisons, features_by_drift, slices_by_column
from tasks.reporting.judgement import digits_of_errors, is_regression, sized, with_unit_of_errors
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


class Pictures:
    """The pictures of one run, each drawn when somebody first asks for it, and once.

    None stands for what was not measured.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def gallery(self) -> dict[str, Markup]:
        """The pictures worth showing beside a run, by key."""
        first, second = (drawing for _, drawing in self.curves[:2])
        names = ("calibration", "roc")
        if is_regression(self._record):
            names = ("observed", "residuals")
        pictures = {
            **dict(zip(names, (first, second), strict=True)),
            "learning-curve": self.losses,
            "drift": self.drift,
            "latency": self.latencies,
            **{f"trade-{n}": drawing for n, (_, drawing) in enumerate(self.trades, start=1)},
            "lineage": self.lineage,
            "features": self.feature_values,
        }
        return {key: drawing for key, drawing in pictures.items() if drawing is not None}

    @cached_property
    def lineage(self) -> Markup:
        """Where the model came from."""
        return lineage_chart(columns(self._record))

    @cached_property
    def feature_values(self) -> Markup | None:
        """Median of each monitored feature as a line, its middle nine tenths as a band."""
        seen = self._record.refresh.monitoring
        if seen is None or not seen.features:
            return None
        words = "; ".join(f"{f.view} {f.feature}: {_psi(f)}" for f in seen.features)
        cells = [_feature_cell(feature) for feature in seen.features]
        return multiples("Features over time", words, cells, seen.window)

    @cached_property
    def view_health(self) -> Markup | None:
        """Share of nulls of each monitored view as an area, age of its newest row dashed."""
        seen = self._record.refresh.monitoring
        if seen is None or not seen.views:
            return None
        words = "; ".join(f"{v.view}: {percent(v.null_rate)} nulls" for v in seen.views)
        return multiples("Views over time", words, [_view_cell(v) for v in seen.views], seen.window)

    @cached_property
    def windows(self) -> Markup:
        """Which span of time served which purpose."""
        splits, drift = self._record.model.splits, self._record.drift
        spans = [
            ("all rows", self._record.dataset.snapshot.window),
            ("train", splits.train),
            ("validate", splits.validation),
            ("test", splits.test),
            ("drift reference", drift.reference),
            ("drift current", drift.current),
        ]
        if drift.performance_reference is not None:
            spans.insert(5, ("quality reference", drift.performance_reference))
        return windows_chart(spans)

    @cached_property
    def losses(self) -> Markup:
        """Training and validation loss by epoch."""
        epochs = self._record.model.epochs
        lines = [
            Series("validation", [(e.epoch, e.validation_loss) for e in epochs]),
            Series("training", [(e.epoch, e.train_loss) for e in epochs]),
        ]
        unit = "mean cross-entropy, nats"
        if is_regression(self._record):
            unit = "mean Huber loss of the standardised label"
        return line_chart("Loss by epoch", lines, *self._epochs(unit))

    @cached_property
    def validation_quality(self) -> Markup:
        """Validation AUC, or R2, by epoch."""
        name = self._record.evaluation.overall.primary_name
        points = [(e.epoch, e.quality) for e in self._record.model.epochs]
        line = Series("validation", points)
        return line_chart(f"Validation {name} by epoch", [line], *self._epochs(name))

    def _epochs(self, y_title: str) -> tuple[str, str, tuple[float, str]]:
        """Titles of the axes, and the epoch that was kept."""
        model = self._record.model
        counted_from_zero = any(e.epoch == 0 for e in model.epochs)
        x_title = "epoch, counted from 0" if counted_from_zero else "epoch"
        return x_title, y_title, (model.best_epoch, f"kept: epoch {model.best_epoch}")

    @cached_property
    def curves(self) -> list[tuple[str, Markup]]:
        """What each picture of the candidate's quality asks, and the picture."""
        report = self._record.evaluation
        overall = report.overall
        if not isinstance(overall, MetricSet):
            return [
                ("Predicted against observed: do predictions come true?", observed_chart(report)),
                ("Errors: how far off, and to which side?", residual_chart(report)),
            ]
        rate = overall.base_rate if is_shown(overall.base_rate) else 0.0
        roc = curve_chart(
            "ROC curve",
            _candidate(report.roc, overall.auc),
            "false positive rate",
            "true positive rate",
            baseline=((0, 0), (1, 1)),
            baseline_text="guessing",
        )
        precision_recall = curve_chart(
            "Precision-recall curve",
            _candidate(report.precision_recall, overall.pr_auc),
            "recall",
            "precision",
            baseline=((0, rate), (1, rate)),
            baseline_text=f"guessing ({percent(overall.base_rate)})",
        )
        return [
            ("Calibration: do scores come true?", calibration_chart(report.calibration)),
            ("ROC: true against false alarms", roc),
            ("Precision and recall", precision_recall),
        ]

    @cached_property
    def slices(self) -> list[SliceFigure]:
        """AUC, or mean absolute error, by slice: a chart for each column, of the largest slices."""
        found = []
        name, overall = slice_metric(self._record.evaluation.overall)
        for column, parts in slices_by_column(self._record).items():
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

    @cached_property
    def compared(self) -> list[tuple[str, Markup]]:
        """Candidate minus each other model, first metric and error, around zero; with captions."""
        record = self._record
        found = comparisons(record)
        if not found:
            return []
        name, error = record.evaluation.overall.primary_name, found[0].error_name
        short = with_unit_of_errors(error.split()[0] + " difference", record)
        errors = [c.error for c in found]
        sides = [
            (f"{name}: right", f"{name} difference (right", [c.primary for c in found], 4),
            (f"{error}: left", f"{short} (left", errors, digits_of_errors(errors, record)),
        ]
        drawn = []
        for caption, title, metrics, digits in sides:
            rows = [
                Estimate(c.against, m.value, m.low, m.high, difference(m, digits))
                for c, m in zip(found, metrics, strict=True)
            ]
            title = f"{title} is better)"
            drawing = interval_chart(
                title, rows, title, reference=0.0, reference_text="no difference", note_below=True
            )
            drawn.append((f"Candidate minus the other, {caption} of zero is better", drawing))
        return drawn

    @cached_property
    def latencies(self) -> Markup | None:
        """Latency by variant and batch size."""
        variants = self._record.variants
        return latency_chart(variants) if any(v.latencies for v in variants) else None

    @cached_property
    def trades(self) -> list[tuple[str, Markup]]:
        """Latency, and price, against the change of the metric: a caption and a picture each."""
        variants = self._record.variants
        sizes = sorted({at.batch_rows for v in variants for at in v.latencies})
        unit = next((v.price.currency for v in variants if v.price), "")
        drawn = [
            self._trade(
                f"Latency of {'one row' if size == 1 else f'{size:,} rows'}",
                "median latency in ms, logarithmic",
                partial(_latency_of, batch_rows=size),
            )
            for size in sizes
        ]
        price = f"{unit} per million rows, logarithmic"
        drawn.append(
            self._trade("Price", price, lambda v: v.price.per_million if v.price else None)
        )
        return [one for one in drawn if one is not None]

    def _trade(
        self, what: str, x_title: str, cost_of: Callable[[ModelVariant], float | None]
    ) -> tuple[str, Markup] | None:
        points = []
        for variant in self._record.variants:
            cost, change = cost_of(variant), variant.quality_change
            if is_shown(cost) and cost > 0 and change is not None and is_shown(change.value):
                points.append((variant, cost, change))
        if not points:
            return None
        metric = self._record.evaluation.overall.primary_name
        title = f"{what} against {metric}"
        caption = f"{title} change: left is cheaper, up is better"
        return caption, trade_chart(title, points, x_title, metric)

    @cached_property
    def drift(self) -> Markup | None:
        """The features that changed most."""
        chosen = features_by_drift(self._record)[:MOST_FEATURES]
        chosen.sort(key=lambda f: -f.effect if is_shown(f.effect) else 1.0)
        return drift_chart(chosen, self._record.drift.effect_threshold) if chosen else None


def _latency_of(variant: ModelVariant, batch_rows: int) -> float | None:
    return next((at.p50_ms for at in variant.latencies if at.batch_rows == batch_rows), None)


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


def _candidate(points: tuple[CurvePoint, ...], area: Metric) -> Series:
    return Series(f"candidate, area {decimal(area.value)}", [(p.x, p.y) for p in points])


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
