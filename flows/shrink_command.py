"""`python -m flows shrink`: make a version's network smaller, and say what came of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from flows.config import PipelineConfig
    from tasks.contracts.release import ShrinkingResult


def add_shrink_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    command = commands.add_parser(
        "shrink", help="prune a version's network, or let a small one learn from it"
    )
    command.add_argument(
        "--version", type=int, metavar="N", help="version to make smaller (default: the champion)"
    )
    command.add_argument(
        "--method",
        choices=("pruning", "distillation", "pruning-distillation"),
        help="how (default: what the use case says under `shrinking`)",
    )


def run_shrink(
    config: PipelineConfig, options: argparse.Namespace, settings: Settings
) -> list[str]:
    """Run the flow; returns what to tell the person."""
    from flows.shrinking import shrinking_flow
    from tasks.reporting.shrinking_page import place_of

    if options.method:
        shrinking = config.shrinking.model_copy(update={"method": options.method})
        config = config.model_copy(update={"shrinking": shrinking})
    result = shrinking_flow(config, options.version)
    return [*told(result), f"{'Page':<10}{place_of(result, settings.reports)}"]


def told(result: ShrinkingResult) -> list[str]:
    """The outcome, a line each: sizes, quality, whether the teacher helped, the version."""
    from flows.approval import promotion_outcome

    made, judged = result.shrinking, result.judged
    parent, student = judged.parent.primary, judged.student.primary
    lines = [
        "",
        f"{'Network':<10}{made.method} of {made.parent.name} version {made.parent.version}: "
        f"{result.num_parameters:,} of {made.parent_parameters:,} parameters, hidden layers "
        f"{'-'.join(map(str, result.hidden_sizes))} of {'-'.join(map(str, made.parent_sizes))}",
        f"{judged.parent.primary_name:<10}{student.value:.4f} [{student.low:.4f}, "
        f"{student.high:.4f}] on {judged.student.num_rows:,} test rows; the large network "
        f"{parent.value:.4f} [{parent.low:.4f}, {parent.high:.4f}]",
    ]
    if judged.verdict:
        lines += [f"{'Teacher':<10}{judged.verdict}", f"{'Choice':<10}{result.choice}"]
    if result.promotion is not None:
        return [*lines, f"{'Model':<10}{promotion_outcome(result.promotion)}"]
    return [*lines, f"{'Model':<10}version {made.parent.version} is left: {judged.refusal}"]
