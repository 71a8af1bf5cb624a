"""`python -m flows import FILE`: register a model that was trained elsewhere and convert it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.import_config import ImportConfig
    from tasks.contracts.release import ImportedModel


def add_import_command(commands: Any) -> None:
    """Declare the command and its argument."""
    command = commands.add_parser("import", help="register and convert a model trained elsewhere")
    command.add_argument(
        "file", type=Path, help="its description, such as feature_repo/models/<name>.yaml"
    )


def run_import(options: argparse.Namespace) -> list[str]:
    """Run the import and say what became of each variant.

    Raises:
        ConfigurationError: the file is missing or wrong.
        FalajError: a stage failed.
    """
    from flows.model_import import model_import_flow

    return told(model_import_flow(read_description(options)))


def read_description(options: argparse.Namespace) -> ImportConfig:
    """What the file asks for; a fault is told before anything has been started.

    Raises:
        ConfigurationError: the file is missing or wrong.
    """
    from flows.import_config import read_import_config

    return read_import_config(options.file)


def told(result: ImportedModel) -> list[str]:
    """The version, what became of each variant, and which one serves which goal, a line each."""
    version = result.version
    chosen = [
        (standing, variant.name)
        for variant in result.variants
        for standing in variant.standings
        if standing.chosen
    ]
    return [
        "",
        f"{'Model':<10}{version.name} version {version.version}, {version.program_sha256[:12]}",
        *(f"{variant.name:<22}{variant.reason}" for variant in result.variants),
        *(f"{'Goal':<10}{goal.goal}: {name}, {goal.reason}" for goal, name in chosen),
    ]
