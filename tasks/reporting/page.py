"""The page of one run: a template filled with the record, its pictures and nothing from outside."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tasks.contracts.base import Artifact
from tasks.contracts.evaluation import EvaluationReport, RegressionMetrics
from tasks.contracts.run import RunRecord
from tasks.kernel.errors import ArtifactError
from tasks.kernel.settings import URI_SCHEME, ArtifactStore, named_artifacts
from tasks.reporting import conversion, facts, figures, judgement, quantities, training_cost
from tasks.reporting.drawing import STYLE_SHEET
from tasks.reporting.quantities import count, decimal, percent

FOLDER = Path(__file__).parent
Drawings = Mapping[str, Markup]
"""Pictures of a page by key."""
_UNBROKEN = re.compile(
    rf"\d{{4}}-\d\d-\d\d|(?:[-+{quantities.MINUS}]?[\d.,]+ )?\[[^][<>]{{1,40}}\]"
)


def render_page(
    record: RunRecord,
    stored: Sequence[StoredArtifact],
    docs: str,
    pictures: figures.Pictures | None = None,
) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load.

    Args:
        record: what the run did.
        stored: every artifact that the record names, and whether it is whole.
        docs: where the data docs lie, from the page's folder.
        pictures: of the run; they are drawn here where none are given.
    """
    found: list[Check] = checks(record, stored)
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            record=record,
            facts=facts,
            conversion=conversion,
            judgement=judgement,
            figures=figures,
            pictures=pictures or figures.Pictures(record),
            training_cost=training_cost,
            stored=stored,
            docs=docs,
            checks=found,
        )
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
    environment.filters["prose"] = prose
    environment.filters.update(getmembers(quantities, isfunction))
    return environment


def prose(text: str) -> Markup:
    """Escaped text in which no line breaks inside a date or an interval."""
    escaped = str(escape(quantities.printable(text)))
    return Markup(_UNBROKEN.sub(r'<span class="nowrap">\g<0></span>', escaped))


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

    def path(artifact: Artifact) -> str:
        return paths[artifact.uri, artifact.sha256]

    snapshot = record.dataset.snapshot
    rows = f"d = pandas.read_parquet({json.dumps(path(snapshot.data))})"
    label = json.dumps(snapshot.columns.label)
    mean = percent(snapshot.positive_rate, 3)
    if snapshot.label_summary is not None:
        mean = decimal(snapshot.label_summary.mean, 3)
    return [
        *_of_predictions(record.evaluation, path(record.evaluation.predictions), label),
        Check("Rows", count(snapshot.num_rows), _python(f"import pandas; {rows}; print(len(d))")),
        Check(
            "Positive rate" if snapshot.label_summary is None else "Mean label",
            mean,
            _python(f"import pandas; {rows}; print(d[{label}].mean())"),
        ),
        Check(
            "Digest of the rows",
            snapshot.data.sha256,
            f"sha256sum {shlex.quote(path(snapshot.data))}",
        ),
        Check(
            "Digest of the model",
            record.model.program.sha256,
            f"sha256sum {shlex.quote(path(record.model.program))}",
        ),
    ]


def _of_predictions(report: EvaluationReport, path: str, label: str) -> list[Check]:
    """Commands that recompute the metrics from the stored predictions."""
    overall, baseline_model = report.overall, report.baseline_model
    opened = f"import pandas, sklearn.metrics as m; p = pandas.read_parquet({json.dumps(path)})"
    name, function = "AUC", "roc_auc_score"
    if isinstance(overall, RegressionMetrics):
        name, function = "R²", "r2_score"
        second = Check(
            "RMSE",
            decimal(overall.rmse.value, 6),
            _python(f"{opened}; print(((p[{label}] - p.score) ** 2).mean() ** 0.5)"),
        )
    else:
        second = Check(
            "Brier score",
            decimal(overall.brier.value, 6),
            _python(f"{opened}; print(((p[{label}] - p.score) ** 2).mean())"),
        )
    return [
        Check(
            name,
            decimal(overall.primary.value, 6),
            _python(f"{opened}; print(m.{function}(p[{label}], p.score))"),
        ),
        Check(
            f"{name} of the baseline model",
            decimal(baseline_model.primary.value, 6),
            _python(f"{opened}; print(m.{function}(p[{label}], p.yardstick_score))"),
        ),
        second,
    ]


def _python(program: str) -> str:
    return f"python -c {shlex.quote(program)}"
