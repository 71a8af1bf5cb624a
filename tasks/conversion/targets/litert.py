"""LiteRT, for small devices: one file for fixed numbers of rows, run on the processor."""

from __future__ import annotations

import importlib
import json
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tasks.contracts.conversion import BATCH_AXIS, Signature
from tasks.conversion.targets.interface import BuildRequest, Runtime
from tasks.conversion.targets.program import check_program, load_program
from tasks.conversion.targets.runtimes import Array, Float32Array, LoadedModel
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import PROJECT_ROOT, tool_python

TOOL = "litert"
RUNTIME_PACKAGE = "ai-edge-litert"
MODEL_FILE = "model.tflite"
STAMP_FILE = "stamp.json"
CALLS = {"rows_1": 1, "rows_32": 32}
"""The file's signatures: it converts at fixed numbers of rows only, a larger call is cut up."""
TIMEOUT_S = 800
_VERSIONS = (
    "import importlib.metadata as m; print(m.version('litert-torch'), m.version('torch'), sep=',')"
)


def equipment() -> dict[str, str]:
    """Versions of converter and runtime.

    Raises:
        ConversionError: one of them is missing, with where to get it.
    """
    python = tool_python(TOOL)
    if python is None:
        raise ConversionError(
            "the LiteRT converter has an environment of its own, and there is none here; "
            "`make test-litert` makes it, or name its interpreter with FALAJ_LITERT_PYTHON"
        )
    done = subprocess.run(
        [python, "-c", _VERSIONS], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise ConversionError(
            f"{python} has no LiteRT converter: {_last_line(done.stderr)}; install "
            "infra/litert/requirements.in there, as `make test-litert` does"
        )
    converter, torch_version = done.stdout.strip().split(",")
    return {
        "litert-torch": converter,
        "litert_torch_on": f"torch {torch_version}",
        RUNTIME_PACKAGE: _runtime_version(),
    }


def _runtime_version() -> str:
    try:
        return version(RUNTIME_PACKAGE)
    except PackageNotFoundError as exc:
        raise ConversionError(
            "the runtime of LiteRT is not installed here, so no such form could be judged; "
            f"install {RUNTIME_PACKAGE}. The other forms serve meanwhile"
        ) from exc


def write_litert(request: BuildRequest, folder: Path) -> dict[str, str]:
    """Convert the program, in the converter's own environment, as a process of its own.

    Raises:
        ConversionError: an axis other than the rows has any length, or the converter refuses.
        ArtifactError: the program is absent or damaged.
    """
    signature = request.program.signature
    refuse_other_axes(signature)
    path = request.program_path
    check_program(load_program(path), signature)  # also that it holds nothing pickled
    order = {
        "program": str(path),
        "sha256": request.program.program.sha256,
        "written": str(folder / MODEL_FILE),
        "signatures": CALLS,
        "inputs": [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape[1:])}
            for spec in signature.inputs
        ],
    }
    _run_converter(order)
    (folder / STAMP_FILE).write_text(json.dumps(dict(request.stamp), indent=1, sort_keys=True))
    return {"rows_of_calls": ", ".join(map(str, CALLS.values()))}


def refuse_other_axes(signature: Signature) -> None:
    """Refuse what takes rows of any length: the file has fixed shapes.

    Raises:
        ConversionError: an axis other than the rows has any length.
    """
    free = {axis for spec in signature.inputs for axis in spec.shape[1:] if isinstance(axis, str)}
    if free:
        raise ConversionError(
            f"the axes {', '.join(sorted(free))} take any length, and LiteRT's file has fixed "
            f"shapes; only the rows ({BATCH_AXIS}) are cut up and filled. The ONNX form serves"
        )


def _run_converter(order: dict[str, Any]) -> None:
    python = tool_python(TOOL)
    assert python is not None  # the equipment of the target
    try:
        done = subprocess.run(
            [python, "-m", "tasks.conversion.targets.litert_convert"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            cwd=PROJECT_ROOT,
        )
    except subprocess.TimeoutExpired as exc:
        raise ConversionError(f"LiteRT's converter was not done within {TIMEOUT_S} s") from exc
    if done.returncode or not Path(order["written"]).is_file():
        raise ConversionError(
            f"LiteRT cannot take the program: {_last_line(done.stderr)}. Replace that operator in "
            "the network; the ONNX form serves meanwhile"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it says nothing"


def load_litert(folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    """Load a file into LiteRT's interpreter, on the processor.

    Raises:
        ConversionError: the runtime is not installed or refuses the file, or it is another model's.
    """
    start = time.perf_counter()
    installed = _runtime_version()
    interpreter = importlib.import_module("ai_edge_litert.interpreter")
    path = str(folder / MODEL_FILE)
    try:
        model = interpreter.Interpreter(model_path=path, num_threads=runtime.threads)
        runners = {rows: model.get_signature_runner(name) for name, rows in CALLS.items()}
    except (ValueError, RuntimeError) as exc:
        raise ConversionError(f"LiteRT cannot load the model: {exc}") from exc
    for rows, runner in runners.items():
        _check_tensors(runner, rows, signature)
    settings = {
        "runtime": f"litert {installed}",
        "threads": str(runtime.threads),
        "rows_of_calls": ", ".join(map(str, runners)),
        "provider": "XNNPACK",
    }
    score = _Calls(model, runners)
    return LoadedModel(score, signature, settings, (time.perf_counter() - start) * 1e3)


def _check_tensors(runner: Any, rows: int, signature: Signature) -> None:
    """Read back from the file what a call takes."""
    expected = {spec.name: (spec.dtype, (rows, *spec.shape[1:])) for spec in signature.inputs}
    seen = {
        name: (str(np.dtype(told["dtype"])), tuple(int(n) for n in told["shape"]))
        for name, told in runner.get_input_details().items()
    }
    if seen != expected:
        raise ConversionError(
            f"the LiteRT file takes {seen}, expected {expected}; it is another model's"
        )


class _Calls:
    """Answers for any number of rows, from calls of the fixed numbers."""

    def __init__(self, model: Any, runners: dict[int, Any]) -> None:
        self._model, self._runners = model, runners  # a runner needs its interpreter

    def __call__(self, arrays: dict[str, Array]) -> Float32Array:
        rows, largest = len(next(iter(arrays.values()))), max(self._runners)
        parts = []
        for start in range(0, rows, largest):
            block = {name: array[start : start + largest] for name, array in arrays.items()}
            parts.append(self._run(block, min(largest, rows - start)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _run(self, arrays: dict[str, Array], rows: int) -> Float32Array:
        taken = min(size for size in self._runners if size >= rows)
        filled = {name: _filled(array, taken) for name, array in arrays.items()}
        (answers,) = self._runners[taken](**filled).values()
        scores: Float32Array = np.array(answers[:rows])  # the interpreter's memory is used again
        return scores


def _filled(array: Array, rows: int) -> Array:
    """The array with its last row over again, up to so many rows; no row looks at another one."""
    missing = rows - len(array)
    return array if not missing else np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
