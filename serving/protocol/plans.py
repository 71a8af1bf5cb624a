"""How requests to one model are read and checked: made once from its signature."""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from serving.errors import BadRequestError
from serving.interfaces import Array
from serving.protocol.messages import InferRequest
from serving.protocol.tensors import DATATYPE_OF, Sent, array_of, decoder, exact, refused
from tasks.contracts.conversion import BATCH_AXIS, Signature, TensorSpec

_CODES = {"BOOL": "?", "UINT8": "B", "INT32": "i", "INT64": "q", "FP32": "f"}
"""Of `struct`, for the types that a signature may have."""


class Wanted(NamedTuple):
    """One output to send, and how."""

    name: str
    binary: bool


class InputPlan:
    """How one input is read and checked."""

    def __init__(self, spec: TensorSpec, largest: Mapping[str, int]) -> None:
        self.name = spec.name
        self.dtype = np.dtype(spec.dtype)
        self.datatype = DATATYPE_OF[self.dtype]
        self.shape = spec.shape
        self.largest = largest
        self._flat = decoder(self.dtype.kind, 1)

    def read(self, sent: Sent, axes: dict[str, int]) -> Array:
        """The array that was sent.

        Args:
            axes: lengths of the named axes so far; those of this input are added.

        Raises:
            BadRequestError: type, shape or data are not what the input takes.
        """
        self._check_shape(sent.shape, axes)
        if sent.text is not None and sent.datatype == self.datatype:
            try:
                # Three times as fast as numpy, for a list without nulls or lists in it.
                values = self._flat.decode(sent.text)
                if len(values) == math.prod(sent.shape):
                    packed = bytearray(len(values) * self.dtype.itemsize)
                    struct.pack_into(f"<{len(values)}{_CODES[self.datatype]}", packed, 0, *values)
                    return np.frombuffer(packed, self.dtype).reshape(sent.shape)
            except (msgspec.DecodeError, OverflowError, struct.error):
                pass  # what it is is said below
        return exact(self.name, array_of(sent), self.dtype)

    def _check_shape(self, shape: list[int], axes: dict[str, int]) -> None:
        if len(shape) != len(self.shape):
            raise refused(self.name, f"has {len(shape)} axes; expected {len(self.shape)}")
        for length, axis in zip(shape, self.shape, strict=True):
            if isinstance(axis, int):
                if length != axis:
                    raise refused(self.name, f"has shape {shape}; expected {list(self.shape)}")
                continue
            most = self.largest.get(axis, 2**62)
            if not 1 <= length <= most:
                raise refused(self.name, f"has shape {shape}; expected 1 to {most} along {axis!r}")
            if axes.setdefault(axis, length) != length:
                other = f"{axes[axis]} along {axis!r}, as another input"
                raise refused(self.name, f"has shape {shape}; expected {other}")


class ModelPlan:
    """How requests for one signature are read and checked."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.inputs = {spec.name: InputPlan(spec, signature.largest) for spec in signature.inputs}
        self.output = signature.output.name
        self._names = ", ".join(repr(name) for name in self.inputs)

    def arrays(self, inputs: Iterable[Sent]) -> tuple[dict[str, Array], int]:
        """All inputs of a request, and the rows that each has.

        Raises:
            BadRequestError: an input is absent, unknown, twice there, or not as it must be.
        """
        found: dict[str, Array] = {}
        axes: dict[str, int] = {}
        for sent in inputs:
            plan = self.inputs.get(sent.name)
            if plan is None:
                raise refused(sent.name, f"is none of the model's; it takes {self._names}")
            if sent.name in found:
                raise refused(sent.name, "is in the request twice")
            found[sent.name] = plan.read(sent, axes)
        if len(found) != len(self.inputs):
            absent = ", ".join(repr(name) for name in self.inputs if name not in found)
            raise BadRequestError(f"the request lacks {absent}; the model takes {self._names}")
        return found, axes[BATCH_AXIS]

    def wanted(self, request: InferRequest) -> Wanted:
        """How the output is sent.

        Raises:
            BadRequestError: another is asked for, or in a way that is not offered.
        """
        is_binary = request.parameters is not None and request.parameters.binary_data_output
        if not request.outputs:
            return Wanted(self.output, is_binary)
        self.check_outputs([output.name for output in request.outputs])
        parameters = request.outputs[0].parameters
        if parameters is None:
            return Wanted(self.output, is_binary)
        if (parameters.classification or parameters.shared_memory_region) is not None:
            raise BadRequestError(
                f"output {self.output!r} is asked for by classification or shared memory, which "
                "this server does not offer"
            )
        asked = parameters.binary_data
        return Wanted(self.output, is_binary if asked is None else asked)

    def check_outputs(self, names: Sequence[str]) -> None:
        """Refuse names of outputs that are not the model's one.

        Raises:
            BadRequestError: there is another, or it is there twice.
        """
        if list(names) != [self.output]:
            seen = [name[:100] for name in names[:10]]
            raise BadRequestError(f"outputs {seen} are asked for; the model gives {self.output!r}")
