"""What a serving process imports before it answers."""

import ssl
import subprocess
from pathlib import Path

import pytest

from serving.security.certificates import ensure_authority, ensure_certificate
from tests.support.host.processes import python, run_python
from tests.support.services.listeners import tls_connection

pytestmark = pytest.mark.slow

IMPORTED = """
import sys
import typeguard
from serving.security.tls import only_tls_1_3
from tasks.features.access.profile import import_feast
only_tls_1_3()  # gRPC is not imported yet
whole = typeguard.typechecked
import_feast()
import feast, serving.components
assert "torch" not in sys.modules
assert typeguard.typechecked is whole
assert "TypeCheckMemo" not in feast.FeatureView.__init__.__code__.co_names
assert feast.FeatureStore.get_online_features.__code__.co_names
try:
    feast.Entity(name="station", join_keys="station_id")
except TypeError as error:
    assert "Entity, argument 'join_keys'" in str(error), error
else:
    raise AssertionError("a wrong definition was taken")
"""


def test_feast_comes_lean_and_still_says_what_is_wrong_in_a_definition() -> None:
    run_python("-c", IMPORTED, check=True)


LISTENING = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from serving.security.config import TlsConfig
from serving.security.tls import grpc_credentials, only_tls_1_3
only_tls_1_3()
import grpc
server = grpc.server(ThreadPoolExecutor(1))
names = ("certificate", "key", "client_ca")
config = TlsConfig(**dict(zip(names, map(Path, sys.argv[1:]), strict=True)))
print(server.add_secure_port("127.0.0.1:0", grpc_credentials(config)), flush=True)
server.start()
sys.stdin.read()
server.stop(0).wait()
"""


def test_grpc_of_the_server_takes_tls_1_3_alone(tmp_path: Path) -> None:
    authority = ensure_authority(tmp_path, "internal")
    server = ensure_certificate(tmp_path, "server", authority, ["localhost"], "server")
    client = ensure_certificate(tmp_path, "client", authority, ["client"], "client")
    files = [server.certificate, server.key, authority.certificate]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with python("-c", LISTENING, *map(str, files), **pipes) as process:
        try:
            port = int(process.stdout.readline())

            def version(wanted: ssl.TLSVersion) -> str | None:
                context = ssl.create_default_context(cafile=str(authority.certificate))
                context.load_cert_chain(client.certificate, client.key)
                context.minimum_version = context.maximum_version = wanted
                context.set_alpn_protocols(["h2"])
                with tls_connection(port, context) as secure:
                    assert secure.recv(9)  # its settings, once it has taken the certificate
                    return secure.version()

            assert version(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
            with pytest.raises((ssl.SSLError, ConnectionError)):
                version(ssl.TLSVersion.TLSv1_2)
        finally:
            process.stdin.close()
            process.wait(60)
