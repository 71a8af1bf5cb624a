"""Did the new map of the scores help, beyond doubt?"""

from __future__ import annotations

from collections.abc import Callable

from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.evaluation import (
    Calibration,
    Comparison,
    EvaluationReport,
    Metric,
    PairedComparison,
)

Rule = Callable[[Metric], bool]
MAX_RANK_CHANGE = 1e-4
"""AUC that a rising map may move: scores that 32 bits hold apart may meet, and the reverse."""


def why_no_gain(evaluation: EvaluationReport, source: int) -> str | None:
    """Why the recalibrated model is no better than its source, as a sentence; None where it is.

    Both are judged on the same later rows and the same bootstrap draws. Of a classification log
    loss, Brier score and calibration error must each be lower by the whole 95 % interval, and the
    AUC be the same; of a regression the RMSE must be lower and R2 higher.

    Args:
        evaluation: of the recalibrated model.
        source: number of the version that it was made from.
    """
    against = f"champion:{source}"
    found = [c for c in evaluation.comparisons if c.against == against]
    if len(found) != 1:
        seen = ", ".join(c.against for c in evaluation.comparisons)
        return (
            f"version {source} was mapped, and the evaluation compares with {seen}: another "
            "version became the champion in between. Nothing was registered; check its drift"
        )
    wanting = [
        f"{name} {_shown(change)}"
        for name, change, is_better in _changes(found[0])
        if not (change is not None and is_better(change))
    ]
    if not wanting:
        return None
    return (
        f"on {evaluation.overall.num_rows:,} rows of {evaluation.window} the new map does not help "
        f"beyond doubt: {'; '.join(wanting)}. Nothing was registered; retrain if scores stay wrong"
    )


def describe_changes(evaluation: EvaluationReport, source: int) -> list[str]:
    """What the map changed on the rows of an evaluation, a line each."""
    found = [c for c in evaluation.comparisons if c.against == f"champion:{source}"]
    return [f"{name} {_shown(change)}" for part in found for name, change, _ in _changes(part)]


def _changes(comparison: Comparison) -> list[tuple[str, Metric | None, Rule]]:
    rules: list[tuple[str, str, Rule]] = [
        ("log loss", "log_loss_difference", lambda change: change.high < 0),
        ("Brier score", "brier_difference", lambda change: change.high < 0),
        ("calibration error", "calibration_error_difference", lambda change: change.high < 0),
        (AUC_NAME, "auc_difference", lambda change: abs(change.value) <= MAX_RANK_CHANGE),
    ]
    if not isinstance(comparison, PairedComparison):
        rules = [
            ("RMSE", "rmse_difference", lambda change: change.high < 0),
            (R2_NAME, "r2_difference", lambda change: change.low > 0),
        ]
    return [(name, getattr(comparison, field), rule) for name, field, rule in rules]


def _shown(metric: Metric | None) -> str:
    return "is not known" if metric is None else f"changed by {metric:+.4f}"


def announcement(
    calibration: Calibration, evaluation: EvaluationReport, refusal: str | None
) -> str:
    """What was fitted, what it changed on later rows, and whether it is kept.

    Args:
        calibration: the map, and where it comes from.
        evaluation: of the recalibrated model.
        refusal: why it is not kept; None where it is.
    """
    fit, whole = calibration.fit, calibration.whole_map
    positives = "" if fit.num_positives is None else f", {fit.num_positives:,} with label 1"
    kept = "**Kept.** The scores mean what they say, as far as these rows can tell."
    lines = [
        f"**Not kept.** {refusal}" if refusal else kept,
        "",
        f"- slope {fit.map.slope:.4f} ± {fit.slope_error:.4f}",
        f"- intercept {fit.map.intercept:+.4f} ± {fit.intercept_error:.4f}",
        f"- fitted to {fit.num_rows:,} labelled rows of {fit.window}{positives}",
        f"- from the network's output {whole.slope:.4f} x {whole.intercept:+.4f}",
        *(f"- {line}" for line in describe_changes(evaluation, calibration.source.version)),
    ]
    return "\n".join(lines) + "\n"
