"""Where ranks find each other: Horovod's rendezvous server, on one address, loopback by default.

Horovod's own start-up binds the server to all interfaces, without authentication. It is a plain
key-value store over HTTP that holds the ranks' addresses; nothing in it is unpickled.
"""

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.config import STORE_FILE, TIMEOUT

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
HOST_NAME = "localhost"
# Horovod's numbers of a rank.
SLOT_FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
# How long ranks may take to find each other: slow imports on a busy machine are waited for.
GLOO_TIMEOUT_S = 120
# The ranks' Horovod threads meet when there is something to exchange, and else this often: to
# notice that a rank wants to leave. A short cycle would take a core that trains.
CYCLE_VARIABLES = {"HOROVOD_WAKE_ON_ENQUEUE": "1", "HOROVOD_CYCLE_TIME": "20"}


class Rendezvous:
    """Horovod's key-value server for one group of ranks, on one address.

    Each group gets a new one, so nothing of an earlier group can be met in it.

    Args:
        slots: Horovod's numbers of the ranks.
        address: where it listens.
    """

    def __init__(self, slots: Sequence[SlotInfo], address: str = LOOPBACK) -> None:
        self._server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
        self._server.daemon_threads = True
        self._server.init(slots)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="rendezvous", daemon=True
        )
        self._thread.start()
        self.address = address
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        """End it; ranks that still wait there for one that is lost then fail within seconds."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def assignments(hosts: Sequence[str]) -> list[SlotInfo]:
    """Horovod's numbers of each rank; `hosts` are theirs in rank order, equal ones together."""
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
        f"{socket.gethostname()} has no network interface {interface!r} with an IPv4 address; it "
        f"has {', '.join(sorted(interfaces))}. Name one that all hosts have in elastic.interface"
    )


def stall_variables(stall_s: int) -> dict[str, str]:
    """A rank that is missing from a collective ends the job after `stall_s`; warned of before."""
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall_s // 3),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(stall_s),
    }


def slot_variables(slot: Any, address: str, port: int) -> dict[str, str]:
    """Environment that tells a rank who it is in its group, and where that group meets.

    Args:
        slot: has Horovod's numbers of the rank.
        address: of the group's rendezvous server.
        port: likewise.
    """
    return {
        **{f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in SLOT_FIELDS},
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }


def network_variables(
    host: str, interface: str = LOOPBACK_INTERFACE, timeout_s: int = GLOO_TIMEOUT_S
) -> dict[str, str]:
    """Environment that tells a rank its host's name, and over what Horovod's traffic goes."""
    return {
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(timeout_s),
        "NCCL_SOCKET_IFNAME": interface,
    }


def local_torch_variables(
    rank: int, num_ranks: int, store_file: Path, timeout_s: int = GLOO_TIMEOUT_S
) -> dict[str, str]:
    """Environment of one rank of a single host: its numbers, and where the ranks meet.

    Args:
        rank: number of the rank.
        num_ranks: ranks of the job, all on this host.
        store_file: absent; a new name for each attempt, the same for all its ranks. To be removed
            by the caller after the attempt.
        timeout_s: how long a rank waits for another in one collective before it gives up.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE_FILE: str(store_file),
        TIMEOUT: str(timeout_s),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }
