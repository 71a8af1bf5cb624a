"""The folder of one registered model: written so that it is whole or not seen, read by digest.

    program.pt2  checkpoint.pt  evaluation.json  model.json     written before the version exists
    variants/<name>-<digest>/  variants.json                    variants.json last: it names them

The registry's database holds the digests of `model.json` and `variants.json`, and these hold those
of everything else.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tasks.contracts.base import Contract
from tasks.contracts.conversion import ImportedProgram
from tasks.contracts.data import FeatureSnapshot
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import ModelVariant
from tasks.contracts.training import CandidateModel
from tasks.kernel.errors import RegistryError, refused_writes_explained
from tasks.kernel.files import digest_of, flush_to_disk, size_of, write_atomically
from tasks.kernel.settings import ArtifactStore
from tasks.registry.mlflow_registry import (
    MANIFEST_TAG,
    ORIGIN_TAG,
    PROGRAM_TAG,
    VARIANTS_TAG,
    RegisteredVersion,
)
from tasks.registry.records import (
    EVALUATION_FILE,
    MANIFEST_FILE,
    PROGRAM_FILE,
    VARIANTS_FILE,
    FileRecord,
    ImportedManifest,
    ModelInterface,
    ModelManifest,
    ModelStart,
    RegisteredVariant,
    VariantList,
    VersionRecord,
    describe_import,
    describe_model,
)

Value = TypeVar("Value", bound=BaseModel)
CHECKPOINT_STEM = "checkpoint"


def write_model(
    folder: Path,
    trained: CandidateModel,
    evaluation: EvaluationReport,
    snapshot: FeatureSnapshot,
    model_name: str,
    code_commit: str,
    store: ArtifactStore,
) -> str:
    """Fill a new model's folder and flush it to disk.

    Returns:
        SHA-256 of `model.json`, written last.

    Raises:
        ArtifactError: the program or checkpoint is gone from the store, or damaged.
        StorageError: the disk refused.
    """
    checkpoint = f"{CHECKPOINT_STEM}{Path(trained.checkpoint.uri).suffix}"
    with refused_writes_explained(folder):
        folder.mkdir(parents=True)
        copy_flushed(store.path(trained.program), folder / PROGRAM_FILE)
        copy_flushed(store.path(trained.checkpoint), folder / checkpoint)
    write_atomically(folder / EVALUATION_FILE, evaluation.model_dump_json(indent=1))
    names = (PROGRAM_FILE, checkpoint, EVALUATION_FILE)
    files = {name: _record(folder / name) for name in names}
    manifest = describe_model(trained, evaluation, snapshot, model_name, code_commit, files)
    return _write_value(folder / MANIFEST_FILE, manifest)


def write_import(
    folder: Path,
    imported: ImportedProgram,
    model_name: str,
    code_commit: str,
    store: ArtifactStore,
) -> str:
    """Fill the folder of a program that was trained elsewhere and flush it to disk.

    Returns:
        SHA-256 of `model.json`, written last.

    Raises:
        ArtifactError: the program is gone from the store, or damaged.
        StorageError: the disk refused.
    """
    with refused_writes_explained(folder):
        folder.mkdir(parents=True)
        copy_flushed(store.path(imported.program), folder / PROGRAM_FILE)
    files = {PROGRAM_FILE: _record(folder / PROGRAM_FILE)}
    manifest = describe_import(imported, model_name, code_commit, files)
    return _write_value(folder / MANIFEST_FILE, manifest)


def write_variants(
    folder: Path, source_sha256: str, variants: tuple[ModelVariant, ...], store: ArtifactStore
) -> str:
    """Copy the kept variants beside what is there, then name them in `variants.json`.

    A folder's name holds its digest, so a variant that was built anew lies beside the old one until
    `variants.json` is replaced, and a process killed on the way leaves the old list valid.

    Returns:
        SHA-256 of `variants.json`.

    Raises:
        ArtifactError: a kept variant is gone from the store, or damaged.
        StorageError: the disk refused.
    """
    listed = list_variants(source_sha256, variants)
    with refused_writes_explained(folder):
        for entry in listed.variants:
            if entry.folder is not None and entry.variant.files is not None:
                files = entry.variant.files
                _copy_folder(store.path(files), folder / entry.folder, files.sha256)
    return _write_value(folder / VARIANTS_FILE, listed)


def list_variants(source_sha256: str, variants: tuple[ModelVariant, ...]) -> VariantList:
    """The content of `variants.json`."""
    return VariantList(
        source_sha256=source_sha256,
        variants=tuple(RegisteredVariant(variant=v, folder=_folder_of(v)) for v in variants),
    )


def digest_of_value(value: Contract) -> str:
    """SHA-256 of the file that holds this value."""
    return hashlib.sha256(_text_of(value).encode()).hexdigest()


def remove_unlisted(folder: Path, listed: VariantList) -> None:
    """Remove folders of variants that `variants.json` no longer names."""
    keep = {entry.folder for entry in listed.variants}
    for path in (folder / "variants").glob("*"):
        if path.relative_to(folder).as_posix() not in keep:
            shutil.rmtree(path, ignore_errors=True)


def read_version(version: RegisteredVersion) -> VersionRecord:
    """Read a version back and check every file against the digests in the registry's database."""
    ref, folder, damage = version.ref, version.folder, list[str]()
    manifest, imported = None, None
    if ORIGIN_TAG in version.tags:
        imported = _read_value(version, MANIFEST_FILE, MANIFEST_TAG, ImportedManifest, damage)
    else:
        manifest = _read_value(version, MANIFEST_FILE, MANIFEST_TAG, ModelManifest, damage)
    variants = _read_value(version, VARIANTS_FILE, VARIANTS_TAG, VariantList, damage)
    expected: dict[str, str] = {}
    if described := manifest or imported:
        expected |= {name: record.sha256 for name, record in described.files.items()}
        if expected.get(PROGRAM_FILE) != ref.program_sha256:
            damage.append(f"{MANIFEST_FILE} is of another program than the version's tag says")
    if variants is not None:
        expected |= {
            entry.folder: entry.variant.files.sha256
            for entry in variants.variants
            if entry.folder is not None and entry.variant.files is not None
        }
    damage += [text for name, sha in expected.items() if (text := _damage(folder / name, sha))]
    return VersionRecord(ref, manifest, variants, tuple(damage), imported)


def copy_flushed(source: Path, target: Path) -> None:
    """Copy a file or folder and flush it to disk."""
    # Not shutil.copytree: it hides the system's reason for a refused write.
    if source.is_dir():
        target.mkdir()
        for child in source.iterdir():
            copy_flushed(child, target / child.name)
    else:
        shutil.copyfile(source, target)
    flush_to_disk(target)


def verified_program(version: RegisteredVersion) -> tuple[Path, ModelInterface]:
    """The program's file and what it takes, both checked by digest.

    Raises:
        RegistryError: one is missing or damaged.
    """
    damage: list[str] = []
    interface = _read_value(version, MANIFEST_FILE, MANIFEST_TAG, ModelInterface, damage)
    program = version.folder / PROGRAM_FILE
    if text := _damage(program, version.tags.get(PROGRAM_TAG, "")):
        damage.append(text)
    if interface is None or damage:
        raise RegistryError(
            f"{version} cannot be used: {'; '.join(damage) or 'it has no manifest'} (in "
            f"{version.folder}). Restore the folder from a backup, or point the alias at a whole "
            "version"
        )
    return program, interface


def verified_start(version: RegisteredVersion) -> tuple[Path, ModelStart]:
    """The checkpoint's file, checked by the digest in the manifest, and the manifest's part.

    Raises:
        RegistryError: one is missing or damaged.
    """
    damage: list[str] = []
    start = _read_value(version, MANIFEST_FILE, MANIFEST_TAG, ModelStart, damage)
    names = [n for n in start.files if n.startswith(CHECKPOINT_STEM)] if start else []
    if start is None or len(names) != 1:
        damage.append("it names no checkpoint")
    elif text := _damage(version.folder / names[0], start.files[names[0]].sha256):
        damage.append(text)
    if start is None or damage:
        raise RegistryError(
            f"{version} cannot be begun with: {'; '.join(damage)} (in {version.folder}). Restore "
            "the folder from a backup, or train with start='scratch'"
        )
    return version.folder / names[0], start


def _read_value(
    version: RegisteredVersion, name: str, tag: str, kind: type[Value], damage: list[str]
) -> Value | None:
    expected = version.tags.get(tag)
    if expected is None:
        return None
    path = version.folder / name
    if text := _damage(path, expected):
        damage.append(text)
        return None
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as exc:
        damage.append(f"{name} is not what this code writes ({exc.error_count()} errors)")
        return None


def _damage(path: Path, expected: str) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    if (seen := digest_of(path)) != expected:
        return f"{path.name} has SHA-256 {seen[:12]}, expected {expected[:12]}"
    return None


def _folder_of(variant: ModelVariant) -> str | None:
    if not variant.accepted or variant.files is None:
        return None
    return f"variants/{variant.name}-{variant.files.sha256[:12]}"


def _copy_folder(source: Path, target: Path, sha256: str) -> None:
    if target.exists():
        if digest_of(target) == sha256:
            return
        shutil.rmtree(target)
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f".{target.name}")
    if aside.exists():  # of a process that was killed
        shutil.rmtree(aside)
    copy_flushed(source, aside)
    aside.rename(target)
    flush_to_disk(target.parent)


def _record(path: Path) -> FileRecord:
    return FileRecord(sha256=digest_of(path), num_bytes=size_of(path))


def _text_of(value: Contract) -> str:
    return value.model_dump_json(indent=1) + "\n"


def _write_value(path: Path, value: Contract) -> str:
    write_atomically(path, _text_of(value))
    flush_to_disk(path.parent)
    return digest_of(path)
