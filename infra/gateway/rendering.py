"""What Envoy reads, from the templates beside this module.

A template holds all that does not depend on the installation; filled in are addresses,
certificates, limits, models and shares. Text is filled in as JSON, which YAML reads as it is.
"""

import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jinja2
import yaml

from infra.gateway.config import GatewayPlan, Shares
from serving.config import MAX_HEADER_BYTES
from serving.interfaces import GRPC_MODEL_HEADER, TRACKS
from serving.interfaces import SECURITY_HEADERS as OF_SERVER
from serving.security.certificates import Pair
from tasks.governance.identity import ISSUER_TIMEOUT_S, LEEWAY_S
from tasks.kernel.errors import ConfigurationError

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters["json"] = lambda value: json.dumps(value, default=str)
SERVER_NAME = "falaj-server"
"""In the server's certificate; the gateway talks to nobody else."""
SECURITY_HEADERS = OF_SERVER | {
    "strict-transport-security": "max-age=31536000",
    "x-frame-options": "DENY",
}
"""Of every answer, those of the server with the same names replaced."""
VERSION = r"(/versions/[^/]+)?"


def rendered(kind: str, plan: GatewayPlan, shares: Mapping[str, Shares] | None = None) -> Any:
    """What Envoy is to read of a kind: `bootstrap`, or a list of resources.

    Raises:
        ConfigurationError: an issuer's keys cannot be read.
    """
    folder = plan.files.certificates
    values = {
        "config": plan.config,
        "security": plan.security,
        "servers": plan.servers,
        "issuers": plan.security.issuers,
        "issuer_names": [f"issuer-{index}" for index in range(len(plan.security.issuers))],
        "policies": policies(plan),
        "public": public_pair(plan),
        **_platform_values(plan),
        "ours": Pair.at(folder, "edge-client"),
        "internal": Pair.at(folder, "internal"),
        "shares_of": lambda model: (shares or {}).get(model, Shares()),
        "follow": lambda name: json.dumps(_followed(plan.files.resource(name))),
        "security_headers": [set_header(*pair) for pair in SECURITY_HEADERS.items()],
        "tracks": TRACKS,
        "server_name": SERVER_NAME,
        "grpc_model_header": GRPC_MODEL_HEADER,
        "max_header_kb": MAX_HEADER_BYTES // 1024,
        "leeway_s": LEEWAY_S,
        "issuer_timeout_s": ISSUER_TIMEOUT_S,
    }
    own = (set_header, seconds, socket_address, cluster_kind, infer_path, read_path)
    functions = {function.__name__: function for function in own} | {
        "split_url": urlsplit,
        "escape": re.escape,
        "read_text": lambda file: Path(file).read_text(encoding="utf-8"),
    }
    template = TEMPLATES.get_template(f"{kind}.yaml.j2")
    try:
        return yaml.safe_load(template.render(values, **functions))
    except OSError as exc:
        raise ConfigurationError(f"keys {exc.filename} cannot be read: {exc.strerror}") from exc


def _platform_values(plan: GatewayPlan) -> dict[str, Any]:
    """What the listener `platform` needs; nothing where there is none."""
    sign_in = plan.sign_in
    if sign_in is None:
        return {"sign_in": None, "remote": {}}
    issuer = json.loads(plan.files.issuer_file.read_text())
    return {
        "sign_in": sign_in,
        "issuer": issuer,
        "address": plan.address,
        "upstreams": plan.upstreams,
        "remote": {"sign-in-token": issuer["token_endpoint"], "sign-in-keys": issuer["jwks_uri"]},
    }


def sign_in_secret(name: str, text: str) -> dict[str, Any]:
    """A secret as Envoy reads it, alone in a file of its own."""
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
    return {"@type": kind, "name": name, "generic_secret": {"secret": {"inline_string": text}}}


def policies(plan: GatewayPlan) -> list[dict[str, Any]]:
    """For each model and action: which roles of which issuers let a token do it."""
    found = []
    for model in plan.config.models:
        owner = plan.security.owners.get(model)
        # Each issuer names tenants its own way; where none of its tokens may, it is left out.
        issuers = [
            one
            for one in plan.security.issuers
            if owner is None or one.tenant_claim is not None or one.tenant in ("", owner)
        ]
        for action, method, path in (
            ("infer", {"exact": "POST"}, infer_path(model)),
            ("read", {"safe_regex": {"regex": "GET|HEAD"}}, read_path(model)),
        ):
            wanted = {f"{action}:{model}", f"{action}:*"}
            granted = {n for n, grants in plan.security.grants.items() if wanted & set(grants)}
            policy = {"name": f"{action}-{model}", "method": method, "path": path, "owner": owner}
            if issuers:
                found.append(policy | {"roles": sorted(wanted | granted), "issuers": issuers})
    return found


def public_pair(plan: GatewayPlan) -> Pair:
    """Certificate and key for clients: those named, or those made here."""
    config = plan.config
    if config.certificate is not None and config.key is not None:
        return Pair(config.certificate, config.key)
    return Pair.at(plan.files.certificates, "public")


def infer_path(model: str) -> str:
    """Regular expression of the paths on which a model answers."""
    return rf"/v2/models/{re.escape(model)}{VERSION}/infer"


def read_path(model: str) -> str:
    """Regular expression of the paths that describe a model."""
    return rf"/v2/models/{re.escape(model)}{VERSION}(/ready)?"


def set_header(name: str, text: str) -> dict[str, Any]:
    """Gives a header this one value, whatever it had."""
    pair = {"key": name, "value": text}
    return {"header": pair, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def seconds(value: float) -> str:
    """A duration."""
    return f"{value:g}s" if value >= 0.001 else f"{value:.9f}s"


def _followed(file: Path) -> dict[str, Any]:
    """Configuration that is read from a file, and again when it is replaced."""
    return {"path_config_source": {"path": str(file)}, "resource_api_version": "V3"}


def socket_address(address: str) -> str:
    """Host and port of an address, as Envoy reads them."""
    host, _, port = address.rpartition(":")
    found = {"address": host.strip("[]"), "port_value": int(port)}
    return json.dumps({"socket_address": found})


def cluster_kind(addresses: tuple[str, ...]) -> str:
    """Names of hosts are looked up again and again; addresses never change."""
    try:
        for address in addresses:
            ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return "STRICT_DNS"
    return "STATIC"
