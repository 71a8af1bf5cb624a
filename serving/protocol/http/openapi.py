"""The OpenAPI document of the public listener, and a page that shows it."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any

from serving.protocol.datatypes import BYTES, NUMPY_OF
from serving.protocol.metadata import server_metadata

DOCS_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_TEXT = {"type": "string"}
_SHAPE = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 8}
_MODEL = {"name": "model", "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
_VERSION = {**_MODEL, "name": "version"}
_INFER_HEADERS = (
    ("x-request-id", "Named in the answer and in all records; made here if absent."),
    ("x-falaj-timeout-ms", "Whole milliseconds after which no answer is wanted; 504 then."),
    ("inference-header-content-length", "Bytes of JSON before binary tensors."),
    ("traceparent", "W3C trace context."),
)
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


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"type": "object", "properties": properties}
    return {**told, "required": list(required)} if required else told


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _schemas() -> dict[str, Any]:
    datatype = {"type": "string", "enum": [*NUMPY_OF, BYTES]}
    tensor = {"name": _TEXT, "datatype": datatype, "shape": _SHAPE}
    data = {"type": "array", "description": "Flat in row order, or nested; `null` is missing."}
    size = {"type": "integer", "minimum": 0}
    return {
        "Error": _object(("error",), error=_TEXT),
        "Input": _object(
            ("name", "datatype", "shape"),
            **tensor,
            data=data,
            parameters=_object(binary_data_size=size),
        ),
        "WantedOutput": _object(
            ("name",), name=_TEXT, parameters=_object(binary_data={"type": "boolean"})
        ),
        "InferRequest": _object(
            ("inputs",),
            id=_TEXT,
            inputs={**_array(_ref("Input")), "minItems": 1},
            outputs=_array(_ref("WantedOutput")),
            parameters=_object(
                binary_data_output={"type": "boolean"},
                timeout={**size, "description": "Microseconds; as x-falaj-timeout-ms."},
            ),
        ),
        "Output": _object(
            ("name", "datatype", "shape"), **tensor, data=_array({}), parameters=_object()
        ),
        "InferAnswer": _object(
            ("model_name", "model_version", "outputs"),
            model_name=_TEXT,
            model_version=_TEXT,
            id=_TEXT,
            parameters=_object(features=_object()),
            outputs=_array(_ref("Output")),
        ),
        "Ready": _object(("ready",), name=_TEXT, ready={"type": "boolean"}, reason=_TEXT),
        "Tensor": _object(("name", "datatype", "shape"), **tensor),
        "Metadata": _object(
            ("name", "versions", "platform", "inputs", "outputs"),
            name=_TEXT,
            versions=_array(_TEXT),
            platform=_TEXT,
            inputs=_array(_ref("Tensor")),
            outputs=_array(_ref("Tensor")),
        ),
        "LoadRequest": _object(parameters=_object(version={"type": ["string", "null"]})),
    }


def _operation(
    name: str,
    summary: str,
    answer: dict[str, Any],
    path: str,
    body: dict[str, Any] | None = None,
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    parameters = [_MODEL] * ("{model}" in path) + [_VERSION] * ("{version}" in path)
    told: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": {"description": "Answered.", "content": _content(answer)}},
        "security": [{}, {"bearer": []}],
    }
    for status in ("400", "401", "403", "404", "408", "413", "429", "431", *also):
        content = _content(_ref("Error"))
        told["responses"][status] = {"description": _REFUSALS[status], "content": content}
    if body is not None:
        told["requestBody"] = {"required": "inputs" in str(body), "content": _content(body)}
    return told


def _infer(path: str, name: str) -> dict[str, Any]:
    told = _operation(
        name,
        "Answers of a model; tensors as JSON, or as binary data behind it.",
        _ref("InferAnswer"),
        path,
        _ref("InferRequest"),
        ("415", "422", "500", "503", "504"),
    )
    told["requestBody"]["required"] = True
    told["parameters"] = told["parameters"] + [
        {"name": header, "in": "header", "schema": _TEXT, "description": text}
        for header, text in _INFER_HEADERS
    ]
    return told


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, Any] = {}

    def add(method: str, path: str, name: str, summary: str, answer: Any, **more: Any) -> None:
        paths.setdefault(path, {})[method] = _operation(name, summary, answer, path, **more)

    add("get", "/v2", "server", "Name, version and extensions of the server.", _object())
    add("get", "/v2/health/live", "live", "Whether the process answers.", _object())
    ready = {"also": ("503",)}
    add("get", "/v2/health/ready", "ready", "Whether all models answer.", _ref("Ready"), **ready)
    for path, suffix in (
        ("/v2/models/{model}", ""),
        ("/v2/models/{model}/versions/{version}", "_version"),
    ):
        add("get", path, f"metadata{suffix}", "Tensors and versions.", _ref("Metadata"), **ready)
        add(
            "get",
            f"{path}/ready",
            f"model_ready{suffix}",
            "Whether it answers.",
            _ref("Ready"),
            **ready,
        )
        paths[f"{path}/infer"] = {"post": _infer(path, f"infer{suffix}")}
    repository, load = "/v2/repository/models/{model}", {"body": _ref("LoadRequest"), **ready}
    index = _object(ready={"type": "boolean"})
    add("post", "/v2/repository/index", "index", "All versions.", _array(_object()), body=index)
    add("post", f"{repository}/load", "load", "Load a version.", _object(), **load)
    add("post", f"{repository}/unload", "unload", "Take it out of service.", _object(), **load)
    add("get", "/openapi.json", "openapi", "This document.", _object())
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Falaj: models over the Open Inference Protocol",
            "version": str(server_metadata()["version"]),
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def docs_html() -> bytes:
    """A page for people, without scripts and without anything from elsewhere."""
    rows = "".join(
        f"<tr><td><code>{method.upper()}</code></td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(told['summary'])}</td></tr>"
        for path, methods in document()["paths"].items()
        for method, told in methods.items()
    )
    refusals = "".join(
        f"<tr><td><code>{status}</code></td><td>{escape(text)}</td></tr>"
        for status, text in _REFUSALS.items()
    )
    headers = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"
        for name, text in _INFER_HEADERS
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Falaj serving</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td{padding:.2em 1em .2em 0;vertical-align:top}</style>"
        "<h1>Models over the Open Inference Protocol</h1>"
        "<p>For programs: <code>/openapi.json</code>.</p>"
        f"<h2>Paths</h2><table>{rows}</table>"
        f"<h2>Headers of a request for answers</h2><table>{headers}</table>"
        f"<h2>Refusals</h2><table>{refusals}</table>"
    ).encode()
