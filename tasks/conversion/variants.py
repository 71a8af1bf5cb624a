"""Building a variant: once, with its provenance, complete or not at all.

A conversion that fails is a result like any other: a `BuiltVariant` with the reason. So one
format's missing operator does not spoil the others. A refused write is raised instead.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.inputs import SEED
from tasks.conversion.kinds.registry import kind_of
from tasks.conversion.provenance import (
    check_provenance,
    check_sample,
    full_provenance,
    identity,
    library_versions,
)
from tasks.conversion.targets.catalog import Format
from tasks.conversion.targets.interface import BuildRequest
from tasks.conversion.targets.registry import converter_of
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

KIND = "variants"
FOLDER = "model"


def build_variant(
    made: Format,
    program: RegisteredProgram,
    sources: tuple[BuiltVariant, ...],
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> BuiltVariant:
    """Build one variant into the store, or return what the same inputs gave before, failed or not.

    A failure for lack of equipment on this machine is not stored: it is tried again each time.

    Args:
        made: its format.
        program: what it is made from.
        sources: the variants that `made.made_from` names, failed ones included.
        rows: calibrate it, where the format needs that.
        config: settings of the conversion.
        store: holds program, sources and rows, receives the folder.

    Returns:
        The variant; without files and with `failure` where it cannot be built.

    Raises:
        ArtifactError: the program, a source or the rows are absent or damaged.
        StorageError: the disk refused a write.
    """
    try:
        equipment = converter_of(made).equipment(made)
    except ConversionError as exc:
        return failed_variant(made, str(exc))
    by_name = {source.name: source for source in sources}
    request = BuildRequest(program, by_name, rows, config, store, identity(made, program))
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
        return BuiltVariant(
            name=made.name,
            format=made.file_format,
            precision=made.precision,
            files=folder.artifact(FOLDER),
            provenance=provenance,
            settings={**settings, **libraries},
        )

    return store.build_once(KIND, key, BuiltVariant, build)


def _write(
    made: Format, request: BuildRequest, folder: Path
) -> tuple[dict[str, str], dict[str, str]]:
    """Build the files and read their provenance back; returns it and how they were made."""
    program, rows, config = request.program, request.rows, request.config
    calibrated: dict[str, str] = {}
    if made.needs_calibration:
        sample = kind_of(program).read_calibration(program, rows, config, request.store)
        check_sample(sample)
        request = replace(request, sample=sample)
        calibrated = {"calibration_seed": str(SEED), **rows.calibration_source}
    provenance = full_provenance(made, program, request.sample)
    request = replace(request, provenance=provenance)
    settings = converter_of(made).build(made, request, folder)
    try:
        check_provenance(made, folder, provenance)
    except ArtifactError as exc:
        raise ConversionError(f"it was written without its provenance: {exc}") from exc
    return provenance, {**settings, **calibrated}


def failed_variant(made: Format, failure: str) -> BuiltVariant:
    """A variant that could not be built, with the reason."""
    return BuiltVariant(
        name=made.name,
        format=made.file_format,
        precision=made.precision,
        files=None,
        failure=failure,
        settings={},
    )
