"""Queries of a use case, run on a sample; each mistake with its file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import duckdb

from falaj.onboarding.findings import Finding, YamlPlaces, finding_of
from flows.config import PipelineConfig
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, LandedRows
from tasks.features.config import FeatureTable
from tasks.features.declared.columns import plain_frame
from tasks.features.declared.queries import frame_query, table_query
from tasks.features.entities import write_entities
from tasks.features.offline.duck import parquet, set_window, sql_name, sql_text
from tasks.features.tables.build import check_computed, register_raw, run_query
from tasks.kernel.errors import DataContractError, FalajError
from tasks.kernel.settings import USE_CASE_FILE, ArtifactStore

CHECK = "queries"


@dataclass
class Sample:
    """A use case on a sample of its raw rows.

    Attributes:
        features: folder of the rows of each feature table whose query ran.
        frame: the labelled entity rows, once the query ran; with all columns of the query.
    """

    con: duckdb.DuckDBPyConnection
    config: PipelineConfig
    repo: Path
    places: YamlPlaces
    store: ArtifactStore
    rows: LandedRows
    features: dict[str, Path] = field(default_factory=dict)
    frame: Path | None = None

    def read_raw(self, since: datetime | None = None, until: datetime | None = None) -> None:
        """Let queries read the raw rows, or those between two moments alone."""
        folders = {t.name: self.store.path(t.artifact, verify=False) for t in self.rows.tables}
        register_raw(self.con, folders, self.config.features, self.repo, since, until)

    def compute(self, table: FeatureTable, window: TimeWindow, name: str) -> None:
        """Compute a feature table for a window into a table of this name."""
        set_window(self.con, window)
        text = table_query(self.repo, table, self.config.features)
        run_query(self.con, f"CREATE OR REPLACE TEMP TABLE {name} AS {text}", table.origin)

    def compute_frame(self, window: TimeWindow, name: str) -> None:
        """Compute the entity rows of a window into a table of this name."""
        set_window(self.con, window)
        spec = self.config.features.training_set
        text = plain_frame(self.con, frame_query(self.repo, self.config.features), spec)
        run_query(self.con, f"CREATE OR REPLACE TEMP TABLE {name} AS {text}", spec.origin)


def query_findings(sample: Sample) -> list[Finding]:
    """Run every query on the sample; what it gives stays for the checks that follow."""
    features = sample.config.features
    if found := _attempt(sample.read_raw, USE_CASE_FILE, sample.places.line("features", "staging")):
        return found
    for number, table in enumerate(features.feature_tables):
        line = sample.places.line("features", "feature_tables", number)
        found += _attempt(partial(_fill, sample, table), table.sql or USE_CASE_FILE, line)
        if table.name in sample.features:
            found += _empty_columns(sample, table, line)
    line = sample.places.line("features", "training_set")
    spec = features.training_set
    return found + _attempt(partial(_fill_frame, sample), spec.sql or USE_CASE_FILE, line)


def _fill(sample: Sample, table: FeatureTable) -> None:
    window = sample.config.window
    sample.compute(table, window, "computed")
    check_computed(sample.con, table, window)
    folder = sample.store.root / "features" / table.name
    folder.mkdir(parents=True)
    target = sql_text(folder / "rows.parquet")
    sample.con.execute(f"COPY computed TO {target} (FORMAT parquet)")
    sample.features[table.name] = folder


def _fill_frame(sample: Sample) -> None:
    config, target = sample.config, sample.store.root / "entities.parquet"
    tables = FeatureTables(version="0" * 32, raw=sample.rows.tables, tables=(), sources={})
    write_entities(tables, config.window, config.features, sample.repo, sample.store, target)
    sample.frame = target


def _attempt(step: Callable[[], None], file: str, line: int) -> list[Finding]:
    try:
        step()
    except FalajError as exc:
        return [query_finding(exc, file, line)]
    return []


def query_finding(exc: FalajError, file: str, line: int, *, check: str = CHECK) -> Finding:
    """What a query's error says, at the query's file and line where it names them.

    Args:
        exc: error of a query, or of what it gave.
        file: where the query is written.
        line: line that declares it, for a query that stands in no file of its own.
        check: what was looked at.
    """
    text = re.sub(r"\. Nothing was \w+$", "", str(exc))
    wrong = re.search(r"query (\S+) (?:.*? is wrong|met a value .*?): (.*)", text)
    if not wrong:
        return finding_of(exc, check, file, line if file == USE_CASE_FILE else None)
    file = wrong[1] if "/" in wrong[1] or "." in wrong[1] else USE_CASE_FILE
    if file != USE_CASE_FILE:
        line = int(at[1]) if (at := re.search(r"LINE (\d+):", text)) else 1
    reason, _, near = re.sub(r" ?LINE \d+:.*", "", wrong[2]).partition(" Candidate bindings: ")
    reason, _, meant = reason.partition(" Did you mean ")
    guess = near.split(",")[0] or meant.rstrip("?")
    return Finding(
        check=check,
        kind="data" if isinstance(exc, DataContractError) else "configuration",
        file=file,
        line=line,
        seen=reason,
        action=f"did you mean {guess}? mend the query there" if guess else "mend the query there",
    )


def _empty_columns(sample: Sample, table: FeatureTable, line: int) -> Iterator[Finding]:
    rows = parquet(sample.features[table.name])
    columns = [row[0] for row in sample.con.execute(f"DESCRIBE SELECT * FROM {rows}").fetchall()]
    counts = ", ".join(f"count({sql_name(column)})" for column in columns)
    total, *known = sample.con.execute(f"SELECT count(*), {counts} FROM {rows}").fetchall()[0]
    file = table.sql or USE_CASE_FILE
    empty: list[str | None] = (
        [None] if not total else [c for c, n in zip(columns, known, strict=True) if not n]
    )
    for column in empty:
        yield Finding(
            check=CHECK,
            kind="configuration",
            file=file,
            line=line_naming(sample.repo / file, column) if column and table.sql else line,
            column=column,
            seen=f"feature table {table.name} has no "
            f"{'value in this column' if column else f'rows in {sample.config.window}'}",
            expected="some",
            action="mend what it is made from, or take it out",
            severity="warning" if column else "error",
        )


def line_naming(file: Path, column: str) -> int | None:
    """Line of a query that gives a column its name; the last line that has the name at all."""
    lines = file.read_text(encoding="utf-8").splitlines()
    numbers: list[int | None] = [
        n for n, text in enumerate(lines, 1) if re.search(rf"\b{column}\b", text)
    ]
    named = [n for n in numbers if n and re.search(rf"(?i)\bas {column}\b", lines[n - 1])]
    return (named or numbers or [None])[-1]
