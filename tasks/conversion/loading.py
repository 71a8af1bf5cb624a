"""Opening a variant, the only way that anyone should: judge, profiler, serving process.

Its files have to be those that its record names, and to say of themselves what the record says: the
program, snapshot, precision and rows they were made from. A variant that was judged has to run with
the runtime it was judged with, or its figures say nothing of it.
"""

from __future__ import annotations

from pathlib import Path

from tasks.contracts.base import Artifact
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.processor import check_weight_bits
from tasks.conversion.provenance import check_stamp, identity
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.registry import target_of
from tasks.conversion.targets.runtimes import LoadedModel
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
        ArtifactError: the files are absent, damaged, or are not what the variant says.
        ConversionError: the runtime refuses them, or runs other than it was told to.
        ConfigurationError: there is no such target.
    """
    return open_variant(store.path(files_of(variant), verify=False), variant, program, runtime)


def open_variant(
    folder: Path,
    variant: BuiltVariant | ModelVariant,
    program: RegisteredProgram,
    runtime: Runtime,
) -> LoadedModel:
    """Check and load a variant whose files lie in `folder`, such as that of a registered version.

    Args:
        folder: holds the files of the variant and nothing else.
        variant: what is known of it; of a `ModelVariant` also what it was judged with.
        program: the version that it should be a form of.
        runtime: how it is to be run.

    Raises:
        ArtifactError: the files are damaged, carry no stamp, or another one than the record's.
        ConversionError: the runtime refuses them, or runs other than it was told to, or other than
            it did when the variant was judged.
        ConfigurationError: there is no such target.
    """
    check_files(folder, variant, program)
    if not runtime.hardware_class.startswith("gpu"):
        check_weight_bits(variant.name, variant.settings)
    model = target_of(variant.name).load(folder, program.signature, runtime)
    if isinstance(variant, ModelVariant):
        _check_same_runtime(variant, model)
    return model


def check_files(
    folder: Path, variant: BuiltVariant | ModelVariant, program: RegisteredProgram
) -> None:
    """Refuse files that are not those of the record, or do not say so of themselves.

    Raises:
        ArtifactError: they are damaged, carry no stamp, or another one than the record's.
    """
    target, files = target_of(variant.name), files_of(variant)
    if (seen := digest_of(folder)) != files.sha256:
        raise ArtifactError(
            f"the files of {variant.name} have SHA-256 {seen[:12]}, expected {files.sha256[:12]}: "
            "they were changed or damaged, and are not loaded. Convert the model again"
        )
    if not variant.stamp:
        raise ArtifactError(
            f"{variant.name} was recorded without a stamp, by an earlier release, so nothing says "
            "what its files should be; convert the model again"
        )
    check_stamp(target, folder, variant.stamp)
    check_stamp(target, folder, identity(target, program))


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
