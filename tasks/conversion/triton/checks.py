"""Is a model repository what Triton will take, and does it say what the model files say?

Triton's schema lets nonsense pass, and a server finds it when it loads the model; or not even then.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import onnx

from tasks.conversion.triton.model import (
    ANY_LENGTH,
    CONFIG_FILE,
    TYPES,
    WARMUP_FOLDER,
    Tensor,
    TritonModel,
)
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import tool_python

ONNX_FILE = "model.onnx"
SCHEMA_FILE = "tritonclient/grpc/model_config_pb2.py"
SCHEMA_PACKAGE = "tritonclient"


def check_repository(models: tuple[TritonModel, ...], version: int, folder: Path) -> None:
    """Compare what was written with the model files, and the models with each other.

    Raises:
        ConversionError: a file is missing, or tensors, types, lengths or steps do not agree.
    """
    problems: list[str] = []
    for model in models:
        home = folder / model.name
        wanted = [home / CONFIG_FILE, home / str(version)]
        wanted += [home / str(version) / name for name in model.files]
        wanted += [home / WARMUP_FOLDER / name for name in model.warmup]
        problems += [
            f"{path.relative_to(folder)} is missing" for path in wanted if not path.exists()
        ]
        problems += [f"{model.name}: {text}" for text in _warmup_problems(model)]
        if ONNX_FILE in model.files:
            problems += [f"{model.name}: {text}" for text in _onnx_problems(model)]
        problems += [f"{model.name}: {text}" for text in _step_problems(model, models, version)]
    if problems:
        raise ConversionError(
            f"the model repository is not one that Triton could serve: {'; '.join(problems)}. "
            "Nothing was kept of it"
        )


def _onnx_problems(model: TritonModel) -> list[str]:
    """Where the configuration says something else than the ONNX file."""
    graph = onnx.load(model.files[ONNX_FILE], load_external_data=False).graph
    problems = []
    for declared, values in ((model.inputs, graph.input), (model.outputs, graph.output)):
        seen = {value.name: _seen(value) for value in values}
        if sorted(seen) != sorted(tensor.name for tensor in declared):
            names = [tensor.name for tensor in declared]
            problems.append(f"it names {names}, the ONNX file {sorted(seen)}")
            continue
        for tensor in declared:
            dtype, first, dims = seen[tensor.name]
            if (tensor.dtype, tensor.dims) != (dtype, dims):
                problems.append(
                    f"{tensor.name} is {tensor.dtype} {list(tensor.dims)}, in the ONNX file "
                    f"{dtype} {list(dims)}"
                )
            if first != ANY_LENGTH:
                problems.append(f"{tensor.name} takes {first} rows in the ONNX file, and no others")
    return problems


def _seen(value: onnx.ValueInfoProto) -> tuple[str, int, tuple[int, ...]]:
    tensor = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    first, *dims = (ANY_LENGTH if d.dim_param else d.dim_value for d in tensor.shape.dim)
    return TYPES.get(dtype, dtype), first, tuple(dims)


def _warmup_problems(model: TritonModel) -> list[str]:
    if not model.warmup:
        return []
    problems = []
    for tensor in model.inputs:
        row = model.warmup.get(tensor.name)
        if row is None or len(row) != 1 or not _fit(row.shape[1:], tensor.dims):
            seen = None if row is None else list(row.shape)
            problems.append(f"no warm-up row fits {tensor.name} {list(tensor.dims)}: {seen}")
        elif TYPES.get(str(row.dtype)) != tensor.dtype:
            problems.append(
                f"the warm-up row of {tensor.name} is {row.dtype}, expected {tensor.dtype}"
            )
    return problems


def _fit(dims: tuple[int, ...], promised: tuple[int, ...]) -> bool:
    return len(dims) == len(promised) and all(
        length in (axis, ANY_LENGTH) or axis == ANY_LENGTH
        for length, axis in zip(dims, promised, strict=True)
    )


def _step_problems(model: TritonModel, models: tuple[TritonModel, ...], version: int) -> list[str]:
    """Where the steps of an ensemble do not join: each takes what is there by then."""
    if not model.steps:
        return []
    there: dict[str, Tensor] = {tensor.name: tensor for tensor in model.inputs}
    problems = []
    for step in model.steps:
        if step.model not in models or step.version != version:
            problems.append(f"{step.model.name} version {step.version} is not in the repository")
        if step.model.max_batch_rows < model.max_batch_rows:
            problems.append(f"{step.model.name} takes {step.model.max_batch_rows} rows, it more")
        problems += [
            f"{step.model.name} takes {_described(tensor)}, there is {_described(given)}"
            for tensor in step.model.inputs
            if not _joins(given := there.get(tensor.name), tensor)
        ]
        there |= {tensor.name: tensor for tensor in step.model.outputs}
    problems += [
        f"it gives {_described(tensor)}, its steps {_described(there.get(tensor.name))}"
        for tensor in model.outputs
        if not _joins(there.get(tensor.name), tensor)
    ]
    return problems


def _joins(given: Tensor | None, taken: Tensor) -> bool:
    return given is not None and given.dtype == taken.dtype and _fit(given.dims, taken.dims)


def _described(tensor: Tensor | None) -> str:
    return f"{tensor.name} {tensor.dtype} {list(tensor.dims)}" if tensor else "no such tensor"


def check_schema(text: str, name: str) -> str:
    """Parse a configuration with Triton's own schema.

    Args:
        text: what `config.pbtxt` says.
        name: of the model.

    Returns:
        Whose schema it was; empty where there is none on this machine.

    Raises:
        ConversionError: it has fields or values that Triton does not know.
    """
    found = _schema()
    if found is None:
        return ""
    from google.protobuf import text_format

    message, schema = found
    try:
        text_format.Parse(text, message())
    except text_format.ParseError as exc:
        raise ConversionError(
            f"the configuration of {name} is not one of Triton's: {exc}. Nothing was kept of it"
        ) from exc
    return schema


@cache
def _schema() -> tuple[Any, str] | None:
    """The message `ModelConfig` of Triton's client, and which version of it.

    The file alone is executed: its package wants a protobuf older than the project's, which the
    generated code runs under all the same. It is looked for here, and in the environment of Triton.
    """
    path = _schema_file()
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("falaj_triton_model_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (info,) = path.parents[2].glob(f"{SCHEMA_PACKAGE}-*.dist-info")
    return module.ModelConfig, info.name.removesuffix(".dist-info").replace("-", " ")


def _schema_file() -> Path | None:
    try:
        return Path(str(distribution(SCHEMA_PACKAGE).locate_file(SCHEMA_FILE)))
    except PackageNotFoundError:
        python = tool_python("triton")
        found = python.parents[1].glob(f"lib/*/site-packages/{SCHEMA_FILE}") if python else ()
        return next(iter(found), None)
