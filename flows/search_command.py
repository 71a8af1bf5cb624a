"""`python -m flows search`: walk the use case's search space, one line a trial."""

from __future__ import annotations

import argparse
from typing import Any

from flows.config import PipelineConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings


def add_search_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    search = commands.add_parser("search", help="search for better training settings")
    search.add_argument("--trials", type=_at_least_one, metavar="N", help="trials of the study")
    search.add_argument(
        "--parallel", type=_at_least_one, metavar="N", help="trials at the same time"
    )
    search.add_argument(
        "--register", action="store_true", help="judge the best model and make it the candidate"
    )


def run_search(
    config: PipelineConfig, options: argparse.Namespace, settings: Settings
) -> list[str]:
    """Run the search and say what to tell at the end.

    Raises:
        ConfigurationError: the use case has no search space.
        FalajError: a stage failed.
    """
    from flows.search import search_flow

    chosen = {"num_trials": options.trials, "parallel_trials": options.parallel}
    changes = {name: value for name, value in chosen.items() if value is not None}
    search = config.search.model_copy(update=changes)
    if not search.space:
        raise ConfigurationError(
            "use_case.yaml has no search.space; name there the fields of the training "
            "configuration that may change, such as dropout: {kind: float, low: 0, high: 0.5}"
        )
    result = search_flow(
        config.model_copy(update={"search": search}), make_candidate=options.register
    )
    study = result.study
    best = next(trial for trial in study.trials if trial.number == study.best)
    states = [trial.state for trial in study.trials]
    lines = [
        "",
        f"{'Study':<10}{study.study}: {states.count('complete')} complete, "
        f"{states.count('pruned')} pruned, {states.count('failed')} failed; {study.ended_because}",
        f"{'Best':<10}trial {best.number}, validation {study.quality_name} {best.quality:.4f}",
        *(f"{'':<10}{name}: {value}" for name, value in best.point.items()),
        f"{'Page':<10}{settings.home / result.page}",
    ]
    if result.version is not None:
        lines.append(
            f"{'Model':<10}{result.version.name} version {result.version.version} is the candidate"
        )
    return lines


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} trials cannot be run; expected 1 or more")
    return number
