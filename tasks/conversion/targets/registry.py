"""All targets of the conversion, from simple to complex, and what a choice of them takes."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.conversion.targets.interface import Target
from tasks.conversion.targets.litert_targets import LITERT_FP32
from tasks.conversion.targets.onnx_targets import ONNX_FP16, ONNX_FP32, ONNX_INT8
from tasks.conversion.targets.openvino_targets import (
    OPENVINO_BF16,
    OPENVINO_FP32,
    OPENVINO_INT8,
    OPENVINO_WEIGHTS_INT8,
)
from tasks.conversion.targets.tensorrt_targets import TENSORRT_FP16, TENSORRT_INT8
from tasks.kernel.errors import ConfigurationError

# A later target is judged against the earlier ones, and is made from earlier ones only.
TARGETS = (
    ONNX_FP32,
    OPENVINO_FP32,
    LITERT_FP32,
    OPENVINO_BF16,
    OPENVINO_WEIGHTS_INT8,
    ONNX_INT8,
    OPENVINO_INT8,
    ONNX_FP16,
    TENSORRT_FP16,
    TENSORRT_INT8,
)
TARGET = {target.name: target for target in TARGETS}
PRECISIONS = tuple(dict.fromkeys(target.precision for target in TARGETS))


def target_of(name: str) -> Target:
    """The target of a name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in TARGET:
        raise ConfigurationError(f"there is no target {name!r}; there are {', '.join(TARGET)}")
    return TARGET[name]


def with_sources(names: Iterable[str]) -> tuple[Target, ...]:
    """These targets and all that they are made from, each after what it is made from."""
    needed = set(names)
    for target in reversed(TARGETS):
        if target.name in needed:
            needed.update(target.made_from)
    return tuple(target for target in TARGETS if target.name in needed)
