"""A tunnel between the driver and all hosts of an elastic run, made and removed with it.

WireGuard (Donenfeld, NDSS 2017): each pair of hosts has keys of its own, exchanged over the SSH
sessions, whose host keys are known. Ranks, rendezvous and NCCL get the tunnel's interface, so none
of their traffic goes in the clear; where the tunnel of a host does not stand, no rank starts there.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

from tasks.kernel import guard
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.process import attempts
from tasks.training.elastic import process
from tasks.training.elastic.config import ElasticConfig
from tasks.training.launch.rank_group import Lines, end_guard
from tasks.training.launch.rendezvous import address_of

NETWORK, PREFIX_BITS = "10.213", 16
AGENT = [sys.executable, "-S", str(Path(__file__).with_name("tunnel_agent.py"))]
START_LIMIT_S = 20.0


class Tunnel:
    """The driver's end and one on each host. To be used in one thread that stays.

    Args:
        config: interface on which hosts reach each other; port; how SSH reaches them.

    Raises:
        ConfigurationError: there can be no tunnel on this machine.
    """

    def __init__(self, config: ElasticConfig) -> None:
        self._config = config
        self.interface = f"falaj{secrets.token_hex(3)}"
        self._ends: dict[str, _End] = {}
        self._num_ends = 0
        own = self._begin("", AGENT, address_of(config.interface))
        for _ in attempts(START_LIMIT_S, 0.02):
            own.hear()
            if own.public or own.trouble:
                break
        if own.trouble or not own.public:
            self.close()
            reason = own.trouble or "no answer"
            raise ConfigurationError(
                f"no tunnel to training hosts can be made here: {reason}. Nothing was trained"
            )
        self.address = own.address

    def follow(self, hosts: Iterable[str]) -> None:
        """Begin the ends of new hosts, and make all known to each other; returns at once."""
        for host in hosts:
            if host not in self._ends:
                line = process.ssh_command(host, AGENT, self._config)
                self._begin(host, line, socket.gethostbyname(host))
        for end in self._ends.values():
            end.hear()
        known = [end for end in self._ends.values() if end.public and not end.is_over]
        for end in known:
            if end.num_told != len(known):
                end.num_told = len(known)
                end.send({"peers": [other.as_peer for other in known if other is not end]})

    def stands(self, host: str) -> bool:
        """Whether a host's end knows all others, and they know it.

        Where it does not because its session ended, the next `follow` makes it again.
        """
        if (end := self._ends.get(host)) is None:
            return False
        if end.is_over:
            end.close()
            del self._ends[host]
            return False
        known = [each for each in self._ends.values() if each.public and not each.is_over]
        return bool(end.public) and all(each.num_peers >= len(known) - 1 for each in known)

    @property
    def trouble(self) -> str:
        """Why ends do not stand, as clauses; empty where all do."""
        found = {host: end.trouble for host, end in self._ends.items() if end.trouble}
        return "; ".join(f"{host}: {trouble}" for host, trouble in found.items())

    def close(self) -> None:
        """Remove all ends."""
        for end in self._ends.values():
            end.close()

    def _begin(self, host: str, command: list[str], outside: str) -> "_End":
        self._num_ends += 1
        address = f"{NETWORK}.{self._num_ends // 250}.{self._num_ends % 250 + 1}/{PREFIX_BITS}"
        order = {"interface": self.interface, "address": address, "port": self._config.tunnel_port}
        self._ends[host] = _End(command, order, outside)
        return self._ends[host]


class _End:
    """One end: its agent, and what it has said."""

    def __init__(self, command: list[str], order: dict[str, Any], outside: str) -> None:
        self.address = str(order["address"]).partition("/")[0]
        self._outside = outside
        self.public, self.port, self.trouble = "", 0, ""
        self.num_told = self.num_peers = 0
        self._guard = subprocess.Popen(
            guard.guarded(command, 2),
            env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._lines = Lines(cast(IO[bytes], self._guard.stdout))
        self.send(order)

    @property
    def as_peer(self) -> dict[str, str]:
        """What others are told of it."""
        endpoint = f"{self._outside}:{self.port}"
        return {"public": self.public, "address": self.address, "endpoint": endpoint}

    @property
    def is_over(self) -> bool:
        """Whether its session ended."""
        return self._guard.poll() is not None

    def hear(self) -> None:
        """Take what its agent has said; does not wait."""
        for line in self._lines.read():
            try:
                said = json.loads(line)
                self.public = str(said.get("public", self.public))
                self.port = int(said.get("port", self.port))
                self.num_peers = int(said.get("peers", self.num_peers))
                self.trouble = str(said.get("error", self.trouble))
            except (ValueError, AttributeError):  # of ssh
                self.trouble = line.decode(errors="replace").strip()

    def send(self, message: dict[str, Any]) -> None:
        """Send its agent a message."""
        try:
            pipe = cast(IO[bytes], self._guard.stdin)
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            self.trouble = self.trouble or "its session broke off"

    def close(self) -> None:
        """End its agent, and with it the interface."""
        cast(IO[bytes], self._guard.stdin).close()
        self._guard.terminate()
        end_guard(self._guard, guard.GRACE_S)
        self._lines.pipe.close()
