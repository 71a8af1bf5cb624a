"""What a run did, as steps from data to data: each says what it read and what it made.

    file -> landed/<table> -> raw/<table> -> features/<table> -> views/<view>
         -> snapshots/<service> -> models/<name>/<version> -> variants/<name>/<version>/<variant>

A dataset is named once and has a version, the SHA-256 of its content (of a view: of definition and
table), so a chain can be followed by digests. Everything is read from the contracts.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import duckdb

from tasks.contracts import data, training
from tasks.contracts.base import Artifact, ModelVersionRef
from tasks.contracts.conversion import ImportedProgram, PreparedRows
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import ModelVariant


@dataclass(frozen=True)
class Node:
    """One version of one dataset."""

    name: str
    version: str
    note: str = ""
    namespace: str | None = None
    """None: the installation's own."""
    num_rows: int | None = None
    num_bytes: int | None = None
    uri: str | None = None
    """Where its files are, in the artifact store."""
    validation: data.ValidationResult | None = None


@dataclass(frozen=True)
class Step:
    """One job that ran once on exactly these inputs."""

    job: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    description: str
    sql: str | None = None


@dataclass(frozen=True)
class Query:
    """A query of the feature repository and the raw tables that it reads in the end."""

    text: str
    reads: tuple[str, ...]


def queries_with_reads(
    texts: Mapping[str, str], staging: Mapping[str, str], raw: frozenset[str]
) -> dict[str, Query]:
    """Each query with the raw tables that it reads, directly or through staging queries.

    Args:
        texts: name to SQL; what DuckDB cannot parse is taken to read every raw table.
        staging: name of each staging table to its SQL.
        raw: names of the raw tables.
    """
    with duckdb.connect() as con:
        direct = {name: _tables(con, text) for name, text in staging.items()}
        found = {name: _tables(con, text) for name, text in texts.items()}
    for names in found.values():
        while more := {n for name in names for n in direct.get(name, ())} - names:
            names |= more
    return {
        name: Query(text, tuple(sorted(raw if "?" in found[name] else found[name] & raw)))
        for name, text in texts.items()
    }


def _tables(con: duckdb.DuckDBPyConnection, text: str) -> set[str]:
    """Every table name in a query, those of its own `WITH` clauses too; `?` where it is no query.

    A `WITH` clause that bears the name of a raw table hides it, and may well read it; counting it
    as read errs on the safe side.
    """
    parsed = con.execute("SELECT json_serialize_sql(?)", [text]).fetchall()[0][0]
    named = {*re.findall(r'"table_name":"([^"]+)"', parsed)}
    return named if '"error":false' in parsed else {"?"}


def refresh_steps(refresh: data.FeatureRefresh, queries: Mapping[str, Query]) -> Iterator[Step]:
    """Steps of one feature refresh.

    Args:
        refresh: what it returned.
        queries: of each feature table, by its name.
    """
    vouched = {v.subject_sha256: v for v in (*refresh.rows.validations, *refresh.validations)}
    window = str(refresh.window)
    raw = {ref.name: _table("raw", ref) for ref in refresh.tables.raw}
    for ref in refresh.rows.landed.tables:
        landed = replace(_table("landed", ref, vouched), note=window)
        if ref.source is not None:
            description = f"Copied the rows of {window}, typed, as they came."
            yield Step(f"land.{ref.name}", (_file(ref.source),), (landed,), description)
        if ref.name in raw:
            before = refresh.tables.follows.get(ref.name)
            changed = before and before != raw[ref.name].version
            known = (Node(f"raw/{ref.name}", str(before)),) if changed else ()
            description = f"Put the validated rows of {window} in the place of what was there."
            yield Step(f"merge.{ref.name}", (landed, *known), (raw[ref.name],), description)
    tables = {ref.name: _table("features", ref, vouched) for ref in refresh.tables.tables}
    for name, node in tables.items():
        query = queries.get(name)
        read = query.reads if query else tuple(raw)
        inputs = tuple(raw[table] for table in read if table in raw)
        description = "Computed features wherever the window's rows can be felt."
        yield Step(f"compute.{name}", inputs, (node,), description, query.text if query else None)
    for view in refresh.views:
        if view.definition and view.table in tables:
            made = _view(view.name, view.version or 0, view.definition, tables[view.table])
            yield _view_step(view.name, tables[view.table], made)


def version_steps(
    version: ModelVersionRef,
    model: training.CandidateModel,
    dataset: data.ValidatedDataset,
    evaluation: EvaluationReport,
    query: Query | None,
) -> Iterator[Step]:
    """Steps to one model version: the snapshot, the version, its predictions.

    Args:
        version: what was registered.
        model: the same, as it was judged; its kind says how it was made.
        dataset: rows of training, or of the fit, and of the judgement.
        evaluation: the judgement.
        query: of the entity frame.
    """
    yield from _snapshot_steps(dataset, query)
    snapshot, made = _snapshot(dataset), _model(version, model.program)
    verb, source, description = _origin(model)
    inputs = (snapshot,) if source is None else (_model(source), snapshot)
    yield Step(f"{verb}.{version.name}", inputs, (made,), description)
    overall = evaluation.overall
    name, note = f"predictions/{version.name}/{version.version}", str(evaluation.window)
    scored = _of(name, evaluation.predictions, note=note, num_rows=overall.num_rows)
    quality = f"{overall.primary_name} {overall.primary.value:.4f}"
    description = f"Scored the test window {evaluation.window}: {quality}."
    yield Step(f"judge.{version.name}", (made, snapshot), (scored,), description)


def _origin(model: training.CandidateModel) -> tuple[str, ModelVersionRef | None, str]:
    """What was done, to which version if to any, and a sentence about it."""
    if isinstance(model, training.RecalibratedModel):
        source, rows = model.calibration.source, model.splits.validation
        fitted = f"Fitted a map of version {source.version}'s scores on {rows}."
        return "recalibrate", source, fitted
    assert isinstance(model, training.TrainedModel)
    ended = f"on {model.num_ranks} rank(s) and registered the best epoch."
    if not isinstance(model, training.CompressedModel):
        start = model.started_from.version if model.started_from else None
        return "train", start, f"Trained a model ({model.kind}) {ended}"
    how = model.compression
    scores = "with" if how.is_distilled else "without"
    made = f"Made version {how.parent.version} smaller by {how.method}, {scores} its scores in the"
    return "compress", how.parent, f"{made} loss, {ended}"


def _snapshot_steps(dataset: data.ValidatedDataset, query: Query | None) -> Iterator[Step]:
    """Steps that made a snapshot: its views out of their tables, then the rows themselves."""
    snapshot, pins = dataset.snapshot, dataset.snapshot.pins
    if pins is None:
        return
    nodes = {
        (pin.group, pin.name): Node(f"{pin.group}/{pin.name}", pin.sha256, num_rows=pin.num_rows)
        for pin in pins.tables
    }
    views = []
    for name, view in pins.views.items():
        if table := nodes.get(("features", view.table)):
            views.append(_view(name, view.version, view.definition, table))
            yield _view_step(name, table, views[-1])
    raw = {name: node for (group, name), node in nodes.items() if group == "raw"}
    read = [raw[name] for name in (query.reads if query else raw) if name in raw]
    description = (
        f"Retrieved {snapshot.feature_service} version {pins.service_version} for every "
        f"labelled row of {snapshot.window}, as known at its moment."
    )
    job, made = f"snapshot.{snapshot.feature_service}", _snapshot(dataset)
    yield Step(job, (*views, *read), (made,), description, query.text if query else None)


def conversion_steps(
    version: ModelVersionRef,
    rows: data.ValidatedDataset | PreparedRows,
    variants: Iterable[ModelVariant],
) -> Iterator[Step]:
    """Steps from a model version, and what calibrates and judges, to each converted form."""
    model = _model(version)
    source = _prepared(rows) if isinstance(rows, PreparedRows) else _snapshot(rows)
    for variant in variants:
        if variant.files is None:
            continue
        name = f"variants/{version.name}/{version.version}/{variant.name}"
        made = _of(name, variant.files, note="kept" if variant.accepted else "dropped")
        description = f"Converted and judged: {variant.reason}"
        yield Step(f"convert.{variant.name}", (model, source), (made,), description)


def import_steps(version: ModelVersionRef, imported: ImportedProgram) -> Iterator[Step]:
    """The step from the files of a model that was trained elsewhere to its version."""
    package = " ".join(imported.origin.get(name, "") for name in ("package", "version")).strip()
    files = tuple(
        Node(f"imports/{version.name}/{name}", digest, note=package)
        for name, digest in sorted(imported.files.items())
    )
    model = _model(version, imported.program)
    description = (
        f"Exported a network that was trained elsewhere{f' ({package})' if package else ''}."
    )
    yield Step(f"import.{version.name}", files, (model,), description)


def _view_step(name: str, table: Node, view: Node) -> Step:
    # Refresh and training record the same step under the same run, so it is written once.
    return Step(f"feature-view.{name}", (table,), (view,), "The view as Feast reads and serves it.")


def _file(source: data.SourceFile) -> Node:
    parts = urlsplit(source.uri)
    namespace = f"{parts.scheme}://{parts.netloc}" if parts.netloc else "file"
    name = parts.path.lstrip("/") if parts.netloc else parts.path
    return Node(name, source.sha256, namespace=namespace, num_bytes=source.num_bytes)


def _of(
    name: str,
    artifact: Artifact,
    *,
    note: str = "",
    num_rows: int | None = None,
    validation: data.ValidationResult | None = None,
) -> Node:
    """What an artifact holds."""
    size, uri = artifact.num_bytes, artifact.uri
    return Node(name, artifact.sha256, note, None, num_rows, size, uri, validation)


def _table(
    group: str, ref: data.TableRef, vouched: Mapping[str, data.ValidationResult] | None = None
) -> Node:
    result = vouched.get(ref.artifact.sha256) if vouched else None
    return _of(f"{group}/{ref.name}", ref.artifact, num_rows=ref.num_rows, validation=result)


def _view(name: str, number: int, definition: str, table: Node) -> Node:
    content = hashlib.sha256(f"{definition} {table.version}".encode()).hexdigest()
    return Node(f"views/{name}", content, note=f"v{number}, definition {definition[:12]}")


def _snapshot(dataset: data.ValidatedDataset) -> Node:
    snapshot, pins = dataset.snapshot, dataset.snapshot.pins
    return _of(
        f"snapshots/{snapshot.feature_service}",
        snapshot.data,
        note=f"version {pins.service_version}" if pins else "",
        num_rows=snapshot.num_rows,
        validation=dataset.validation,
    )


def _prepared(rows: PreparedRows) -> Node:
    return _of(
        "corpora/" + "+".join(sorted(rows.made_from)),
        rows.data,
        note=", ".join(f"{name} {text[:12]}" for name, text in sorted(rows.made_from.items())),
        num_rows=rows.num_calibration + rows.num_judged,
    )


def _model(version: ModelVersionRef, program: Artifact | None = None) -> Node:
    size = program.num_bytes if program else None
    return Node(f"models/{version.name}/{version.version}", version.program_sha256, num_bytes=size)
