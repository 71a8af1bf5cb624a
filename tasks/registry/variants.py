"""Converted variants filed with the version they were made from."""

from __future__ import annotations

import re

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.release import ModelVariant
from tasks.kernel.errors import RegistryError
from tasks.kernel.settings import ArtifactStore
from tasks.registry.connection import RegistryLocation, exclusive
from tasks.registry.mlflow_registry import (
    KEPT_TAG,
    NOBODY,
    VARIANTS_TAG,
    Registry,
)
from tasks.registry.model_folder import (
    digest_of_value,
    list_variants,
    read_version,
    remove_unlisted,
    write_variants,
)
from tasks.registry.records import VersionRecord

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def attach_variants(
    ref: ModelVersionRef,
    variants: tuple[ModelVariant, ...],
    location: RegistryLocation,
    store: ArtifactStore,
) -> ModelVersionRef:
    """File the kept variants under the version, and name all, kept and dropped, with the reasons.

    They take the place of those that were made before for the same hardware classes; what was made
    for other classes stays. Idempotent: the same variants, whole in the registry, are not copied
    again. Interrupted, the version has the list it had before; the next call completes.

    Raises:
        RegistryError: a variant is of another program, or has no files though it is kept; the
            version is gone; MLflow refused. Nothing was attached.
        ArtifactError: a kept variant is gone from the store, or damaged.
        TransientError: the registry was busy.
        StorageError: the disk refused.
    """
    _check(ref, variants)
    registry = Registry(location)
    with exclusive(location):
        version = registry.confirmed(ref)
        record = read_version(version)
        together = _with_other_classes(record, variants)
        listed = list_variants(ref.program_sha256, together)
        attached = version.tags.get(VARIANTS_TAG) == digest_of_value(listed)
        if attached and not record.damage:
            return ref
        digest = write_variants(version.folder, ref.program_sha256, together, store)
        kept = ",".join(dict.fromkeys(v.name for v in together if v.accepted)) or NOBODY
        registry.set_tags(version, {KEPT_TAG: kept, VARIANTS_TAG: digest})
        remove_unlisted(version.folder, listed)
    return ref


def _with_other_classes(
    record: VersionRecord, variants: tuple[ModelVariant, ...]
) -> tuple[ModelVariant, ...]:
    """These, and what is filed for hardware classes that none of these is of; class by class."""
    classes = {variant.hardware_class for variant in variants}
    listed = record.variants.variants if record.variants is not None else ()
    others = [e.variant for e in listed if e.variant.hardware_class not in classes]
    return tuple(sorted((*others, *variants), key=lambda variant: variant.hardware_class))


def _check(ref: ModelVersionRef, variants: tuple[ModelVariant, ...]) -> None:
    names = [(variant.hardware_class, variant.name) for variant in variants]
    for variant in variants:
        problem = _problem(ref, variant)
        if names.count((variant.hardware_class, variant.name)) > 1:
            problem = "is there twice"
        if problem:
            raise RegistryError(
                f"variant {variant.name!r} {problem}; nothing was attached to {ref.name} version "
                f"{ref.version}. Convert this version and attach the result"
            )


def _problem(ref: ModelVersionRef, variant: ModelVariant) -> str | None:
    if variant.source_sha256 != ref.program_sha256:
        return (
            f"was made from program {variant.source_sha256[:12]}, expected "
            f"{ref.program_sha256[:12]}"
        )
    if variant.accepted and variant.files is None:
        return "is kept but names no files"
    if not _FOLDER_NAME.fullmatch(variant.name):
        return "has a name that is no folder name (letters, digits and _.- are)"
    return None
