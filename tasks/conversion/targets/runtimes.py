"""Loading a form of the model into the runtime that serves it; what it really got is read back.

PyTorch is imported by what runs it alone: a process that serves other forms saves its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from tasks.contracts.conversion import BATCH_AXIS, Signature, TensorSpec
from tasks.conversion.gates.profiles import (
    Profiler,
    profile_onnx,
    profile_openvino,
    profile_pytorch,
)
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.onnx import MODEL_FILE as ONNX_FILE
from tasks.conversion.targets.onnx_halving import with_overflows
from tasks.conversion.targets.openvino import MODEL_FILE as OPENVINO_FILE
from tasks.conversion.targets.openvino import without_reporting
from tasks.conversion.targets.tensorrt_engine import shape_ranges
from tasks.conversion.variants import sentence_of
from tasks.kernel.errors import ConversionError, DataContractError

CPU_PROVIDER = "CPUExecutionProvider"
GPU_PROVIDER = "CUDAExecutionProvider"
TENSORRT_PROVIDER = "TensorrtExecutionProvider"
OPENVINO_DEVICE = "CPU"
Array = NDArray[Any]
Float32Array = NDArray[np.float32]
Score = Callable[[dict[str, Array]], Float32Array]


@dataclass(frozen=True)
class LoadedModel:
    """One form of the model, ready to answer."""

    score: Score
    signature: Signature
    settings: dict[str, str]
    load_ms: float
    profiler: Profiler | None = None
    """Tells the time of each operator; None where it was not asked for, or the runtime cannot."""
    refusals: tuple[type[Exception], ...] = (RuntimeError,)
    """What the runtime raises where it cannot answer."""

    def __call__(self, inputs: Mapping[str, Array]) -> Float32Array:
        """Answers, float32, in the order of the rows; their shape is the signature's output.

        Args:
            inputs: an array for each input of the signature, rows first; any layout and any type
                of number.

        Raises:
            DataContractError: an array is absent, or does not have the model's shape.
            ConversionError: the runtime cannot answer.
        """
        arrays: dict[str, Array] = {}
        axes: dict[str, int] = {}
        for name, dtype, shape in self._inputs:
            array = inputs.get(name)
            if array is None or not _fits(np.shape(array), shape, axes):
                raise _other_shapes(inputs, self.signature)
            arrays[name] = np.ascontiguousarray(array, dtype)
        if axes[BATCH_AXIS] == 0:
            return np.empty(_sizes(self.signature.output, axes), dtype=np.float32)
        try:
            return self.score(arrays)
        except self.refusals as exc:
            raise ConversionError(
                f"{self.settings['runtime']} cannot answer a call of {axes[BATCH_AXIS]} rows: "
                f"{sentence_of(exc)}"
            ) from exc

    @cached_property
    def _inputs(self) -> tuple[tuple[str, np.dtype[Any], tuple[str | int, ...]], ...]:
        """The signature's inputs as plain values: a call of one row takes microseconds."""
        return tuple(
            (spec.name, np.dtype(spec.dtype), spec.shape) for spec in self.signature.inputs
        )


def _fits(shape: tuple[int, ...], expected: tuple[str | int, ...], axes: dict[str, int]) -> bool:
    """Whether a shape is the expected one; an axis of any length is the same in all inputs."""
    if len(shape) != len(expected):
        return False
    for length, axis in zip(shape, expected, strict=True):
        if length != (axis if isinstance(axis, int) else axes.setdefault(str(axis), length)):
            return False
    return True


def _sizes(spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axes.get(axis, 0) if isinstance(axis, str) else axis for axis in spec.shape)


def _other_shapes(inputs: Mapping[str, Array], signature: Signature) -> DataContractError:
    seen = {name: np.shape(array) for name, array in inputs.items()}
    expected = {spec.name: spec.shape for spec in signature.inputs}
    return DataContractError(
        f"model inputs have shapes {seen}, expected {expected}; were they swapped?"
    )


def _loaded(
    start: float,
    score: Score,
    signature: Signature,
    settings: dict[str, str],
    profiler: Profiler | None,
    refusals: tuple[type[Exception], ...] = (RuntimeError,),
) -> LoadedModel:
    load_ms = (time.perf_counter() - start) * 1e3
    return LoadedModel(score, signature, settings, load_ms, profiler, refusals)


def load_pytorch(path: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    """Load a program as it was exported, on the CPU.

    The number of threads is a setting of the whole process; see `torch_threads_restored`.

    Raises:
        ConversionError: PyTorch runs other than it was told to.
        ArtifactError: the file is damaged.
    """
    import torch

    from tasks.conversion.targets.program import load_program

    start = time.perf_counter()
    torch.set_num_threads(runtime.threads)
    module = load_program(path).module(check_guards=False)
    # Range checks of the export would double the time of a small batch; plain eager has none.
    module._forward_pre_hooks.clear()

    def score(arrays: dict[str, Array]) -> Float32Array:
        with torch.inference_mode():
            tensors = [
                torch.from_numpy(values if values.flags.writeable else values.copy())
                for values in arrays.values()
            ]
            result = module(*tensors)
            scores: Float32Array = result.numpy()
        return scores

    settings = {
        "runtime": f"pytorch {torch.__version__}",
        "threads": str(torch.get_num_threads()),
        "precision": torch.get_float32_matmul_precision(),
    }
    wanted = {"threads": str(runtime.threads), "precision": "highest"}
    profiler = profile_pytorch(lambda inputs: score(dict(inputs))) if runtime.profiled else None
    return _loaded(start, score, signature, _read_back(settings, wanted), profiler)


def load_onnx(
    folder: Path,
    signature: Signature,
    runtime: Runtime,
    provider: str | None = None,
    provider_options: Mapping[str, str] | None = None,
    precision: str = "",
) -> LoadedModel:
    """Load an ONNX form into ONNX Runtime, on the hardware it is asked for and no other.

    Args:
        folder: holds the model.
        signature: of the program.
        runtime: how it is to be run.
        provider: what computes it; None for CUDA on graphics processors and else the processor.
        provider_options: of that provider; see `tensorrt_options`.
        precision: of the form. One of 16 bits is computed in 32 on processors, and overflows there
            as it does elsewhere: see `with_overflows`.

    Raises:
        ConversionError: ONNX Runtime refuses the file, or runs other than it was told to.
    """
    start = time.perf_counter()
    if provider is None:
        provider = GPU_PROVIDER if runtime.hardware_class.startswith("gpu") else CPU_PROVIDER
    chosen = [(provider, dict(provider_options or {}))]
    options = ort.SessionOptions()
    options.intra_op_num_threads = runtime.threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    is_emulated = precision == "fp16" and provider == CPU_PROVIDER
    try:
        model = _overflowing(folder / ONNX_FILE) if is_emulated else folder / ONNX_FILE
        session = ort.InferenceSession(model, options, providers=chosen)
    except _ORT_REFUSALS as exc:
        raise ConversionError(f"ONNX Runtime cannot load the model: {sentence_of(exc)}") from exc
    outputs = [signature.output.name]

    def score(arrays: dict[str, Array]) -> Float32Array:
        scores: Float32Array = session.run(outputs, arrays)[0]
        return scores

    used = session.get_session_options()
    settings = {
        "runtime": f"onnxruntime {ort.__version__}",
        "threads": str(used.intra_op_num_threads),
        "spinning": used.get_session_config_entry("session.intra_op.allow_spinning"),
        "provider": session.get_providers()[0],  # without a GPU it silently falls back
    }
    wanted = {"threads": str(runtime.threads), "spinning": "0", "provider": provider}
    profiled = profile_onnx(folder / ONNX_FILE, options, chosen) if runtime.profiled else None
    return _loaded(start, score, signature, _read_back(settings, wanted), profiled, _ORT_REFUSALS)


def _overflowing(path: Path) -> bytes:
    model: bytes = with_overflows(onnx.load(path)).SerializeToString()
    return model


def tensorrt_options(
    signature: Signature, precision: str, typical_rows: int, most_rows: int
) -> dict[str, str]:
    """For ONNX Runtime's TensorRT provider: one engine for all shapes, as narrow as the file is.

    Without ranges it builds a new engine for each shape that it has not seen; without leave for
    narrow types it computes a narrow file in 32 bits.

    Raises:
        ConversionError: nothing says how long an axis may be.
    """
    ranges = shape_ranges(signature, typical_rows, most_rows)

    def told(part: str) -> str:
        shapes = {name: getattr(shape, part) for name, shape in ranges.items()}
        return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())

    return {
        "trt_profile_min_shapes": told("least"),
        "trt_profile_opt_shapes": told("typical"),
        "trt_profile_max_shapes": told("most"),
        "trt_fp16_enable": str(int(precision == "fp16")),
        "trt_int8_enable": str(int(precision == "int8")),
    }


_ORT_REFUSALS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def load_openvino(
    folder: Path, signature: Signature, runtime: Runtime, precision: str = "f32"
) -> LoadedModel:
    """Load an OpenVINO form on the CPU.

    Args:
        folder: holds the IR.
        signature: of the program.
        runtime: how it is to be run.
        precision: what it computes in. Left alone, OpenVINO takes bfloat16 on processors that have
            it, and answers differently there.

    Raises:
        ConversionError: OpenVINO refuses the file, or runs other than it was told to.
    """
    start = time.perf_counter()
    ov = without_reporting("openvino")
    hints = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": str(runtime.threads),
        "NUM_STREAMS": "1",
        "PERF_COUNT": runtime.profiled,
    }
    try:
        compiled = ov.Core().compile_model(folder / OPENVINO_FILE, OPENVINO_DEVICE, hints)
    except RuntimeError as exc:
        raise ConversionError(f"OpenVINO cannot load the model: {sentence_of(exc)}") from exc
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
    wanted = {"threads": str(runtime.threads), "precision": precision, "device": OPENVINO_DEVICE}
    profiler = profile_openvino(request) if runtime.profiled else None
    return _loaded(start, score, signature, _read_back(settings, wanted), profiler)


def _read_back(settings: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    for name, value in wanted.items():
        if settings[name] != value:
            raise ConversionError(
                f"{settings['runtime']} runs with {name} {settings[name]!r}, it was told "
                f"{value!r}; figures taken so would not hold elsewhere. Look for environment "
                "variables or a runtime version that override it"
            )
    return settings


@contextmanager
def torch_threads_restored() -> Iterator[None]:
    """Put back PyTorch's thread count, which `load` sets for the whole process."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
