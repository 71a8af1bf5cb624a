"""The page of one run: a template filled with the record, its pictures and nothing from outside."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tasks.contracts.base import Artifact
from tasks.contracts.evaluation import RegressionMetrics
from tasks.contracts.run import RunRecord
from tasks.kernel.errors import ArtifactError
from tasks.kernel.settings import (
    DEFAULT_FEATURE_REPO,
    URI_SCHEME,
    ArtifactStore,
    named_artifacts,
)
from tasks.kernel.values import flattened
from tasks.reporting import facts, quantities, training_cost
from tasks.reporting.drawing import STYLE_SHEET
from tasks.reporting.pictures import Pictures, draw
from tasks.reporting.quantities import count, decimal

FOLDER = Path(__file__).parent
_UNBROKEN = re.compile(
    rf"\d{{4}}-\d\d-\d\d|(?:[-+{quantities.MINUS}]?[\d.,]+ )?\[[^][<>]{{1,40}}\]"
)


def render_page(
    record: RunRecord,
    stored: Sequence[StoredArtifact],
    docs: str,
    pictures: Pictures | None = None,
) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load.

    Args:
        record: what the run did.
        stored: every artifact that the record names, and whether it is whole.
        docs: where the data docs lie, from the page's folder.
        pictures: of the run; they are drawn here where none are given.
    """
    template = page_environment().get_template("report.html.j2")
    return template.render(
        record=record,
        facts=facts,
        pictures=pictures or draw(record),
        training_cost=training_cost,
        stored=stored,
        docs=docs,
        checks=checks(record, stored),
        default_use_case=DEFAULT_FEATURE_REPO.name,
    )


@cache
def page_environment() -> Environment:
    """Templates of this folder, and what they draw and write numbers with."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, sheet in (("chart_style", STYLE_SHEET), ("page_style", FOLDER / "report.css")):
        environment.globals[name] = Markup(sheet.read_text(encoding="utf-8"))
    environment.filters.update(prose=prose, flattened=flattened)
    environment.tests["is_shown"] = quantities.is_shown
    environment.filters.update(getmembers(quantities, isfunction))
    return environment


def prose(text: str) -> Markup:
    """Escaped text in which no line breaks inside a date or an interval."""
    escaped = text if isinstance(text, Markup) else escape(quantities.printable(text))
    return Markup(_UNBROKEN.sub(r'<span class="nowrap">\g<0></span>', str(escaped)))


def _without_control_characters(value: object) -> object:
    return value if isinstance(value, Markup) else quantities.printable(value)


@dataclass(frozen=True)
class StoredArtifact:
    """One artifact: its `path` within the state folder; `whole` where it has its digest."""

    artifact: Artifact
    path: str
    whole: bool


@dataclass(frozen=True)
class Check:
    """One claim of the page and the command, run in the state folder, that gives it again."""

    claim: str
    value: str
    command: str


def stored_artifacts(record: RunRecord, store: ArtifactStore) -> tuple[StoredArtifact, ...]:
    """Every artifact that the record names, each once, in order of its URI, read and digested.

    An artifact that is absent, damaged or no artifact of this store is reported, not raised: the
    rest of the report is still true.
    """
    found = {(a.uri, a.sha256): a for a in named_artifacts(record)}
    return tuple(
        StoredArtifact(found[key], relative_path(found[key], store), _is_whole(found[key], store))
        for key in sorted(found)
    )


def relative_path(artifact: Artifact, store: ArtifactStore) -> str:
    """Path within the state folder, such as `artifacts/snapshots/3f2a/data.parquet`."""
    return f"{store.root.name}/{artifact.uri.removeprefix(URI_SCHEME)}"


def _is_whole(artifact: Artifact, store: ArtifactStore) -> bool:
    try:
        return store.holds(artifact)
    except (ArtifactError, OSError):  # unreadable is as good as absent
        return False


def checks(record: RunRecord, stored: Sequence[StoredArtifact]) -> list[Check]:
    """Commands that recompute the main claims from the stored files alone."""
    paths = {(s.artifact.uri, s.artifact.sha256): s.path for s in stored}
    snapshot, report, overall = (
        record.dataset.snapshot,
        record.evaluation,
        record.evaluation.overall,
    )
    predictions, rows, program = (
        paths[a.uri, a.sha256] for a in (report.predictions, snapshot.data, record.model.program)
    )
    label, name = json.dumps(snapshot.columns.label), overall.primary_name
    judge = "import pandas, sklearn.metrics as m; p = pandas.read_parquet("
    judge += f"{json.dumps(predictions)}); print("
    error = f"((p[{label}] - p.score) ** 2).mean()"
    function, second = "roc_auc_score", ("Brier score", error)
    if isinstance(overall, RegressionMetrics):
        function, second = "r2_score", ("RMSE", f"{error} ** 0.5")
    value = overall.rmse if isinstance(overall, RegressionMetrics) else overall.brier
    mean = snapshot.positive_rate if snapshot.label_summary is None else snapshot.label_summary.mean
    read = f"import pandas; d = pandas.read_parquet({json.dumps(rows)}); print("
    python = (
        (name, overall.primary.value, f"{judge}m.{function}(p[{label}], p.score))"),
        (
            f"{name} of the baseline model",
            report.baseline_model.primary.value,
            f"{judge}m.{function}(p[{label}], p.yardstick_score))",
        ),
        (second[0], value.value, f"{judge}{second[1]})"),
        ("Mean label", mean, f"{read}d[{label}].mean())"),
    )
    found = [Check(claim, decimal(seen, 6), _python(program)) for claim, seen, program in python]
    found.append(Check("Rows", count(snapshot.num_rows), _python(f"{read}len(d))")))
    for claim, sha256, path in (
        ("Digest of the rows", snapshot.data.sha256, rows),
        ("Digest of the model", record.model.program.sha256, program),
    ):
        found.append(Check(claim, sha256, f"sha256sum {shlex.quote(path)}"))
    return found


def _python(program: str) -> str:
    return f"python -c {shlex.quote(program)}"
