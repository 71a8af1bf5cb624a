"""The story of a check: what is written, the raw rows, the queries, the windows, the leaks."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from falaj.onboarding import leaks, raw, windows
from falaj.onboarding.findings import Finding, YamlPlaces, nearest
from falaj.onboarding.queries import Sample, query_finding, query_findings
from falaj.onboarding.schema import schema_findings
from flows.config import PipelineConfig, check_repository, read_pipeline_config
from tasks.features.offline.duck import duckdb_session
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import scratch_folder
from tasks.kernel.settings import USE_CASE_FILE, ArtifactStore


@dataclass
class CheckReport:
    """Findings of a check, and what it saw beside them."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    splits: list[dict[str, object]] = field(default_factory=list)
    leading: list[tuple[str, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, step: str, started: float) -> float:
        """Note how long a step took; returns the moment at which the next one begins."""
        now = time.monotonic()
        self.seconds[step] = round(now - started, 2)
        return now


def check_project(repo: Path) -> CheckReport:
    """Look for every mistake that can be found without training; changes nothing.

    A step whose ground is missing, such as queries over a file that cannot be read, is left out.

    Raises:
        ConfigurationError: the folder is no project.
    """
    report, started = CheckReport(repo.name), time.monotonic()
    report.findings += schema_findings(repo)
    if not report.findings:
        places = YamlPlaces(repo / USE_CASE_FILE)
        report.findings += _file_findings(repo, places)
    started = report.timed("schema", started)
    if report.findings:
        return report
    config = read_pipeline_config(repo)
    report.name = config.name
    with scratch_folder("falaj-check-") as folder:
        _check_rows(report, config, repo, places, ArtifactStore(folder), started)
    return report


def _file_findings(repo: Path, places: YamlPlaces) -> list[Finding]:
    """Files that the use case names: queries, suites, definitions."""
    try:
        config = read_pipeline_config(repo)
        if missing := _missing_queries(config, repo, places):
            return missing
        check_repository(config, repo)
    except ConfigurationError as exc:
        named = re.search(r"[\w./-]+\.(py|sql|yaml)", str(exc))
        line = places.declared(str(exc), places.line("features"))
        return [query_finding(exc, named[0] if named else USE_CASE_FILE, line, check="files")]
    return []


def _missing_queries(config: PipelineConfig, repo: Path, places: YamlPlaces) -> list[Finding]:
    features = config.features
    named: list[tuple[str, *tuple[str | int, ...]]] = [
        *((query.sql, "staging", n, "sql") for n, query in enumerate(features.staging)),
        *(
            (table.sql, "feature_tables", n, "sql")
            for n, table in enumerate(features.feature_tables)
        ),
        (features.training_set.sql, "training_set", "sql"),
    ]
    found = []
    for name, *path in named:
        if name and not (repo / name).is_file():
            near = nearest(name, (str(f.relative_to(repo)) for f in repo.rglob("*.sql")))
            found.append(
                Finding(
                    check="files",
                    kind="configuration",
                    file=USE_CASE_FILE,
                    line=places.line("features", *path),
                    seen=f"there is no file {name}",
                    action=f"did you mean {near}?" if near else "write it, or mend the name",
                )
            )
    return found


def _check_rows(
    report: CheckReport,
    config: PipelineConfig,
    repo: Path,
    places: YamlPlaces,
    store: ArtifactStore,
    started: float,
) -> None:
    landed, report.findings = raw.land(config, repo, store, places)
    if report.findings:
        report.timed("rows", started)
        return
    sampled = raw.sample(landed, config, repo, store)
    report.findings += sampled.findings
    started = report.timed("rows", started)
    with duckdb_session(store.root) as con:
        sample = Sample(con, config, repo, places, store, sampled.rows)
        report.findings += query_findings(sample)
        started = report.timed("queries", started)
        if sample.frame is None:
            return
        counts = windows.count_splits(sample, min(sampled.shares.values()))
        report.splits = [asdict(split) for split in counts]
        report.findings += windows.split_findings(sample, counts)
        report.findings += windows.gate_findings(sample, counts)
        started = report.timed("windows", started)
        report.findings += leaks.future_findings(sample)
        started = report.timed("future", started)
        found, report.leading = leaks.single_findings(sample)
        report.findings += found
        report.timed("single inputs", started)
