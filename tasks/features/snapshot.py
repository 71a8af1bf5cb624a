"""Point-in-time training sets: the entity frame, the features known at each moment, the label."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
from feast import FeatureService, FeatureStore
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.types import String

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import (
    DatasetSchema,
    ExcludedRows,
    FeatureSnapshot,
    FeatureTables,
    NumberSummary,
)
from tasks.features.access.store import (
    apply_definitions,
    find_service,
    load_definitions,
    open_store,
)
from tasks.features.access.versions import ServiceVersion, newest_version
from tasks.features.config import FeatureConfig, TrainingSet
from tasks.features.declared.columns import plain_frame
from tasks.features.declared.definitions import Definition
from tasks.features.declared.queries import frame_query
from tasks.features.offline.duck import (
    NUMBERS,
    duckdb_session,
    endless_numbers,
    set_window,
    sql_name,
    sql_text,
)
from tasks.features.tables.build import features_folder, register_raw, run_query
from tasks.features.tables.evidence import pin
from tasks.features.tables.ledger import SNAPSHOTS, training_set_key
from tasks.kernel.errors import ConfigurationError, DataContractError, FeatureStoreError
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder

logger = logging.getLogger(__name__)

DATA_FILE = "data.parquet"
EVENT_TIME = "event_timestamp"
"""Column of an entity frame with the moment of the prediction."""
ROW_GROUP_ROWS = 8192
"""Small enough that ranks can share a snapshot by row group."""


def build_training_set(
    tables: FeatureTables, window: TimeWindow, config: FeatureConfig, settings: Settings
) -> FeatureSnapshot:
    """Retrieve every labelled row of `window` with the features that were known at its moment.

    Feast's retrieval runs with the created-time cut-off, on the given version of the tables. Rows
    without a label are counted by reason, never dropped in silence.

    Raises:
        ConfigurationError: the feature service does not exist, or the entity query is wrong.
        DataContractError: the window was not refreshed, row ids repeat, or no row has a label.
        FeatureStoreError: rows were lost or doubled on the way.
    """
    spec, store, repo = config.training_set, settings.store, settings.feature_repo
    _check_covered(tables, window)
    key = training_set_key(tables, window, config, repo)

    def build(folder: StagedFolder) -> FeatureSnapshot:
        features = features_folder(tables, store)
        feast = open_store(settings.features_home, repo, features)
        definitions = load_definitions(repo)
        _check_defined(spec.feature_service, definitions)
        apply_definitions(feast, definitions, keep_undefined=True)
        service = service_to_train_on(feast, spec.feature_service)
        frame = folder.path / "entities.parquet"
        excluded, labels = write_entities(tables, window, config, repo, store, frame)
        registered = feast.get_feature_service(service.registered_name)
        columns = _dataset_columns(registered, spec)
        job, num_rows = retrieve(feast, registered, spec, frame, folder.path / DATA_FILE)
        pins = pin(feast, service, tables, config, store, job, folder)
        frame.unlink()
        return FeatureSnapshot(
            data=folder.artifact(DATA_FILE),
            num_rows=num_rows,
            window=window,
            columns=columns,
            feature_service=service.name,
            feature_views={name: view.definition for name, view in pins.views.items()},
            tables_version=tables.version,
            label_definition=spec.label_definition,
            positive_rate=labels.mean if spec.task == "classification" else None,
            label_summary=labels if spec.task == "regression" else None,
            excluded=excluded,
            pins=pins,
        )

    return store.build_once(SNAPSHOTS, key, FeatureSnapshot, build)


def _check_covered(tables: FeatureTables, window: TimeWindow) -> None:
    reached = window.start
    spans = sorted(tuple(map(datetime.fromisoformat, s.split("/"))) for s in tables.sources)
    for start, end in spans:
        if start <= reached:
            reached = max(reached, end)
    if reached < window.end:
        held = ", ".join(sorted(tables.sources)) or "nothing"
        raise DataContractError(
            f"window {window} is not covered by the refreshed windows ({held}); run "
            f"`python -m falaj features refresh {reached:%Y-%m-%dT%H:%MZ} "
            f"{window.end:%Y-%m-%dT%H:%MZ}`. Nothing was retrieved"
        )


def write_entities(
    tables: FeatureTables,
    window: TimeWindow,
    config: FeatureConfig,
    repo: Path,
    store: ArtifactStore,
    target: Path,
) -> tuple[tuple[ExcludedRows, ...], NumberSummary]:
    """Write the labelled entity rows; return what was left out, and what labels are like."""
    spec = config.training_set
    folders = {t.name: store.path(t.artifact) for t in tables.raw}
    with duckdb_session(target.parent) as con:
        register_raw(con, folders, config, repo)
        set_window(con, window)
        text = frame_query(repo, config)
        statement = f"CREATE TEMP TABLE frame AS {plain_frame(con, text, spec)}"
        run_query(con, statement, spec.origin)
        _check_frame(con, spec, window)
        _check_narrower_window(con, spec, text, window)
        label, reason = sql_name(spec.label_column), sql_name(spec.exclusion)
        counted = con.execute(
            f"SELECT {reason}, count(*) FROM frame WHERE {label} IS NULL GROUP BY 1 ORDER BY 1"
        ).fetchall()
        mean, deviation, low, high = con.execute(
            f"SELECT avg({label}), stddev_pop({label}), min({label}), max({label}) FROM frame"
        ).fetchall()[0]
        con.execute(
            f"COPY (SELECT * EXCLUDE ({reason}) FROM frame WHERE {label} IS NOT NULL) "
            f"TO {sql_text(target)} (FORMAT parquet)"
        )
    excluded = tuple(ExcludedRows(reason=why or "unstated", num_rows=n) for why, n in counted)
    return excluded, NumberSummary(mean=mean, deviation=deviation, low=low, high=high)


def _check_frame(con: duckdb.DuckDBPyConnection, spec: TrainingSet, window: TimeWindow) -> None:
    types = {row[0]: row[1] for row in con.execute("DESCRIBE frame").fetchall()}
    wanted = [spec.row_id, EVENT_TIME, spec.label_column, spec.exclusion]
    if missing := [c for c in (*wanted, *spec.categorical, *spec.numeric) if c not in types]:
        raise ConfigurationError(
            f"query {spec.origin} gives no column {', '.join(missing)}, which the training set "
            "names; add it to the query or take it out of use_case.yaml. Nothing was retrieved"
        )
    if not types[EVENT_TIME].startswith("TIMESTAMP"):
        raise ConfigurationError(
            f"query {spec.origin} gives {EVENT_TIME} as {types[EVENT_TIME]}, expected a "
            f"moment; write {EVENT_TIME}::TIMESTAMPTZ. Nothing was retrieved"
        )
    row_id, moment, label = (sql_name(c) for c in (spec.row_id, EVENT_TIME, spec.label_column))
    total, distinct, labelled, outside = con.execute(
        f"SELECT count(*), count(DISTINCT {row_id}), count({label}), count(*) FILTER ("
        f"{moment} < getvariable('window_start') OR {moment} >= getvariable('window_end') "
        f"OR {moment} IS NULL) FROM frame"
    ).fetchall()[0]
    if distinct != total or outside:
        raise DataContractError(
            f"entity frame of {spec.origin}: {total - distinct} of {total} row ids repeat or are "
            f"null, {outside} rows lie outside {window}; expected unique ids inside the window. "
            "Nothing was retrieved"
        )
    if not labelled:
        raise DataContractError(
            f"entity frame of {spec.origin}: none of {total} rows in {window} has a label; choose "
            "a window whose outcomes are known. Nothing was retrieved"
        )
    _check_label(con, spec, types[spec.label_column])
    others = types.keys() - set(spec.numeric)
    if endless := endless_numbers(con, "frame", {*others, *spec.unbounded}):
        raise DataContractError(
            f"entity frame of {spec.origin}: {endless}; expected numbers. Divide by nullif(..., 0) "
            "there, or name the column among `unbounded` of the training set. Nothing was retrieved"
        )


def _check_narrower_window(
    con: duckdb.DuckDBPyConnection, spec: TrainingSet, text: str, window: TimeWindow
) -> None:
    """See that the query keeps to a window that ends before the data do, as drift checks ask."""
    quarter = (window.end - window.start) / 4
    inner = TimeWindow(start=window.start + quarter, end=window.end - quarter)
    set_window(con, inner)
    run_query(con, f"CREATE OR REPLACE TEMP TABLE narrower AS {text}", spec.origin)
    set_window(con, window)
    moment = sql_name(EVENT_TIME)
    total, before, after = con.execute(
        f"SELECT count(*), count(*) FILTER ({moment} < ?::TIMESTAMPTZ), "
        f"count(*) FILTER ({moment} >= ?::TIMESTAMPTZ) FROM narrower",
        [inner.start, inner.end],
    ).fetchall()[0]
    con.execute("DROP TABLE narrower")
    if before or after:
        raise DataContractError(
            f"entity frame of {spec.origin}: asked for {inner}, it gives {before:,} rows before "
            f"and {after:,} after that, of {total:,}; expected none. Bound {EVENT_TIME} by "
            "getvariable('window_start') and getvariable('window_end') in the query: drift checks "
            "ask for other windows than training. Nothing was retrieved"
        )


def _check_label(con: duckdb.DuckDBPyConnection, spec: TrainingSet, kind: str) -> None:
    """See that every known label is 0 or 1, or a finite number where the task is regression."""
    label, is_number = sql_name(spec.label_column), spec.task == "regression"
    fits = "TRUE" if kind in NUMBERS or kind.startswith("DECIMAL") else "FALSE"
    if fits == "TRUE":
        fits = f"isfinite({label}::DOUBLE)" if is_number else f"{label} IN (0, 1)"
    found = con.execute(
        f"SELECT {label}::VARCHAR, count(*), sum(count(*)) OVER () FROM frame "
        f"WHERE {label} IS NOT NULL AND NOT {fits} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 5"
    ).fetchall()
    if found:
        shown = ", ".join(f"{value!r} ({count:,} rows)" for value, count, _ in found)
        cure = (
            "a finite number, or null where it is not known; mend the query"
            if is_number
            else f"0, 1, or null where it is not known; write ({spec.label} = ...)::INTEGER in the "
            "query for one of the values, or set task to regression for a number"
        )
        raise DataContractError(
            f"label {spec.label_column} of {spec.origin} ({kind}) has other values in "
            f"{found[0][2]:,} rows: {shown}; expected {cure}. Nothing was retrieved"
        )


def _check_defined(service: str, definitions: Sequence[Definition]) -> None:
    """See that the repository defines a service; a registry also holds those it once defined."""
    defined = [o.name for o in definitions if isinstance(o, FeatureService)]
    if service not in defined:
        raise ConfigurationError(
            f"feature service {service!r} is not defined in the feature repository; it defines "
            f"{', '.join(sorted(defined)) or 'none'}. Name one of these in use_case.yaml or define "
            "it. Nothing was applied"
        )


def service_to_train_on(feast: FeatureStore, name: str) -> ServiceVersion:
    """The newest version of a service, whether or not readers get it already.

    Raises:
        ConfigurationError: there is no such service; the sentence lists those there are.
    """
    version = newest_version(feast, name)
    if version is None:
        found = find_service(feast, name)  # raises where it is not there at all
        raise ConfigurationError(
            f"feature service {found.name!r} has no version; apply the feature repository with "
            "this project's commands, which number what they apply. Nothing was read"
        )
    return version


def retrieve(
    feast: FeatureStore, service: FeatureService, spec: TrainingSet, frame: Path, target: Path
) -> tuple[RetrievalJob, int]:
    """Run Feast's retrieval into one Parquet file; return it with its rows, all accounted for."""
    job = feast.get_historical_features(
        entity_df=f"SELECT * FROM read_parquet({sql_text(frame)})",
        features=service,
        full_feature_names=True,
        filter_by_created_timestamp=True,
    )
    job.write_parquet(target, [EVENT_TIME, spec.row_id], ROW_GROUP_ROWS)
    rows_in, rows_out = (int(pq.read_metadata(file).num_rows) for file in (frame, target))
    if rows_in != rows_out:
        raise FeatureStoreError(
            f"retrieval of {service.name}: {rows_in} rows went in, {rows_out} came out; expected "
            "equal numbers. The snapshot was discarded"
        )
    logger.info("retrieved %s rows of %s", f"{rows_out:,}", service.name)
    return job, rows_out


def _dataset_columns(service: FeatureService, spec: TrainingSet) -> DatasetSchema:
    """Columns of the snapshot: those of the entity frame, then each view's features in order."""
    categorical, numeric = list(spec.categorical), list(spec.numeric)
    for projection in service.feature_view_projections:
        for feature in projection.features:
            group = categorical if feature.dtype == String else numeric
            group.append(f"{projection.name_alias or projection.name}__{feature.name}")
    if spec.baseline is not None and spec.baseline not in numeric:
        raise ConfigurationError(
            f"the training set's baseline {spec.baseline!r} is not among the numbers that the "
            f"model takes ({', '.join(numeric)}); name one of these. Nothing was retrieved"
        )
    return DatasetSchema(
        row_id=spec.row_id,
        event_time=EVENT_TIME,
        label=spec.label_column,
        categorical=tuple(categorical),
        numeric=tuple(numeric),
        task=spec.task,
        unit=spec.label_unit,
        baseline=spec.baseline,
    )
