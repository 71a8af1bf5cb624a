"""Elastic training over several hosts, played by network namespaces of this machine.

Every host maps its own name to 127.0.1.1, as Debian does. So each of these tests also shows that
Horovod's traffic goes over the chosen interface: without that the ranks could not meet.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

import psutil
import pytest

from infra.bench.elastic import hosts
from infra.bench.elastic.runs import started
from tests.support.host.processes import command_of, wait_until
from tests.support.ranks.elastic import finish, ranks_on, report_of

SECRET = "marker-of-a-secret-51be07"
LISTENING = "0A"  # in /proc/net/tcp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Cluster]:
    with hosts.cluster(tmp_path_factory.mktemp("cluster"), num_hosts=3) as built:
        yield built


def listening(host: str) -> set[str]:
    """IPv4 addresses on which the processes of training listen on a host."""
    found = set()
    for pid in hosts.pids_in(hosts.namespace(host)):
        if "elastic" in command_of(pid):
            sockets = set()
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    sockets.add(os.readlink(entry))
            # psutil would show the connections of this process's own namespace.
            for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTENING and f"socket:[{inode}]" in sockets:
                    found.add(str(IPv4Address(bytes.fromhex(local.partition(":")[0])[::-1])))
    return found


def test_three_hosts_train_one_network_and_nothing_shows_a_secret(
    cluster: hosts.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_DATABASE_PASSWORD", SECRET)
    with started(cluster, tmp_path, 3, {"min_ranks": 3}, num_steps=40, patient=True) as job:
        monkeypatch.undo()  # the driver has it, its ranks must not
        job.await_that(lambda: job.run.has_done(3, size=3), "three ranks train")
        assert listening("h0") == {hosts.address("h0")}
        for host in cluster.hosts:
            ranks = ranks_on(host, job.run)
            assert len(ranks) == 2  # a guard and a rank
            for pid in ranks:
                assert SECRET not in str(psutil.Process(pid).environ())
            assert listening(host) <= {hosts.address(host)}
        for pid in psutil.pids():
            assert SECRET not in command_of(pid)
        finish(job)
        report = report_of(job.run)
    assert [group.places for group in report.groups] == [("h1-0", "h2-0", "h3-0")]
    assert not any(ranks_on(host, job.run) for host in ("h0", *cluster.hosts))


@pytest.mark.skipif(shutil.which("wireguard-go") is None, reason="wireguard-go is not installed")
def test_with_a_tunnel_nothing_of_the_training_is_readable_on_the_wire(
    cluster: hosts.Cluster, tmp_path: Path
) -> None:
    clear = on_the_wire(cluster, tmp_path / "clear", {})
    tunnelled = on_the_wire(cluster, tmp_path / "tunnel", {"encrypted": True})
    assert (clear["tcp"] > 100, clear["udp"]) == (True, 0)
    # SSH, and the tunnel's UDP.
    assert (tunnelled["tcp"], tunnelled["udp"] > 100) == (0, True)
    for host in ("h0", *cluster.hosts):
        links = hosts.run("ip", "-n", hosts.namespace(host), "-o", "link")
        assert not re.search(r"falaj[0-9a-f]{6}\b", links), "the interface goes with the run"


def on_the_wire(cluster: hosts.Cluster, folder: Path, options: dict[str, object]) -> dict[str, int]:
    """Packets on the switch while two ranks train: TCP but for SSH's, and UDP."""
    folder.mkdir()
    capture = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))\n"
        "seen = {6: 0, 17: 0}\n"
        "print('ready', flush=True)\n"
        "s.settimeout(0.2)\n"
        "while True:\n"
        "    try:\n"
        "        p = s.recv(65536)\n"
        "    except TimeoutError:\n"
        "        print(seen[6], seen[17], flush=True)\n"
        "        continue\n"
        "    ports = int.from_bytes(p[34:36], 'big'), int.from_bytes(p[36:38], 'big')\n"
        "    if p[23] in seen and 22 not in ports:\n"
        "        seen[p[23]] += 1\n"
    )
    line = ["ip", "netns", "exec", hosts.SWITCH, sys.executable, "-c", capture]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as sniffer:
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == "ready\n"
        given = {"min_ranks": 2, **options}
        with started(cluster, folder, 2, given, num_steps=40, patient=True) as job:
            job.await_that(lambda: job.run.has_done(30, size=2), "two ranks train")
            finish(job)
        time.sleep(1)
        sniffer.terminate()
        tcp, udp = sniffer.stdout.read().split("\n")[-2].split()
    return {"tcp": int(tcp), "udp": int(udp)}


def test_a_cut_link_is_noticed_and_its_host_is_used_again_when_it_is_back(
    cluster: hosts.Cluster, tmp_path: Path
) -> None:
    with started(cluster, tmp_path, 3, {"gloo_timeout_s": 5}, num_steps=200, patient=True) as job:
        job.await_that(lambda: job.run.has_done(3, size=3), "three ranks train")
        cluster.cut("h2")
        try:
            job.await_that(lambda: job.run.has_done(3, size=2), "the others go on")
            job.await_that(lambda: not ranks_on("h2", job.run), "the rank behind the cut ends")
        finally:
            cluster.mend("h2")
        job.await_that(lambda: job.run.has_done(3, size=3), "the host is back")
        finish(job)
        report = report_of(job.run)
    assert {event.place for event in report.events if event.kind == "lost"} == {"h2-0"}


def test_kill_9_of_the_driver_leaves_no_process_on_any_host(
    cluster: hosts.Cluster, tmp_path: Path
) -> None:
    with started(cluster, tmp_path, 2, {}, num_steps=100_000) as job:
        job.await_that(lambda: job.run.has_done(3, size=2), "two ranks train")
        for pid in ranks_on("h0", job.run):
            if "infra.bench.elastic.runs" in command_of(pid):
                os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not any(ranks_on(host, job.run) for host in ("h0", *cluster.hosts)),
            "no process is left on any host",
        )
