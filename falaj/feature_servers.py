"""Feast's servers, one process each, under the guard: none outlives the command that started it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tasks.features.access.servers import Listening, oidc_settings
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.files import private_folder
from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import PROJECT_ROOT, Settings

START_TIMEOUT_S = 180
POLL_S = 0.1
EXIT_REFUSED = 2
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
        kinds: online, offline, registry: which to start.
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
        for kind, process in started.items():
            try:
                wait_until_ready(
                    process,
                    partial(_listens, host, ports[kind]),
                    f"the {kind} feature server",
                    _log(settings, kind),
                    START_TIMEOUT_S,
                )
            except TransientError as exc:
                lines = _log(settings, kind).read_text(errors="replace").strip().splitlines()
                if process.returncode == EXIT_REFUSED and lines:
                    raise ConfigurationError(lines[-1].removeprefix("refused: ")) from exc
                raise
        yield started


def wait_for_any(servers: dict[str, subprocess.Popen[bytes]]) -> str:
    """Wait until a server ends; returns which."""
    while True:
        for kind, process in servers.items():
            if process.poll() is not None:
                return kind
        time.sleep(POLL_S)


def _server(
    settings: Settings, kind: str, place: Listening
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    folder, log = private_folder(settings.home / "feast" / "servers"), _log(settings, kind)
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tasks.features.access.servers", kind, place.host]
    command.append(str(place.port))
    if place.certificate and place.key:
        command += ["--tls-cert", str(place.certificate), "--tls-key", str(place.key)]
    environment = {name: value for name, value in os.environ.items() if name not in UNSAFE}
    environment |= {
        "HOME": str(folder),  # libraries keep their files there
        "FALAJ_HOME": str(settings.home),
        "FALAJ_FEATURE_REPO": str(settings.feature_repo),
        "FALAJ_PROFILE": settings.profile,
    }
    return guarded_process(command, log, environment, folder=PROJECT_ROOT)


def _log(settings: Settings, kind: str) -> Path:
    return settings.home / "feast" / "servers" / f"{kind}.log"


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True
