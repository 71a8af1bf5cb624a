"""Loading a form of the model into the runtime that serves it; what it really got is read back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from tasks.contracts.data import DatasetSchema
from tasks.conversion.onnx_export import MODEL_FILE as ONNX_FILE
from tasks.conversion.openvino_export import MODEL_FILE as OPENVINO_FILE
from tasks.conversion.openvino_export import without_reporting
from tasks.conversion.program import INPUT_NAMES, OUTPUT_NAME, load_program
from tasks.conversion.variants import sentence_of
from tasks.errors import ConversionError, DataContractError

CPU_PROVIDER = "CPUExecutionProvider"
OPENVINO_DEVICE = "CPU"
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Score = Callable[[Int32Array, Float32Array], Float32Array]


@dataclass(frozen=True)
class LoadedModel:
    """One form of the model, ready to score."""

    score: Score
    columns: DatasetSchema
    settings: dict[str, str]
    load_ms: float

    def __call__(self, categorical: NDArray[Any], numeric: NDArray[Any]) -> Float32Array:
        """Probabilities, float32, shape (rows,), in the order of the rows.

        Args:
            categorical: integer codes, shape (rows, categories); any layout.
            numeric: numbers, shape (rows, numbers), NaN for missing; any layout and float type.

        Raises:
            DataContractError: the arrays do not have the model's shape.
        """
        codes = np.ascontiguousarray(categorical, dtype=np.int32)
        numbers = np.ascontiguousarray(numeric, dtype=np.float32)
        rows = len(numbers)
        expected = (rows, len(self.columns.categorical)), (rows, len(self.columns.numeric))
        if (codes.shape, numbers.shape) != expected:
            raise DataContractError(
                f"model inputs have shapes {codes.shape} and {numbers.shape}, expected "
                f"{expected[0]} codes and {expected[1]} numbers; were they swapped?"
            )
        if rows == 0:
            return np.empty(0, dtype=np.float32)
        return self.score(codes, numbers)


def load(path: Path, model_format: str, columns: DatasetSchema, threads: int = 1) -> LoadedModel:
    """Load a form of the model into its runtime on the CPU.

    Args:
        path: the `.pt2` file for `pytorch`, else the variant's folder.
        model_format: `pytorch`, `onnx` or `openvino`.
        columns: the raw columns it takes.
        threads: within one call. For `pytorch` this is a setting of the whole process.

    Raises:
        ConversionError: the runtime refuses the files, or runs other than it was told to.
        ArtifactError: a `.pt2` file is damaged.
    """
    start = time.perf_counter()
    score, settings = _LOADERS[model_format](path, threads)
    load_ms = (time.perf_counter() - start) * 1e3
    return LoadedModel(score, columns, settings, load_ms)


def _load_pytorch(path: Path, threads: int) -> tuple[Score, dict[str, str]]:
    torch.set_num_threads(threads)
    module = load_program(path).module(check_guards=False)
    # Range checks of the export would double the time of a small batch; plain eager has none.
    module._forward_pre_hooks.clear()

    def score(categorical: Int32Array, numeric: Float32Array) -> Float32Array:
        with torch.inference_mode():
            result = module(_as_tensor(categorical), _as_tensor(numeric))
            scores: Float32Array = result.numpy()
        return scores

    settings = {
        "runtime": f"pytorch {torch.__version__}",
        "threads": str(torch.get_num_threads()),
        "precision": torch.get_float32_matmul_precision(),
    }
    return score, _read_back(settings, {"threads": str(threads), "precision": "highest"})


def _as_tensor(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _load_onnx(path: Path, threads: int) -> tuple[Score, dict[str, str]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(path / ONNX_FILE, options, providers=[CPU_PROVIDER])
    except _ORT_REFUSALS as exc:
        raise ConversionError(f"ONNX Runtime cannot load the model: {sentence_of(exc)}") from exc

    def score(categorical: Int32Array, numeric: Float32Array) -> Float32Array:
        feed = {INPUT_NAMES[0]: categorical, INPUT_NAMES[1]: numeric}
        scores: Float32Array = session.run([OUTPUT_NAME], feed)[0]
        return scores

    used = session.get_session_options()
    settings = {
        "runtime": f"onnxruntime {ort.__version__}",
        "threads": str(used.intra_op_num_threads),
        "spinning": used.get_session_config_entry("session.intra_op.allow_spinning"),
        "provider": session.get_providers()[0],
    }
    wanted = {"threads": str(threads), "spinning": "0", "provider": CPU_PROVIDER}
    return score, _read_back(settings, wanted)


_ORT_REFUSALS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def _load_openvino(path: Path, threads: int) -> tuple[Score, dict[str, str]]:
    ov = without_reporting("openvino")
    # Without the hint OpenVINO takes bfloat16 on processors that have it, and answers differently.
    wanted = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": str(threads),
        "NUM_STREAMS": "1",
    }
    try:
        compiled = ov.Core().compile_model(path / OPENVINO_FILE, OPENVINO_DEVICE, wanted)
    except RuntimeError as exc:
        raise ConversionError(f"OpenVINO cannot load the model: {sentence_of(exc)}") from exc
    request = compiled.create_infer_request()

    def score(categorical: Int32Array, numeric: Float32Array) -> Float32Array:
        feed = {INPUT_NAMES[0]: categorical, INPUT_NAMES[1]: numeric}
        scores: Float32Array = request.infer(feed, share_inputs=True)[0]
        return scores

    settings = {
        "runtime": f"openvino {ov.get_version()}",
        "threads": str(compiled.get_property("INFERENCE_NUM_THREADS")),
        "streams": str(compiled.get_property("NUM_STREAMS")),
        "precision": compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name(),
        "device": ",".join(compiled.get_property("EXECUTION_DEVICES")),
    }
    expected = {"threads": str(threads), "precision": "f32", "device": OPENVINO_DEVICE}
    return score, _read_back(settings, expected)


def _read_back(settings: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    for name, value in wanted.items():
        if settings[name] != value:
            raise ConversionError(
                f"{settings['runtime']} runs with {name} {settings[name]!r}, it was told "
                f"{value!r}; figures taken so would not hold elsewhere. Look for environment "
                "variables or a runtime version that override it"
            )
    return settings


_LOADERS: dict[str, Callable[[Path, int], tuple[Score, dict[str, str]]]] = {
    "pytorch": _load_pytorch,
    "onnx": _load_onnx,
    "openvino": _load_openvino,
}


@contextmanager
def torch_threads_restored() -> Iterator[None]:
    """Put back PyTorch's thread count, which `load` sets for the whole process."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
