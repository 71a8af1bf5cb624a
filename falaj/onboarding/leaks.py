"""Leaks: the future is taken away, and inputs of the past must not change; none tells too much.

Raw rows from a moment on are hidden; features and entity rows of the time before it are computed
again and must be the same. That finds what looks ahead. It cannot find a value that was written
into an old row afterwards: that shows in an input which predicts too well by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import pyarrow.parquet as pq

from falaj.onboarding.findings import Finding, found
from falaj.onboarding.queries import Sample, line_naming
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema
from tasks.features.checks.before_publish import PROBED, check_same_rows, probes
from tasks.features.checks.single_features import MIN_ROWS, TELLS_THE_LABEL, SingleScores
from tasks.features.config import FeatureTable
from tasks.features.entities import EVENT_TIME
from tasks.features.offline.duck import parquet, sql_name, sql_text
from tasks.kernel.errors import FalajError
from tasks.kernel.settings import USE_CASE_FILE

CATEGORIES = ("VARCHAR", "BOOLEAN")


def future_findings(sample: Sample) -> list[Finding]:
    """Features and inputs that change when later raw rows are hidden."""
    findings: list[Finding] = []
    for number, table in enumerate(sample.config.features.feature_tables):
        if folder := sample.features.get(table.name):
            line = sample.places.line("features", "feature_tables", number)
            findings += _table_changes(sample, table, folder, line)
    if sample.frame:
        findings += _frame_changes(sample, sample.frame)
    sample.read_raw()
    return findings


def _table_changes(
    sample: Sample, table: FeatureTable, folder: Path, line: int
) -> Iterator[Finding]:
    window, file = sample.config.window, table.sql or USE_CASE_FILE
    for given in probes(sample.con, table, folder, window):
        # What a query misses of the past is told once, by the probe that hides the past alone.
        probe = replace(given, since=None) if given.until else given
        sample.read_raw(probe.since, probe.until)
        sample.compute(table, probe.of_window(window), PROBED)
        try:
            check_same_rows(sample.con, table, folder, probe)
        except FalajError as exc:
            changed = re.findall(r"(\w+) differs in", str(exc))
            column = changed[0] if changed else None
            at = line_naming(sample.repo / file, changed[0]) if changed and table.sql else line
            seen = str(exc).partition(": ")[2].partition(f". {probe.cure}")[0]
            yield found("future-feature", file, at, column, seen=seen, advice=_as_one(probe.cure))


def _as_one(cure: str) -> str:
    """Why it matters, and what to do, the latter first."""
    why, _, what = cure.partition(". ")
    return f"{what[:1].lower()}{what[1:]}. {why}"


def _frame_changes(sample: Sample, frame: Path) -> Iterator[Finding]:
    """Inputs of entity rows in the older half that are others without the raw rows after it."""
    spec, con = sample.config.features.training_set, sample.con
    moment, rows = sql_name(EVENT_TIME), parquet(frame)
    middle = con.execute(f"SELECT quantile_disc({moment}, 0.5) FROM {rows}").fetchall()[0][0]
    window = sample.config.window
    if middle is None or middle <= window.start:
        return
    before = TimeWindow(start=window.start, end=middle.astimezone(UTC))
    sample.read_raw(until=before.end)
    sample.compute_frame(before, PROBED)
    inputs = [c for c in (*spec.categorical, *spec.numeric) if c not in spec.trusted]
    counts = ", ".join(
        f"count(*) FILTER (w.{name} IS DISTINCT FROM s.{name})" for name in map(sql_name, inputs)
    )
    if not inputs:
        return
    total, *changed = con.execute(
        f"SELECT count(*), {counts} FROM {rows} AS w JOIN {PROBED} AS s "
        f"USING ({sql_name(spec.row_id)})"
    ).fetchall()[0]
    for column, number in zip(inputs, changed, strict=True):
        if number:
            at = sample.places.line("features", "training_set")
            file = spec.sql or USE_CASE_FILE
            at = (spec.sql and line_naming(sample.repo / file, column)) or at
            values = {"number": number, "total": total, "until": before.end}
            yield found("future-input", file, at, column, **values)


def single_findings(sample: Sample) -> tuple[list[Finding], list[tuple[str, float]]]:
    """Inputs that predict too well by themselves; and the scores of all, the best first."""
    config, frame = sample.config, sample.frame
    if frame is None:
        return [], []
    spec, promotion = config.features.training_set, config.promotion
    joined, categorical, numeric = _joined(sample, frame)
    columns = DatasetSchema(
        row_id=spec.row_id,
        event_time=EVENT_TIME,
        label=spec.label_column,
        categorical=tuple(categorical),
        numeric=tuple(numeric),
        task=spec.task,
        classes=spec.class_names,
    )
    rows = SingleScores(joined, columns, config.splits)
    scores = sorted(
        ((name, rows.score(name)) for name in (*categorical, *numeric)), key=lambda s: -s[1]
    )
    limit = promotion.max_plausible_r2 if rows.is_number else promotion.max_plausible_auc
    findings = []
    if spec.label_column in (*categorical, *numeric):
        findings.append(
            _too_good(sample, spec.label_column, "certainty", ": it is the label", limit)
        )
    for name, score in scores if rows.num_test >= MIN_ROWS else ():
        if score > limit and name not in (*spec.trusted, spec.label_column):
            is_label = ": it is the label, or made from it" if score >= TELLS_THE_LABEL else ""
            findings.append(_too_good(sample, name, f"{rows.measure} {score:.4f}", is_label, limit))
    return findings, scores


def _too_good(sample: Sample, name: str, score: str, verdict: str, limit: float) -> Finding:
    view, _, feature = name.partition("__")
    table = next((t for t in sample.config.features.feature_tables if t.name == view), None)
    file = table.sql if feature and table else sample.config.features.training_set.sql
    line = line_naming(sample.repo / file, feature or name) if file else None
    if not file:
        part = ("feature_tables",) if feature else ("training_set",)
        line = sample.places.line("features", *part)
    return found(
        "tells-too-much",
        file or USE_CASE_FILE,
        line,
        name,
        score=score,
        verdict=verdict,
        limit=limit,
    )


def _joined(sample: Sample, frame: Path) -> tuple[Path, list[str], list[str]]:
    """The entity rows with the features known at their moments; its text and number inputs."""
    spec, con = sample.config.features.training_set, sample.con
    held = pq.read_schema(frame).names
    categorical, numeric = list(spec.categorical), list(spec.numeric)
    wanted, joins = ["f.*"], []
    for number, table in enumerate(sample.config.features.feature_tables):
        folder = sample.features.get(table.name)
        if folder is None or not set(table.entity_keys) <= set(held):
            continue
        rows, keys = parquet(folder), table.entity_keys
        described = con.execute(f"DESCRIBE SELECT * FROM {rows}").fetchall()
        for column, kind, *_ in described:
            if column not in (*keys, EVENT_TIME, "created"):
                name = f"{table.name}__{column}"
                (categorical if kind in CATEGORIES else numeric).append(name)
                wanted.append(f"t{number}.{sql_name(column)} AS {sql_name(name)}")
        equal = " AND ".join(f"f.{sql_name(k)} = t{number}.{sql_name(k)}" for k in keys)
        known = f"greatest({sql_name(EVENT_TIME)}, created) AS known_at"
        joins.append(
            f"ASOF LEFT JOIN (SELECT *, {known} FROM {rows}) AS t{number} "
            f"ON {equal} AND f.{sql_name(EVENT_TIME)} >= t{number}.known_at"
        )
    target = frame.with_name("joined.parquet")
    con.execute(
        f"COPY (SELECT {', '.join(wanted)} FROM {parquet(frame)} AS f {' '.join(joins)}) "
        f"TO {sql_text(target)} (FORMAT parquet)"
    )
    return target, categorical, numeric
