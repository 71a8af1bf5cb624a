"""Ports: the one that is wanted, or a free one that is remembered."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from infra.platform.config import Place, PlatformConfig
from tasks.kernel.settings import write_atomically

SERVICES = ("prefect", "mlflow", "serving", "serving_grpc")


@dataclass(frozen=True)
class Ports:
    """The ports of one platform, and what to tell about their choice."""

    prefect: int
    mlflow: int
    serving: int = 8000
    serving_grpc: int = 8001
    remarks: tuple[str, ...] = ()


def choose_ports(config: PlatformConfig, place: Place) -> Ports:
    """Take the wanted ports; where one is taken, the one chosen last time, else any free one.

    The choice is remembered for as long as the same port is wanted, so that addresses stay.
    """
    remembered = _read(place)
    chosen: dict[str, int] = {}
    remarks = []
    ports = (config.port, config.mlflow_port, config.serving_port, config.serving_grpc_port)
    for service, wanted in zip(SERVICES, ports, strict=True):
        earlier = remembered.get(service, {})
        candidates = [earlier.get("chosen", 0)] if earlier.get("wanted") == wanted else []
        free = [
            port
            for port in [*candidates, wanted]
            if port and port not in chosen.values() and is_free(config.host, port)
        ]
        port = free[0] if free else _any_free(config.host, set(chosen.values()))
        if wanted and port != wanted:
            taken = "was chosen earlier instead of" if port in candidates else "is used instead of"
            remarks.append(f"{service}: port {port} {taken} {wanted}, which was taken")
        chosen[service] = port
        remembered[service] = {"wanted": wanted, "chosen": port}
    write_atomically(place.ports, json.dumps(remembered))
    return Ports(**chosen, remarks=tuple(remarks))


def _read(place: Place) -> dict[str, dict[str, int]]:
    try:
        found: dict[str, dict[str, int]] = json.loads(place.ports.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def is_free(host: str, port: int) -> bool:
    """True where a server could listen on this port now."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """True where somebody takes connections; behind an edge a server answers nobody else."""
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _any_free(host: str, but: set[int]) -> int:
    while True:
        with socket.socket(_family(host)) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in but:
            return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
