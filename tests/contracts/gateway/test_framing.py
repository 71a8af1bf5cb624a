"""Requests that can be read in two ways, sent to a real Envoy: none becomes two behind it."""

import re
import ssl
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.services.listeners import tls_connection
from tests.support.serving.edges import INFER, Edge
from tests.support.serving.odd_requests import ODD

pytestmark = pytest.mark.slow
CASES = [case for case in ODD if case.name != "CONNECT"]
"""Envoy answers that one and then waits for the tunnel's end, as it should."""


def statuses(edge: Edge, data: bytes) -> list[int]:
    """What is answered until the connection ends."""
    context = ssl.create_default_context(cafile=str(edge.authority))
    context.set_alpn_protocols(["http/1.1"])
    received = b""
    with tls_connection(edge.port, context) as secure:
        try:
            secure.sendall(data)
            while piece := secure.recv(65_536):
                received += piece
        except (ConnectionError, ssl.SSLError):
            pass  # Envoy resets what it does not read to its end
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) [A-Z]", received)]


def test_each_has_one_answer_and_its_body_is_no_request(edge: Edge) -> None:
    token = b"authorization: " + edge.bearer("odd")["authorization"].encode()
    asked = [case.at(INFER.encode(), token, b"x-case: %d" % n) for n, case in enumerate(CASES)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda data: statuses(edge, data), asked))
    seen = Counter(int(one.headers.get("x-case", "-1")) for one in edge.upstream.seen)
    assert {one.path for one in edge.upstream.seen} == {INFER}
    faults = {}
    for number, (case, got) in enumerate(zip(CASES, found, strict=True)):
        if len(got) > case.num_requests + 1 or seen[number] > case.num_requests:
            faults[case.name] = (got, seen[number])
        if case.taken and got[0] == 200 and case.num_requests == 1 and got != [200, 200]:
            faults[case.name] = (got, seen[number])
    assert faults == {}
    assert seen[-1] == 0
    assert sum(seen.values()) > 3
