"""Feast's feature server under the guard: it does not outlive the command that started it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.features.access.server import EXIT_REFUSED, Listening, oidc_settings
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.files import private_folder
from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import PROJECT_ROOT, Settings

START_TIMEOUT_S = 180
UNSAFE = ("INTRA_COMMUNICATION_BASE64",)
"""Whoever knows this value would pass every check of Feast's, without a signature."""


@contextmanager
def feature_server(settings: Settings, at: Listening) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server and wait until it takes connections; stop it in the end.

    Args:
        settings: state folder, feature repository and profile to serve.
        at: where it listens.

    Raises:
        ConfigurationError: there is no issuer, the address is open, or the server refused to start.
        TransientError: the server ended or did not answer in time.
    """
    oidc_settings(os.environ)
    at.check()
    folder = private_folder(settings.home / "feast" / "servers")
    log = folder / "online.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tasks.features.access.server", at.host, str(at.port)]
    if at.certificate and at.key:
        command += ["--tls-cert", str(at.certificate), "--tls-key", str(at.key)]
    environment = {name: value for name, value in os.environ.items() if name not in UNSAFE}
    environment |= {
        "HOME": str(folder),  # libraries keep their files there
        "FALAJ_HOME": str(settings.home),
        "FALAJ_FEATURE_REPO": str(settings.feature_repo),
        "FALAJ_PROFILE": settings.profile,
    }
    with guarded_process(command, log, environment, folder=PROJECT_ROOT) as process:
        try:
            wait_until_ready(
                process, lambda: _listens(at), "the feature server", log, START_TIMEOUT_S
            )
        except TransientError as exc:
            lines = log.read_text(errors="replace").strip().splitlines()
            if process.returncode == EXIT_REFUSED and lines:
                raise ConfigurationError(lines[-1].removeprefix("refused: ")) from exc
            raise
        yield process


def _listens(at: Listening) -> bool:
    try:
        socket.create_connection((at.host, at.port), timeout=2).close()
    except OSError:
        return False
    return True
