"""Feast's servers, one process each, under the guard: none outlives the command that started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.features.access.servers import Listening, oidc_settings
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.files import private_folder
from tasks.kernel.settings import Settings

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 15
POLL_S = 0.1
EXIT_REFUSED = 2
PORTS = {"online": 6566, "offline": 8815, "registry": 6570}
"""Feast's own ports."""

UNSAFE = ("INTRA_COMMUNICATION_BASE64",)
"""Whoever knows this value would pass every check of Feast's, without a signature."""


@contextmanager
def feature_servers(
    settings: Settings,
    kinds: Sequence[str],
    host: str,
    ports: dict[str, int],
    certificate: Path | None = None,
    key: Path | None = None,
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start servers and wait until they take connections; stop them in the end.

    Args:
        settings: state folder, feature repository and profile to serve.
        kinds: which of `PORTS` to start.
        host: address to listen on.
        ports: port of each kind.
        certificate: file with the servers' certificate, needed outside of loopback.
        key: file with its key.

    Raises:
        ConfigurationError: there is no issuer, the address is open, or a server refused to start.
        TransientError: a server ended or did not answer in time.
    """
    oidc_settings(os.environ)
    places = {kind: Listening(host, ports[kind], certificate, key) for kind in kinds}
    for place in places.values():
        place.check()
    with ExitStack() as stack:
        started = {
            kind: stack.enter_context(_server(settings, kind, place))
            for kind, place in places.items()
        }
        deadline = time.monotonic() + START_TIMEOUT_S
        for kind, process in started.items():
            _wait_until_ready(process, kind, host, ports[kind], deadline, _log(settings, kind))
        yield started


def wait_for_any(servers: dict[str, subprocess.Popen[bytes]]) -> str:
    """Wait until a server ends; returns which."""
    while True:
        for kind, process in servers.items():
            if process.poll() is not None:
                return kind
        time.sleep(POLL_S)


@contextmanager
def _server(settings: Settings, kind: str, place: Listening) -> Iterator[subprocess.Popen[bytes]]:
    from tasks.kernel import guard

    folder = private_folder(settings.home / "feast" / "servers")
    command = [
        sys.executable,
        "-m",
        "tasks.features.access.servers",
        kind,
        place.host,
        str(place.port),
    ]
    if place.certificate and place.key:
        command += ["--tls-cert", str(place.certificate), "--tls-key", str(place.key)]
    environment = {name: value for name, value in os.environ.items() if name not in UNSAFE}
    environment |= {
        "HOME": str(folder),  # libraries keep their files there
        "FALAJ_HOME": str(settings.home),
        "FALAJ_FEATURE_REPO": str(settings.feature_repo),
        "FALAJ_PROFILE": settings.profile,
    }
    with (
        _log(settings, kind).open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-S", guard.__file__, str(os.getpid()), "5", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _log(settings: Settings, kind: str) -> Path:
    return settings.home / "feast" / "servers" / f"{kind}.log"


def _wait_until_ready(
    process: subprocess.Popen[bytes], kind: str, host: str, port: int, deadline: float, log: Path
) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines()
            if process.returncode == EXIT_REFUSED and said:
                raise ConfigurationError(said[-1].removeprefix("refused: "))
            raise TransientError(
                f"the {kind} feature server ended with code {process.returncode} before it was "
                f"ready; its log is {log}"
            )
        try:
            socket.create_connection((host, port), timeout=2).close()
        except OSError:
            time.sleep(POLL_S)
        else:
            return
    raise TransientError(
        f"the {kind} feature server did not answer within {START_TIMEOUT_S} s; its log is {log}"
    )
