"""What closes a serving process: its guard and TLS, from the files of a state folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serving.security.config import SECURITY_FILE, SecuritySection, check_exposure, read_security
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
