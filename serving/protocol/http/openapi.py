"""The OpenAPI document of the public listener, made of its types."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

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


class IndexRequest(msgspec.Struct):
    """What of the repository is asked for."""

    ready: bool = False


class VersionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A version; null for what the registry's alias names, or for all."""

    version: str | None = None


class LoadParameters(msgspec.Struct):
    """Which version to load or unload; all of them, or what the registry names, without."""

    version: str | None = None


class LoadRequest(msgspec.Struct):
    """A request to load or unload."""

    parameters: LoadParameters = msgspec.field(default_factory=LoadParameters)


class Error(msgspec.Struct):
    """A refusal."""

    error: str


_MODEL = "/v2/models/{model}"
_REPOSITORY = "/v2/repository/models/{model}"
_VERSION = _MODEL + "/versions/{version}"
_OPERATIONS: tuple[tuple[str, str, str, str, Any, Any], ...] = (
    ("get", "/v2", "server", "Name, version and extensions of the server.", dict, None),
    ("get", "/v2/health/live", "live", "Whether the process answers.", dict, None),
    ("get", "/v2/health/ready", "ready", "Whether all models answer.", Ready, None),
    *(
        operation
        for path, suffix in ((_MODEL, ""), (_VERSION, "_version"))
        for operation in (
            ("get", path, f"metadata{suffix}", "Tensors and versions.", Metadata, None),
            ("get", f"{path}/ready", f"model_ready{suffix}", "Whether it answers.", Ready, None),
            ("post", f"{path}/infer", f"infer{suffix}",
             "Answers of a model; tensors as JSON, or as binary data behind it.", InferAnswer,
             InferRequest),
        )
    ),
    ("post", "/v2/repository/index", "index", "All versions.", list, IndexRequest),
    ("post", f"{_REPOSITORY}/load", "load", "Load a version.", dict, LoadRequest),
    ("post", f"{_REPOSITORY}/unload", "unload", "Take it out of service.", dict, LoadRequest),
    ("get", "/openapi.json", "openapi", "This document.", dict, None),
)  # fmt: skip
"""Method, path, name, summary, type of the answer, type of the body."""


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [Error, Ready, Metadata, InferRequest, InferAnswer, IndexRequest, LoadRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name in ("InputTensor", "OutputTensor", "Tensor"):
        schemas[name]["properties"]["datatype"] = {**_TEXT, "enum": [*NUMPY_OF, BYTES]}
    schemas["InferRequest"]["properties"]["inputs"]["minItems"] = 1
    paths: dict[str, Any] = {}
    for method, path, *operation in _OPERATIONS:
        paths.setdefault(path, {})[method] = _described(path, *operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Falaj: models over the Open Inference Protocol",
            "version": str(server_metadata()["version"]),
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(path: str, name: str, summary: str, answer: Any, body: Any) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": part, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
        for part in ("model", "version")
        if f"{{{part}}}" in path
    ]
    if body is InferRequest:
        parameters += [
            {"name": header, "in": "header", "schema": _TEXT, "description": text}
            for header, text in _INFER_HEADERS.items()
        ]
    responses = {"200": {"description": "Answered.", "content": _content(answer)}}
    if answer is Ready:  # what is not ready answers so too
        responses["503"] = {"description": "Not ready.", "content": _content(dict)}
    responses["default"] = {"description": _REFUSED, "content": _content(Error)}
    operation = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        "responses": responses,
        "security": [{}, {"bearer": []}],
    }
    if body is not None:
        operation["requestBody"] = {"required": body is InferRequest, "content": _content(body)}
    return operation


def _content(kind: Any) -> dict[str, Any]:
    plain = {dict: {"type": "object"}, list: {"type": "array", "items": {"type": "object"}}}
    schema = plain.get(kind) or {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"application/json": {"schema": schema}}
