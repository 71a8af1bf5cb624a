"""Point-in-time training sets: the entity frame, the features known at each moment, the label."""

import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pyarrow.parquet as pq
from feast import FeatureService, FeatureStore
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.types import String

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, FeatureSnapshot, FeatureTables
from tasks.features.access import store as feast_store
from tasks.features.access.versions import ServiceVersion, newest_version
from tasks.features.config import FeatureConfig, TrainingSet
from tasks.features.declared.definitions import Definition
from tasks.features.entities import EVENT_TIME, schema_of, write_entities
from tasks.features.offline.duck import sql_text
from tasks.features.tables.build import features_folder
from tasks.features.tables.evidence import pin
from tasks.features.tables.ledger import SNAPSHOTS, training_set_key
from tasks.governance.signing import build_signed
from tasks.kernel.errors import ConfigurationError, DataContractError, FeatureStoreError
from tasks.kernel.settings import Settings, StagedFolder

logger = logging.getLogger(__name__)

DATA_FILE = "data.parquet"
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
        SignatureError: the training set that is there was made or changed by somebody else.
    """
    spec, store, repo = config.training_set, settings.store, settings.feature_repo
    _check_covered(tables, window)
    key = training_set_key(tables, window, config, repo)

    def build(folder: StagedFolder) -> FeatureSnapshot:
        feast = feast_store.open_store(settings.features_home, repo, features_folder(tables, store))
        definitions = feast_store.load_definitions(repo)
        _check_defined(spec.feature_service, definitions)
        feast_store.apply_definitions(feast, definitions, keep_undefined=True)
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
            class_shares=_class_shares(folder.path / DATA_FILE, columns),
            excluded=excluded,
            pins=pins,
            parts=folder.parts(DATA_FILE),
        )

    snapshot = build_signed(store, SNAPSHOTS, key, FeatureSnapshot, build)
    return snapshot.model_copy(update={"handling": config.handling})  # of equal rows: as of now


def _class_shares(data: Path, columns: DatasetSchema) -> dict[str, float]:
    """Share of the rows of each of several classes; none of another task."""
    if not columns.classes:
        return {}
    numbers = pq.read_table(data, columns=[columns.label])[columns.label].to_numpy()
    return {name: float((numbers == k).mean()) for k, name in enumerate(columns.classes)}


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
            f"`falaj features refresh {reached:%Y-%m-%dT%H:%MZ} "
            f"{window.end:%Y-%m-%dT%H:%MZ}`. Nothing was retrieved"
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
        found = feast_store.find_service(feast, name)  # raises where it is not there at all
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
    return schema_of(spec, categorical, numeric)
