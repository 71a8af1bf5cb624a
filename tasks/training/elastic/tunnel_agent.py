"""One end of the ranks' tunnel: a WireGuard interface, which goes when its session does.

Usage: python -S tunnel_agent.py     (by the driver, here or as the remote command of ssh)

The first line of stdin is JSON: name and address of the interface, and the UDP port. Answered is
the public key, made here, and the port. Each further line names all peers. The private key never
leaves the host. The kernel's WireGuard is used where it is there, else the program `wireguard-go`.
Needs CAP_NET_ADMIN and the programs `ip` and `wg`.

Only the standard library is used, so that it starts in a few milliseconds.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_LIMIT_S = 5.0


def main() -> int:
    """Hold the interface until stdin ends."""
    order: dict[str, Any] = json.loads(sys.stdin.readline() or "{}")
    if not order:
        return 1
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    name, program = order["interface"], None
    made = ["ip", "link", "add", name, "type", "wireguard"]
    if subprocess.run(made, capture_output=True, check=False).returncode:
        guard = str(Path(__file__).parents[2] / "kernel" / "guard.py")
        command = ["wireguard-go", "-f", name]
        line = [sys.executable, "-S", guard, str(os.getpid()), "1", "--", *command]
        program = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_interface(name)
        private = run("wg", "genkey")
        port = ["listen-port", str(order["port"])] if order["port"] else []
        run("wg", "set", name, *port, "private-key", "/dev/stdin", text=private)
        run("ip", "address", "add", order["address"], "dev", name)
        run("ip", "link", "set", name, "mtu", "1420", "up")
        answer(
            public=run("wg", "pubkey", text=private),
            port=int(run("wg", "show", name, "listen-port")),
        )
        for text in sys.stdin:
            peers = json.loads(text)["peers"]
            for peer in peers:
                allowed = ["allowed-ips", f"{peer['address']}/32", "endpoint", peer["endpoint"]]
                run("wg", "set", name, "peer", peer["public"], *allowed)
            answer(peers=len(peers))
    except (OSError, RuntimeError) as exc:
        answer(error=str(exc))
        return 1
    finally:
        if program is not None:
            program.terminate()
            program.wait()
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    return 0


def _await_interface(name: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not Path(f"/sys/class/net/{name}").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(
                "neither the kernel's WireGuard nor wireguard-go makes an interface (expected root "
                "or CAP_NET_ADMIN, /dev/net/tun, and the package wireguard-go)"
            )
        time.sleep(0.02)
    if not Path(f"/var/run/wireguard/{name}.sock").exists():
        time.sleep(0.1)  # the program listens a moment after its interface is there


def run(*command: str, text: str = "") -> str:
    """What a command prints."""
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{command[0]} {command[1]}: {' '.join(ended.stderr.split())}")
    return ended.stdout.strip()


def answer(**facts: Any) -> None:
    """Tell the driver."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
