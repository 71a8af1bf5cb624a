"""Programs out of the registry: the incumbent of a candidate, any version by number or alias."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from tasks.contracts import release
from tasks.contracts.base import Artifact, ModelVersionRef, TimeWindow
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.training import CandidateModel, StartingPoint
from tasks.kernel.errors import RegistryError, SignatureError, refused_writes_explained
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key
from tasks.registry import model_folder
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import (
    CANDIDATE,
    CHAMPION,
    INCUMBENT_TAG,
    ORIGIN_TAG,
    PROGRAM_TAG,
    RegisteredVersion,
    Registry,
)

logger = logging.getLogger(__name__)
NETWORK = "network"
"""Model of a training, whose weights another one may begin with."""
Weighted = TypeVar("Weighted", release.CalibrationSource, release.CompressionParent)


def find_incumbent(
    trained: CandidateModel,
    config: RegistryConfig,
    location: RegistryLocation,
    store: ArtifactStore,
) -> release.RegisteredProgram | None:
    """The champion that a candidate is compared with; None where there is none.

    A candidate that was promoted is not compared with itself when its run is repeated, but with the
    version that it was compared with before, so the repeated evaluation is the same one.

    Raises:
        RegistryError: the champion's files are missing or damaged, or MLflow refused.
        TransientError: the registry was busy.
    """
    registry = Registry(location)
    champion = registry.by_alias(config.model_name, CHAMPION)
    if champion is not None and champion.ref.program_sha256 == trained.program.sha256:
        champion = _recorded_incumbent(registry, champion)
    return None if champion is None else _fetch(champion, store)


def find_champion(
    name: str, location: RegistryLocation, store: ArtifactStore
) -> release.RegisteredProgram | None:
    """The champion's program; before there is a champion, the candidate's, which is logged.

    Raises:
        RegistryError: the files are missing or damaged.
        TransientError: the registry was busy.
    """
    version = _newest(Registry(location), name)
    return None if version is None else _fetch(version, store)


def _newest(registry: Registry, name: str) -> RegisteredVersion | None:
    version = registry.by_alias(name, CHAMPION)
    if version is None and (version := registry.by_alias(name, CANDIDATE)):
        logger.warning("%s has no champion yet; its candidate is taken instead", name)
    return version


def fetch_version(
    ref: ModelVersionRef, location: RegistryLocation, store: ArtifactStore
) -> release.RegisteredProgram:
    """The program of the version that a reference names, copied into the store by digest.

    Raises:
        RegistryError: the version is gone, is of another model than `ref` says, or its files are
            missing or damaged.
        TransientError: the registry was busy.
    """
    return _fetch(Registry(location).confirmed(ref), store)


def find_trained(
    name: str, number: int | None, location: RegistryLocation
) -> release.TrainedVersion:
    """A version that was trained here, with the splits of its rows.

    Args:
        name: registered model.
        number: of the version; None for the champion, and before there is one for the candidate.
        location: the registry.

    Raises:
        RegistryError: there is no such version, its files are missing or damaged, or it was trained
            elsewhere.
        TransientError: the registry was busy.
    """
    registry = Registry(location)
    version = _newest(registry, name) if number is None else registry.version(name, number)
    if version is None:
        raise RegistryError(
            f"{name} has neither a champion nor a candidate; train a first version, or name the "
            "number of another one"
        )
    if model_folder.read_version(version).imported is not None:
        raise RegistryError(
            f"{name} version {version.ref.version} was trained elsewhere and has no snapshot here; "
            "import it again with the conversion that it is to get: that finds this version"
        )
    _, manifest = model_folder.verified_start(version)
    return release.TrainedVersion(version=version.ref, splits=manifest.splits)


def find_filed(name: str, number: int, location: RegistryLocation) -> release.FiledVersion:
    """As `find_trained`, with the judgement and the variants that are filed with the version.

    Raises:
        RegistryError: also where it was not judged or not converted.
        TransientError: the registry was busy.
    """
    trained = find_trained(name, number, location)
    version = Registry(location).confirmed(trained.version)
    evaluation = model_folder.read_evaluation(version)
    listed = model_folder.read_version(version).variants
    if evaluation is None or listed is None:
        missing = "evaluation.json" if evaluation is None else "converted variants"
        raise RegistryError(
            f"{version} has no readable {missing}, so no gate can judge it. Nothing was changed; "
            f"`falaj verify models/{name}/{number}` shows what is damaged, "
            f"`falaj convert {number}` converts it again"
        )
    variants = tuple(entry.variant for entry in listed.variants)
    return release.FiledVersion(**dict(trained), evaluation=evaluation, variants=variants)


def find_start(
    dataset: ValidatedDataset,
    splits: DataSplits,
    training: Mapping[str, object],
    name: str,
    location: RegistryLocation,
    store: ArtifactStore,
) -> StartingPoint | None:
    """The champion's weights, copied into the store; None where there is no champion.

    None too, with a warning, where the champion is no network of ours.

    Where this very training has already made the champion, it began with another version's weights,
    and begins with them again: a repeated run finds its model instead of training on and on.

    Args:
        dataset: what is to be trained on.
        splits: which of its rows.
        training: the training configuration, whole.
        name: registered model.
        location: the registry.
        store: takes the checkpoint.

    Raises:
        RegistryError: the champion's files are missing or damaged, or MLflow refused.
        TransientError: the registry was busy.
    """
    champion = Registry(location).by_alias(name, CHAMPION)
    if champion is None:
        return None
    source, manifest = model_folder.verified_start(champion)
    if (manifest.snapshot_sha256, manifest.splits, manifest.training_config) == (
        dataset.snapshot.data.sha256,
        splits,
        dict(training),
    ):
        return manifest.started_from
    if (made := manifest.training_config.get("model", NETWORK)) != NETWORK:
        logger.warning("%s is %r, not a network whose weights mean the same here", champion, made)
        return None
    return StartingPoint(
        version=champion.ref,
        checkpoint=_copied(champion, source, manifest.files[source.name].sha256, store),
        columns=manifest.columns,
        trained_on=manifest.splits.train,
    )


def find_calibration_source(
    fit: TimeWindow,
    holdout: TimeWindow,
    name: str,
    location: RegistryLocation,
    store: ArtifactStore,
) -> release.CalibrationSource:
    """The champion, with all that another map of its scores needs.

    Where this very recalibration has already made the champion, the version that it was made from:
    a repeated run finds its model instead of mapping on and on.

    Args:
        fit: rows that the new map is to be fitted to.
        holdout: rows that are to judge it.
        name: registered model.
        location: the registry.
        store: takes the program and the checkpoint.

    Raises:
        RegistryError: there is no champion, or its files are missing or damaged.
        TransientError: the registry was busy.
    """
    registry = Registry(location)
    champion = _required_champion(registry, name)
    _, manifest = model_folder.verified_start(champion)
    made = manifest.calibration
    if made is not None and (made.fit.window, manifest.splits.test) == (fit, holdout):
        champion = registry.confirmed(made.source)
    return _fetch_with_weights(champion, store, release.CalibrationSource)


def find_compression_parent(
    version: int | None, name: str, location: RegistryLocation, store: ArtifactStore
) -> release.CompressionParent:
    """The version that a compressed network is to come from, with all that its training needs.

    Where the champion is such a smaller network, the version that it was made from: a repeated run
    finds its model instead of compressing again, and each loss is measured from the same network.

    Args:
        version: its number; None for the champion.
        name: registered model.
        location: the registry.
        store: takes the program and the checkpoint.

    Raises:
        RegistryError: there is no champion or no such version, it was trained elsewhere, or its
            files are missing or damaged.
        TransientError: the registry was busy.
    """
    registry = Registry(location)
    if version is None:
        parent = _before_compression(_required_champion(registry, name), registry)
    else:
        parent = registry.version(name, version)
    if ORIGIN_TAG in parent.tags:
        raise RegistryError(
            f"{parent} was trained elsewhere, so nothing here can train a smaller network as it "
            "was; expected a version that this project trained. Convert it to fewer bits instead"
        )
    return _fetch_with_weights(parent, store, release.CompressionParent)


def _required_champion(registry: Registry, name: str) -> RegisteredVersion:
    champion = registry.by_alias(name, CHAMPION)
    if champion is None:
        raise RegistryError(f"{name} has no champion; train and promote a first version")
    return champion


def _before_compression(champion: RegisteredVersion, registry: Registry) -> RegisteredVersion:
    """The version that a smaller champion was made from; any other champion itself.

    A map of its scores is followed to the network that it maps.
    """
    version = champion
    while True:
        _, manifest = model_folder.verified_start(version)
        if manifest.compression is not None:
            return registry.confirmed(manifest.compression.parent)
        if manifest.calibration is None:
            return champion
        version = registry.confirmed(manifest.calibration.source)


def _fetch_with_weights(
    version: RegisteredVersion, store: ArtifactStore, kind: type[Weighted]
) -> Weighted:
    """A version's program and checkpoint in the store, with what training goes on from."""
    checkpoint, manifest = model_folder.verified_start(version)
    copied = _copied(version, checkpoint, manifest.files[checkpoint.name].sha256, store)
    described = dict(manifest)
    recorded = {name: described[name] for name in kind.model_fields.keys() & described.keys()}
    return kind(program=_fetch(version, store), checkpoint=copied, **recorded)


def _recorded_incumbent(registry: Registry, version: RegisteredVersion) -> RegisteredVersion | None:
    number = version.tags.get(INCUMBENT_TAG, "")
    found = registry.version(version.name, int(number)) if number.isdigit() else None
    is_same = found is not None and found.tags[PROGRAM_TAG] == version.tags[PROGRAM_TAG]
    return None if is_same else found


def _fetch(version: RegisteredVersion, store: ArtifactStore) -> release.RegisteredProgram:
    source, registered = model_folder.verified_program(version)
    copied = _copied(version, source, version.ref.program_sha256, store)
    return registered.model_copy(update={"program": copied})


def _copied(
    version: RegisteredVersion, source: Path, signed: str, store: ArtifactStore
) -> Artifact:
    """The store's copy of a version's file, with the content that its signature vouches for."""

    def build(folder: StagedFolder) -> Artifact:
        with refused_writes_explained(folder.path):
            model_folder.copy_flushed(source, folder.path / source.name)
        return folder.artifact(source.name)

    key = content_key(version.ref, source.name)
    copy = store.build_once("programs", key, Artifact, build)
    if copy.sha256 != signed:
        raise SignatureError(
            f"{copy.uri}, the copy of a file of {version}, is {copy.sha256[:12]}, and "
            f"{signed[:12]} was signed. Nothing of it was used; remove its folder and run again"
        )
    return copy
