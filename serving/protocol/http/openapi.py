"""The OpenAPI document of the public listener, made of its types, and a page that shows it."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any

import msgspec

from serving.protocol.answers import InferAnswer
from serving.protocol.messages import InferRequest, server_metadata
from serving.protocol.tensors import BYTES, NUMPY_OF

DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_TEXT = {"type": "string"}
_INFER_HEADERS = {
    "x-request-id": "Named in the answer and in all records; made here if absent.",
    "x-falaj-timeout-ms": "Whole milliseconds after which no answer is wanted; 504 then.",
    "inference-header-content-length": "Bytes of JSON before binary tensors.",
    "traceparent": "W3C trace context.",
}
_REFUSALS = {
    "400": "The request is not what the model takes.",
    "401": "Nobody is known by what was presented.",
    "403": "Who asks may not do this.",
    "404": "There is no such model or version.",
    "408": "The request did not arrive whole in its time.",
    "413": "The request is too large.",
    "415": "The body is compressed.",
    "422": "Features of an entity are missing or too old.",
    "429": "The client asks more often than it may; see `Retry-After`.",
    "431": "Request line and headers are too large.",
    "500": "The model failed.",
    "503": "The queue is full, or the model is not ready; see `Retry-After`.",
    "504": "The request's time was over before it was computed.",
}
_ANY_REQUEST = ("400", "401", "403", "404", "408", "413", "429", "431")


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
_OPERATIONS: tuple[tuple[str, str, str, str, Any, Any, tuple[str, ...]], ...] = (
    ("get", "/v2", "server", "Name, version and extensions of the server.", dict, None, ()),
    ("get", "/v2/health/live", "live", "Whether the process answers.", dict, None, ()),
    ("get", "/v2/health/ready", "ready", "Whether all models answer.", Ready, None, ("503",)),
    *(
        operation
        for path, suffix in ((_MODEL, ""), (_VERSION, "_version"))
        for operation in (
            ("get", path, f"metadata{suffix}", "Tensors and versions.", Metadata, None, ("503",)),
            ("get", f"{path}/ready", f"model_ready{suffix}", "Whether it answers.", Ready, None,
             ("503",)),
            ("post", f"{path}/infer", f"infer{suffix}",
             "Answers of a model; tensors as JSON, or as binary data behind it.", InferAnswer,
             InferRequest, ("415", "422", "500", "503", "504")),
        )
    ),
    ("post", "/v2/repository/index", "index", "All versions.", list, IndexRequest, ()),
    ("post", f"{_REPOSITORY}/load", "load", "Load a version.", dict, LoadRequest, ("503",)),
    ("post", f"{_REPOSITORY}/unload", "unload", "Take it out of service.", dict, LoadRequest,
     ("503",)),
    ("get", "/openapi.json", "openapi", "This document.", dict, None, ()),
)  # fmt: skip
"""Method, path, name, summary, type of the answer, type of the body, refusals beside those of any
request."""


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


def _described(
    path: str, name: str, summary: str, answer: Any, body: Any, also: tuple[str, ...]
) -> dict[str, Any]:
    named = [part for part in ("model", "version") if f"{{{part}}}" in path]
    parameters: list[dict[str, Any]] = [
        {"name": part, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
        for part in named
    ]
    if body is InferRequest:
        parameters += [
            {"name": header, "in": "header", "schema": _TEXT, "description": text}
            for header, text in _INFER_HEADERS.items()
        ]
    refusals = {
        status: {"description": _REFUSALS[status], "content": _content(Error)}
        for status in (*_ANY_REQUEST, *also)
    }
    operation = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": {"description": "Answered.", "content": _content(answer)}, **refusals},
        "security": [{}, {"bearer": []}],
    }
    if answer is Ready:  # what is not ready answers so too
        anything = {"application/json": {"schema": {"type": "object"}}}
        operation["responses"]["503"]["content"] = anything  # type: ignore[index]
    if body is not None:
        operation["requestBody"] = {"required": body is InferRequest, "content": _content(body)}
    return operation


def _content(kind: Any) -> dict[str, Any]:
    plain = {dict: {"type": "object"}, list: {"type": "array", "items": {"type": "object"}}}
    schema = plain.get(kind) or {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"application/json": {"schema": schema}}


@cache
def docs_html() -> bytes:
    """A page for people, without scripts and without anything from elsewhere."""
    paths = [
        (method.upper(), path, operation["summary"])
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Falaj serving</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td{padding:.2em 1em .2em 0;vertical-align:top}</style>"
        "<h1>Models over the Open Inference Protocol</h1>"
        "<p>For programs: <code>/openapi.json</code>.</p>"
        f"<h2>Paths</h2>{_table(paths)}"
        f"<h2>Headers of a request for answers</h2>{_table(_INFER_HEADERS.items())}"
        f"<h2>Refusals</h2>{_table(_REFUSALS.items())}"
    ).encode()


def _table(rows: Any) -> str:
    """Rows of texts, all but the last of each as code."""
    return "<table>" + "".join(
        "<tr>"
        + "".join(f"<td><code>{escape(text)}</code></td>" for text in row[:-1])
        + f"<td>{escape(row[-1])}</td></tr>"
        for row in rows
    ) + "</table>"  # fmt: skip
