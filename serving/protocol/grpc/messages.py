"""Messages of gRPC: inputs and outputs of `ModelInfer`, and those of the model repository.

Inputs are raw contents, or contents typed by a field. The messages of the repository are not in the
protocol's package; they are made in a pool of their own, as Triton's clients send them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from serving.calls import Answer
from serving.errors import BadRequestError
from serving.protocol.plans import ModelPlan, Wanted
from serving.protocol.tensors import BYTES, DATATYPE_OF, Sent, refused

SERVICE = "inference.GRPCInferenceService"
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


_STRING, _BOOL, _INT64, _MESSAGE = 9, 8, 3, 11
_ONE, _MANY = 1, 3


@cache
def repository_messages() -> dict[str, Any]:
    """Message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="falaj_repository.proto", package="inference", syntax="proto3"
    )
    values = [("bool_param", _BOOL), ("int64_param", _INT64), ("string_param", _STRING)]
    parameter = _add(file.message_type, "ModelRepositoryParameter", *values)
    parameter.oneof_decl.add(name="parameter_choice")
    for field in parameter.field:
        field.oneof_index = 0
    _add(
        file.message_type, "RepositoryIndexRequest", ("repository_name", _STRING), ("ready", _BOOL)
    )
    index = _add(file.message_type, "RepositoryIndexResponse")
    states = [(name, _STRING) for name in ("name", "version", "state", "reason")]
    _add(index.nested_type, "ModelIndex", *states)
    _add_many(index, "models", 1, "RepositoryIndexResponse.ModelIndex")
    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        asked = [("repository_name", _STRING), ("model_name", _STRING)]
        request = _add(file.message_type, f"{name}Request", *asked)
        entry = _add(request.nested_type, "ParametersEntry", ("key", _STRING), ("value", _MESSAGE))
        entry.options.map_entry = True
        entry.field[1].type_name = ".inference.ModelRepositoryParameter"
        _add_many(request, "parameters", 3, f"{name}Request.ParametersEntry")
        _add(file.message_type, f"{name}Response")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"inference.{message.name}")
        )
        for message in file.message_type
    }


def _add(to: Any, name: str, *fields: tuple[str, int]) -> Any:
    message = to.add(name=name)
    for number, (field, kind) in enumerate(fields, start=1):
        message.field.add(name=field, number=number, type=kind, label=_ONE)
    return message


def _add_many(message: Any, name: str, number: int, kind: str) -> None:
    message.field.add(
        name=name, number=number, type=_MESSAGE, label=_MANY, type_name=f".inference.{kind}"
    )
