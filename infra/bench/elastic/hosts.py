"""Several hosts on one machine: network namespaces with addresses, names and sshd of their own.

They share the file system, as hosts of a cluster share a folder. Needs Linux, root, iproute2 and
openssh-server. Everything has a name of its own kind, and what an earlier, killed run has left is
removed first.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from infra.bench.parts import wait_until
from tasks.kernel import guard
from tasks.kernel.settings import PROJECT_ROOT

PREFIX = "falajt"
SWITCH = f"{PREFIX}-switch"
INTERFACE = "eth1"
NETWORK = "10.77.0"
DRIVER = "h0"
# Of sshd's own, for the processes that take no password.
PRIVILEGE_FOLDER = Path("/run/sshd")
LOCK = Path("/run/falaj-test-hosts.lock")


def why_not() -> str | None:
    """Why this machine cannot play several hosts; None where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program, package in (("ip", "iproute2"), ("sshd", "openssh-server")):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return f"`{program}` is not installed (Debian package {package})"
    probe = f"{PREFIX}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "the kernel refuses `ip netns add` (a container without CAP_SYS_ADMIN?)"
    run("ip", "netns", "delete", probe)
    return None


def run(*command: str) -> str:
    """Run a command of set-up; returns what it printed."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr}"
    return ended.stdout


def ip(space: str, *commands: str) -> None:
    """Commands of `ip` in a network namespace."""
    for command in commands:
        run("ip", "-n", space, *command.split())


class Cluster:
    """A driver's host `h0` and hosts `h1` to `hN`, on one switch."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self.folder = folder
        self.hosts = [f"h{number}" for number in range(1, num_hosts + 1)]
        self.key_file = folder / "key"
        self.known_hosts_file = folder / "known_hosts"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Build the network and start every host's sshd."""
        run("ip", "netns", "add", SWITCH)
        ip(SWITCH, "link add br0 type bridge", "link set br0 up")
        PRIVILEGE_FOLDER.mkdir(exist_ok=True)
        make_key(self.key_file)
        for host in (DRIVER, *self.hosts):
            self._add(host)
        for host in self.hosts:
            self.start_sshd(host)

    def _add(self, host: str) -> None:
        space, port = namespace(host), f"{PREFIX}{host}"
        run("ip", "netns", "add", space)
        pair = f"link add {port} type veth peer name {INTERFACE} netns {space}"
        ip(SWITCH, pair, f"link set {port} master br0 up")
        own = f"addr add {address(host)}/24 dev {INTERFACE}"
        ip(space, own, f"link set {INTERFACE} up", "link set lo up")
        # As Debian has it: a host's own name is an address that no other host can reach.
        names = ["127.0.0.1 localhost", f"127.0.1.1 {host}"]
        names += [f"{address(other)} {other}" for other in (DRIVER, *self.hosts) if other != host]
        folder = Path("/etc/netns") / space
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("\n".join(names) + "\n")

    def start_sshd(self, host: str) -> None:
        """Start a host's sshd and wait until it answers."""
        host_key = self.folder / f"{host}-key"
        if not host_key.exists():
            make_key(host_key)
            kind, key, *_ = host_key.with_suffix(".pub").read_text().split()
            with self.known_hosts_file.open("a") as stream:
                stream.write(f"{host} {kind} {key}\n")
        options = (
            f"ListenAddress={address(host)}",
            f"AuthorizedKeysFile={self.key_file.with_suffix('.pub')}",
            *("PidFile=none", "UsePAM=no", "StrictModes=no", "PasswordAuthentication=no"),
            "PermitRootLogin=prohibit-password",
        )
        # Sshd wants to be called by its absolute path.
        program = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin")
        assert program is not None, "there is no sshd; install openssh-server"
        sshd = [program, "-D", "-e", "-f", "/dev/null", "-h", str(host_key)]
        sshd += [word for option in options for word in ("-o", option)]
        self._sshds[host] = self.start_on(host, sshd, self.folder / f"{host}.log")
        wait_until(lambda: self._answers(host), f"sshd of {host} answers")

    def _answers(self, host: str) -> bool:
        probe = f"import socket; socket.create_connection(('{address(host)}', 22), 1)"
        command = ["ip", "netns", "exec", namespace(DRIVER), sys.executable, "-S", "-c", probe]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def start_on(self, host: str, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host, under a guard: it ends when this process does."""
        # WireGuard's programs meet in that folder, which hosts do not share.
        own = "mkdir -p /run/wireguard && mount -t tmpfs none /run/wireguard"
        script = f'hostname {host}; {own}; exec "$@"'
        alone = ["unshare", "--uts", "--mount", "sh", "-c", script]
        there = ["ip", "netns", "exec", namespace(host), *alone]
        with output.open("ab") as stream:
            return subprocess.Popen(
                guard.guarded([*there, "sh", *command], 2),
                stdin=subprocess.DEVNULL,
                cwd=PROJECT_ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def kill_host(self, host: str) -> None:
        """As if its power were cut: all processes at once, and the link."""
        self.cut(host)
        kill_all(namespace(host))
        self._sshds.pop(host).wait()

    def cut(self, host: str) -> None:
        """Take its link down: nothing arrives, and nobody notices at once."""
        ip(SWITCH, f"link set {PREFIX}{host} down")

    def mend(self, host: str) -> None:
        """Take its link up again."""
        ip(SWITCH, f"link set {PREFIX}{host} up")

    def stop(self) -> None:
        """Remove all of it."""
        for sshd in self._sshds.values():
            sshd.terminate()
        for sshd in self._sshds.values():
            sshd.wait()
        remove_leftovers()


def pids_in(space: str) -> list[int]:
    """Processes that run in a network namespace."""
    return [int(pid) for pid in run("ip", "netns", "pids", space).split()]


def namespace(host: str) -> str:
    """The network namespace that plays a host."""
    return f"{PREFIX}-{host}"


def address(host: str) -> str:
    """A host's address on the switch."""
    return f"{NETWORK}.{10 + int(host[1:])}"


def make_key(path: Path) -> None:
    """A new key pair."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))


def remove_leftovers() -> None:
    """End and remove all hosts of this kind."""
    for space in (each.name for each in Path("/run/netns").glob(f"{PREFIX}-*")):
        wait_until(partial(kill_all, space), f"the processes in {space} end", 10)
        run("ip", "netns", "delete", space)
    for folder in Path("/etc/netns").glob(f"{PREFIX}-*"):
        shutil.rmtree(folder)


def kill_all(space: str) -> bool:
    """Kill what runs there; true where nothing does."""
    pids = pids_in(space)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not pids


@contextmanager
def cluster(folder: Path, num_hosts: int) -> Iterator[Cluster]:
    """Hosts that are there while the context lasts; one cluster a machine at a time."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_leftovers()
        built = Cluster(folder, num_hosts)
        try:
            built.start()
            yield built
        finally:
            built.stop()
