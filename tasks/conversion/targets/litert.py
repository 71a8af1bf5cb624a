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
from tasks.conversion.targets.catalog import Format
from tasks.conversion.targets.interface import (
    Array,
    BuildRequest,
    Float32Array,
    LoadedModel,
    Runtime,
    in_calls,
    loaded,
    read_beside,
    write_beside,
)
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import PROJECT_ROOT, tool_python

TOOL = "litert"
RUNTIME_PACKAGE = "ai-edge-litert"
MODEL_FILE = "model.tflite"
CALLS = {"rows_1": 1, "rows_32": 32}
"""The file's signatures: it converts at fixed numbers of rows only, a larger call is cut up."""
TIMEOUT_S = 800
_VERSIONS = (
    "import importlib.metadata as m; print(m.version('litert-torch'), m.version('torch'), sep=',')"
)
read_provenance = read_beside


def equipment(made: Format | None = None) -> dict[str, str]:
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
            f"the runtime of LiteRT is not installed here; install {RUNTIME_PACKAGE}"
        ) from exc


def build(made: Format, request: BuildRequest, folder: Path) -> dict[str, str]:
    """Convert the program, in the converter's own environment, as a process of its own.

    Raises:
        ConversionError: an axis other than the rows has any length, or the converter refuses.
        ArtifactError: the program is absent or damaged.
    """
    from tasks.conversion.targets.pytorch import check_program, load_program

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
    write_beside(folder, request.provenance)
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
            f"shapes; only the rows ({BATCH_AXIS}) are cut up and filled"
        )


def _run_converter(order: dict[str, Any]) -> None:
    python = tool_python(TOOL)
    assert python is not None  # `equipment` was asked first
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
            "the network"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no reason given"


def load(made: Format, folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
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
    return loaded(start, _Calls(model, runners), signature, settings, {})


def _check_tensors(runner: Any, rows: int, signature: Signature) -> None:
    """Read back from the file what a call takes."""
    expected = {spec.name: (spec.dtype, (rows, *spec.shape[1:])) for spec in signature.inputs}
    seen = {
        name: (str(np.dtype(has["dtype"])), tuple(int(n) for n in has["shape"]))
        for name, has in runner.get_input_details().items()
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
        return in_calls(self._run, arrays, max(self._runners))

    def _run(self, arrays: dict[str, Array]) -> Float32Array:
        """The last row is repeated up to a fixed number; no row depends on another one."""
        rows = len(next(iter(arrays.values())))
        fixed = min(size for size in self._runners if size >= rows)
        places = np.minimum(np.arange(fixed), rows - 1)
        filled = {name: np.ascontiguousarray(array[places]) for name, array in arrays.items()}
        (answers,) = self._runners[fixed](**filled).values()
        scores: Float32Array = np.array(answers[:rows])  # the interpreter's memory is used again
        return scores
