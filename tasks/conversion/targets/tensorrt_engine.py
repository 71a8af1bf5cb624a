"""ONNX to a TensorRT engine: parse it, promise ranges of shapes, build.

The functions take TensorRT's module: `tensorrt` beside a graphics processor, or TensorRT-RTX's,
which has the same interface and builds without one. That runs in an environment of its own, so
nothing is imported here that such an environment lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tasks.kernel.errors import ConversionError

if TYPE_CHECKING:
    from tasks.contracts.conversion import Signature

TYPICAL_LENGTH = 32  # of an axis other than the rows, for which an engine is tuned


@dataclass(frozen=True)
class ShapeRange:
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
    from tasks.contracts.conversion import BATCH_AXIS

    names = {axis for spec in signature.inputs for axis in spec.shape if isinstance(axis, str)}
    most = {name: signature.largest.get(name, 0) for name in names}
    most[BATCH_AXIS] = min(most_rows, signature.largest.get(BATCH_AXIS, most_rows))
    if unbounded := sorted(name for name, length in most.items() if not length):
        raise ConversionError(
            f"nothing says how long the axes {', '.join(unbounded)} may be, and an engine is built "
            "for ranges of shapes; say so in the signature's `largest`"
        )
    typical = {name: min(TYPICAL_LENGTH, length) for name, length in most.items()}
    typical[BATCH_AXIS] = min(typical_rows, most[BATCH_AXIS])

    def shape(axes: tuple[str | int, ...], lengths: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(axis if isinstance(axis, int) else lengths[axis] for axis in axes)

    return {
        spec.name: ShapeRange(
            shape(spec.shape, dict.fromkeys(names, 1)),
            shape(spec.shape, typical),
            shape(spec.shape, most),
        )
        for spec in signature.inputs
    }


def is_supported(trt: Any, content: bytes) -> bool:
    """Whether TensorRT has an implementation of every node of an ONNX model."""
    _, network, log = _beginning(trt)  # a network for this alone: what is asked about stays in it
    return bool(trt.OnnxParser(network, log).supports_model_v2(content))


def build_plan(trt: Any, content: bytes, ranges: Mapping[str, ShapeRange]) -> bytes:
    """Build an engine whose precision is that of the ONNX model: no layer is made narrower.

    Args:
        trt: TensorRT's module.
        content: the ONNX model.
        ranges: of the shapes of each input.

    Returns:
        The engine, for this kind of device and this version of TensorRT alone.

    Raises:
        ConversionError: TensorRT cannot parse the model, or finds no implementation of it.
    """
    builder, network, log = _beginning(trt)
    parser = trt.OnnxParser(network, log)
    if not parser.parse(content):
        errors = [parser.get_error(position) for position in range(parser.num_errors)]
        told = [f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors]
        raise _refused("does not take the ONNX model", told or log.errors)
    profile = builder.create_optimization_profile()
    for name, shapes in ranges.items():
        profile.set_shape(name, shapes.least, shapes.typical, shapes.most)
    config = builder.create_builder_config()
    if config.add_optimization_profile(profile) < 0:
        raise _refused(f"does not take the shapes {dict(ranges)}", log.errors)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _refused("found no implementation of the model", log.errors)
    return bytes(plan)


def _beginning(trt: Any) -> tuple[Any, Any, Any]:
    """A builder, an empty network, and the log of what goes wrong from here on."""
    log = _log(trt)
    log.errors.clear()
    builder = trt.Builder(log)
    # TensorRT 10 has to be told; from 11 on there is nothing else.
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return builder, builder.create_network(strongly_typed), log


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
