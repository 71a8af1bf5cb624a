"""Where the ranks of one host find each other: Horovod's rendezvous server, on loopback only.

Horovod's own start-up binds the server to all interfaces, without authentication. It is a plain
key-value store over HTTP that holds the ranks' addresses; nothing in it is unpickled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
HOST_NAME = "localhost"
# How long ranks may take to find each other: slow imports on a busy machine are waited for.
GLOO_TIMEOUT_S = 120
# The ranks' Horovod threads meet when there is something to exchange, and else this often: to
# notice that a rank wants to leave. A short cycle would take a core that trains.
CYCLE_VARIABLES = {"HOROVOD_WAKE_ON_ENQUEUE": "1", "HOROVOD_CYCLE_TIME": "20"}


@contextmanager
def rendezvous_server(num_ranks: int) -> Iterator[int]:
    """Serve the rendezvous of `num_ranks` local ranks while the context lasts; yields the port."""
    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.daemon_threads = True
    server.init(get_host_assignments([HostInfo(HOST_NAME, num_ranks)], num_ranks))
    thread = threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def rank_variables(
    rank: int, num_ranks: int, port: int, stall_warning_s: int, stall_shutdown_s: int
) -> dict[str, str]:
    """Environment that tells one local rank who it is and how to reach the others."""
    return {
        "HOROVOD_HOSTNAME": HOST_NAME,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(num_ranks),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(num_ranks),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": LOOPBACK_INTERFACE,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_S),
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        **CYCLE_VARIABLES,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall_warning_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(stall_shutdown_s),
    }
