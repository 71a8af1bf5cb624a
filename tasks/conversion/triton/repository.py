"""A model repository for Triton: one folder with its configuration, a row to warm up, the model."""

import json
import shutil
from pathlib import Path

import jinja2
import numpy as np

from tasks.contracts.conversion import BATCH_AXIS
from tasks.contracts.release import ModelVariant, RegisteredProgram, TritonRepository
from tasks.conversion.config import TRITON_FILES, TritonConfig
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.targets.interface import ConversionJob
from tasks.conversion.variants import check_files, files_of
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import StagedFolder, code_digest, content_key

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


def with_repository(job: ConversionJob, variant: ModelVariant) -> ModelVariant:
    """The variant with its repository, or with the reason why none could be written.

    A variant is not worse for that: it was accepted for what was measured of it.

    Raises:
        ArtifactError: the variant or the rows are absent or damaged.
        StorageError: the disk refused a write.
    """
    try:
        written = write_repository(job, variant)
    except ConversionError as exc:
        settings = {**variant.settings, "triton": f"no model repository: {exc}"}
        return variant.model_copy(update={"settings": settings})
    return variant.model_copy(update={"triton": written})


def write_repository(job: ConversionJob, variant: ModelVariant) -> TritonRepository:
    """Write the repository that serves a variant, or return the one that was written from the same.

    Args:
        job: its program's version names the folder, a typical one of its rows warms the model up,
            and `config.triton` says how it is served.
        variant: an accepted one, of a format that Triton serves.

    Raises:
        ConversionError: Triton could not serve it so.
        ArtifactError: the variant or the rows are absent or damaged.
        StorageError: the disk refused a write.
    """
    program, name = job.program, job.program.version.name
    key = content_key(
        KIND,
        code_digest(__file__),
        [file.read_text(encoding="utf-8") for file in (TEMPLATE, PYTHON_BACKEND)],
        files_of(variant),
        program,
        job.rows,
        job.config.triton,
        job.config.threads,
    )

    def build(folder: StagedFolder) -> TritonRepository:
        typical = kind_of(program).read_judged(job).timing_batch(1)
        warmup = {
            spec.name: np.ascontiguousarray(typical[spec.name], spec.dtype)
            for spec in program.signature.inputs
        }
        home = folder.path / FOLDER / name
        _copy_model(job, variant, home)
        (home / CONFIG_FILE).write_text(_config_of(job, variant, warmup), encoding="utf-8")
        (home / WARMUP_FOLDER).mkdir()
        for input_name, row in warmup.items():
            (home / WARMUP_FOLDER / input_name).write_bytes(row.tobytes())
        return TritonRepository(files=folder.artifact(FOLDER), model=name, models=(name,))

    return job.store.build_once(KIND, key, TritonRepository, build)


def _copy_model(job: ConversionJob, variant: ModelVariant, home: Path) -> None:
    folder, file = job.store.path(files_of(variant), verify=False), TRITON_FILES[variant.format]
    check_files(folder, variant, job.program)
    versioned = home / str(job.program.version.version)
    versioned.mkdir(parents=True)
    shutil.copyfile(folder / file, versioned / file)
    if _backend(job, variant) == "python":
        if variant.hardware_class.startswith("gpu"):
            raise ConversionError(
                "ONNX in Triton's Python backend runs on processors alone, and the variant is for "
                f"{variant.hardware_class}; set conversion.triton.onnx_backend to onnxruntime"
            )
        shutil.copyfile(PYTHON_BACKEND, versioned / "model.py")


def _backend(job: ConversionJob, variant: ModelVariant) -> str:
    assert job.config.triton is not None
    return job.config.triton.onnx_backend if variant.format == "onnx" else variant.format


def _config_of(job: ConversionJob, variant: ModelVariant, warmup: dict[str, np.ndarray]) -> str:
    """The text that Triton reads."""
    program, served, threads = job.program, job.config.triton, str(job.config.threads)
    assert served is not None
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False
    )
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        model=program.version.name,
        version=program.version.version,
        backend=_backend(job, variant),
        kind="KIND_GPU" if variant.hardware_class.startswith("gpu") else "KIND_CPU",
        most_rows=most_rows(program, variant, served),
        signature=program.signature,
        served=served,
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
