"""Opening a variant, the only way that anyone should: judge, profiler, serving process.

Its files have to be those of its record, and carry the same provenance: program, snapshot,
precision and calibrating rows. A variant that was judged has to run with the runtime it was judged
with, or its figures do not hold.
"""

from __future__ import annotations

from pathlib import Path

from tasks.contracts.base import Artifact
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.provenance import check_provenance, check_weight_bits, identity
from tasks.conversion.targets.catalog import format_of
from tasks.conversion.targets.interface import LoadedModel, Runtime
from tasks.conversion.targets.registry import load_files
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore

JUDGED_WITH = ("runtime", "precision", "provider", "device")


def load_variant(
    variant: BuiltVariant | ModelVariant,
    program: RegisteredProgram,
    runtime: Runtime,
    store: ArtifactStore,
) -> LoadedModel:
    """Check and load a variant whose files are in the artifact store.

    Raises:
        ArtifactError: the files are absent, damaged, or not those of the record.
        ConversionError: the runtime refuses them, or runs with other settings.
        ConfigurationError: there is no such format.
    """
    return open_variant(store.path(files_of(variant), verify=False), variant, program, runtime)


def open_variant(
    folder: Path,
    variant: BuiltVariant | ModelVariant,
    program: RegisteredProgram,
    runtime: Runtime,
) -> LoadedModel:
    """Check and load a variant from a folder, such as that of a registered version.

    Args:
        folder: holds the files of the variant and nothing else.
        variant: its record; of a `ModelVariant` also what it was judged with.
        program: the version that it should be a variant of.
        runtime: how it is to be run.

    Raises:
        ArtifactError: the files are damaged, or carry no or another provenance than the record.
        ConversionError: the runtime refuses them, or runs with other settings than asked for, or
            than those that the variant was judged with.
        ConfigurationError: there is no such format.
    """
    check_files(folder, variant, program)
    if not runtime.hardware_class.startswith("gpu"):
        check_weight_bits(variant.name, variant.settings)
    model = load_files(variant.name, folder, program.signature, runtime)
    if isinstance(variant, ModelVariant):
        _check_same_runtime(variant, model)
    return model


def check_files(
    folder: Path, variant: BuiltVariant | ModelVariant, program: RegisteredProgram
) -> None:
    """Refuse files that are not those of the record, by their digest and their provenance.

    Raises:
        ArtifactError: they are damaged, or carry no or another provenance than the record.
    """
    made, files = format_of(variant.name), files_of(variant)
    if (seen := digest_of(folder)) != files.sha256:
        raise ArtifactError(
            f"the files of {variant.name} have SHA-256 {seen[:12]}, expected {files.sha256[:12]}: "
            "they were changed or damaged, and are not loaded. Convert the model again"
        )
    if not variant.provenance:
        raise ArtifactError(
            f"{variant.name} was recorded without provenance by an earlier release, so its files "
            "cannot be checked; convert the model again"
        )
    check_provenance(made, folder, variant.provenance)
    check_provenance(made, folder, identity(made, program))


def files_of(variant: BuiltVariant | ModelVariant) -> Artifact:
    """The files of a variant.

    Raises:
        ArtifactError: none were built.
    """
    if variant.files is None:
        raise ArtifactError(f"{variant.name} has no files: it could not be built")
    return variant.files


def _check_same_runtime(variant: ModelVariant, model: LoadedModel) -> None:
    for name in JUDGED_WITH:
        judged, now = variant.settings.get(name), model.settings.get(name)
        if judged is not None and now is not None and judged != now:
            raise ConversionError(
                f"{variant.name} was judged with {name} {judged!r} and would run here with "
                f"{now!r}, so its figures do not hold; convert the model again with what serves it"
            )
