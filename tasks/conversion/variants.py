"""Building a variant once, with its provenance, complete or not at all; and opening it.

A conversion that fails is a result like any other: a `BuiltVariant` with the reason. So one
format's missing operator does not spoil the others. A refused write is raised instead.

`load_variant` and `open_variant` are the only way that anyone should open one: judge, profiler,
serving process. Its files have to be those of its record, and carry the same provenance: program,
snapshot, precision and calibrating rows. A variant that was judged has to run with the runtime it
was judged with, or its figures do not hold.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.contracts.base import Artifact
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.provenance import (
    check_provenance,
    check_sample,
    check_weight_bits,
    full_provenance,
    identity,
    library_versions,
)
from tasks.conversion.targets import interface
from tasks.conversion.targets.catalog import Format, format_of
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

KIND = "variants"
FOLDER = "model"


def build_variant(
    made: Format, job: interface.ConversionJob, sources: tuple[BuiltVariant, ...]
) -> BuiltVariant:
    """Build one variant into the store, or return what the same inputs gave before, failed or not.

    A failure for lack of equipment on this machine is not stored: it is tried again each time.

    Args:
        made: its format.
        job: what it is made from; the rows calibrate it, where the format needs that.
        sources: the variants that `made.made_from` names, failed ones included.

    Returns:
        The variant; without files and with `failure` where it cannot be built.

    Raises:
        ArtifactError: the program, a source or the rows are absent or damaged.
        StorageError: the disk refused a write.
    """
    try:
        equipment = interface.converter_of(made).equipment(made)
    except ConversionError as exc:
        return failed_variant(made, str(exc))
    program, rows, config, store = job.program, job.rows, job.config, job.store
    by_name = {source.name: source for source in sources}
    request = interface.BuildRequest(program, rows, config, store, by_name, identity(made, program))
    libraries = {**library_versions(made), **equipment}
    key = content_key(
        made.name,
        code_digest(__file__),
        program.program,
        program.signature,
        dict(request.provenance),
        list(sources),
        [(name, getattr(config, name)) for name in made.settings],
        list(rows.calibration_key if made.needs_calibration else ()),
        libraries,
    )

    def build(folder: StagedFolder) -> BuiltVariant:
        path = folder.path / FOLDER
        path.mkdir()
        try:
            provenance, settings = _write(made, request, path)
        except ConversionError as exc:
            shutil.rmtree(path)
            return failed_variant(made, str(exc))
        files, settings = folder.artifact(FOLDER), {**settings, **libraries}
        return _variant(made, files=files, provenance=provenance, settings=settings)

    return store.build_once(KIND, key, BuiltVariant, build)


def _write(
    made: Format, request: interface.BuildRequest, folder: Path
) -> tuple[dict[str, str], dict[str, str]]:
    """Build the files and read their provenance back; returns it and how they were made."""
    program, calibrated = request.program, dict[str, str]()
    if made.needs_calibration:
        sample = kind_of(program).read_calibration(request)
        check_sample(sample)
        request = replace(request, sample=sample)
        calibrated = {"calibration_seed": str(interface.SEED), **request.rows.calibration_source}
    provenance = full_provenance(made, program, request.sample)
    request = replace(request, provenance=provenance)
    settings = interface.converter_of(made).build(made, request, folder)
    try:
        check_provenance(made, folder, provenance)
    except ArtifactError as exc:
        raise ConversionError(f"it was written without its provenance: {exc}") from exc
    return provenance, {**settings, **calibrated}


def failed_variant(made: Format, failure: str) -> BuiltVariant:
    """A variant that could not be built, with the reason."""
    return _variant(made, files=None, failure=failure, settings={})


def _variant(made: Format, **outcome: Any) -> BuiltVariant:
    about: dict[str, Any] = {"name": made.name, "format": made.file_format}
    return BuiltVariant(**about, precision=made.precision, **outcome)


def load_variant(
    variant: BuiltVariant | ModelVariant,
    program: RegisteredProgram,
    runtime: interface.Runtime,
    store: ArtifactStore,
) -> interface.LoadedModel:
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
    runtime: interface.Runtime,
) -> interface.LoadedModel:
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
    model = interface.load_files(variant.name, folder, program.signature, runtime)
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
    check_provenance(made, folder, variant.provenance, identity(made, program))


def files_of(variant: BuiltVariant | ModelVariant) -> Artifact:
    """The files of a variant.

    Raises:
        ArtifactError: none were built.
    """
    if variant.files is None:
        raise ArtifactError(f"{variant.name} has no files: it could not be built")
    return variant.files


def _check_same_runtime(variant: ModelVariant, model: interface.LoadedModel) -> None:
    for name in ("runtime", "precision", "provider", "device"):
        judged, now = variant.settings.get(name), model.settings.get(name)
        if judged is not None and now is not None and judged != now:
            raise ConversionError(
                f"{variant.name} was judged with {name} {judged!r} and would run here with "
                f"{now!r}, so its figures do not hold; convert the model again with what serves it"
            )
