"""Tensors of the gRPC form of the protocol: raw contents, or contents typed by a field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.calls import Answer, Array
from serving.errors import BadRequestError
from serving.protocol.keys import (
    check_lengths,
    numbers_type,
    refuse_twice,
    split_bytes,
    texts_of,
    values_of,
)
from serving.protocol.messages import BYTES, MOST_AXES, NUMPY_OF, InputTensor, datatype_of
from serving.protocol.plans import ModelPlan, Wanted

_FIELD = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def read_arrays(request: Any, plan: ModelPlan) -> dict[str, Array]:
    """All inputs of a `ModelInferRequest`.

    Raises:
        BadRequestError: an input is absent, unknown, twice there, or not as it must be.
    """
    raw = _raw_of(request)
    found: dict[str, Array] = {}
    axes: dict[str, int] = {}
    for number, tensor in enumerate(request.inputs):
        one = plan.plan_of(tensor.name, found)
        if raw is not None:
            told = InputTensor(tensor.name, tensor.datatype, list(tensor.shape))
            found[tensor.name] = one.read_binary(told, memoryview(raw[number]), axes)
        else:
            found[tensor.name] = one.take(_typed(tensor), axes)
    plan.check_complete(found)
    return found


def read_key_columns(request: Any) -> dict[str, list[Any]]:
    """Columns of a request that names entities; the reader judges which there have to be.

    Raises:
        BadRequestError: one is there twice, or is no column.
    """
    raw = _raw_of(request)
    found: dict[str, list[Any]] = {}
    for number, tensor in enumerate(request.inputs):
        refuse_twice(tensor.name, found)
        found[tensor.name] = _column(tensor, None if raw is None else raw[number])
    check_lengths(found)
    return found


def wanted_outputs(request: Any, plan: ModelPlan) -> tuple[Wanted, ...]:
    """Outputs to send, as raw contents where the inputs are.

    Raises:
        BadRequestError: the model does not give one.
    """
    names = [output.name for output in request.outputs]
    for name in names:
        plan.check_output(name)
    binary = bool(request.raw_input_contents)
    return tuple(Wanted(name, binary) for name in dict.fromkeys(names or [plan.output]))


def fill_answer(response: Any, answer: Answer, wanted: Sequence[Wanted]) -> None:
    """Put outputs into a `ModelInferResponse`."""
    for one in wanted:
        array = answer.outputs[one.name]
        datatype = datatype_of(array)
        tensor = response.outputs.add(name=one.name, datatype=datatype, shape=array.shape)
        if one.binary:
            response.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
        else:
            getattr(tensor.contents, _FIELD[datatype]).extend(array.ravel().tolist())


def _raw_of(request: Any) -> Sequence[bytes] | None:
    raw: Sequence[bytes] = request.raw_input_contents
    if not raw:
        return None
    if len(raw) != len(request.inputs):
        raise BadRequestError(
            f"the request has {len(request.inputs)} inputs and {len(raw)} raw_input_contents; "
            "expected one of the latter for each input, or none"
        )
    if any(tensor.HasField("contents") for tensor in request.inputs):
        raise BadRequestError("the request has both contents and raw_input_contents; send one")
    return raw


def _contents(tensor: Any) -> Any:
    field = _FIELD.get(tensor.datatype)
    if field is None:
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has datatype {tensor.datatype[:40]!r} in typed contents; "
            f"expected one of {', '.join(_FIELD)}, or raw_input_contents"
        )
    odd = [f.name for f, _ in tensor.contents.ListFields() if f.name != field]
    if odd:
        raise BadRequestError(
            f"input {tensor.name[:100]!r} of {tensor.datatype} has {odd[0]}; expected {field}"
        )
    return getattr(tensor.contents, field)


def _typed(tensor: Any) -> Array:
    values = _contents(tensor)
    if len(tensor.shape) > MOST_AXES:
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has {len(tensor.shape)} axes; expected at most "
            f"{MOST_AXES}"
        )
    if tensor.datatype == BYTES:
        raise BadRequestError(f"input {tensor.name[:100]!r} is sent as BYTES; expected numbers")
    shape = tuple(tensor.shape)
    size = 1
    for length in shape:
        size *= max(length, 0)
    if size != len(values) or not shape:
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has {len(values)} values; its shape {list(shape)} takes "
            f"{size}"
        )
    if not size:
        # numpy has no arrays of some such shapes, and no input takes any of them.
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has shape {list(shape)}, which holds no value"
        )
    try:
        return np.array(values, NUMPY_OF[tensor.datatype]).reshape(shape)
    except OverflowError as exc:
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has a number beyond {tensor.datatype}: {exc}"
        ) from exc


def _column(tensor: Any, raw: bytes | None) -> list[Any]:
    sent = None if tensor.datatype == BYTES else numbers_type(tensor.name, tensor.datatype)
    values: list[Any]
    if raw is None:
        values = list(_contents(tensor))
        if sent is not None and sent.kind == "f":
            values = values_of(tensor.name, np.array(values, sent))
    elif sent is None:
        values = split_bytes(tensor.name, memoryview(raw))
    elif len(raw) % sent.itemsize:
        raise BadRequestError(f"input {tensor.name[:100]!r}: its raw contents end inside a number")
    else:
        values = values_of(tensor.name, np.frombuffer(raw, sent))
    shape = list(tensor.shape)
    if not values or shape not in ([len(values)], [len(values), 1]):
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has {len(values)} values and shape {shape}; a request by "
            "entities has columns, of shape [rows] or [rows, 1]"
        )
    return values if sent is not None else list(texts_of(tensor.name, values))
