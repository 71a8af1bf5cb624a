"""Two ranks on two hosts whose own names resolve to a loopback address, as Debian sets them up.

`python -m tests.support.elastic.two_networks FOLDER` makes the hosts: two network namespaces,
joined by a pair of interfaces `eth1`, and a file of host names that only they see. Nothing of it is
visible outside, and all of it ends with this process. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import horovod.torch as hvd
import psutil
import torch
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tasks.training.launch.rendezvous import rank_variables

HOST_NAME = "falaj-host"
INTERFACE = "eth1"
ADDRESSES = ("10.77.9.1", "10.77.9.2")
LIMIT_S = 60

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def enter_new_namespaces(flags: int) -> None:
    if LIBC.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=LIMIT_S)


def make_hosts(folder: Path) -> subprocess.Popen[bytes]:
    """Be the first host from now on; returns a process that holds the second one's network."""
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {HOST_NAME}\n")
    enter_new_namespaces(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET)
    run("mount", "--make-rprivate", "/")
    run("mount", "--bind", str(hosts), "/etc/hosts")
    socket.sethostname(HOST_NAME)
    waiting = "echo ready; exec sleep infinity"
    second = subprocess.Popen(["unshare", "--net", "sh", "-c", waiting], stdout=subprocess.PIPE)
    assert second.stdout is not None
    assert second.stdout.readline() == b"ready\n"
    peer = ("netns", str(second.pid))
    run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, *peer)
    inside = ("nsenter", "--net", f"--target={second.pid}")
    for prefix, address in (((), ADDRESSES[0]), (inside, ADDRESSES[1])):
        run(*prefix, "ip", "link", "set", "lo", "up")
        run(*prefix, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
        run(*prefix, "ip", "link", "set", INTERFACE, "up")
    return second


def start_rank(rank: int, port: int, second: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **rank_variables(rank, 2, port, 30),
        "HOROVOD_HOSTNAME": f"host-{rank}",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ADDRESSES[0],
        "HOROVOD_GLOO_IFACE": INTERFACE,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT_S),
        "OMP_NUM_THREADS": "1",
    }
    prefix = ["nsenter", "--net", f"--target={second.pid}"] if rank else []
    command = [*prefix, sys.executable, "-m", __spec__.name, "rank"]
    return subprocess.Popen(command, env=environment)


def be_rank() -> None:
    hvd.init()
    total = hvd.allreduce(torch.ones(1000) * (hvd.rank() + 1), op=hvd.Sum)
    assert total.tolist() == [3.0] * 1000
    own = ADDRESSES[hvd.rank()]
    used = {connection.laddr.ip for connection in psutil.Process().net_connections("tcp")}
    sys.stdout.write(f"rank {hvd.rank()} uses {sorted(used)}, expected {own}\n")
    assert used == {own}
    hvd.shutdown()


def main(folder: Path) -> int:
    with ExitStack() as stack:
        second = make_hosts(folder)
        stack.callback(second.wait)
        stack.callback(second.kill)
        assert second.stdout is not None
        stack.callback(second.stdout.close)
        server = RendezvousHTTPServer((ADDRESSES[0], 0), RendezvousHandler, 0)
        server.init(get_host_assignments([HostInfo("host-0", 1), HostInfo("host-1", 1)], 2))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        ranks = [start_rank(rank, server.server_address[1], second) for rank in range(2)]
        for process in ranks:
            stack.callback(process.wait)
            stack.callback(process.kill)
        return max(abs(process.wait(2 * LIMIT_S)) for process in ranks)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        be_rank()
    else:
        sys.exit(main(Path(sys.argv[1])))
