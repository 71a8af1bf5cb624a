"""OpenVINO: IR in 32-bit floats or with 8-bit integers, run without its usage reporting."""

import contextlib
import importlib
import io
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.contracts.conversion import Signature
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.provenance import processor_equipment, weight_bits
from tasks.conversion.targets.catalog import Format
from tasks.conversion.targets.interface import (
    PROVENANCE_PREFIX,
    Array,
    Batches,
    BuildRequest,
    Float32Array,
    LoadedModel,
    Runtime,
    check_quantisable,
    first_line_of,
    loaded,
)
from tasks.conversion.targets.onnx import MODEL_FILE as ONNX_FILE
from tasks.conversion.targets.onnx import in_products
from tasks.kernel.errors import ArtifactError, ConversionError, StorageError
from tasks.kernel.files import scratch_folder

MODEL_FILE = "model.xml"
DEVICE = "CPU"
LAYERS = ("MatMul", "Convolution")
"""OpenVINO operations to quantise; all others, as the encoding of raw numbers, stay in floats."""
_FRONTEND_FAILURES = (
    "GeneralFailure",
    "InitializationFailure",
    "NotImplementedFailure",
    "OpConversionFailure",
    "OpValidationFailure",
)


def without_reporting(name: str) -> Any:
    """Import `openvino` or `nncf` so that it reports nothing to anyone, and changes no logging.

    Both send an event to an analytics service when they are imported or used, unless a file in the
    home folder forbids it. Both do without where their reporting package cannot be imported; a
    module that is None in `sys.modules` is one that cannot. NNCF makes its own class that of every
    logger created later; that is put back.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    logger_class = logging.getLoggerClass()
    module = importlib.import_module(name)
    logging.setLoggerClass(logger_class)
    return module


equipment = processor_equipment


def build(made: Format, request: BuildRequest, folder: Path) -> dict[str, str]:
    """Convert the ONNX variant, or put the products of the 32-bit IR in 8 bits.

    From ONNX and not from PyTorch, because only that way keeps input names and shapes.

    Raises:
        ConversionError: the source was not built, OpenVINO lacks an operator, or NNCF refuses.
        ArtifactError: the source is absent or damaged.
        StorageError: the disk refused a write.
    """
    (source,) = made.made_from
    how = {"made_from": source}
    with scratch_folder("falaj-openvino") as scratch:
        if made.precision == "int8":
            is_transformer = kind_of(request.program).is_transformer
            wide = read_ir(request.source_folder(source))
            model = quantize(wide, request.sample, is_transformer, weight_bits())
            rows = sum(batch.num_rows for batch in request.sample)
            how |= {"calibration_rows": str(rows), "quantized_layers": ", ".join(LAYERS)}
        else:  # OpenVINO takes files alone
            file = scratch / ONNX_FILE
            file.write_bytes(in_products(request, source).SerializeToString(deterministic=True))
            model = convert_onnx(file)
        save_ir(model, folder, request.provenance)
    return how


def convert_onnx(path: Path) -> Any:
    """The `openvino.Model` of an ONNX file.

    Raises:
        ConversionError: OpenVINO lacks one of its operators.
    """
    ov = without_reporting("openvino")
    refusals = tuple(getattr(ov.frontend, name) for name in _FRONTEND_FAILURES)
    try:
        return ov.convert_model(path)
    except (RuntimeError, *refusals) as exc:
        reason = " ".join(str(exc).split("Summary:")[-1].split())[:400]
        raise ConversionError(f"OpenVINO cannot convert the ONNX file: {reason}") from exc


def save_ir(model: Any, folder: Path, provenance: Mapping[str, str]) -> None:
    """Write a model with its provenance as `model.xml` and `model.bin`, weights as they are.

    Raises:
        StorageError: the disk refused the write. OpenVINO reports that as a `RuntimeError`.
    """
    ov = without_reporting("openvino")
    for name, value in sorted(provenance.items()):
        model.set_rt_info(value, [PROVENANCE_PREFIX, name])
    # Names that OpenVINO counts up in a process are replaced: equal models are equal files then.
    model.set_friendly_name("falaj")
    for position, operation in enumerate(model.get_ordered_ops()):
        if re.fullmatch(r"[A-Za-z]+_\d+", operation.get_friendly_name()):
            operation.set_friendly_name(f"{operation.get_type_name()}_{position}")
    try:
        ov.save_model(model, folder / MODEL_FILE, compress_to_fp16=False)
    except RuntimeError as exc:
        raise StorageError(
            f"{folder}: OpenVINO could not write the model ({first_line_of(exc)}); expected a "
            "writable folder with free space. Free space and run again, finished stages are kept"
        ) from exc


def read_ir(folder: Path) -> Any:
    """The `openvino.Model` of a folder written by `save_ir`."""
    return without_reporting("openvino").Core().read_model(folder / MODEL_FILE)


def read_provenance(folder: Path) -> dict[str, str]:
    """The provenance of the model in a folder; empty where it has none.

    Raises:
        ArtifactError: there is no readable model.
    """
    try:
        model = read_ir(folder)
    except RuntimeError as exc:
        raise ArtifactError(
            f"{MODEL_FILE} cannot be read as an OpenVINO model ({first_line_of(exc)}); build the "
            "variant again"
        ) from exc
    if not model.has_rt_info([PROVENANCE_PREFIX]):
        return {}
    values: dict[str, Any] = model.get_rt_info([PROVENANCE_PREFIX]).value
    return {name: str(value) for name, value in values.items()}


def quantize(model: Any, sample: Batches, is_transformer: bool = False, bits: int = 8) -> Any:
    """A copy of an `openvino.Model` whose `LAYERS` take and hold 8-bit integers.

    Everything else is left in floats on purpose. Raw numbers have heavy tails, and one scale for
    all columns crushes most of them; what enters the first matrix product is encoded, in 0 to 1.
    With `bits` 7 the weights take half of their range, so that no sum of products saturates.

    Raises:
        ConversionError: the sample is empty, the model has none of the layers, or NNCF refuses it.
    """
    nncf = without_reporting("nncf")
    present = {operation.get_type_name() for operation in model.get_ops()}
    check_quantisable(present, LAYERS)
    fix = nncf.OverflowFix.ENABLE if bits == 7 else nncf.OverflowFix.DISABLE
    with _quiet_nncf():
        return nncf.quantize(
            model,
            nncf.Dataset(list(sample)),
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(sample),
            ignored_scope=nncf.IgnoredScope(types=sorted(present - set(LAYERS)), validate=False),
            model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
        )


@contextlib.contextmanager
def _quiet_nncf() -> Iterator[None]:
    """Without the progress bars that NNCF draws on standard output, and with errors of ours."""
    nncf = without_reporting("nncf")
    nncf.set_log_level(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except (RuntimeError, nncf.ValidationError, nncf.InternalError) as exc:
        raise ConversionError(f"NNCF cannot quantise the model: {first_line_of(exc)}") from exc


def load(made: Format, folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    """Load an IR on the processor, in the precision of its format.

    Left alone, OpenVINO computes in bfloat16 on processors that have it, and answers differently
    there.

    Raises:
        ConversionError: OpenVINO refuses the file, or runs with other settings.
    """
    start = time.perf_counter()
    ov = without_reporting("openvino")
    precision = "bf16" if made.precision == "bf16" else "f32"
    hints = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": str(runtime.threads),
        "NUM_STREAMS": "1",
    }
    try:
        compiled = ov.Core().compile_model(folder / MODEL_FILE, DEVICE, hints)
    except RuntimeError as exc:
        raise ConversionError(f"OpenVINO cannot load the model: {first_line_of(exc)}") from exc
    request = compiled.create_infer_request()

    def score(arrays: dict[str, Array]) -> Float32Array:
        scores: Float32Array = request.infer(arrays, share_inputs=True)[0]
        return scores

    settings = {
        "runtime": f"openvino {ov.get_version()}",
        "threads": str(compiled.get_property("INFERENCE_NUM_THREADS")),
        "streams": str(compiled.get_property("NUM_STREAMS")),
        "precision": compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name(),
        "device": ",".join(compiled.get_property("EXECUTION_DEVICES")),
    }
    wanted = {"threads": str(runtime.threads), "precision": precision, "device": DEVICE}
    return loaded(start, score, signature, settings, wanted)
