"""A TensorRT engine: built on the kind of graphics processor that runs it, and run there."""

import importlib
import json
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tasks.contracts.conversion import BATCH_AXIS, Signature
from tasks.conversion.targets import interface
from tasks.conversion.targets.catalog import Format
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.kernel.errors import ArtifactError, ConversionError

ENGINE_FILE = "model.plan"
FACTS_FILE = "engine.json"
ENGINE_ROWS = 1024
"""Rows a call that an engine is built for; larger calls are cut up."""
TYPICAL_LENGTH = 32  # of an axis other than the rows, for which an engine is tuned
BOUND_TO = ("tensorrt", "compute_capability")
"""An engine runs on no other version and no other kind of device."""


def equipment(made: Format | None = None) -> dict[str, str]:
    """What engines built here are bound to.

    Raises:
        ConversionError: TensorRT or a device is missing, with what to do.
    """
    import torch

    trt = _tensorrt()
    if not torch.cuda.is_available():
        raise ConversionError(
            "this machine shows no CUDA device, and an engine is built on the kind of device that "
            "runs it. Convert on the `gpu` work pool"
        )
    major, minor = torch.cuda.get_device_capability()
    return {
        "tensorrt": str(trt.__version__),
        "compute_capability": f"{major}.{minor}",
        "device": torch.cuda.get_device_name(),
    }


def _tensorrt() -> Any:
    try:
        return importlib.import_module("tensorrt")
    except (ImportError, OSError) as exc:  # its libraries are opened while it is imported
        raise ConversionError(
            f"TensorRT cannot be imported here ({exc}), so no engine is built. Convert on the "
            "`gpu` work pool, in NVIDIA's image of the Triton that is to serve it"
        ) from exc


def read_provenance(folder: Path) -> dict[str, str]:
    """What the engine is recorded with; empty where there is nothing.

    Raises:
        ArtifactError: it cannot be read.
    """
    try:
        facts: dict[str, str] = json.loads((folder / FACTS_FILE).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise ArtifactError(
            f"{FACTS_FILE} cannot be read ({exc}); build the variant again"
        ) from exc
    return facts


def build(made: Format, request: interface.BuildRequest, folder: Path) -> dict[str, str]:
    """Build the engine of the ONNX variant, in the precision that its file has.

    Raises:
        ConversionError: the source was not built, TensorRT or a device is missing, or TensorRT
            refuses the model.
        ArtifactError: the source is absent or damaged.
    """
    config, (source,) = request.config, made.made_from
    content = (request.source_folder(source) / MODEL_FILE).read_bytes()
    typical = sorted(config.batch_sizes)[len(config.batch_sizes) // 2]
    ranges = shape_ranges(request.program.signature, typical, ENGINE_ROWS)
    plan = build_plan(content, ranges)
    most = next(iter(ranges.values())).most[0]
    facts = {**request.provenance, **equipment(), "engine_rows": str(most)}
    (folder / ENGINE_FILE).write_bytes(plan)
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1, sort_keys=True))
    shapes = "; ".join(
        f"{name} {list(of.least)} to {list(of.most)}, tuned for {list(of.typical)}"
        for name, of in ranges.items()
    )
    return {"made_from": source, "engine_rows": str(most), "shapes": shapes}


class ShapeRange(NamedTuple):
    """Shapes that an engine takes for one input; it is tuned for the typical one."""

    least: tuple[int, ...]
    typical: tuple[int, ...]
    most: tuple[int, ...]


def shape_ranges(signature: Signature, typical_rows: int, most_rows: int) -> dict[str, ShapeRange]:
    """The ranges that an engine of this signature promises, by input.

    Args:
        signature: of the program; an axis of any length has to have its `largest`.
        typical_rows: a call, for which the engine is tuned.
        most_rows: a call, where the program itself takes as many.

    Raises:
        ConversionError: nothing says how long an axis may be.
    """
    names = {axis for spec in signature.inputs for axis in spec.shape if isinstance(axis, str)}
    if unbounded := sorted(names - {BATCH_AXIS} - signature.largest.keys()):
        raise ConversionError(
            f"nothing says how long the axes {', '.join(unbounded)} may be, and an engine is built "
            "for ranges of shapes; say so in the signature's `largest`"
        )
    most = {**signature.largest}
    most[BATCH_AXIS] = min(most_rows, most.get(BATCH_AXIS, most_rows))
    typical = {name: min(TYPICAL_LENGTH, length) for name, length in most.items()}
    typical[BATCH_AXIS] = min(typical_rows, most[BATCH_AXIS])
    return {
        spec.name: ShapeRange(
            *(
                tuple(axis if isinstance(axis, int) else lengths[axis] for axis in spec.shape)
                for lengths in (dict.fromkeys(names, 1), typical, most)
            )
        )
        for spec in signature.inputs
    }


def build_plan(content: bytes, ranges: Mapping[str, ShapeRange]) -> bytes:
    """Build an engine whose precision is that of the ONNX model: no layer is made narrower.

    Args:
        content: the ONNX model.
        ranges: of the shapes of each input.

    Returns:
        The engine, for this kind of device and this version of TensorRT alone.

    Raises:
        ConversionError: TensorRT cannot parse the model, or finds no implementation of it.
    """
    trt = _tensorrt()
    log = _log(trt)
    log.errors.clear()
    builder = trt.Builder(log)
    # TensorRT 10 has to be told; from 11 on there is nothing else.
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    parser = trt.OnnxParser(network, log)
    if not parser.parse(content):
        errors = [parser.get_error(position) for position in range(parser.num_errors)]
        reasons = [f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors]
        raise _refused("does not take the ONNX model", reasons or log.errors)
    profile = builder.create_optimization_profile()
    for name, shapes in ranges.items():
        profile.set_shape(name, *shapes)
    config = builder.create_builder_config()
    if config.add_optimization_profile(profile) < 0:
        raise _refused(f"does not take the shapes {dict(ranges)}", log.errors)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _refused("found no implementation of the model", log.errors)
    return bytes(plan)


@cache
def _log(trt: Any) -> Any:
    """Where TensorRT's complaints are collected; one a process, since it keeps to its first."""

    class Complaints(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.errors.append(message)

    return Complaints()


def _refused(what: str, errors: list[str]) -> ConversionError:
    lines = [" ".join(error.split()) for error in errors]
    return ConversionError(
        f"TensorRT {what}: {'; '.join(lines)[:400] or 'it does not say why'}. The ONNX form serves "
        "meanwhile"
    )


def load(
    made: Format, folder: Path, signature: Signature, runtime: interface.Runtime
) -> interface.LoadedModel:
    """Load an engine onto the device.

    Raises:
        ConversionError: there is no such device or TensorRT here, or the engine is another model's.
    """
    start = time.perf_counter()
    if not runtime.hardware_class.startswith("gpu"):
        raise ConversionError(
            f"an engine runs on graphics processors, and it was asked for on "
            f"{runtime.hardware_class!r}; load its ONNX variant there"
        )
    here = equipment()
    facts = json.loads((folder / FACTS_FILE).read_text())
    for name in BOUND_TO:
        if facts[name] != here[name]:
            raise ConversionError(
                f"the engine was built for {name} {facts[name]}, here it is {here[name]}, and an "
                "engine runs nowhere else. Build it again on such a machine, from its ONNX variant"
            )
    trt = _tensorrt()
    host = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = host.deserialize_cuda_engine((folder / ENGINE_FILE).read_bytes())
    if engine is None:
        raise ConversionError("TensorRT cannot read the engine; build it again from its ONNX file")
    check_tensors(trt, engine, signature)
    score = _Execution(host, engine, signature, int(facts["engine_rows"]))
    settings = {"runtime": f"tensorrt {here['tensorrt']}", "provider": "TensorRT", **here}
    return interface.loaded(start, score, signature, settings, {})


def check_tensors(trt: Any, engine: Any, signature: Signature) -> None:
    """Read back from the engine what it takes and gives.

    Raises:
        ConversionError: it is not that of the signature.
    """
    expected = {
        spec.name: (
            spec is not signature.output,
            spec.dtype,
            tuple(axis if isinstance(axis, int) else -1 for axis in spec.shape),
        )
        for spec in (*signature.inputs, signature.output)
    }
    seen = {}
    for position in range(engine.num_io_tensors):
        name = engine.get_tensor_name(position)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        dtype = str(np.dtype(trt.nptype(engine.get_tensor_dtype(name))))
        seen[name] = (is_input, dtype, tuple(engine.get_tensor_shape(name)))
    if seen != expected:
        raise ConversionError(
            f"the engine has {seen}, expected {expected} (input, type, shape): another model's"
        )


class _Execution:
    """Answers of one engine; calls of more rows than it takes are cut into several."""

    def __init__(self, host: Any, engine: Any, signature: Signature, most_rows: int) -> None:
        import torch

        self._host, self._engine = host, engine  # an engine needs the runtime that it came from
        self._context = engine.create_execution_context()
        self._output, self._most_rows = signature.output, most_rows
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, arrays: dict[str, interface.Array]) -> interface.Float32Array:
        rows, most = len(next(iter(arrays.values()))), self._most_rows
        answers = [
            self._run({name: array[start : start + most] for name, array in arrays.items()})
            for start in range(0, rows, most)
        ]
        return np.concatenate(answers)

    def _run(self, arrays: dict[str, interface.Array]) -> interface.Float32Array:
        import torch

        with torch.cuda.stream(self._stream):
            given = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
            for name, tensor in given.items():
                self._context.set_input_shape(name, tuple(tensor.shape))
                self._context.set_tensor_address(name, tensor.data_ptr())
            sizes = tuple(self._context.get_tensor_shape(self._output.name))
            result = torch.empty(sizes, dtype=getattr(torch, self._output.dtype), device="cuda")
            self._context.set_tensor_address(self._output.name, result.data_ptr())
            if not self._context.execute_async_v3(self._stream.cuda_stream):
                shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
                raise ConversionError(f"TensorRT did not run the engine on inputs of {shapes}")
            answers: interface.Float32Array = result.cpu().numpy()  # waits for the stream
        return answers
