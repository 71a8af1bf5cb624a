"""Small pieces of Envoy's configuration that several parts are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.security.headers import SECURITY_HEADERS

Value = dict[str, Any]
TYPES = "type.googleapis.com/"
FILTERS = "envoy.extensions.filters.http."
TLS = "envoy.extensions.transport_sockets.tls.v3."
SUBJECT_HEADER = "x-falaj-subject"
ADDRESS_HEADER = "x-falaj-address"
CERTIFICATE_HEADER = "x-forwarded-client-cert"


def typed(kind: str, **fields: Any) -> Value:
    """A message that says what it is."""
    return {"@type": TYPES + kind, **fields}


def seconds(value: float) -> str:
    """A duration."""
    return f"{value:g}s" if value >= 0.001 else f"{value:.9f}s"


def exact(text: str) -> Value:
    """Matches this text alone."""
    return {"exact": text}


def header(name: str, text: str) -> Value:
    """Matches requests whose header is this text."""
    return {"name": name, "string_match": exact(text)}


def read_method() -> Value:
    """Matches requests that only read."""
    return {"name": ":method", "string_match": {"safe_regex": {"regex": "GET|HEAD"}}}


def has_header(name: str) -> Value:
    """Matches requests that have this header."""
    return {"name": name, "present_match": True}


def set_header(name: str, text: str) -> Value:
    """Gives a header this one value, whatever it had."""
    return {
        "header": {"key": name, "value": text},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }


def security_headers() -> list[Value]:
    """Headers of every answer, those of the server with the same names replaced."""
    return [set_header(name.decode(), value.decode()) for name, value in SECURITY_HEADERS]


def socket_address(host: str, port: int) -> Value:
    """An address and port."""
    return {"socket_address": {"address": host, "port_value": port}}


def follow(file: Path) -> Value:
    """Configuration that is read from a file, and again when it is replaced."""
    return {"path_config_source": {"path": str(file)}, "resource_api_version": "V3"}


def resources(found: Sequence[Value]) -> str:
    """The content of a file that Envoy follows; its version is a digest of what it says."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    return json.dumps({"version_info": digest, "resources": found}, indent=1) + "\n"


def version_of(content: str) -> str:
    """The version that a file says it has."""
    return str(json.loads(content)["version_info"])
