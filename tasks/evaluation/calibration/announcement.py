"""A recalibration in a few lines of Markdown, for the Prefect UI: parameters, changes, picture."""

from __future__ import annotations

import base64

from tasks.contracts.calibration import MapFit
from tasks.contracts.evaluation import Comparison, Metric
from tasks.evaluation.calibration.gain import measured_changes


def announcement(
    fit: MapFit, whole: str, comparison: Comparison | None, refusal: str | None, picture: bytes
) -> str:
    """What was fitted, what it changed on later rows, and whether it is kept.

    Args:
        fit: the map.
        whole: the one map from the network's own output, in words.
        comparison: new minus old model on later rows; None where the champion is another one.
        refusal: why it is not kept; None where it is.
        picture: PNG of the reliability before and after.
    """
    positives = "" if fit.num_positives is None else f", {fit.num_positives:,} with label 1"
    kept = "**Kept.** The scores mean what they say, as far as these rows can tell."
    lines = [
        f"**Not kept.** {refusal}" if refusal else kept,
        "",
        "| | |",
        "| --- | --- |",
        f"| slope | {fit.map.slope:.4f} ± {fit.slope_error:.4f} |",
        f"| intercept | {fit.map.intercept:+.4f} ± {fit.intercept_error:.4f} |",
        f"| fitted to | {fit.num_rows:,} labelled rows of {fit.window}{positives} |",
        f"| from the network's output | {whole} |",
    ]
    if comparison is not None:
        changes = measured_changes(comparison)
        lines += [f"| {name} changed by | {_shown(metric)} |" for name, metric in changes]
    data = base64.b64encode(picture).decode()
    return "\n".join([*lines, "", f"![reliability](data:image/png;base64,{data})"]) + "\n"


def _shown(metric: Metric | None) -> str:
    if metric is None:
        return "not known"
    return f"{metric.value:+.4f} [{metric.low:+.4f}, {metric.high:+.4f}]"
