"""The pictures of one run, drawn from its record; page and Prefect artifacts show the same."""

from markupsafe import Markup

from tasks.contracts.evaluation import EvaluationReport, Metric, MetricSet, SliceMetrics
from tasks.contracts.release import ModelVariant
from tasks.contracts.run import RunRecord
from tasks.reporting import charts, facts, quantities
from tasks.reporting.gallery import Picture, Pictures

MOST_SLICES = 24
HEADING_IN_ROWS = 5


def draw(record: RunRecord) -> Pictures:
    """Draw all pictures of a run."""
    losses, validation_quality = _learning(record)
    seen = record.refresh.monitoring
    return Pictures(
        losses=losses,
        validation_quality=validation_quality,
        curves=curves(record.evaluation),
        compared=_compared(record),
        slices=_slices(record.evaluation),
        features=charts.feature_charts(seen.features) if seen and seen.features else None,
        trades=_trades(record),
    )


def _learning(record: RunRecord) -> tuple[Markup, Markup]:
    """Losses, and validation AUC (or R2), by epoch, the kept epoch marked."""
    model, name = record.model, record.evaluation.overall.primary_name
    zero = any(e.epoch == 0 for e in model.epochs)
    x_title = "epoch, counted from 0" if zero else "epoch"
    kept = model.best_epoch, f"kept: epoch {model.best_epoch}"
    unit = "mean Huber loss of the standardised label" if facts.is_regression(record) else ""
    lines = [
        charts.Series("validation", [(e.epoch, e.validation_loss) for e in model.epochs]),
        charts.Series("training", [(e.epoch, e.train_loss) for e in model.epochs]),
    ]
    quality = charts.Series("validation", [(e.epoch, e.quality) for e in model.epochs])
    return (
        charts.line_chart(
            "Loss by epoch", lines, x_title, unit or "mean cross-entropy, nats", kept
        ),
        charts.line_chart(f"Validation {name} by epoch", [quality], x_title, name, kept),
    )


def _trades(record: RunRecord) -> list[Picture]:
    """Latency of one row, and price of a million, against the change of the metric."""
    metric = record.evaluation.overall.primary_name
    one_row = {
        v.name: at.p50_ms for v in record.variants for at in v.latencies if at.batch_rows == 1
    }
    prices = {v.name: v.price.per_million for v in record.variants if v.price}
    unit = next((v.price.currency for v in record.variants if v.price), "")
    drawn = []
    for what, x_title, costs in (
        ("Latency of one row", "median, ms, logarithmic", one_row),
        ("Price of a million rows", f"{unit}, logarithmic", prices),
    ):
        rows = [
            (cost, _trade(v, v.quality_change, cost, metric))
            for v in record.variants
            if quantities.is_shown(cost := costs.get(v.name)) and cost > 0
            if v.quality_change is not None and quantities.is_shown(v.quality_change.value)
        ]
        if rows:
            caption = f"{what} against {metric}: best is upper left"
            drawn.append(
                Picture(caption, charts.trade_chart(what, x_title, f"{metric} change", rows))
            )
    return drawn


def _trade(variant: ModelVariant, change: Metric, cost: float, metric: str) -> charts.Estimate:
    kept = "kept" if variant.accepted else ""
    figures = f"{quantities.significant(cost)}, {metric} {quantities.decimal(change.value, 5)}"
    tip = f"{variant.name} ({kept or 'dropped'}): {figures}"
    return charts.Estimate(variant.name, change.value, change.low, change.high, kept, tip)


def curves(report: EvaluationReport) -> dict[str, Picture]:
    """What the candidate's quality looks like, by key."""
    overall = report.overall
    if not isinstance(overall, MetricSet):
        observed, residuals = charts.observed_chart(report), charts.residual_chart(report)
        return {
            "observed": Picture("Predicted against observed: do predictions come true?", observed),
            "residuals": Picture("Errors: how far off, and to which side?", residuals),
        }
    rate = overall.base_rate if quantities.is_shown(overall.base_rate) else 0.0
    roc, recall = (
        charts.Series(
            f"candidate, area {quantities.decimal(area.value)}", [(p.x, p.y) for p in points]
        )
        for points, area in ((report.roc, overall.auc), (report.precision_recall, overall.pr_auc))
    )
    titles = "false positive rate", "true positive rate"
    return {
        "calibration": Picture(
            "Calibration: do scores come true?", charts.calibration_chart(report.calibration)
        ),
        "roc": Picture(
            "ROC: true against false alarms",
            charts.curve_chart("ROC curve", roc, *titles, ((0, 0), (1, 1))),
        ),
        "precision-recall": Picture(
            "Precision and recall",
            charts.curve_chart(
                "Precision-recall curve", recall, "recall", "precision", ((0, rate), (1, rate))
            ),
        ),
    }


def _compared(record: RunRecord) -> list[Picture]:
    """Candidate minus each other model, first metric and error, around zero."""
    found = facts.comparisons(record)
    if not found:
        return []
    name, error = record.evaluation.overall.primary_name, found[0].error_name
    errors = [c.error for c in found]
    digits = 4
    if facts.is_regression(record):
        digits = facts.digits_of(*(bound for e in errors for bound in (e.value, e.low, e.high)))
    short = facts.with_label_unit(f"{error} difference", record.evaluation)
    sides = [
        (f"{name}: right", f"{name} difference (right", [c.primary for c in found], 4),
        (f"{error}: left", f"{short} (left", errors, digits),
    ]
    drawn = []
    for caption, title, metrics, shown in sides:
        rows = [
            charts.Estimate(c.against, m.value, m.low, m.high, quantities.difference(m, shown))
            for c, m in zip(found, metrics, strict=True)
        ]
        x_title = f"{title} is better)"
        drawing = charts.interval_chart(x_title, rows, x_title, (0.0, "no difference"))
        words = f"Candidate minus the other, {caption} of zero is better"
        drawn.append(Picture(words, drawing))
    return drawn


def _slices(report: EvaluationReport) -> tuple[list[Picture], list[Picture]]:
    """AUC, or mean absolute error, by slice: a chart a column, in two stacks of about one height.

    Of many slices the largest are shown.
    """
    stacks: tuple[list[Picture], list[Picture]] = ([], [])
    heights = [0, 0]
    name, overall = facts.slice_metric(report.overall)
    for column, parts in facts.slices_by_column(report).items():
        largest = sorted(parts, key=lambda p: -p.metrics.num_rows)[:MOST_SLICES]
        shown = [_slice(p) for p in parts if p in largest]
        title = f"{name} by {column}"
        reference = overall.value, f"all {facts.sized(overall.value)}"
        drawing = charts.interval_chart(title, shown, f"{name} with 95 % interval", reference)
        some = f", the {len(shown)} largest of {len(parts)}" if len(shown) < len(parts) else ""
        shorter = heights.index(min(heights))
        stacks[shorter].append(Picture(title + some, drawing))
        heights[shorter] += len(shown) + HEADING_IN_ROWS
    return stacks


def _slice(part: SliceMetrics) -> charts.Estimate:
    metrics = part.metrics
    name, shown = facts.slice_metric(metrics)
    if isinstance(metrics, MetricSet):
        more = f"base rate {quantities.percent(metrics.base_rate)}"
    else:
        more = f"skill {quantities.estimate(metrics.skill)}"
    rows = f"{quantities.count(metrics.num_rows)} rows"
    return charts.Estimate(
        name=part.value or "(empty)",
        value=shown.value,
        low=shown.low,
        high=shown.high,
        note=f"{facts.sized(shown.value)} · {rows}",
        tip=f"{part.value}: {name} {quantities.estimate(shown)} on {rows}, {more}",
    )
