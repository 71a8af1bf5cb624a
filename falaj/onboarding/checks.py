"""The story of a check: what is written, the raw rows, the queries, the windows, the leaks."""

import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from falaj.onboarding import leaks, raw
from falaj.onboarding.findings import Finding, Findings, did_you_mean
from falaj.onboarding.queries import Sample, add_query_error, check_queries
from falaj.onboarding.schema import check_schema
from falaj.onboarding.windows import check_windows
from flows.config import PipelineConfig, check_repository, read_pipeline_config
from tasks.features.declared.columns import defining_files
from tasks.features.offline.duck import duckdb_session
from tasks.imports.config import find_package
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.files import scratch_folder
from tasks.kernel.settings import USE_CASE_FILE, ArtifactStore
from tasks.training.models.source import check_source

CHECK = "files"
DEFINES = re.compile(r"\b(Entity|FeatureService|Permission|\w*(FeatureView|Source|feature_view))\b")
"""Names of Feast in files that define something."""


@dataclass
class CheckReport:
    """Findings of a check, and what it saw beside them."""

    name: str
    findings: list[Finding]
    splits: list[dict[str, Any]] = field(default_factory=list)
    leading: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0


def check_project(repo: Path) -> CheckReport:
    """Look for every mistake that can be found without training; changes nothing.

    A step whose ground is missing, such as queries over a file that cannot be read, is left out.

    Raises:
        ConfigurationError: the folder is no project.
    """
    findings, started = Findings(repo), time.monotonic()
    report = CheckReport(repo.name, findings.found)
    check_schema(findings)
    config = None if findings.found else _checked_files(findings)
    if config and not findings.found:
        report.name = config.name
        with scratch_folder("falaj-check-") as folder:
            _check_rows(report, config, findings, ArtifactStore(folder))
    report.seconds = round(time.monotonic() - started, 2)
    return report


def _checked_files(findings: Findings) -> PipelineConfig | None:
    """The use case with what follows from its columns, and what is wrong with files it names."""
    repo = findings.repo
    try:
        config = read_pipeline_config(repo)
        check_repository(config, repo)
    except ConfigurationError as exc:
        named = re.search(r"[\w./-]+\.(py|sql|yaml)", str(exc))
        file = named[0] if named else USE_CASE_FILE
        if "has no file" in str(exc):
            near = did_you_mean(file, (str(f.relative_to(repo)) for f in repo.rglob("*.sql")))
            advice = f"{near}write it, or mend the name"
            findings.add_error(exc, CHECK, findings.naming(file), advice)
        else:
            declared = findings.declared(str(exc), "features")
            place = declared if file == USE_CASE_FILE else (file, None)
            add_query_error(exc, findings, place, CHECK)
        return None
    for path in defining_files(repo):
        if not DEFINES.search(path.read_text(encoding="utf-8", errors="replace")):
            findings.add("no-definitions", (path.name, None))
    try:
        if config.training.own_model is not None:
            check_source(config.training.own_model, repo)
    except ConfigurationError as exc:
        named = re.match(r"(\S+), line ", str(exc))
        findings.add_error(exc, CHECK, (named[1], None) if named else findings.at("model"))
    for spec in config.features.training_set.encoded.values():
        try:
            if not (spec.text and (repo / spec.text).is_dir()):
                find_package(str(spec.text or spec.image))
        except ConfigurationError as exc:
            findings.add_error(exc, CHECK, findings.at("features", "training_set", "encoded"))
    return config


def _check_rows(
    report: CheckReport, config: PipelineConfig, findings: Findings, store: ArtifactStore
) -> None:
    landed = raw.land(config, findings, store)
    if landed is None:
        return
    rows = raw.sample(landed, config, findings, store)
    with duckdb_session(store.root) as con:
        sample = Sample(con, config, findings, store, rows)
        check_queries(sample)
        if sample.frame is None:
            return
        try:
            report.splits = check_windows(replace(sample, rows=landed))
        except FalajError as exc:  # of a value that the sample has not
            add_query_error(exc, findings, sample.place(config.features.training_set))
            return
        leaks.check_future(sample, sample.frame)
        report.leading = leaks.check_single_inputs(sample, sample.frame)
