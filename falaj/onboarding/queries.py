"""Queries of a use case, run on a sample; each mistake with its file and line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import duckdb

from falaj.onboarding.findings import Findings, Place
from flows.config import PipelineConfig
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, LandedRows
from tasks.features.config import FeatureTable, TrainingSet
from tasks.features.declared.columns import plain_frame
from tasks.features.declared.queries import frame_query
from tasks.features.entities import EVENT_TIME, write_entities
from tasks.features.offline.duck import inside, parquet, set_window, sql_name, sql_text
from tasks.features.tables.build import Queries, check_computed, run_query
from tasks.kernel.errors import DataContractError, FalajError
from tasks.kernel.settings import ArtifactStore

CHECK = "queries"
FEW_ROWS = 5000
"""Features are computed where so many entity rows of training and of test lie next to each other:
many queries give a row an hour, however few raw rows there are."""
LEAST_SPAN = timedelta(days=7)


@dataclass
class Sample:
    """A use case on a sample of its raw rows.

    Attributes:
        windows: where features are computed; the test window, or its beginning, is the last.
        features: folder of the rows of each feature table whose query ran, a file a window.
        frame: the labelled entity rows, once the query ran; with all columns of the query.
    """

    con: duckdb.DuckDBPyConnection
    config: PipelineConfig
    findings: Findings
    store: ArtifactStore
    rows: LandedRows
    windows: list[TimeWindow] = field(default_factory=list)
    features: dict[str, Path] = field(default_factory=dict)
    frame: Path | None = None

    @property
    def queries(self) -> Queries:
        """The use case's queries over the sample."""
        return Queries(self.con, self.config.features, self.findings.repo, spark=None)

    def read_raw(self, since: datetime | None = None, until: datetime | None = None) -> None:
        """Let queries read the raw rows, or those between two moments alone."""
        folders = {t.name: self.store.path(t.artifact, verify=False) for t in self.rows.tables}
        self.queries.register_raw(folders, since, until)

    def compute_frame(self, window: TimeWindow, name: str, columns: Sequence[str] = ()) -> None:
        """Compute the entity rows of a window, or some columns, into a table of this name."""
        set_window(self.con, window)
        spec = self.config.features.training_set
        text = plain_frame(self.con, frame_query(self.findings.repo, self.config.features), spec)
        if columns:
            listed = sql_text(f"(?i)^({'|'.join(map(re.escape, columns))})$")
            text = f"SELECT COLUMNS({listed}) FROM (\n{text.strip().rstrip(';')}\n)"
        run_query(self.con, f"CREATE OR REPLACE TEMP TABLE {name} AS {text}", spec.origin)

    def windows_of(self, table: FeatureTable) -> list[TimeWindow]:
        """Where a table is computed."""
        return [self.config.window] if table.static else self.windows

    def place(self, part: FeatureTable | TrainingSet, column: str | None = None) -> Place:
        """Where a table, or a column of it, is made: the line of its query that names the column.

        Of what no query makes, where the use case declares it.
        """
        if part.sql:
            file = self.findings.repo / part.sql
            return part.sql, line_naming(file, column) if column else None
        return self.findings.declared(part.origin)


def check_queries(sample: Sample) -> None:
    """Run every query on the sample; what it gives stays for the checks that follow."""
    findings, features = sample.findings, sample.config.features
    try:
        sample.read_raw()
    except FalajError as exc:
        add_query_error(exc, findings, findings.at("features", "staging"))
        return
    target = sample.store.root / "entities.parquet"
    tables = FeatureTables(version="0" * 32, raw=sample.rows.tables, tables=(), sources={})
    try:
        write_entities(tables, sample.config.window, features, findings.repo, sample.store, target)
        sample.frame = target
    except FalajError as exc:
        add_query_error(exc, findings, sample.place(features.training_set))
    sample.windows = _looked_at(sample)
    for table in features.feature_tables:
        try:
            _fill(sample, table)
        except FalajError as exc:
            add_query_error(exc, findings, sample.place(table))
        else:
            _check_columns(sample, table)


def _looked_at(sample: Sample) -> list[TimeWindow]:
    """The end of training and the beginning of test, as far as enough rows; or all there is."""
    whole, splits = sample.config.window, sample.config.splits
    if sample.frame is None:
        return [whole]
    spans = []
    for split in (splits.train, splits.test):
        query = f"SELECT count(*) FROM {parquet(sample.frame)} WHERE {inside(EVENT_TIME, split)}"
        num_rows = sample.con.execute(query).fetchall()[0][0]
        share = min(1.0, FEW_ROWS / max(num_rows, 1))
        spans.append(max((split.end - split.start) * share, LEAST_SPAN))
    if sum(spans, timedelta(0)) > (whole.end - whole.start) / 2:
        return [whole]
    return [
        TimeWindow(start=splits.train.end - spans[0], end=splits.train.end),
        TimeWindow(start=splits.test.start, end=splits.test.start + spans[1]),
    ]


def _fill(sample: Sample, table: FeatureTable) -> None:
    folder = sample.store.root / "features" / table.name
    folder.mkdir(parents=True)
    for number, window in enumerate(sample.windows_of(table)):
        sample.queries.compute(table, window, "computed")
        check_computed(sample.con, table, window)
        target = sql_text(folder / f"{number}.parquet")
        sample.con.execute(f"COPY computed TO {target} (FORMAT parquet)")
    sample.features[table.name] = folder


def add_query_error(exc: FalajError, findings: Findings, place: Place, check: str = CHECK) -> None:
    """Note what a query's error says, at the query's file and line where it names them.

    Args:
        exc: error of a query, or of what it gave.
        findings: of the project.
        place: of the query, or of what declares it.
        check: what was looked at.
    """
    text = re.sub(r"\. Nothing was \w+$", "", str(exc))
    wrong = re.search(
        r"query (\S+) (?:.*? is wrong|met a value .*?): (.*?)(?: ?LINE (\d+):.*)?$", text
    )
    if not wrong:
        findings.add_error(exc, check, place)
        return
    if re.search(r"[/.]", wrong[1]):
        place = wrong[1], int(wrong[3] or 1)
    reason, *near = re.split(r" Candidate bindings: | Did you mean ", wrong[2])
    guess = f"did you mean {near[0].split(',')[0].rstrip('?')}? " if near else ""
    is_value = isinstance(exc, DataContractError)
    findings.add("wrong-value" if is_value else "wrong-query", place, reason=reason, guess=guess)


def _check_columns(sample: Sample, table: FeatureTable) -> None:
    rows = parquet(sample.features[table.name])
    columns = [row[0] for row in sample.con.execute(f"DESCRIBE SELECT * FROM {rows}").fetchall()]
    counts = ", ".join(f"count({sql_name(column)})" for column in columns)
    total, *known = sample.con.execute(f"SELECT count(*), {counts} FROM {rows}").fetchall()[0]
    if not total:
        window = sample.config.window
        sample.findings.add("no-rows", sample.place(table), table=table.name, window=window)
    for column in (c for c, n in zip(columns, known, strict=True) if total and not n):
        place = sample.place(table, column)
        sample.findings.add("no-feature-value", place, column, table=table.name)


def line_naming(file: Path, column: str) -> int | None:
    """Line of a query that gives a column its name; the last line that has the name at all."""
    lines = list(enumerate(file.read_text(encoding="utf-8").splitlines(), 1))
    for pattern in (rf"(?i)\bas {column}\b", rf"\b{column}\b"):
        if numbers := [number for number, line in lines if re.search(pattern, line)]:
            return numbers[-1]
    return None
