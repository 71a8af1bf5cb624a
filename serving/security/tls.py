"""TLS contexts: 1.3 or nothing, read again when certificates are renewed."""

from __future__ import annotations

import logging
import os
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from serving.security.config import TlsConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import file_state

if TYPE_CHECKING:
    import grpc

_NO_TLS_1_2 = "PSK-AES128-CBC-SHA"
"""The one suite that gRPC may take in TLS 1.2: it needs a shared secret, and there is none."""
LOGGER = logging.getLogger(__name__)


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """A context for a listener; with `client_ca`, clients need a certificate of that authority.

    Raises:
        ConfigurationError: certificate or key are absent, unfit, or open to others.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _check_key(config.key)
    try:
        context.load_cert_chain(config.certificate, config.key)
        if config.client_ca is not None:
            context.load_verify_locations(config.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as exc:
        raise ConfigurationError(
            f"TLS with {config.certificate} and {config.key} cannot be had: {exc}"
        ) from exc
    return context


def only_tls_1_3() -> None:
    """Keep gRPC in this process from TLS 1.2, as server and as client; for a program's start.

    Python's gRPC has no setting for it, so it is left without a suite that it could agree on. It
    reads that when it is imported. The suites of TLS 1.3 are not touched by it.

    Raises:
        RuntimeError: gRPC was imported before.
    """
    if "grpc" in sys.modules:
        raise RuntimeError("gRPC was imported before it could be held to TLS 1.3")
    os.environ["GRPC_SSL_CIPHER_SUITES"] = _NO_TLS_1_2


def grpc_credentials(config: TlsConfig) -> grpc.ServerCredentials:
    """Credentials of a gRPC listener that only holders of a certificate can talk to.

    Without `client_ca` there are none: then it belongs on loopback, or behind the edge. New
    connections see renewed files, as those of `RenewingTls` do. TLS 1.2 is taken too, unless the
    program called `only_tls_1_3` before.

    Raises:
        ConfigurationError: there is no `client_ca`, or a file cannot be read.
    """
    if config.client_ca is None:
        raise ConfigurationError(
            "gRPC has TLS here for holders of a certificate alone; put the edge before it, or "
            "listen on loopback"
        )
    import grpc

    following, authority = RenewingTls(config), config.client_ca  # says what is wrong with files

    def files() -> grpc.ServerCertificateConfiguration:
        pair = (config.key.read_bytes(), config.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], authority.read_bytes())

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Asked at each handshake, by threads of gRPC; None leaves it as it is."""
        return files() if following.look() else None

    return grpc.dynamic_ssl_server_credentials(files(), renewed, require_client_authentication=True)


class RenewingTls:
    """A context that follows its files, so that a renewed certificate needs no restart.

    Whoever listens with it calls `look` from time to time. New connections see the new certificate.
    A changed `client_ca` adds authorities; taking one away needs a restart, since OpenSSL forgets
    none.
    """

    def __init__(self, config: TlsConfig) -> None:
        self.context = server_context(config)
        self._config = config
        self._files = _files_of(config)

    def look(self) -> bool:
        """Read the files again where they have changed; True where that was so.

        Files that do not fit each other are left for the next look: one of the two may still
        be on its way.
        """
        files = _files_of(self._config)
        if files == self._files:
            return False
        try:
            server_context(self._config)  # tried aside: a failure must not leave half of it
            self.context.load_cert_chain(self._config.certificate, self._config.key)
            if self._config.client_ca is not None:
                self.context.load_verify_locations(self._config.client_ca)
        except (OSError, ConfigurationError) as exc:  # `ssl.SSLError` is an `OSError`
            LOGGER.warning("the TLS certificate stays as it was: %s", exc)
            return False
        self._files = files
        return True


def _files_of(config: TlsConfig) -> tuple[object, ...]:
    files = (config.certificate, config.key, config.client_ca)
    return tuple(file_state(file) for file in files if file is not None)


def _check_key(file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except OSError as exc:
        raise ConfigurationError(f"TLS key {file} cannot be read: {exc.strerror}") from exc
    if mode & 0o077:
        raise ConfigurationError(f"TLS key {file} may be read by others than its owner; chmod 600")
