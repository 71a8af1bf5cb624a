"""The edge as a service of the platform's supervisor."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from infra.gateway.admin import Admin
from infra.gateway.place import EdgePlace
from infra.platform.supervisor import Service

EDGE = "edge"


def has_edge(home: Path) -> bool:
    """True where the owner of a state folder has described an edge."""
    return EdgePlace(home).config_file.is_file()


def edge_service(home: Path, environment: Mapping[str, str]) -> Service:
    """Envoy, started with what edge.yaml says at that moment.

    Args:
        home: the state folder.
        environment: all that Envoy inherits; it needs nothing, so no secrets.
    """
    return Service(
        name=EDGE,
        command=(sys.executable, "-m", "falaj", "--home", str(home), "gateway", "run"),
        environment=environment,
        probe=lambda _: Admin(EdgePlace(home).folder).is_ready(),
        restart_when_silent=True,
    )
