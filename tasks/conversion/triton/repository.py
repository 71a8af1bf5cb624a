"""A model repository for Triton: folders, configurations, warm-up rows, and what stands before."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tasks.contracts.conversion import BATCH_AXIS, ConversionRows
from tasks.contracts.release import ModelVariant, RegisteredProgram, TritonRepository
from tasks.conversion.config import TRITON_FILES, ConversionConfig, TritonConfig
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.targets.interface import ModelInputs
from tasks.conversion.triton.model import (
    BACKEND_MODULES,
    BACKENDS,
    CONFIG_FILE,
    WARMUP_FOLDER,
    Step,
    TritonModel,
    as_text,
    check_schema,
    tensors_of,
)
from tasks.conversion.variants import check_files
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

KIND = "triton"
FOLDER = "models"
GPU, CPU = "KIND_GPU", "KIND_CPU"


def with_repository(
    program: RegisteredProgram,
    variant: ModelVariant,
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> ModelVariant:
    """The variant with its repository, or with the reason why none could be written.

    A variant is not worse for that: it was accepted for what was measured of it.

    Raises:
        ArtifactError: the variant or the rows are absent or damaged.
        StorageError: the disk refused a write.
    """
    try:
        written = write_repository(program, variant, rows, config, store)
    except ConversionError as exc:
        settings = {**variant.settings, "triton": f"no model repository: {exc}"}
        return variant.model_copy(update={"settings": settings})
    return variant.model_copy(update={"triton": written})


def write_repository(
    program: RegisteredProgram,
    variant: ModelVariant,
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> TritonRepository:
    """Write the repository that serves a variant, or return the one that was written from the same.

    A program that takes what clients have is one model. Where its kind puts something before it,
    such as a tokenizer, its name is that of an ensemble, and the program is the model behind.

    Args:
        program: the version that the variant is of; its number names the folder of the version.
        variant: an accepted one, of a format that Triton serves.
        rows: a typical one of them warms the model up.
        config: its `triton` says how it is served.
        store: holds the variant, receives the repository.

    Raises:
        ConversionError: Triton could not serve it so.
        ArtifactError: the variant or the rows are absent or damaged.
        StorageError: the disk refused a write.
    """
    assert config.triton is not None
    served = config.triton
    assert variant.files is not None
    key = content_key(
        KIND,
        code_digest(__file__, *BACKEND_MODULES),
        variant.files,
        program,
        rows,
        served,
        config.threads,
    )
    version = program.version.version

    def build(folder: StagedFolder) -> TritonRepository:
        models = _models(program, variant, rows, config, store)
        kind = GPU if variant.hardware_class.startswith("gpu") else CPU
        path = folder.path / FOLDER
        schemas = {_write(model, version, kind, served, path) for model in models}
        return TritonRepository(
            files=folder.artifact(FOLDER),
            model=models[-1].name,
            models=tuple(model.name for model in models),
            schema_of=", ".join(schemas),
        )

    return store.build_once(KIND, key, TritonRepository, build)


def _models(
    program: RegisteredProgram,
    variant: ModelVariant,
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> tuple[TritonModel, ...]:
    """All models of a repository; the last one is what clients ask."""
    assert config.triton is not None
    kind = kind_of(program)
    typical = kind.read_judged(program, rows, config, store).timing_batch(1)
    name, version = program.version.name, program.version.version
    front = kind.front(program, rows, config.triton, store) if kind.front else None
    if front is None:
        return (_served(name, program, variant, typical, config, store),)
    behind = _served(f"{name}-model", program, variant, typical, config, store)
    ensemble = TritonModel(
        name=name,
        backend="",
        inputs=front.inputs,
        outputs=behind.outputs,
        max_batch_rows=behind.max_batch_rows,
        parameters=behind.parameters,
        steps=(Step(front, version), Step(behind, version)),
    )
    return front, behind, ensemble


def _served(
    name: str,
    program: RegisteredProgram,
    variant: ModelVariant,
    typical: ModelInputs,
    config: ConversionConfig,
    store: ArtifactStore,
) -> TritonModel:
    """The model that runs the variant's file."""
    assert variant.files is not None
    assert config.triton is not None
    folder = store.path(variant.files, verify=False)
    check_files(folder, variant, program)
    file = TRITON_FILES[variant.format]
    backend, files = variant.format, {file: folder / file}
    threads = {}
    if variant.format == "onnx":
        backend, threads = config.triton.onnx_backend, _threads(config)
    if backend == "python":
        if variant.hardware_class.startswith("gpu"):
            raise ConversionError(
                "ONNX in Triton's Python backend runs on processors alone, and the variant is for "
                f"{variant.hardware_class}; set conversion.triton.onnx_backend to onnxruntime"
            )
        files["model.py"] = BACKENDS / "onnx_backend.py"
    inputs, outputs = tensors_of(program.signature)
    rows = {
        spec.name: np.ascontiguousarray(typical[spec.name], spec.dtype)
        for spec in program.signature.inputs
    }
    return TritonModel(
        name=name,
        backend=backend,
        inputs=inputs,
        outputs=outputs,
        max_batch_rows=most_rows(program, variant, config.triton),
        files=files,
        parameters={**threads, **_origin(program, variant)},
        warmup=rows,
    )


def most_rows(program: RegisteredProgram, variant: ModelVariant, config: TritonConfig) -> int:
    """Rows of one execution: what is asked for, as far as program and engine take so many."""
    limits = [config.max_batch_rows, program.signature.largest.get(BATCH_AXIS)]
    if engine_rows := variant.settings.get("engine_rows"):
        limits.append(int(engine_rows))
    return min(limit for limit in limits if limit is not None)


def _threads(config: ConversionConfig) -> dict[str, str]:
    """For our model and for Triton's backend, which has names of its own."""
    threads = str(config.threads)
    return {"threads": threads, "intra_op_thread_count": threads, "inter_op_thread_count": "1"}


def _origin(program: RegisteredProgram, variant: ModelVariant) -> Mapping[str, str]:
    assert variant.files is not None
    return {
        "falaj.variant": variant.name,
        "falaj.variant_sha256": variant.files.sha256,
        "falaj.program_sha256": program.program.sha256,
        "falaj.snapshot_sha256": program.version.snapshot_sha256,
    }


def _write(
    model: TritonModel, version: int, kind: str, config: TritonConfig, repository: Path
) -> str:
    home = repository / model.name
    versioned = home / str(version)
    versioned.mkdir(parents=True)
    # Devices are the model's; what stands before it computes nothing that these are for.
    text = as_text(model.config(version, CPU if model.backend == "python" else kind, config))
    schema = check_schema(text, model.name)
    (home / CONFIG_FILE).write_text(text, encoding="utf-8")
    for name, source in model.files.items():
        shutil.copyfile(source, versioned / name)
    if model.warmup:
        (home / WARMUP_FOLDER).mkdir()
    for name, row in model.warmup.items():
        (home / WARMUP_FOLDER / name).write_bytes(row.tobytes())
    return schema
