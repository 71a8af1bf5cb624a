"""How OpenBao is asked."""

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from serving.security.certificates import ensure_authority, ensure_certificate
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.keys.openbao import OpenBao

V2, V3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize(("newest", "fault"), [(V2, ConfigurationError), (V3, TransientError)])
def test_it_is_asked_by_tls_1_3_alone(
    tmp_path: Path, newest: ssl.TLSVersion, fault: type[Exception]
) -> None:
    authority = ensure_authority(tmp_path, "authority")
    pair = ensure_certificate(tmp_path, "server", authority, ["127.0.0.1"], "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = newest
    context.load_cert_chain(pair.certificate, pair.key)

    def answer(listening: socket.socket) -> None:
        with suppress(ssl.SSLError), listening.accept()[0] as accepted:
            context.wrap_socket(accepted, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = threading.Thread(target=answer, args=[listening])
        served.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(fault):
            OpenBao(url, None, authority.certificate).ask("get", "sys/health")
        served.join()
