"""`python -m flows recalibrate`: map the champion's scores anew, and say what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.contracts.base import TimeWindow
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from flows.config import PipelineConfig
    from tasks.contracts.release import RecalibrationResult


def add_recalibrate_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    command = commands.add_parser(
        "recalibrate", help="map the champion's scores anew on newer labels, without training"
    )
    command.add_argument(
        "start", nargs="?", help="first moment (default: the window `current` of the use case)"
    )
    command.add_argument("end", nargs="?", help="first moment after the window")


def recalibrate(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    """Run the flow; returns what to tell the person."""
    from flows.recalibration import recalibration_flow

    return told(recalibration_flow(window or config.current, config))


def told(result: RecalibrationResult) -> list[str]:
    """The outcome, a line each: the map, what it changed, what became of the version."""
    from flows.approval import promotion_outcome
    from tasks.evaluation.calibration.gain import changes_told

    lines = [""]
    fit, source = result.fit.fit, result.source
    if fit is not None:
        lines.append(
            f"{'Map':<10}slope {fit.map.slope:.4f} ± {fit.slope_error:.4f}, intercept "
            f"{fit.map.intercept:+.4f} ± {fit.intercept_error:.4f}, fitted to {fit.num_rows:,} "
            f"rows of {fit.window}"
        )
    if result.evaluation is not None:
        lines += [
            f"{'Changes':<10}{line}" for line in changes_told(result.evaluation, source.version)
        ]
    if result.promotion is not None:
        lines.append(f"{'Model':<10}{promotion_outcome(result.promotion)}")
    else:
        lines.append(
            f"{'Model':<10}{source.name} version {source.version} is left: {result.refusal}"
        )
    return lines
