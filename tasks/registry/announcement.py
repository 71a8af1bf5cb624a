"""A registered version in a few lines of Markdown, for the Prefect UI: facts, pictures, links."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import quote

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.evaluation import EvaluationReport
from tasks.kernel.settings import platform_address
from tasks.registry.question import pictures_in, plain


def announcement(
    ref: ModelVersionRef, evaluation: EvaluationReport, commit: str, run_folder: Path, home: Path
) -> str:
    """What was registered, from what, and where to read more.

    Args:
        ref: the version.
        evaluation: its judgement.
        commit: of the code.
        run_folder: folder of the MLflow run's files, with the pictures that were drawn.
        home: the state folder; a platform that runs on it is linked to.
    """
    page = mlflow_page(home, f"models/{quote(ref.name)}/versions/{ref.version}")
    facts = {
        "MLflow": f"[model version and run]({page}) (asks for the platform's user and password)"
        if page
        else f"run `{plain(ref.run_id)}`",
        "lineage": f"`python -m falaj trace models/{plain(ref.name)}/{ref.version}`",
        "judged on": plain(evaluation.window),
        "program": f"`{plain(ref.program_sha256[:12])}`",
        "training snapshot": f"`{plain(ref.snapshot_sha256[:12])}`",
        "code": f"`{plain(commit[:12])}`",
    }
    lines = [f"## {plain(ref.name)} version {ref.version}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    for title, content in pictures_in(run_folder / "pictures").items():
        data = base64.b64encode(content).decode()
        lines += ["", f"![{title}](data:image/png;base64,{data})"]
    return "\n".join(lines) + "\n"


def mlflow_page(home: Path, page: str) -> str | None:
    """Address of a page of the platform's MLflow; None where no platform ran on this folder."""
    base = platform_address(home, "mlflow_url")
    return f"{base}/#/{page}" if base else None
