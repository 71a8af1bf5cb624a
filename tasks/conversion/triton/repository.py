"""A model repository for Triton: one folder with its configuration, a row to warm up, the model."""

import json
import shutil
from pathlib import Path

import jinja2
import numpy as np

from tasks.contracts.conversion import BATCH_AXIS, ConversionRows
from tasks.contracts.release import ModelVariant, RegisteredProgram, TritonRepository
from tasks.conversion.config import TRITON_FILES, ConversionConfig, TritonConfig
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.variants import check_files, files_of
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

KIND, FOLDER = "triton", "models"
CONFIG_FILE, WARMUP_FOLDER = "config.pbtxt", "warmup"
TEMPLATE = Path(__file__).with_name("config.pbtxt.j2")
PYTHON_BACKEND = Path(__file__).with_name("onnx_backend.py")
"""Copied into a repository, not imported."""
TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float32": "TYPE_FP32",
}
WARMUP_ROWS = (1, 32)
"""Of the executions before a model is ready: a single request and a dynamic batch."""


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
    name, served = program.version.name, config.triton
    key = content_key(
        KIND,
        code_digest(__file__),
        [file.read_text(encoding="utf-8") for file in (TEMPLATE, PYTHON_BACKEND)],
        files_of(variant),
        program,
        rows,
        served,
        config.threads,
    )

    def build(folder: StagedFolder) -> TritonRepository:
        typical = kind_of(program).read_judged(program, rows, config, store).timing_batch(1)
        warmup = {
            spec.name: np.ascontiguousarray(typical[spec.name], spec.dtype)
            for spec in program.signature.inputs
        }
        home = folder.path / FOLDER / name
        _copy_model(program, variant, served, store, home)
        text = _config_of(program, variant, config, warmup)
        (home / CONFIG_FILE).write_text(text, encoding="utf-8")
        (home / WARMUP_FOLDER).mkdir()
        for input_name, row in warmup.items():
            (home / WARMUP_FOLDER / input_name).write_bytes(row.tobytes())
        files = folder.artifact(FOLDER)
        return TritonRepository(files=files, model=name, models=(name,))

    return store.build_once(KIND, key, TritonRepository, build)


def _copy_model(
    program: RegisteredProgram,
    variant: ModelVariant,
    served: TritonConfig,
    store: ArtifactStore,
    home: Path,
) -> None:
    folder, file = store.path(files_of(variant), verify=False), TRITON_FILES[variant.format]
    check_files(folder, variant, program)
    versioned = home / str(program.version.version)
    versioned.mkdir(parents=True)
    shutil.copyfile(folder / file, versioned / file)
    if _backend(variant, served) == "python":
        if variant.hardware_class.startswith("gpu"):
            raise ConversionError(
                "ONNX in Triton's Python backend runs on processors alone, and the variant is for "
                f"{variant.hardware_class}; set conversion.triton.onnx_backend to onnxruntime"
            )
        shutil.copyfile(PYTHON_BACKEND, versioned / "model.py")


def _backend(variant: ModelVariant, served: TritonConfig) -> str:
    return served.onnx_backend if variant.format == "onnx" else variant.format


def _config_of(
    program: RegisteredProgram,
    variant: ModelVariant,
    config: ConversionConfig,
    warmup: dict[str, np.ndarray],
) -> str:
    """The text that Triton reads."""
    assert config.triton is not None
    threads = str(config.threads)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False
    )
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        model=program.version.name,
        version=program.version.version,
        backend=_backend(variant, config.triton),
        kind="KIND_GPU" if variant.hardware_class.startswith("gpu") else "KIND_CPU",
        most_rows=most_rows(program, variant, config.triton),
        signature=program.signature,
        served=config.triton,
        types=TYPES,
        warmup=warmup,
        warmup_rows=WARMUP_ROWS,
        parameters={
            # For our model and for Triton's backend, which has names of its own.
            **{"threads": threads, "intra_op_thread_count": threads, "inter_op_thread_count": "1"},
            "falaj.variant": variant.name,
            "falaj.variant_sha256": files_of(variant).sha256,
            "falaj.program_sha256": program.program.sha256,
            "falaj.snapshot_sha256": program.version.snapshot_sha256,
        },
    )


def most_rows(program: RegisteredProgram, variant: ModelVariant, config: TritonConfig) -> int:
    """Rows of one execution: what is asked for, as far as program and engine take so many."""
    limits = [config.max_batch_rows, program.signature.largest.get(BATCH_AXIS)]
    if engine_rows := variant.settings.get("engine_rows"):
        limits.append(int(engine_rows))
    return min(limit for limit in limits if limit is not None)
