"""One model of a Triton repository: its tensors and settings, and the text that Triton reads.

Is a model configuration one that Triton will take?
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from tasks.contracts.conversion import Signature, TensorSpec
from tasks.conversion.config import TritonConfig
from tasks.conversion.targets.interface import Array
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import tool_python

CONFIG_FILE = "config.pbtxt"
WARMUP_FOLDER = "warmup"
BACKENDS = Path(__file__).parent
BACKEND_MODULES = (
    "tasks.conversion.triton.onnx_backend",
    "tasks.conversion.triton.tokenizer_backend",
)
"""Copied into a repository, not imported."""
TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float32": "TYPE_FP32",
}
TEXT_TYPE = "TYPE_STRING"
ANY_LENGTH = -1
MAX_QUEUE_REQUESTS = 256
"""Requests that wait; a further one is refused."""
WARMUP_ROWS = (1, 32)
"""Of the executions before a model is ready: a single request and a dynamic batch."""


class Word(str):
    """A name that Triton knows, which is written without quotes."""


@dataclass(frozen=True)
class Tensor:
    """An input or output as Triton knows it; the rows, its first axis, are left out."""

    name: str
    dtype: str
    dims: tuple[int, ...]

    @classmethod
    def of(cls, spec: TensorSpec) -> Tensor:
        """The tensor of a signature."""
        dims = tuple(ANY_LENGTH if isinstance(axis, str) else axis for axis in spec.shape[1:])
        return cls(spec.name, TYPES[spec.dtype], dims)

    @property
    def described(self) -> dict[str, Any]:
        """For the configuration. Triton has no tensor without an axis beside the rows.

        One number a row is declared, and sent, as an axis of length 1 that the model does not see.
        """
        named: dict[str, Any] = {"name": self.name, "data_type": Word(self.dtype)}
        if self.dims:
            return {**named, "dims": list(self.dims)}
        return {**named, "dims": [1], "reshape": {"shape": []}}


@dataclass(frozen=True)
class Step:
    """One model of an ensemble; tensors have the same names in all of them."""

    model: TritonModel
    version: int


@dataclass(frozen=True)
class TritonModel:
    """One folder of a repository."""

    name: str
    backend: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_rows: int
    files: Mapping[str, Path] = field(default_factory=dict)
    """By the name that they get in the folder of the version."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    warmup: Mapping[str, Array] = field(default_factory=dict)
    """One row of each input."""
    steps: tuple[Step, ...] = ()
    """Of an ensemble, in their order; empty for any other model."""

    def config(self, version: int, kind: str, config: TritonConfig) -> dict[str, Any]:
        """The configuration of the model.

        Args:
            version: the one that is served.
            kind: of the devices it runs on: `KIND_CPU` or `KIND_GPU`.
            config: how it is served.
        """
        fields: dict[str, Any] = {
            "name": self.name,
            "max_batch_size": self.max_batch_rows,
            "input": [tensor.described for tensor in self.inputs],
            "output": [tensor.described for tensor in self.outputs],
            "version_policy": {"specific": {"versions": [version]}},
            "parameters": [
                {"key": key, "value": {"string_value": value}}
                for key, value in sorted(self.parameters.items())
            ],
        }
        if self.steps:
            plain = {side: _without_reshape(fields[side]) for side in ("input", "output")}
            scheduling = {"ensemble_scheduling": self._scheduling()}
            return {**fields, **plain, "platform": "ensemble", **scheduling}
        return {
            **fields,
            "backend": self.backend,
            "instance_group": [{"count": config.instances, "kind": Word(kind)}],
            "dynamic_batching": _batching(config),
            "model_warmup": self._warmups(),
        }

    def _scheduling(self) -> dict[str, Any]:
        return {
            "step": [
                {
                    "model_name": step.model.name,
                    "model_version": step.version,
                    "input_map": _same_names(step.model.inputs),
                    "output_map": _same_names(step.model.outputs),
                }
                for step in self.steps
            ]
        }

    def _warmups(self) -> list[dict[str, Any]]:
        return [
            {
                "name": f"rows_{rows}",
                "batch_size": rows,
                "inputs": [
                    {
                        "key": name,
                        "value": {
                            "data_type": Word(TYPES[str(row.dtype)]),
                            "dims": list(row.shape[1:]),
                            "input_data_file": name,
                        },
                    }
                    for name, row in sorted(self.warmup.items())
                ],
            }
            for rows in WARMUP_ROWS
            if self.warmup and rows <= self.max_batch_rows
        ]


def _same_names(tensors: tuple[Tensor, ...]) -> list[dict[str, str]]:
    return [{"key": tensor.name, "value": tensor.name} for tensor in tensors]


def _without_reshape(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of an ensemble, which hands tensors on as its models send them."""
    return [{k: v for k, v in tensor.items() if k != "reshape"} for tensor in tensors]


def _batching(config: TritonConfig) -> dict[str, Any]:
    """Late requests are rejected: a queue without a bound computes what nobody awaits any more."""
    return {
        "max_queue_delay_microseconds": config.max_wait_us,
        "default_queue_policy": {
            "timeout_action": Word("REJECT"),
            "default_timeout_microseconds": config.timeout_ms * 1000,
            "max_queue_size": MAX_QUEUE_REQUESTS,
        },
    }


def tensors_of(signature: Signature) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs and outputs of a program."""
    return tuple(Tensor.of(spec) for spec in signature.inputs), (Tensor.of(signature.output),)


def as_text(fields: Mapping[str, Any], indent: str = "") -> str:
    """Values in the text format of protocol buffers, in which Triton reads a configuration."""
    return "".join(
        f"{indent}{name}{line}\n"
        for name, value in fields.items()
        for line in _lines(value, indent)
    )


def _lines(value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping):
        return [f" {{\n{as_text(value, indent + '  ')}{indent}}}"]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [line for item in value for line in _lines(item, indent)]
    if isinstance(value, list):
        return [f": [{', '.join(_scalar(item) for item in value)}]"]
    return [f": {_scalar(value)}"]


def _scalar(value: str | int) -> str:
    return str(value) if isinstance(value, Word | int) else json.dumps(value, ensure_ascii=False)


SCHEMA_FILE = "tritonclient/grpc/model_config_pb2.py"
SCHEMA_PACKAGE = "tritonclient"


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
