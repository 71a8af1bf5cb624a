"""Where the files of an edge are; importing this reads nothing and is cheap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ADMIN_SOCKET = "admin.sock"
"""In the edge's folder, in which Envoy runs; a whole path may be too long for a socket."""


@dataclass(frozen=True)
class EdgePlace:
    """Files of the edge under a state folder."""

    home: Path

    @property
    def folder(self) -> Path:
        """All of them; open to the owner alone."""
        return self.home / "edge"

    @property
    def config_file(self) -> Path:
        """What its owner wrote."""
        return self.folder / "edge.yaml"

    @property
    def security_file(self) -> Path:
        """What server and edge believe about clients, as the owner wrote it."""
        return self.home / "serving" / "security.yaml"

    @property
    def server_security_file(self) -> Path:
        """The same for a server behind this edge, with mutual TLS; made here."""
        return self.folder / "server-security.yaml"

    @property
    def certificates(self) -> Path:
        """Folder of certificates and keys."""
        return self.folder / "certificates"

    @property
    def bootstrap(self) -> Path:
        """Envoy's first file; names the others."""
        return self.folder / "bootstrap.json"

    @property
    def shares_file(self) -> Path:
        """Shares of candidates and mirrors; outlives everything but its folder."""
        return self.folder / "shares.json"

    def resource(self, kind: str) -> Path:
        """A file that Envoy follows: `listeners`, `routes`, `clusters` or `secrets`."""
        return self.folder / f"{kind}.json"
