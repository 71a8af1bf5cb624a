"""Checks of requests against a model's signature, prepared once for each signature.

Numbers of missing values: `null` in JSON and NaN in binary data are the same to an FP32 input;
infinity is refused, and so is `null` where whole numbers are expected.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from serving.calls import Array
from serving.errors import BadRequestError
from serving.protocol.messages import (
    KNOWN,
    MOST_AXES,
    NO_DATA,
    NUMPY_OF,
    InferRequest,
    InputTensor,
    datatype_of,
    exact,
    refuse_infinite,
)
from tasks.contracts.conversion import BATCH_AXIS, Signature, TensorSpec

_ITEM_TYPE: dict[str, Any] = {"f": float, "i": int, "u": int, "b": bool}
_DECODERS: dict[tuple[str, int], msgspec.json.Decoder[Any]] = {}
_CODES = {"BOOL": "?", "UINT8": "B", "INT32": "i", "INT64": "q", "FP32": "f"}
"""Of `struct`, for the types that a signature may have."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One output to send, and how."""

    name: str
    binary: bool


class InputPlan:
    """How one input is read and checked."""

    def __init__(self, spec: TensorSpec, largest: Mapping[str, int]) -> None:
        self.name = spec.name
        self.dtype = np.dtype(spec.dtype)
        self.datatype = datatype_of(np.empty(0, self.dtype))
        self.shape = spec.shape
        self.largest = largest
        lengths = [length for length in spec.shape[1:] if isinstance(length, int)]
        self._fixed = lengths if len(lengths) == len(spec.shape) - 1 else None
        self._row_size: int = math.prod(lengths)
        self._most_rows = largest.get(str(spec.shape[0]), 2**62)
        self._flat = _decoder(self.dtype.kind, 1)
        self._code = _CODES[self.datatype]

    def read(self, tensor: InputTensor, axes: dict[str, int]) -> Array:
        """The array that a JSON tensor describes.

        Args:
            axes: lengths of the named axes so far; those of this input are added.

        Raises:
            BadRequestError: type, shape or data are not what the input takes.
        """
        if tensor.datatype != self.datatype:
            return exact(self.name, self._read_other(tensor, axes), self.dtype)
        size = self.check_shape(tensor.shape, axes)
        try:
            values = self._flat.decode(tensor.data)
            if len(values) != size:
                raise self._wrong_size(tensor.shape, size, len(values))
            return _packed(values, self._code, self.dtype).reshape(tensor.shape)
        except (msgspec.DecodeError, OverflowError, struct.error):
            return _slowly(self.name, tensor, self.dtype).reshape(tensor.shape)

    def read_binary(self, tensor: InputTensor, data: memoryview, axes: dict[str, int]) -> Array:
        """The array that lies in binary data, little-endian; a copy, aligned."""
        sent = _numeric(self.name, tensor.datatype)
        size = self.check_shape(tensor.shape, axes)
        if len(data) != size * sent.itemsize:
            raise BadRequestError(
                f"input {self.name!r} has {len(data)} bytes of binary data; shape {tensor.shape} "
                f"of {tensor.datatype} takes {size * sent.itemsize}"
            )
        if sent.kind == "b":
            return _booleans(self.name, data).reshape(tensor.shape)
        array = np.frombuffer(data, sent).reshape(tensor.shape).copy()
        refuse_infinite(self.name, array)
        return exact(self.name, array, self.dtype)

    def take(self, array: Array, axes: dict[str, int]) -> Array:
        """The array of another protocol's typed tensor, checked."""
        self.check_shape(list(array.shape), axes)
        refuse_infinite(self.name, array)
        return exact(self.name, array, self.dtype)

    def check_shape(self, shape: list[int], axes: dict[str, int]) -> int:
        """Number of values of a shape that the input takes.

        Raises:
            BadRequestError: it does not take this shape.
        """
        if self._fixed is not None and shape[1:] == self._fixed and shape:
            rows = shape[0]
            if 0 < rows <= self._most_rows and axes.setdefault(str(self.shape[0]), rows) == rows:
                return rows * self._row_size
        if len(shape) != len(self.shape):
            raise self._wrong_shape(shape, f"{len(self.shape)} axes")
        for length, axis in zip(shape, self.shape, strict=True):
            self._check_axis(shape, length, axis, axes)
        return math.prod(shape)

    def _check_axis(
        self, shape: list[int], length: int, axis: str | int, axes: dict[str, int]
    ) -> None:
        if isinstance(axis, int):
            if length != axis:
                raise self._wrong_shape(shape, f"{list(self.shape)}")
            return
        if length < 1:
            raise self._wrong_shape(shape, f"at least 1 along {axis!r}")
        most = self.largest.get(axis)
        if most is not None and length > most:
            raise self._wrong_shape(shape, f"at most {most} along {axis!r}")
        if axes.setdefault(axis, length) != length:
            raise self._wrong_shape(
                shape, f"{axes[axis]} along {axis!r}, as another input of the request has"
            )

    def _wrong_shape(self, shape: list[int], expected: str) -> BadRequestError:
        return BadRequestError(f"input {self.name!r} has shape {shape}; expected {expected}")

    def _wrong_size(self, shape: list[int], size: int, seen: int) -> BadRequestError:
        return BadRequestError(
            f"input {self.name!r} has {seen} values; its shape {shape} takes {size}"
        )

    def _read_other(self, tensor: InputTensor, axes: dict[str, int]) -> Array:
        sent = _numeric(self.name, tensor.datatype)
        self.check_shape(tensor.shape, axes)
        array = _slowly(self.name, tensor, sent)
        refuse_infinite(self.name, array)
        return array.reshape(tensor.shape)


class ModelPlan:
    """How requests for one signature are read and checked."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.inputs = {spec.name: InputPlan(spec, signature.largest) for spec in signature.inputs}
        self.output = signature.output.name
        self._all = (Wanted(self.output, False),)
        self._all_binary = (Wanted(self.output, True),)
        self._names = ", ".join(repr(name) for name in self.inputs)

    def arrays(
        self, request: InferRequest, binary: memoryview | None
    ) -> tuple[dict[str, Array], int]:
        """All inputs of a request, and the rows that each has.

        Raises:
            BadRequestError: an input is absent, unknown, twice there, or not as it must be.
        """
        found: dict[str, Array] = {}
        axes: dict[str, int] = {}
        position = 0
        for tensor in request.inputs:
            plan = self.plan_of(tensor.name, found)
            parameters = tensor.parameters
            if parameters is None or parameters.binary_data_size is None:
                refuse_odd_source(tensor)
                found[tensor.name] = plan.read(tensor, axes)
            else:
                data, position = binary_part(tensor, binary, position)
                found[tensor.name] = plan.read_binary(tensor, data, axes)
        refuse_left_over(binary, position)
        self.check_complete(found)
        return found, axes[BATCH_AXIS]

    def plan_of(self, name: str, found: Mapping[str, object]) -> InputPlan:
        """How an input of this name is read.

        Raises:
            BadRequestError: there is none, or it was there already.
        """
        plan = self.inputs.get(name)
        if plan is None:
            raise BadRequestError(f"the model has no input {name[:100]!r}; it takes {self._names}")
        if name in found:
            raise BadRequestError(f"input {name!r} is in the request twice")
        return plan

    def check_complete(self, found: Mapping[str, object]) -> None:
        """Refuse a request that lacks an input.

        Raises:
            BadRequestError: one is absent.
        """
        if len(found) != len(self.inputs):
            absent = ", ".join(repr(name) for name in self.inputs if name not in found)
            raise BadRequestError(f"the request lacks {absent}; the model takes {self._names}")

    def wanted(self, request: InferRequest) -> tuple[Wanted, ...]:
        """Outputs to send: those asked for, else all.

        Raises:
            BadRequestError: there is no such output, or it is asked for in a way not offered.
        """
        told = request.parameters is not None and request.parameters.binary_data_output
        if not request.outputs:
            return self._all_binary if told else self._all
        wanted: list[Wanted] = []
        for output in request.outputs:
            self.check_output(output.name)
            if output.name in (one.name for one in wanted):
                raise BadRequestError(f"output {output.name!r} is asked for twice")
            said = output.parameters
            if said is not None and (said.classification or said.shared_memory_region) is not None:
                raise BadRequestError(
                    f"output {output.name!r} is asked for by classification or shared memory, "
                    "which this server does not offer"
                )
            binary = said.binary_data if said is not None else None
            wanted.append(Wanted(output.name, told if binary is None else binary))
        return tuple(wanted)

    def check_output(self, name: str) -> None:
        """Refuse a name that no output bears.

        Raises:
            BadRequestError: the model does not give it.
        """
        if name != self.output:
            raise BadRequestError(
                f"the model has no output {name[:100]!r}; it gives {self.output!r}"
            )


def refuse_odd_source(tensor: InputTensor) -> None:
    """Refuse a tensor without data, or with data in shared memory.

    Raises:
        BadRequestError: it is one.
    """
    if tensor.parameters is not None and tensor.parameters.shared_memory_region is not None:
        raise BadRequestError(
            f"input {tensor.name!r} lies in shared memory, which this server does not read"
        )
    if tensor.data is NO_DATA:
        raise BadRequestError(
            f"input {tensor.name!r} has neither `data` nor the parameter binary_data_size"
        )


def binary_part(
    tensor: InputTensor, binary: memoryview | None, position: int
) -> tuple[memoryview, int]:
    """A tensor's part of the binary data, and where the next one starts.

    Raises:
        BadRequestError: there is no binary data, or too little, or `data` is there too.
    """
    assert tensor.parameters is not None
    size = tensor.parameters.binary_data_size
    assert size is not None
    if binary is None:
        raise BadRequestError(
            f"input {tensor.name!r} says binary_data_size={size}, but the request has no header "
            "Inference-Header-Content-Length"
        )
    if tensor.data is not NO_DATA:
        raise BadRequestError(f"input {tensor.name!r} has both `data` and binary_data_size")
    if position + size > len(binary):
        raise BadRequestError(
            f"input {tensor.name!r} says binary_data_size={size}; {len(binary) - position} bytes "
            "of binary data are left"
        )
    return binary[position : position + size], position + size


def refuse_left_over(binary: memoryview | None, position: int) -> None:
    """Refuse binary data that belongs to no tensor.

    Raises:
        BadRequestError: some is left.
    """
    if binary is not None and position != len(binary):
        raise BadRequestError(
            f"{len(binary) - position} bytes of binary data belong to no input; check "
            "Inference-Header-Content-Length and the inputs' binary_data_size"
        )


def _decoder(kind: str, depth: int) -> msgspec.json.Decoder[Any]:
    """Reads lists of lists, `depth` deep, of a numpy kind; kind `n` is floats with nulls."""
    key = (kind, depth)
    if key not in _DECODERS:
        item: Any = float | None if kind == "n" else _ITEM_TYPE[kind]
        for _ in range(depth):
            item = list[item]
        _DECODERS[key] = msgspec.json.Decoder(item)
    return _DECODERS[key]


def _packed(values: Sequence[Any], code: str, dtype: np.dtype[np.generic]) -> Array:
    """A list as an array that may be written to; three times as fast as numpy makes it.

    Raises:
        OverflowError, struct.error: a number is beyond the type.
    """
    buffer = bytearray(len(values) * dtype.itemsize)
    struct.pack_into(f"<{len(values)}{code}", buffer, 0, *values)
    return np.frombuffer(buffer, dtype)


def _slowly(name: str, tensor: InputTensor, sent: np.dtype[np.generic]) -> Array:
    """Values of a tensor that may be nested or hold nulls, flat."""
    text = bytes(tensor.data).lstrip()
    nested = text[1:].lstrip()[:1] == b"["
    depth = min(len(tensor.shape), MOST_AXES) if nested else 1
    kind = "n" if sent.kind == "f" else sent.kind
    try:
        values = _decoder(kind, depth).decode(text)
        if nested:
            values = _flat(name, values, tensor.shape)
        if len(values) != math.prod(tensor.shape):
            raise BadRequestError(
                f"input {name!r} has {len(values)} values; its shape {tensor.shape} takes "
                f"{math.prod(tensor.shape)}"
            )
        with np.errstate(over="raise"):
            return np.array(values, sent)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequestError(
            f"input {name!r}: its data is not what {tensor.datatype} takes: {exc}"
        ) from exc
    except (OverflowError, FloatingPointError) as exc:
        raise BadRequestError(
            f"input {name!r} has a number beyond {tensor.datatype}: {exc}"
        ) from exc


def _flat(name: str, values: Any, shape: Sequence[int]) -> list[Any]:
    """Values of lists in lists, which have the lengths that the shape says."""
    for axis, length in enumerate(shape[:-1]):
        if len(values) != math.prod(shape[: axis + 1]):
            raise BadRequestError(
                f"input {name!r}: its nested data has not {length} entries along axis {axis}, as "
                f"its shape {list(shape)} says"
            )
        if any(len(value) != shape[axis + 1] for value in values):
            raise BadRequestError(
                f"input {name!r}: its nested data has not {shape[axis + 1]} entries along axis "
                f"{axis + 1}, as its shape {list(shape)} says"
            )
        values = [item for value in values for item in value]
    return list(values)


def _numeric(name: str, datatype: str) -> np.dtype[np.generic]:
    sent = NUMPY_OF.get(datatype)
    if sent is None:
        raise BadRequestError(
            f"input {name!r} has datatype {datatype[:40]!r}; expected one of {KNOWN}"
        )
    return sent


def _booleans(name: str, data: memoryview) -> Array:
    values = np.frombuffer(data, np.uint8)
    if values.size and values.max() > 1:
        raise BadRequestError(f"input {name!r}: a byte of BOOL is 0 or 1, seen {values.max()}")
    return values.astype(np.bool_)
