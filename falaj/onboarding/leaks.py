"""Leaks: the future is taken away, and inputs of the past must not change; none tells too much.

Raw rows from a moment on are hidden; features and entity rows of the time before it are computed
again and must be the same. That finds what looks ahead. It cannot find a value that was written
into an old row afterwards: that shows in an input which predicts too well by itself.
"""

import math
import re
from dataclasses import replace
from datetime import UTC, timedelta
from pathlib import Path

import pyarrow.parquet as pq

from falaj.onboarding.queries import Sample
from tasks.contracts.base import TimeWindow
from tasks.features.checks.before_publish import PROBED, check_same_rows, probes
from tasks.features.checks.single_features import MIN_ROWS, TELLS_THE_LABEL, SingleScores
from tasks.features.config import FeatureTable
from tasks.features.entities import EVENT_TIME, schema_of
from tasks.features.offline.duck import inside, parquet, sql_name, sql_text
from tasks.kernel.errors import FalajError


def check_future(sample: Sample, frame: Path) -> None:
    """Find features and inputs that change when later raw rows are hidden."""
    for table in sample.config.features.feature_tables:
        if folder := sample.features.get(table.name):
            _check_table(sample, table, folder)
    _check_frame(sample, frame)


def _check_table(sample: Sample, table: FeatureTable, folder: Path) -> None:
    window, rows = sample.windows_of(table)[-1], max(folder.iterdir())
    for given in probes(sample.con, table, rows, window):
        # What a query misses of the past is told once, by the probe that hides the past alone.
        probe = replace(given, since=None) if given.until else given
        sample.read_raw(probe.since, probe.until)
        sample.queries.compute(table, probe.part or window, PROBED)
        try:
            check_same_rows(sample.con, table, rows, probe)
        except FalajError as exc:
            changed = re.search(r"(\w+) differs in", str(exc))
            column = changed[1] if changed else None
            seen = str(exc).partition(": ")[2].partition(f". {probe.cure}")[0]
            why, _, what = probe.cure.partition(". ")  # what to do comes first here
            advice = f"{what[:1].lower()}{what[1:]}. {why}"
            place = sample.place(table, column)
            sample.findings.add("future-feature", place, column, seen=seen, advice=advice)


def _check_frame(sample: Sample, frame: Path) -> None:
    """Find inputs of entity rows in the older half that change without the raw rows after it.

    Labels may: those that do tell how long their rows must wait for them at least.
    """
    spec, con, window = sample.config.features.training_set, sample.con, sample.config.window
    moment, rows = sql_name(EVENT_TIME), parquet(frame)
    middle = con.execute(f"SELECT quantile_disc({moment}, 0.5) FROM {rows}").fetchall()[0][0]
    inputs = [c for c in (*spec.categorical, *spec.numeric) if c not in spec.trusted]
    if middle is None or middle <= window.start or not inputs:
        return
    before = TimeWindow(start=window.start, end=middle.astimezone(UTC))
    sample.read_raw(until=before.end)
    sample.compute_frame(before, PROBED)
    counts = ", ".join(
        f"count(*) FILTER (w.{name} IS DISTINCT FROM s.{name})" for name in map(sql_name, inputs)
    )
    label = sql_name(spec.label_column)
    total, oldest, *changed = con.execute(
        f"SELECT count(*), min(w.{moment}) FILTER (w.{label} IS DISTINCT FROM s.{label}), {counts} "
        f"FROM {rows} AS w JOIN {PROBED} AS s USING ({sql_name(spec.row_id)})"
    ).fetchall()[0]
    wait = max(spec.label_lag, before.end - oldest if oldest else spec.label_lag)
    if wait > timedelta(hours=(given := sample.config.clock.label_hours)):
        hours = math.ceil(wait / timedelta(hours=1))
        place = sample.findings.at("clock", "label_hours")
        sample.findings.add("early-labels", place, hours=hours, given=given)
    for column, number in zip(inputs, changed, strict=True):
        if number:
            values = {"number": number, "total": total, "until": before.end}
            sample.findings.add("future-input", sample.place(spec, column), column, **values)


def check_single_inputs(sample: Sample, frame: Path) -> list[tuple[str, float]]:
    """Find inputs that predict too well by themselves; returns the scores of all, best first."""
    config, spec = sample.config, sample.config.features.training_set
    joined, categorical, numeric = _joined(sample, frame)
    rows = SingleScores(joined, schema_of(spec, categorical, numeric), config.splits)
    scores = sorted(
        ((name, rows.score(name)) for name in (*categorical, *numeric)), key=lambda s: -s[1]
    )
    promotion, tables = config.promotion, {t.name: t for t in config.features.feature_tables}
    limit = promotion.max_plausible_r2 if rows.is_number else promotion.max_plausible_auc
    for name, score in scores:
        told, is_label = f"{rows.measure} {score:.4f}", score >= TELLS_THE_LABEL
        if name == spec.label_column:
            told, is_label = "certainty", True
        elif score <= limit or rows.num_test < MIN_ROWS or name in spec.trusted:
            continue
        view, _, feature = name.partition("__")
        place = sample.place(tables.get(view, spec) if feature else spec, feature or name)
        verdict = ": it is the label, or made from it" if is_label else ""
        sample.findings.add("tells-too-much", place, name, score=told, verdict=verdict, limit=limit)
    return scores


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
                (categorical if kind in ("VARCHAR", "BOOLEAN") else numeric).append(name)
                wanted.append(f"t{number}.{sql_name(column)} AS {sql_name(name)}")
        equal = " AND ".join(f"f.{sql_name(k)} = t{number}.{sql_name(k)}" for k in keys)
        known = f"greatest({sql_name(EVENT_TIME)}, created) AS known_at"
        joins.append(
            f"ASOF LEFT JOIN (SELECT *, {known} FROM {rows}) AS t{number} "
            f"ON {equal} AND f.{sql_name(EVENT_TIME)} >= t{number}.known_at"
        )
    looked_at = " OR ".join(inside(EVENT_TIME, window) for window in sample.windows)
    target = frame.with_name("joined.parquet")
    con.execute(
        f"COPY (SELECT {', '.join(wanted)} FROM (FROM {parquet(frame)} WHERE {looked_at}) AS f "
        f"{' '.join(joins)}) TO {sql_text(target)} (FORMAT parquet)"
    )
    return target, categorical, numeric
