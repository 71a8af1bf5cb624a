"""Machines of their own on one host: a network with an address, disks that nobody else sees.

What all share is the software: the interpreter, its packages, and the project's code.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from infra.bench.elastic.hosts import ip, kill_all, run
from infra.bench.parts import wait_until
from tasks.kernel.settings import PROJECT_ROOT

HOST = "10.91.77.1"
"""Address of the host in the network of its machines."""
_BRIDGE = "falaj-br0"
DISK = Path("/mnt")
"""Where each machine has its own disk."""


def variables(**more: str) -> dict[str, str]:
    """What a program on a machine sees: state and project on its disk, the code of this one."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
    home = {"FALAJ_HOME": str(DISK / "home"), "FALAJ_FEATURE_REPO": str(DISK / "repo")}
    return {**passed, **home, "PYTHONPATH": str(PROJECT_ROOT), **more}


@dataclass
class Machine:
    """One machine.

    Attributes:
        disk: what it has under `DISK`; the test alone looks at it from outside.
    """

    name: str
    disk: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a program on it; the process id as the host sees it."""
        # Its disk first; then what the tests and the host keep under /tmp is out of its sight.
        mounts = f"mount --bind {self.disk} {DISK} && mount -t tmpfs tmpfs /tmp && "
        mounts += "mount -t tmpfs tmpfs /var/tmp && "
        mounts += f'hostname {self.name} && cd {DISK} && exec "$@"'
        inner = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", mounts]
        command = ["ip", "netns", "exec", self.name, *inner, "sh", *words]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env={**environment}, stdout=output, stderr=output, start_new_session=True
            )
        self.started.append(process)
        return process.pid

    def connect(self, to: str = "up") -> None:
        """Plug its network in, or out (`down`)."""
        ip(self.name, f"link set eth0 {to}")

    def lose_power(self) -> None:
        """End all its processes, and let nobody hear of it: what they send then is lost."""
        self.connect("down")
        self.kill()

    def kill(self) -> None:
        """Reset it: all its processes end at once, and the system closes their connections."""
        wait_until(partial(kill_all, self.name), f"all of {self.name} ends")
        for started in self.started:
            started.wait(30)
        self.started.clear()


@contextmanager
def machines(*names: str) -> Iterator[list[Machine]]:
    """Machines that reach the host at `HOST`, and each other not; skips where none can be made."""
    if os.geteuid() != 0 or _ip("link", "add", _BRIDGE, "type", "bridge"):
        pytest.skip("machines of their own need root and network namespaces")
    made: list[Machine] = []
    try:
        run("ip", "addr", "add", f"{HOST}/24", "dev", _BRIDGE)
        run("ip", "link", "set", _BRIDGE, "up")
        for number, name in enumerate(names, start=2):
            machine = Machine(name, Path(tempfile.mkdtemp(prefix=f"falaj-{name}-", dir="/var/tmp")))
            made.append(machine)
            outside = f"falaj-v{number}"
            pair = ("type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outside, *pair)
            run("ip", "link", "set", outside, "master", _BRIDGE, "up")
            own = f"addr add 10.91.77.{number}/24 dev eth0"
            ip(name, own, "link set eth0 up", "link set lo up")
        yield made
    finally:
        for number, machine in enumerate(made, start=2):
            machine.kill()
            # With the name alone it would go a little later, and be in the way of the next one.
            _ip("link", "delete", f"falaj-v{number}")
            _ip("netns", "delete", machine.name)
            subprocess.run(["rm", "-rf", str(machine.disk)], check=False)
        _ip("link", "delete", _BRIDGE)


def _ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode
