"""What every converted form has in common: its name, its stamp, and being built once, whole or not.

A conversion that fails is a result like any other: a `BuiltVariant` that says why. So one format's
missing operator does not spoil the others. A refused write is no such result, it is raised.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tasks.contracts.data import DatasetSchema
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig, VariantName
from tasks.errors import ConversionError
from tasks.settings import ArtifactStore, StagedFolder, code_digest, content_key

KIND = "variants"
FOLDER = "model"
STAMP_PREFIX = "falaj"


@dataclass(frozen=True)
class VariantForm:
    """One converted form and what it is made from."""

    name: VariantName
    format: str
    precision: str
    made_from: tuple[VariantName, ...] = ()


# From simple to complex: a later form has to earn its place against the earlier ones.
FORMS = (
    VariantForm("onnx-fp32", "onnx", "fp32"),
    VariantForm("openvino-fp32", "openvino", "fp32", made_from=("onnx-fp32",)),
    VariantForm("openvino-int8", "openvino", "int8", made_from=("onnx-fp32", "openvino-fp32")),
)
FORM = {form.name: form for form in FORMS}


def build_variant(
    name: VariantName,
    program: RegisteredProgram,
    config: ConversionConfig,
    store: ArtifactStore,
    decisive: tuple[object, ...],
    convert: Callable[[Path], dict[str, str]],
) -> BuiltVariant:
    """Build one form into the store, or return what was built, or failed, from the same inputs.

    Args:
        name: the form.
        program: what it is made from.
        config: where neither the form nor one made from it is a target, nothing is built.
        store: receives the folder.
        decisive: what else decides the result: settings, versions, other inputs.
        convert: writes the files into the (existing, empty) folder, returns how they were made.

    Raises:
        StorageError: the disk refused a write.
    """
    if not _is_needed(name, config):
        targets = ", ".join(config.targets)
        return _without_files(name, f"{name} was not asked for: the targets are {targets}")
    key = content_key(
        name,
        code_digest(__file__),
        program.program,
        program.columns,
        stamp(name, program),
        *decisive,
    )

    def build(folder: StagedFolder) -> BuiltVariant:
        target = folder.path / FOLDER
        target.mkdir()
        try:
            settings = convert(target)
        except ConversionError as exc:
            shutil.rmtree(target)
            return _without_files(name, str(exc))
        return _described(name).model_copy(
            update={"files": folder.artifact(FOLDER), "settings": settings}
        )

    return store.build_once(KIND, key, BuiltVariant, build)


def _is_needed(name: VariantName, config: ConversionConfig) -> bool:
    return any(name == target or name in FORM[target].made_from for target in config.targets)


def _described(name: VariantName) -> BuiltVariant:
    form = FORM[name]
    return BuiltVariant(
        name=name, format=form.format, precision=form.precision, files=None, settings={}
    )


def _without_files(name: VariantName, failure: str) -> BuiltVariant:
    return _described(name).model_copy(update={"failure": failure})


def source_folder(source: BuiltVariant, store: ArtifactStore) -> Path:
    """Folder of the form that another one is made from, its content verified.

    Raises:
        ConversionError: that form itself could not be built.
        ArtifactError: its files are gone or damaged.
    """
    if source.files is None:
        raise ConversionError(f"it is made from {source.name}, which failed: {source.failure}")
    return store.path(source.files)


def stamp(name: VariantName, program: RegisteredProgram) -> dict[str, str]:
    """What is written into the files of a form, so that each can be traced by itself."""
    return {
        "program_sha256": program.program.sha256,
        "snapshot_sha256": program.version.snapshot_sha256,
        "schema_digest": schema_digest(program.columns),
        "precision": FORM[name].precision,
    }


def schema_digest(columns: DatasetSchema) -> str:
    """Digest of the raw columns and their order; who serves a variant compares it with its own."""
    return content_key(columns)


def library_versions(*packages: str) -> dict[str, str]:
    """Installed versions, for keys and settings."""
    return {package: version(package) for package in packages}


def sentence_of(error: BaseException) -> str:
    """First line of the innermost cause: the libraries wrap the reason in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:400]
