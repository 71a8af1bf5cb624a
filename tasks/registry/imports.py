"""Programs that were trained elsewhere, registered as versions like any other, without an alias."""

from __future__ import annotations

import logging

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ImportedProgram
from tasks.kernel.settings import ArtifactStore
from tasks.registry.candidate import discard_half_runs
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation, exclusive
from tasks.registry.mlflow_registry import (
    MANIFEST_TAG,
    MODEL_FOLDER,
    ORIGIN_TAG,
    PROGRAM_TAG,
    SNAPSHOT_TAG,
    RegisteredVersion,
    Registry,
)
from tasks.registry.model_folder import read_version, write_import
from tasks.registry.records import ImportedManifest

logger = logging.getLogger(__name__)


def register_import(
    imported: ImportedProgram,
    config: RegistryConfig,
    location: RegistryLocation,
    store: ArtifactStore,
    code_commit: str,
) -> ModelVersionRef:
    """Record where the program comes from and file it as a version of its model.

    The same program of the same origin and description is registered once. No alias points at it:
    nothing judged it against a champion.

    Raises:
        RegistryError: MLflow refused.
        ArtifactError: the program is gone from the store, or damaged.
        TransientError: the registry was busy.
        StorageError: the disk refused.
    """
    registry = Registry(location)
    with exclusive(location):
        version = _find_whole(registry, config.model_name, imported)
        if version is None:
            discard_half_runs(registry, config)
            version = _register(registry, imported, config, store, code_commit)
        registry.finish_run(version.run_id)
    return version.ref


def _find_whole(
    registry: Registry, name: str, imported: ImportedProgram
) -> RegisteredVersion | None:
    tags = {PROGRAM_TAG: imported.program.sha256, SNAPSHOT_TAG: imported.origin_sha256}
    for version in registry.versions(name, tags):
        record = read_version(version)
        if record.imported is not None and not record.damage:
            if _is_described_so(record.imported, imported):
                return version
            continue
        logger.warning("%s is passed over: %s", version, "; ".join(record.damage) or "no manifest")
    return None


def _is_described_so(manifest: ImportedManifest, imported: ImportedProgram) -> bool:
    """The version is of the same family and tensors; a mended description makes another one."""
    return (manifest.family, manifest.signature, manifest.columns) == (
        imported.family,
        imported.signature,
        imported.columns,
    )


def _register(
    registry: Registry,
    imported: ImportedProgram,
    config: RegistryConfig,
    store: ArtifactStore,
    code_commit: str,
) -> RegisteredVersion:
    told = " ".join(imported.origin.get(name, "") for name in ("package", "version")).strip()
    tags = {
        PROGRAM_TAG: imported.program.sha256,
        SNAPSHOT_TAG: imported.origin_sha256,
        ORIGIN_TAG: told or "files",
        "family": imported.family,
        "code_commit": code_commit,
    }
    run_name = f"import-{imported.program.sha256[:8]}"
    run = registry.start_run(config.experiment, run_name, tags)
    digests = {f"sha256.{name}": digest for name, digest in imported.files.items()}
    registry.log(run, {**imported.origin, **digests}, [])
    folder = run.folder / MODEL_FOLDER
    manifest = write_import(folder, imported, config.model_name, code_commit, store)
    described = f"Trained elsewhere ({tags[ORIGIN_TAG]}); family {imported.family}."
    return registry.add_version(config.model_name, run, {**tags, MANIFEST_TAG: manifest}, described)
