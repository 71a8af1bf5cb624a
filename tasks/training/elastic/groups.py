"""One group of ranks that train together: who is which rank, and where they meet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import psutil
from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tasks.kernel.errors import ConfigurationError


class Candidate(Protocol):
    """What is asked of one that may be in a group."""

    host: str
    commit: int
    seniority: int


T = TypeVar("T", bound=Candidate)


def in_rank_order(candidates: Sequence[T]) -> list[T]:
    """Candidates by rank: the newest commit first, since rank 0 hands out its state.

    Ranks of one host follow each other, as Horovod numbers them.
    """
    ordered = sorted(candidates, key=lambda member: (-member.commit, member.seniority))
    hosts = list(dict.fromkeys(member.host for member in ordered))
    return sorted(ordered, key=lambda member: hosts.index(member.host))


def assignments(hosts: Sequence[str]) -> list[SlotInfo]:
    """Horovod's numbers of each rank; `hosts` are theirs in rank order."""
    counts = {host: list(hosts).count(host) for host in dict.fromkeys(hosts)}
    infos = [HostInfo(host, count) for host, count in counts.items()]
    slots: list[SlotInfo] = get_host_assignments(infos, len(hosts))
    return slots


def address_of(interface: str) -> str:
    """This machine's IPv4 address on a network interface.

    Raises:
        ConfigurationError: there is no such interface, or it has no address.
    """
    interfaces = psutil.net_if_addrs()
    for address in interfaces.get(interface, ()):
        if address.family == socket.AF_INET:
            return str(address.address)
    raise ConfigurationError(
        f"the driver's machine has no network interface {interface!r} with an IPv4 address; it has "
        f"{', '.join(sorted(interfaces))}. Name one that all hosts have in elastic.interface"
    )


@dataclass(frozen=True)
class _Served:
    server: RendezvousHTTPServer
    thread: threading.Thread


class Rendezvous:
    """Horovod's key-value server for one group, on one address; a new one for each group.

    So nothing of an earlier group can be met in it. It holds addresses of ranks only and unpickles
    nothing.
    """

    def __init__(self, address: str, slots: Sequence[SlotInfo]) -> None:
        server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
        server.daemon_threads = True
        server.init(slots)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        self.address = address
        self.port: int = server.server_address[1]
        self._served: _Served | None = _Served(server, thread)

    def close(self) -> None:
        """End it; ranks that still wait there for one that is lost then fail within seconds."""
        if self._served is not None:
            self._served.server.shutdown()
            self._served.server.server_close()
            self._served.thread.join()
            self._served = None
