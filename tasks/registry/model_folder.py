"""The folder of one registered model: written so that it is whole or not seen, read by digest.

    program.pt2  checkpoint.pt  evaluation.json  model.json     written before the version exists
    encoder-<column>/                                           of columns of texts and images
    environment.cdx.json                                        packages that registered it
    variants/<name>-<digest>/  variants.json                    variants.json last: it names them
    bill.cdx.json                                               what it was made of, with variants

The registry's database holds the digests of `model.json` and `variants.json`, and these hold those
of everything else. Who can write both can change a model all the same: so whoever writes one of the
two signs it and all that it names (`model.json.sig`, `variants.json.sig`), and nothing is read
whose signature does not fit.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, Field, NonNegativeInt, ValidationError

from tasks.contracts import training
from tasks.contracts.base import Artifact, Contract, ModelVersionRef, TimeWindow
from tasks.contracts.conversion import ImportedProgram, Signature, TensorSpec, tabular_signature
from tasks.contracts.data import DatasetSchema, DataSplits, FeatureSnapshot, SnapshotPins
from tasks.contracts.evaluation import Calibration, EvaluationReport, Metric
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.governance import signing
from tasks.governance.bill import Part, bill, environment_bill
from tasks.kernel.errors import RegistryError, SignatureError, refused_writes_explained
from tasks.kernel.files import digest_of, flush_to_disk, size_of, write_atomically
from tasks.kernel.settings import ArtifactStore, bring, drop, put, send
from tasks.kernel.values import Frozen
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import (
    KEPT_TAG,
    MANIFEST_FILE,
    MANIFEST_TAG,
    NOBODY,
    ORIGIN_TAG,
    VARIANTS_TAG,
    RegisteredVersion,
    adopt,
    held_registry,
    may_adopt,
)

Value = TypeVar("Value", bound=BaseModel)
CHECKPOINT_STEM, ENCODER_STEM = "checkpoint", "encoder-"


def write_model(
    folder: Path,
    trained: training.CandidateModel,
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
    sources = {PROGRAM_FILE: trained.program, checkpoint: trained.checkpoint}
    files = _copied(folder, {name: store.path(a) for name, a in sources.items()})
    for column, made in snapshot.encoders.items():
        target = folder / f"{ENCODER_STEM}{column}"
        with refused_writes_explained(folder):
            shutil.copytree(store.path(made), target, copy_function=_link_or_copy)
            flush_to_disk(target)
        files[target.name] = _record(target)
    files |= _written(folder, EVALUATION_FILE, evaluation.model_dump_json(indent=1))
    files |= _written(folder, ENVIRONMENT_FILE, environment_bill())
    manifest = manifest_of(trained, snapshot, model_name, code_commit, files)
    return _write_value(folder / MANIFEST_FILE, manifest)


def manifest_of(
    trained: training.CandidateModel,
    snapshot: FeatureSnapshot,
    model_name: str,
    code_commit: str,
    files: dict[str, FileRecord],
) -> ModelManifest:
    """The content of `model.json`; what its fields share with model or snapshot is taken over."""
    signature = tabular_signature(trained.columns)
    described = {**dict(snapshot), **dict(trained)}
    shared = {name: described[name] for name in ModelManifest.model_fields.keys() & described}
    return ModelManifest(
        **shared,
        model_name=model_name,
        code_commit=code_commit,
        inputs=signature.inputs,
        outputs=(signature.output,),
        preprocessing=Preprocessing(fitted_on=trained.splits.train),
        training_config=trained.config,
        files=files,
    )


def _link_or_copy(source: str, target: str) -> None:
    """Encoders are large and the same in each version: one file on one disk, whoever names it."""
    try:
        os.link(source, target)
    except OSError:
        copy_flushed(Path(source), Path(target))


def write_import(
    folder: Path, imported: ImportedProgram, model_name: str, code_commit: str, store: ArtifactStore
) -> str:
    """Fill the folder of a program that was trained elsewhere and flush it to disk.

    Returns:
        SHA-256 of `model.json`, written last.

    Raises:
        ArtifactError: the program is gone from the store, or damaged.
        StorageError: the disk refused.
    """
    files = _copied(folder, {PROGRAM_FILE: store.path(imported.program)})
    files |= _written(folder, ENVIRONMENT_FILE, environment_bill())
    manifest = ImportedManifest(
        model_name=model_name,
        code_commit=code_commit,
        family=imported.family,
        signature=imported.signature,
        columns=imported.columns,
        origin=imported.origin,
        origin_files=imported.files,
        snapshot_sha256=imported.origin_sha256,
        files=files,
    )
    return _write_value(folder / MANIFEST_FILE, manifest)


def _copied(folder: Path, sources: dict[str, Path]) -> dict[str, FileRecord]:
    """Copy files into a new folder, each flushed to disk."""
    with refused_writes_explained(folder):
        folder.mkdir(parents=True)
        for name, source in sources.items():
            copy_flushed(source, folder / name)
    return {name: _record(folder / name) for name in sources}


def _written(folder: Path, name: str, text: str) -> dict[str, FileRecord]:
    write_atomically(folder / name, text)
    return {name: _record(folder / name)}


def write_variants(folder: Path, listed: VariantList, store: ArtifactStore) -> str:
    """Copy the kept variants beside what is there, then name them in `variants.json`.

    A folder's name holds its digest, so a variant that was built anew lies beside the old one until
    `variants.json` is replaced, and a process killed on the way leaves the old list valid.

    Returns:
        SHA-256 of `variants.json`.

    Raises:
        ArtifactError: a kept variant is gone from the store, or damaged.
        StorageError: the disk refused.
    """
    with refused_writes_explained(folder):
        for entry in listed.variants:
            if entry.folder is not None and entry.variant.files is not None:
                files = entry.variant.files
                _copy_folder(store.path(files), folder / entry.folder, files.sha256)
    digest = _write_value(folder / VARIANTS_FILE, listed)
    send(folder)
    return digest


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
            drop(path)


def read_version(version: RegisteredVersion, *, signed: bool = True) -> VersionRecord:
    """Read a version back; check signatures, and every file by the registry's digests.

    Args:
        version: as the registry's database knows it.
        signed: else signatures are not asked for.
    """
    read_value = _signed_value if signed else _read_value
    ref, folder, damage = version.ref, bring(version.folder), list[str]()
    manifest, imported, variants = None, None, None
    try:
        if ORIGIN_TAG in version.tags:
            imported = read_value(version, MANIFEST_FILE, MANIFEST_TAG, ImportedManifest, damage)
        else:
            manifest = read_value(version, MANIFEST_FILE, MANIFEST_TAG, ModelManifest, damage)
        variants = read_value(version, VARIANTS_FILE, VARIANTS_TAG, VariantList, damage)
    except SignatureError as exc:
        return VersionRecord(ref, None, None, (*damage, str(exc)), refused=exc)
    expected: dict[str, str] = {}
    if described := manifest or imported:
        expected |= {name: record.sha256 for name, record in described.files.items()}
        if expected.get(PROGRAM_FILE) != ref.program_sha256:
            damage.append(f"{MANIFEST_FILE} is of another program than the version's tag says")
    if variants is not None:
        expected |= _kept(variants)
    damage += [text for name, sha in expected.items() if (text := _damage(folder / name, sha))]
    roots = {MANIFEST_FILE: MANIFEST_TAG, VARIANTS_FILE: VARIANTS_TAG}
    files = {name: version.tags[tag] for name, tag in roots.items() if tag in version.tags}
    return VersionRecord(ref, manifest, variants, tuple(damage), imported, files | expected)


def read_evaluation(version: RegisteredVersion) -> EvaluationReport | None:
    """How a version was judged; None where its file is gone or damaged, or it has none."""
    try:
        text = bring(version.folder / EVALUATION_FILE).read_text(encoding="utf-8")
        return EvaluationReport.model_validate_json(text)
    except (OSError, ValidationError):
        return None


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


def verified_program(version: RegisteredVersion) -> tuple[Path, RegisteredProgram]:
    """The program's file and what it takes, both checked by digest.

    Raises:
        RegistryError: one is missing or damaged, or nothing says what the program takes.
    """
    interface = verified_manifest(version, ModelInterface)
    path, ref = version.folder / PROGRAM_FILE, version.ref
    _require(version, path, ref.program_sha256)
    file = Artifact(uri=f"registry:{path.name}", sha256=ref.program_sha256, num_bytes=size_of(path))
    try:
        values = {"version": ref, "program": file, **dict(interface)}
        program = RegisteredProgram.model_validate(values)
    except ValidationError as exc:
        raise _unusable(version, "it names neither its columns nor its tensors") from exc
    return path, program


def verified_encoders(version: RegisteredVersion) -> dict[str, Path]:
    """Column of texts or images to the folder of its encoder, each checked by its digest.

    Raises:
        RegistryError: one is missing or damaged.
    """
    files = verified_manifest(version, ModelFiles).files
    found = {name: record for name, record in files.items() if name.startswith(ENCODER_STEM)}
    for name, record in found.items():
        _require(version, version.folder / name, record.sha256)
    return {name.removeprefix(ENCODER_STEM): version.folder / name for name in found}


def verified_start(version: RegisteredVersion) -> tuple[Path, ModelStart]:
    """The checkpoint's file, checked by the digest in the manifest, and the manifest's part.

    Raises:
        RegistryError: one is missing or damaged.
    """
    start = verified_manifest(version, ModelStart)
    name = next((name for name in start.files if name.startswith(CHECKPOINT_STEM)), None)
    if name is None:
        raise RegistryError(f"{version} names no checkpoint; train with start='scratch'")
    _require(version, version.folder / name, start.files[name].sha256)
    return version.folder / name, start


def verified_manifest(version: RegisteredVersion, kind: type[Value]) -> Value:
    """A part of `model.json`, checked by the registry's digest and by its signature.

    Raises:
        RegistryError: it is missing or damaged.
        SignatureError: it is not signed, or by nobody who is trusted.
    """
    damage: list[str] = []
    bring(version.folder)
    value = _signed_value(version, MANIFEST_FILE, MANIFEST_TAG, kind, damage)
    if value is None:
        raise _unusable(version, "; ".join(damage) or "it has no manifest")
    return value


def _require(version: RegisteredVersion, path: Path, sha256: str) -> None:
    if damage := _damage(path, sha256):
        raise _unusable(version, damage)


def _unusable(version: RegisteredVersion, damage: str) -> RegistryError:
    return RegistryError(
        f"{version} cannot be used: {damage} (in {version.folder}). Restore the folder from a "
        "backup, point the alias at a complete version, or train from scratch"
    )


def _signed_value(
    version: RegisteredVersion, name: str, tag: str, kind: type[Value], damage: list[str]
) -> Value | None:
    """A value with the digest of the registry's database and a signature that fits.

    Raises:
        SignatureError: it has none.
    """
    if (value := _read_value(version, name, tag, kind, damage)) is None:
        return None
    files, source = {name: version.tags[tag]}, version.folder / f"{name}{signing.END}"
    if signing.read(source) is None and may_adopt(version.state):
        adopt(version)
    try:
        signing.check(version.state, version.subject, files, source)
    except SignatureError as exc:
        raise SignatureError(
            f"{version} cannot be used, {name}: {exc}. A version that was registered before there "
            f"were signatures is signed by `falaj models sign {version.name} {version.number}`"
        ) from exc
    return value


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


def _kept(listed: VariantList) -> dict[str, str]:
    """Folders of the kept variants, and the bill, with their digests."""
    bill = {BILL_FILE: listed.bill_sha256} if listed.bill_sha256 else {}
    return bill | {
        entry.folder: entry.variant.files.sha256
        for entry in listed.variants
        if entry.folder is not None and entry.variant.files is not None
    }


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


def _text_of(value: BaseModel) -> str:
    return value.model_dump_json(indent=1) + "\n"


def _write_value(path: Path, value: BaseModel) -> str:
    write_atomically(path, _text_of(value))
    flush_to_disk(path.parent)
    return digest_of(path)


BILL_FILE, ENVIRONMENT_FILE = "bill.cdx.json", "environment.cdx.json"
_MODEL: Literal["machine-learning-model"] = "machine-learning-model"
VARIANTS_FILE = "variants.json"
PROGRAM_FILE = "program.pt2"
EVALUATION_FILE = "evaluation.json"
CATEGORY_CODE_RULE = (
    "CRC-32 (zlib) of the string's UTF-8 bytes, bitwise-and 0x7FFFFFFF; null or empty is 0"
)


class FileRecord(Contract):
    """One file or folder in a model's folder."""

    sha256: str = Field(min_length=64, max_length=64)
    num_bytes: NonNegativeInt


class Preprocessing(Contract):
    """Where raw columns become network input."""

    place: str = "inside the program: every format takes the same raw columns"
    fitted_on: TimeWindow = Field(description="The training window; no other row was seen.")
    categorical: str = (
        "the program maps each category code to its own vocabulary; a code it does not know, and "
        "0, have embeddings of their own"
    )
    numeric: str = "NaN means missing; the program fills and scales with training statistics"
    category_code_rule: str = CATEGORY_CODE_RULE


class ModelInterface(Frozen):
    """The part of `model.json` that using the model takes.

    A champion outlives the code that registered it, so what later code added or left out elsewhere
    in the manifest does not matter here.
    """

    columns: DatasetSchema | None
    family: str = "tabular"
    signature: Signature | None = None


class ModelFiles(Frozen):
    """The part of `model.json` that says which files there are."""

    files: dict[str, FileRecord] = Field(description="By name inside the model's folder.")


class ModelStart(ModelInterface, ModelFiles):
    """The part of `model.json` that going on from the model takes."""

    columns: DatasetSchema
    snapshot_sha256: str
    splits: DataSplits
    training_config: dict[str, object]
    best_epoch: NonNegativeInt
    started_from: training.StartingPoint | None = None
    """Whose weights it began with; None for none."""
    calibration: Calibration | None = None
    """The map of another version's scores; None where the network was trained."""
    compression: training.ModelCompression | None = Field(
        default=None, validation_alias=AliasChoices("compression", "shrinking")
    )
    """The version that it is a smaller one of; None for none."""


class ModelManifest(ModelStart):
    """`model.json`: everything needed to use and trace one registered model.

    How good it is says `evaluation.json`; versions before 2026-11-26 have a summary here too.
    """

    manifest_version: Literal[1] = 1
    model_name: str
    code_commit: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocessing: Preprocessing
    feature_service: str
    feature_views: dict[str, str]
    tables_version: str
    pins: SnapshotPins | None = None
    """What the snapshot was made from; None in earlier releases."""
    label_definition: str


class ImportedManifest(ModelInterface):
    """`model.json` of a program that was trained elsewhere."""

    manifest_version: Literal[1] = 1
    model_name: str
    code_commit: str
    signature: Signature
    origin: dict[str, str] = Field(description="Package, its version and licence; settings.")
    origin_files: dict[str, str] = Field(description="Digest of every file it was made from.")
    snapshot_sha256: str = Field(description="Digest of `origin_files`: there is no snapshot.")
    files: dict[str, FileRecord] = Field(description="By name inside the model's folder.")


class RegisteredVariant(Contract):
    """One variant and, where it was kept, its folder inside the model's folder."""

    variant: ModelVariant
    folder: str | None


class VariantList(Contract):
    """`variants.json`: all variants of a version, kept and dropped, with the reasons."""

    source_sha256: str
    variants: tuple[RegisteredVariant, ...]
    bill_sha256: str | None = None
    """Of `bill.cdx.json`; None where no manifest could be read, and before 2026-11-27."""


@dataclass(frozen=True)
class VersionRecord:
    """What the registry really holds of one version, read back and checked by digest."""

    ref: ModelVersionRef
    manifest: ModelManifest | None
    """None too of a program that was trained elsewhere."""
    variants: VariantList | None
    damage: tuple[str, ...]
    """One sentence for each file that is missing or not what its digest says."""
    imported: ImportedManifest | None = None
    """Of a program that was trained elsewhere."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 that each file or folder must have, by its name in the version's folder."""
    refused: SignatureError | None = None
    """Where a signature is missing or does not fit; nothing else was read then."""


def sign_version(version: RegisteredVersion) -> None:
    """Sign a version as it is now, where its files have the digests of the registry's database.

    Raises:
        RegistryError: a file is missing or damaged. Nothing was signed.
    """
    record = read_version(version, signed=False)
    described = record.manifest or record.imported
    if record.damage or described is None:
        raise _unusable(version, "; ".join(record.damage) or "it has no manifest")
    _sign(version, MANIFEST_FILE, described.files)
    if record.variants is not None:
        _sign(version, VARIANTS_FILE, _kept(record.variants))


def _sign(version: RegisteredVersion, root: str, names: Iterable[str]) -> None:
    files, target = signing.digests(version.folder, {root, *names}), f"{root}{signing.END}"
    signing.sign(version.state, version.subject, files, version.folder / target)


_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def attach_variants(
    ref: ModelVersionRef,
    variants: tuple[ModelVariant, ...],
    location: RegistryLocation,
    store: ArtifactStore,
    raw_files: Mapping[str, str] | None = None,
) -> ModelVersionRef:
    """File the kept variants under the version, and name all, kept and dropped, with the reasons.

    The version's bill of materials is written with them.

    Args:
        ref: the version.
        variants: of it, kept and dropped.
        location: the registry.
        store: holds the files of those kept.
        raw_files: SHA-256 to name of each raw file behind the version, for the bill.

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
    with held_registry(location) as registry:
        version = registry.confirmed(ref)
        record = read_version(version)
        together = _with_other_classes(record, variants)
        listed = list_variants(ref.program_sha256, together)
        text = _bill_of(version, record, listed, raw_files or {})
        if text:
            bill_sha256 = hashlib.sha256(text.encode()).hexdigest()
            listed = listed.model_copy(update={"bill_sha256": bill_sha256})
        attached = version.tags.get(VARIANTS_TAG) == digest_of_value(listed)
        if attached and not record.damage:
            return ref
        digest = write_variants(version.folder, listed, store)
        if text:
            put(version.folder / BILL_FILE, text)
        _sign(version, VARIANTS_FILE, _kept(listed))
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


def _bill_of(
    version: RegisteredVersion,
    record: VersionRecord,
    listed: VariantList,
    raw_files: Mapping[str, str],
) -> str:
    """What a version was made of and consists of; empty where its manifest cannot be read."""
    made = record.manifest or record.imported
    if made is None:
        return ""
    if isinstance(made, ModelManifest):
        rows = {"train": str(made.splits.train), "label": made.label_definition}
        tables = made.pins.tables if made.pins else ()
        named = {pin.sha256: f"{pin.group}/{pin.name}" for pin in tables} | dict(raw_files)
        data = [Part("data", f"snapshots/{made.feature_service}", made.snapshot_sha256, facts=rows)]
        data += [Part("data", name, sha256) for sha256, name in named.items()]
        start, fit, smaller = made.started_from, made.calibration, made.compression
        begun = (start and start.version, fit and fit.source, smaller and smaller.parent)
        parents = [Part(_MODEL, p.name, p.program_sha256, str(p.version)) for p in begun if p]
    else:
        origin = made.origin
        data = [Part("file", f"origin/{name}", sha) for name, sha in made.origin_files.items()]
        package, licence = origin.get("package", "files"), origin.get("licence", "")
        parents = [Part(_MODEL, package, version=origin.get("version"), licence=licence)]
    return bill(
        Part(_MODEL, version.name, listed.source_sha256, str(version.number)),
        [
            *data,
            *(Part("file", name, file.sha256) for name, file in made.files.items()),
            *(Part(_MODEL, *variant) for variant in _kept(listed).items()),
            Part("application", "falaj", version=made.code_commit, licence="Apache-2.0"),
        ],
        parents=parents,
        made=version.created,
        card=_card(version, made, [part.ref for part in data if part.kind == "data"]),
    )


def _card(
    version: RegisteredVersion, made: ModelManifest | ImportedManifest, data: list[str]
) -> dict[str, Any]:
    """The model card: what it is for, from which data it was made, and how it was judged."""
    report = read_evaluation(version)
    judged = [(n, m) for n, m in (report.overall if report else ()) if isinstance(m, Metric)]
    bounds = [{"lowerBound": str(m.low), "upperBound": str(m.high)} for _, m in judged]
    metrics = [
        {"type": name, "value": str(metric.value), "confidenceInterval": bounds[position]}
        for position, (name, metric) in enumerate(judged)
    ]
    parameters = {
        "approach": {"type": "supervised"},
        "task": made.columns.task if made.columns else made.family,
        "architectureFamily": made.family,
        "datasets": [{"ref": ref} for ref in data],
    }
    return {"modelParameters": parameters, "quantitativeAnalysis": {"performanceMetrics": metrics}}
