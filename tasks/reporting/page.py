"""The page of one run, and putting it where people find it: complete, one address for the newest.

A template is filled with the record, its pictures and nothing from outside.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from inspect import getmembers, isfunction
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tasks.contracts.base import Artifact
from tasks.contracts.evaluation import EvaluationReport, RegressionMetrics
from tasks.contracts.release import CompressionResult
from tasks.contracts.run import RunRecord
from tasks.governance.duties import broken_glass
from tasks.kernel import errors
from tasks.kernel.files import scratch_folder, write_atomically
from tasks.kernel.settings import (
    DEFAULT_FEATURE_REPO,
    NEWEST_REPORT,
    URI_SCHEME,
    ArtifactStore,
    bring,
    code_digest,
    content_key,
    named_artifacts,
    put,
    send,
)
from tasks.kernel.values import flattened, in_utc, plain
from tasks.reporting import facts, quantities
from tasks.reporting.facts import drift_result, key_figures, promotion_result
from tasks.reporting.gallery import Pictures, as_file
from tasks.reporting.quantities import count, decimal, difference, estimate

FOLDER = Path(__file__).parent
_UNBROKEN = re.compile(
    rf"\d{{4}}-\d\d-\d\d|(?:[-+{quantities.MINUS}]?[\d.,]+ )?\[[^][<>]{{1,40}}\]"
)


def render_page(
    record: RunRecord,
    stored: Sequence[StoredArtifact],
    docs: str,
    pictures: Pictures,
    broken_glass: Sequence[str] = (),
) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load.

    Args:
        record: what the run did.
        stored: every artifact that the record names, and whether it is whole.
        docs: where the data docs lie, from the page's folder.
        pictures: of the run.
        broken_glass: who did what the duties forbid, before it.
    """
    template = page_environment().get_template("report.html.j2")
    return template.render(
        record=record,
        facts=facts,
        pictures=pictures,
        stored=stored,
        docs=docs,
        checks=checks(record, stored),
        broken_glass=broken_glass,
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
    for name, sheet in (("chart_style", "charts.css"), ("page_style", "report.css")):
        environment.globals[name] = Markup((FOLDER / sheet).read_text(encoding="utf-8"))
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
    except (errors.ArtifactError, OSError):  # unreadable is as good as absent
        return False


def checks(record: RunRecord, stored: Sequence[StoredArtifact]) -> list[Check]:
    """Commands that recompute the main claims from the stored files alone."""
    paths = {(s.artifact.uri, s.artifact.sha256): s.path for s in stored}
    snapshot, report = record.dataset.snapshot, record.evaluation
    predictions, rows, program = (
        paths[a.uri, a.sha256] for a in (report.predictions, snapshot.data, record.model.program)
    )
    columns, overall = snapshot.columns, report.overall
    judge = "import pandas, sklearn.metrics as m; p = pandas.read_parquet("
    judge += f"{json.dumps(predictions)}); print("
    read = f"import pandas; d = pandas.read_parquet({json.dumps(rows)}); print("
    label = json.dumps(columns.label)
    error = f"((p[{label}] - p.score) ** 2).mean()"
    function = "r2_score" if isinstance(overall, RegressionMetrics) else "roc_auc_score"
    option = ", multi_class='ovr'" if columns.classes else ""
    claims: list[tuple[str, float | None, str]] = []
    for of, quality, column in (
        ("", overall, "score"),
        (" of the baseline model", report.baseline_model, "yardstick_score"),
    ):
        scores = f"p[{json.dumps(columns.score_columns(column))}]"  # a column for each class
        scores = scores if columns.classes else f"p.{column}"
        text = f"{judge}m.{function}(p[{label}], {scores}{option}))"
        claims.append((f"{overall.primary_name}{of}", quality.primary.value, text))
    if isinstance(overall, RegressionMetrics):
        claims.append(("RMSE", overall.rmse.value, f"{judge}{error} ** 0.5)"))
    elif not columns.classes:
        claims.append(("Brier score", overall.brier.value, f"{judge}{error})"))
    if not columns.classes:
        summary = snapshot.label_summary
        mean = summary.mean if summary else snapshot.positive_rate
        claims.append(("Mean label", mean, f"{read}d[{label}].mean())"))
    digests = (
        ("Digest of the rows", snapshot.data.sha256, rows),
        ("Digest of the model", record.model.program.sha256, program),
    )
    return [
        *(Check(claim, decimal(seen, 6), _python(text)) for claim, seen, text in claims),
        Check("Rows", count(snapshot.num_rows), _python(f"{read}len(d))")),
        *(
            Check(claim, sha256, f"sha256sum {shlex.quote(path)}")
            for claim, sha256, path in digests
        ),
    ]


def _python(program: str) -> str:
    return f"python -c {shlex.quote(program)}"


SCHEMA_VERSION = 1
PAGE, FACTS, LATEST = "report.html", "report.json", "latest"
DATA_DOCS = Path("data_docs") / "current" / "index.html"
"""Place in the state folder; one for all use cases, whose reports lie in folders of their own."""
_BEGINNING = datetime.min.replace(tzinfo=UTC)
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ReportFiles:
    """Where one report lies; `latest_path` is the page of the newest run, at a fixed place."""

    page_path: Path
    facts_path: Path
    latest_path: Path


def write_report(record: RunRecord, store: ArtifactStore, folder: Path) -> ReportFiles:
    """Write `<folder>/<run id>/report.html` and `report.json`, and let `latest` lead to the newest.

    The same record gives the same files, so it can be repeated. The page is written after its
    facts: where there is a page, there are facts. `latest` never goes back to an older run.

    Args:
        record: what the run did.
        store: holds the artifacts that the record names; each is read to check its digest.
        folder: folder of all reports.

    Raises:
        ConfigurationError: the run id cannot be the name of a folder.
        StorageError: the disk refused a write, or something else lies at `latest`.
    """
    _check_run_id(record.run_id)
    stored = stored_artifacts(record, store)
    target = folder / record.run_id
    write_atomically(target / FACTS, facts_as_json(record, stored))
    docs = os.path.relpath(store.root.parent / DATA_DOCS, target)
    broken = broken_glass(store.root.parent, record.started)
    page = render_page(record, stored, docs, pictures_of(record, store), broken)
    write_atomically(target / PAGE, page)
    send(target)
    _lead_to(target, folder / LATEST, record.started)
    return ReportFiles(target / PAGE, target / FACTS, folder / LATEST / PAGE)


def pictures_of(record: RunRecord, store: ArtifactStore) -> Pictures:
    """The pictures of a run, drawn here unless one that shows the same was drawn before.

    Raises:
        StorageError: the disk refused a write.
    """

    def build(_: object) -> Pictures:
        from tasks.reporting.pictures import draw  # imports matplotlib, which takes half a second

        return draw(record)

    code = code_digest(str(FOLDER / "pictures.py"))
    drawn_by = (code, FOLDER / "report.mplstyle", FOLDER / "charts.css", version("matplotlib"))
    shown = record.model_dump(mode="json", include={"model", "evaluation", "variants"})
    key = content_key(drawn_by, shown, record.refresh.monitoring)
    return store.build_once("pictures", key, Pictures, build)


def draw_quality(evaluation: EvaluationReport) -> dict[str, str]:
    """How good a model is on the test rows, as SVG by the name of the file."""
    from tasks.reporting.pictures import curves  # as above

    return {f"{key}.svg": as_file(each.drawing) for key, each in curves(evaluation).items()}


def facts_as_json(record: RunRecord, stored: Sequence[StoredArtifact]) -> str:
    """The record as JSON, its fields at the top level, so that a stranger can recompute its claims.

    Beside them: `schema_version`; `paths`, the place of each artifact URI below the state folder;
    `damaged`, URIs whose content was absent or not what the digest says when this was written. A
    number that is not finite is null, because JSON has no word for it.
    """
    facts = {
        "schema_version": SCHEMA_VERSION,
        **json.loads(record.model_dump_json()),
        "paths": {s.artifact.uri: s.path for s in stored},
        "damaged": [s.artifact.uri for s in stored if not s.whole],
    }
    return json.dumps(facts, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _check_run_id(run_id: str) -> None:
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise errors.ConfigurationError(
            f"run id {run_id!r} cannot name the report's folder; expected 1 to 128 letters, "
            "digits, dots, dashes and underscores, starting with a letter or digit, and not "
            f"{LATEST!r}. No report was written"
        )


def _lead_to(target: Path, latest: Path, started: datetime) -> None:
    """Swap the link `latest` in one step, unless it leads to a run that started later."""
    if latest.exists() and not latest.is_symlink():
        raise errors.StorageError(
            f"{latest} is a file or folder, expected a link to the newest report; the report "
            f"itself is whole in {target}. Move {latest} away and run again"
        )
    if _started(_newest(latest) / FACTS) > in_utc(started):
        return
    with errors.refused_writes_explained(latest), scratch_folder(".latest", latest.parent) as aside:
        link = aside / LATEST
        os.symlink(target.name, link, target_is_directory=True)
        link.replace(latest)
    put(latest.with_name(NEWEST_REPORT), target.name)


def _newest(latest: Path) -> Path:
    """The newest report's folder, which another machine may have written."""
    try:
        name = bring(latest.with_name(NEWEST_REPORT)).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return latest
    bring(latest.with_name(name) / FACTS)
    return latest.with_name(name)


def _started(facts_path: Path) -> datetime:
    """When the run of these facts started; the beginning of time where they cannot be read."""
    try:
        facts = json.loads(facts_path.read_text(encoding="utf-8"))
        return in_utc(datetime.fromisoformat(facts["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _BEGINNING


def announcement(record: RunRecord, files: ReportFiles, address: str | None = None) -> str:
    """Results, key figures and where the page lies; names out of the data stay plain text.

    Args:
        record: what the run did.
        files: its report.
        address: where a platform shows all reports; None where none runs.
    """
    lines = [f"## {plain(record.use_case)}: {plain(record.question)}", ""]
    for result in (promotion_result(record), drift_result(record)):
        lines.append(f"- **{plain(result.headline)}.** {plain(result.detail)}")
    lines += ["", "| figure | value | |", "| --- | --- | --- |"]
    for tile in key_figures(record):
        value = f"{tile.value} {tile.interval}".strip()
        lines.append(f"| {plain(tile.title)} | {plain(value)} | {plain(tile.note)} |")
    if address:
        page = f"{address}/{quote(record.run_id)}/{quote(files.page_path.name)}"
        lines += ["", f"[The report]({page}) (asks for the platform's user and password)"]
    lines += ["", f"Page: {plain(files.page_path)}", "", f"Facts: {plain(files.facts_path)}"]
    return "\n".join(lines)


def write_compression(result: CompressionResult, folder: Path) -> tuple[Path, str]:
    """Write the outcome of a model compression as `compression.md`, and its facts beside it.

    The same result gives the same files, so it can be repeated.

    Returns:
        Path of the Markdown, and its text.

    Raises:
        StorageError: the disk refused a write.
    """
    path, text = compression_path(result, folder), describe_compression(result)
    write_atomically(path.with_suffix(".json"), result.model_dump_json(indent=1) + "\n")
    write_atomically(path, text)
    return path, text


def compression_path(result: CompressionResult, folder: Path) -> Path:
    """Where the outcome is written: one file for each parent and method."""
    made = result.compression
    name = f"compression-{made.parent.name}-v{made.parent.version}-{made.method}"
    return folder / name / "compression.md"


def describe_compression(result: CompressionResult) -> str:
    """How small, how good, and whether a teacher helped, in Markdown."""
    made, judged, decision = result.compression, result.judged, result.promotion
    outcome = f"**Not registered.** {judged.refusal}"
    if result.version is not None:
        is_champion = decision is not None and decision.promoted
        became = "is the champion" if is_champion else "was registered, and is not the champion"
        outcome = f"**{result.version.name} version {result.version.version} {became}.**"
    small, distils = result.num_parameters, judged.control is not None
    networks = {
        "large network": (made.parent_parameters, judged.parent),
        "small network": (small, None if distils else judged.student),
        "small, distilled": (small, judged.distilled),
        "small, control": (small, judged.control),
    }
    changes = {"small minus large": judged.to_parent, "distilled minus control": judged.gain}
    lines = [outcome, "", f"| network | parameters | {judged.parent.primary_name} |"]
    lines += ["| --- | --- | --- |"]
    for name, (size, quality) in networks.items():
        if quality is not None:
            lines.append(f"| {name} | {size:,} | {estimate(quality.primary, 4)} |")
    lines.append("")
    lines += [f"- {name}: {difference(c.primary)}" for name, c in changes.items() if c is not None]
    gates = decision.gates if decision else ()
    lines += [f"- gate {gate.name}: {plain(gate.evidence)}" for gate in gates if not gate.passed]
    if judged.result:
        lines += ["", judged.result, "", f"{result.choice[:1].upper()}{result.choice[1:]}."]
    return "\n".join(lines) + "\n"
