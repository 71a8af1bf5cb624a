"""What every converted form has in common: being built once, stamped, whole or not at all.

A conversion that fails is a result like any other: a `BuiltVariant` that says why. So one format's
missing operator does not spoil the others. A refused write is no such result, it is raised.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.interface import Batches
from tasks.conversion.kinds.registry import family_of
from tasks.conversion.provenance import (
    check_sample,
    check_stamp,
    full_stamp,
    identity,
    library_versions,
    write_beside,
)
from tasks.conversion.targets.interface import BuildRequest, Target
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

KIND = "variants"
FOLDER = "model"
# ONNX Runtime puts file, line and C++ signature before its reason, which would be cut off.
_PLACE_IN_SOURCE = re.compile(r"/onnxruntime_src/\S+:\d+ .*?\) (?=\w)")


def build_variant(
    target: Target,
    program: RegisteredProgram,
    sources: tuple[BuiltVariant, ...],
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> BuiltVariant:
    """Build one form into the store, or return what was built, or failed, from the same inputs.

    What this machine lacks the equipment for fails too, and is tried anew each time.

    Args:
        target: the form.
        program: what it is made from.
        sources: the forms that `target.made_from` names, failed ones included.
        rows: calibrate it, where the target needs that.
        config: settings of the conversion.
        store: holds program, sources and rows, receives the folder.

    Returns:
        The form; without files and with `failure` where it cannot be built.

    Raises:
        ArtifactError: the program, a source or the rows are absent or damaged.
        StorageError: the disk refused a write.
    """
    try:
        equipment = dict(target.equipment())
    except ConversionError as exc:
        return failed_variant(target, str(exc))
    by_name = {source.name: source for source in sources}
    request = BuildRequest(program, by_name, rows, config, store, identity(target, program))
    libraries = {**library_versions(*target.packages), **equipment}

    def build(folder: StagedFolder) -> BuiltVariant:
        return _build(target, request, libraries, folder)

    return store.build_once(KIND, _key(target, request, libraries), BuiltVariant, build)


def _key(target: Target, request: BuildRequest, libraries: dict[str, str]) -> str:
    """Digest of all that decides the files."""
    program, config = request.program, request.config
    return content_key(
        target.name,
        code_digest(__file__),
        program.program,
        program.signature,
        dict(request.stamp),
        list(request.sources.values()),
        [(name, getattr(config, name)) for name in target.settings],
        list(request.rows.calibration_key if target.needs_calibration else ()),
        libraries,
    )


def _build(
    target: Target, request: BuildRequest, libraries: dict[str, str], folder: StagedFolder
) -> BuiltVariant:
    path = folder.path / FOLDER
    path.mkdir()
    try:
        sample = _calibrating_calls(target, request)
        stamped = full_stamp(target, request.program, sample)
        made = _build_stamped(target, replace(request, stamp=stamped, sample=sample), path)
    except ConversionError as exc:
        shutil.rmtree(path)
        return failed_variant(target, str(exc))
    return BuiltVariant(
        name=target.name,
        format=target.format,
        precision=target.precision,
        files=folder.artifact(FOLDER),
        stamp=stamped,
        settings={
            **made,
            **_calibration_told(target, request.rows, request.config),
            **libraries,
        },
    )


def _calibrating_calls(target: Target, request: BuildRequest) -> Batches | None:
    if not target.needs_calibration:
        return None
    family = family_of(request.program)
    sample = family.read_calibration(request.program, request.rows, request.config, request.store)
    check_sample(sample)
    return sample


def _build_stamped(target: Target, request: BuildRequest, folder: Path) -> dict[str, str]:
    """Build the files, and make sure that they carry their stamp."""
    made = target.build(request, folder)
    if target.read_stamp is None:
        write_beside(folder, request.stamp)
    try:
        check_stamp(target, folder, request.stamp)
    except ArtifactError as exc:
        raise ConversionError(f"it was written and does not carry its stamp: {exc}") from exc
    return made


def failed_variant(target: Target, failure: str) -> BuiltVariant:
    """A form that could not be built, with the reason."""
    return BuiltVariant(
        name=target.name,
        format=target.format,
        precision=target.precision,
        files=None,
        failure=failure,
        settings={},
    )


def _calibration_told(
    target: Target, rows: ConversionRows, config: ConversionConfig
) -> dict[str, str]:
    if not target.needs_calibration:
        return {}
    return {"calibration_seed": str(config.seed), **rows.calibration_told}


def sentence_of(error: BaseException) -> str:
    """First line of the innermost cause: the libraries wrap the reason in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _PLACE_IN_SOURCE.sub(" ", lines[0] if lines else type(error).__name__)[:400]
