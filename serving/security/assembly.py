"""What closes a serving process: its guard and TLS, from the files of a state folder.

Without them `OpenGuard` lets everybody in, on loopback alone. A browser on this machine is part of
it, and the pages that it shows are not. What such a page asks names it in `Origin`, or, where the
page's own name was pointed at this machine, in `Host`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from serving.config import ServingConfig
from serving.errors import ForbiddenError
from serving.interfaces import Action, Headers, Principal
from serving.security.config import (
    SECURITY_FILE,
    SecuritySection,
    check_exposure,
    is_loopback,
    read_security,
)
from serving.security.guard import SecurityGuard
from serving.security.tls import RenewingTls, grpc_credentials
from tasks.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    import grpc

BEHIND_EDGE_FILE = Path("edge") / "server-security.yaml"
"""The same with mutual TLS, as `python -m falaj gateway prepare` writes it."""


@dataclass(frozen=True)
class Secured:
    """What closes a serving process.

    Attributes:
        tls: of the HTTP listener; `tls.context` goes to the listener, `tls.follow()` renews it.
        grpc: credentials of the gRPC listener; None where it can be on loopback only, in clear.
    """

    guard: SecurityGuard
    tls: RenewingTls | None
    grpc: grpc.ServerCredentials | None


def secured(section: SecuritySection, home: Path, host: str) -> Secured | None:
    """Guard and TLS of a process; None where the state folder says nothing of clients.

    Args:
        section: `security` of the configuration.
        home: state folder.
        host: address that the process listens on.

    Raises:
        ConfigurationError: a file is absent, wrong, or would open the server to the outside.
    """
    file = home / (BEHIND_EDGE_FILE if section.edge else SECURITY_FILE)
    if section.edge and not file.exists():
        raise ConfigurationError(f"there is no {file}; run `python -m falaj gateway prepare` first")
    if not file.exists():
        return None
    config = read_security(file)
    check_exposure(config, host)
    tls = RenewingTls(config.tls) if config.tls else None
    is_mutual = config.tls is not None and config.tls.client_ca is not None
    credentials = grpc_credentials(config.tls) if config.tls and is_mutual else None
    return Secured(SecurityGuard(config), tls, credentials)


_EVERYBODY = Principal(
    subject="",
    tenant="",
    roles=MappingProxyType({"*": frozenset({"infer", "read", "admin"})}),
    expires=math.inf,
)
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:@\[\]]+))(?::\d*)?")
"""A host, in brackets or not, and perhaps a port; RFC 3986, section 3.2, without a user."""


class OpenGuard:
    """Admits everybody. A web page of another site is no one: browsers name it in `Origin`."""

    def __init__(self, config: ServingConfig) -> None:
        """Refuse to stand before a listener that others can reach.

        Raises:
            ConfigurationError: it is not on loopback, or is not to be open.
        """
        if not config.on_loopback or not config.open_to_all:
            raise ConfigurationError(
                f"host={config.host} and open_to_all={config.open_to_all} need a guard that knows "
                "clients (section `security`); without one the server listens on 127.0.0.1 with "
                "open_to_all: true only. Nothing was started"
            )

    def recognise(self, headers: Headers, address: str) -> None:
        """Everybody, but for pages that a browser on this machine has from elsewhere.

        Raises:
            ForbiddenError: a page of another site asks.
        """
        self.admit(headers, address, "read", None)

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        """Everybody, but for pages that a browser on this machine has from elsewhere.

        Raises:
            ForbiddenError: a page of another site asks.
        """
        for name, value in headers:
            if (name == b"origin" and not _is_local(value.partition(b"://")[2])) or (
                name == b"host" and not _is_local(value)
            ):
                raise ForbiddenError(
                    "a page of another site may not use this server; it is open to this machine's "
                    "own programs"
                )
        return _EVERYBODY


@lru_cache(256)
def _is_local(authority: bytes) -> bool:
    host = _AUTHORITY.fullmatch(authority.decode("latin-1"))
    return host is not None and is_loopback(host[1] or host[2])
