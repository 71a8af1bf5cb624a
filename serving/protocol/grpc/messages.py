"""Messages of the model repository extension, which the protocol's package has not.

They are made in a pool of their own, as Triton's clients send them: in the protocol's service.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
_STRING, _BOOL, _INT64, _MESSAGE = 9, 8, 3, 11
_ONE, _MANY = 1, 3


@cache
def repository_messages() -> dict[str, Any]:
    """Message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="falaj_repository.proto", package="inference", syntax="proto3"
    )
    parameter = _add(file, "ModelRepositoryParameter")
    parameter.oneof_decl.add(name="parameter_choice")
    for number, (name, kind) in enumerate(
        (("bool_param", _BOOL), ("int64_param", _INT64), ("string_param", _STRING)), start=1
    ):
        parameter.field.add(name=name, number=number, type=kind, label=_ONE, oneof_index=0)
    _add(file, "RepositoryIndexRequest", ("repository_name", _STRING), ("ready", _BOOL))
    index = _add(file, "RepositoryIndexResponse")
    state = index.nested_type.add(name="ModelIndex")
    for number, name in enumerate(("name", "version", "state", "reason"), start=1):
        state.field.add(name=name, number=number, type=_STRING, label=_ONE)
    index.field.add(
        name="models",
        number=1,
        type=_MESSAGE,
        label=_MANY,
        type_name=".inference.RepositoryIndexResponse.ModelIndex",
    )
    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        asked = _add(file, f"{name}Request", ("repository_name", _STRING), ("model_name", _STRING))
        _add_parameters(asked)
        _add(file, f"{name}Response")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"inference.{message.name}")
        )
        for message in file.message_type
    }


def _add(file: Any, name: str, *fields: tuple[str, int]) -> Any:
    message = file.message_type.add(name=name)
    for number, (field, kind) in enumerate(fields, start=1):
        message.field.add(name=field, number=number, type=kind, label=_ONE)
    return message


def _add_parameters(message: Any) -> None:
    """A field `map<string, ModelRepositoryParameter> parameters = 3`."""
    entry = message.nested_type.add(name="ParametersEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_STRING, label=_ONE)
    entry.field.add(
        name="value",
        number=2,
        type=_MESSAGE,
        label=_ONE,
        type_name=".inference.ModelRepositoryParameter",
    )
    message.field.add(
        name="parameters",
        number=3,
        type=_MESSAGE,
        label=_MANY,
        type_name=f".inference.{message.name}.ParametersEntry",
    )
