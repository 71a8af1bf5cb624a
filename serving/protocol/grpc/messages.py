"""Inputs and outputs of `ModelInfer`: raw contents, or contents typed by a field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from serving.errors import BadRequestError
from serving.interfaces import Answer
from serving.protocol.plans import ModelPlan, Wanted
from serving.protocol.tensors import BYTES, DATATYPE_OF, Sent, refused

_FIELD = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def sent_inputs(request: Any) -> Iterator[Sent]:
    """Inputs of a `ModelInferRequest`, with their data.

    Raises:
        BadRequestError: some are raw and others typed, or a typed one lies in another's field.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequestError(
            f"the request has {len(request.inputs)} inputs and {len(raw)} raw_input_contents"
        )
    for number, tensor in enumerate(request.inputs):
        sent = Sent(tensor.name, tensor.datatype, list(tensor.shape))
        if not raw:
            yield sent._replace(items=_contents(tensor))
        elif tensor.HasField("contents"):
            raise refused(tensor.name, "has both contents and raw_input_contents; send one")
        else:
            yield sent._replace(raw=memoryview(raw[number]))


def _contents(tensor: Any) -> Any:
    field = _FIELD.get(tensor.datatype)
    if field is None:
        known = ", ".join(_FIELD)
        raise refused(
            tensor.name, f"has datatype {tensor.datatype[:40]!r}; expected one of {known}"
        )
    for odd, _ in tensor.contents.ListFields():
        if odd.name != field:
            raise refused(tensor.name, f"of {tensor.datatype} has {odd.name}; expected {field}")
    return getattr(tensor.contents, field)


def wanted_output(request: Any, plan: ModelPlan) -> Wanted:
    """How the output is sent: as raw contents where the inputs are.

    Raises:
        BadRequestError: the model does not give what is asked for.
    """
    if request.outputs:
        plan.check_outputs(list(dict.fromkeys(output.name for output in request.outputs)))
    return Wanted(plan.output, bool(request.raw_input_contents))


def fill_answer(response: Any, answer: Answer, wanted: Wanted) -> None:
    """Put the output into a `ModelInferResponse`."""
    array = answer.outputs[wanted.name]
    datatype = DATATYPE_OF[array.dtype]
    tensor = response.outputs.add(name=wanted.name, datatype=datatype, shape=array.shape)
    if wanted.binary:
        response.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
    else:
        getattr(tensor.contents, _FIELD[datatype]).extend(array.ravel().tolist())
