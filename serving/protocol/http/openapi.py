"""What the public listener offers besides answers, as one table, and the OpenAPI document of it."""

from functools import cache
from typing import Any, NamedTuple

import msgspec

from serving.interfaces import Action
from serving.protocol.answers import InferAnswer
from serving.protocol.messages import InferRequest, server_metadata
from serving.protocol.tensors import BYTES, NUMPY_OF

_TEXT = {"type": "string"}
_INFER_HEADERS = {
    "x-request-id": "Named in the answer and in all records; made here if absent.",
    "x-falaj-timeout-ms": "Whole milliseconds after which no answer is wanted; 504 then.",
    "inference-header-content-length": "Bytes of JSON before binary tensors.",
    "traceparent": "W3C trace context.",
}
_REFUSED = (
    "Refused, with a sentence that says why: 400, 401, 403, 404, 408, 413, 415, 422, 429, 431, "
    "500, 503 or 504; `Retry-After` where trying again helps."
)


class Ready(msgspec.Struct):
    """Whether the server or a model answers."""

    ready: bool
    name: str = ""
    reason: str = ""


class Tensor(msgspec.Struct):
    """A tensor that a model takes or gives; an axis of any length is -1."""

    name: str
    datatype: str
    shape: list[int]


class Metadata(msgspec.Struct):
    """A model's versions and tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    properties: dict[str, str] = {}


class IndexRequest(msgspec.Struct):
    """What of the repository is asked for."""

    ready: bool = False


class LoadParameters(msgspec.Struct):
    """Which version to load or unload; all of them, or what the registry names, without."""

    version: str | None = None


class LoadRequest(msgspec.Struct):
    """A request to load or unload."""

    parameters: LoadParameters = msgspec.field(default_factory=LoadParameters)


class Error(msgspec.Struct):
    """A refusal."""

    error: str


class Operation(NamedTuple):
    """One page. Who may ask for it: those who may do `action`; without one, everybody."""

    method: str
    path: str
    name: str
    summary: str
    action: Action | None
    gives: Any
    takes: Any = None


_READ: Action = "read"
_LOAD = "/v2/repository/models/{model}"
OPERATIONS = (
    Operation("GET", "/v2", "server", "Name, version and extensions of the server.", "read", dict),
    Operation("GET", "/v2/health/live", "live", "Whether the process answers.", None, dict),
    Operation("GET", "/v2/health/ready", "ready", "Whether all models answer.", None, Ready),
    *(
        Operation(method, path + end, name + suffix, summary, action, gives, takes)
        for path, suffix in (
            ("/v2/models/{model}", ""),
            ("/v2/models/{model}/versions/{version}", "_version"),
        )
        for method, end, name, summary, action, gives, takes in (
            ("GET", "", "metadata", "Tensors and versions.", _READ, Metadata, None),
            ("GET", "/ready", "model_ready", "Whether it answers.", _READ, Ready, None),
            ("POST", "/infer", "infer",
             "Answers of a model; tensors as JSON, or as binary data behind it.", None,
             InferAnswer, InferRequest),
        )
    ),
    Operation("POST", "/v2/repository/index", "index", "All versions.", "admin", list,
              IndexRequest),
    Operation("POST", f"{_LOAD}/load", "load", "Load a version.", "admin", dict, LoadRequest),
    Operation("POST", f"{_LOAD}/unload", "unload", "Take it out of service.", "admin", dict,
              LoadRequest),
    Operation("GET", "/openapi.json", "openapi", "This document.", "read", dict),
)  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [Error, Ready, Metadata, InferRequest, InferAnswer, IndexRequest, LoadRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name in ("InputTensor", "OutputTensor", "Tensor"):
        schemas[name]["properties"]["datatype"] = {**_TEXT, "enum": [*NUMPY_OF, BYTES]}
    schemas["InferRequest"]["properties"]["inputs"]["minItems"] = 1
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _described(one)
    title, version = "Falaj: models over the Open Inference Protocol", server_metadata()["version"]
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    }


def _described(one: Operation) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": part, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
        for part in ("model", "version")
        if f"{{{part}}}" in one.path
    ]
    if one.takes is InferRequest:
        parameters += [
            {"name": header, "in": "header", "schema": _TEXT, "description": text}
            for header, text in _INFER_HEADERS.items()
        ]
    responses = {"200": {"description": "Answered.", "content": _content(one.gives)}}
    if one.gives is Ready:  # what is not ready answers so too
        responses["503"] = {"description": "Not ready.", "content": _content(dict)}
    responses["default"] = {"description": _REFUSED, "content": _content(Error)}
    operation = {
        "operationId": one.name,
        "summary": one.summary,
        "parameters": parameters,
        "responses": responses,
        "security": [{}, {"bearer": []}],
    }
    if one.takes is not None:
        required = one.takes is InferRequest
        operation["requestBody"] = {"required": required, "content": _content(one.takes)}
    return operation


def _content(kind: Any) -> dict[str, Any]:
    plain = {dict: {"type": "object"}, list: {"type": "array", "items": {"type": "object"}}}
    schema = plain.get(kind) or {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"application/json": {"schema": schema}}
