"""Who can read and write what through Feast's server: a real server, real tokens."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from falaj.features import feature_server
from infra.orchestration.embedded import free_port
from tasks.features.access.server import Listening
from tasks.governance.journal import Journal
from tasks.governance.verification import verify
from tasks.kernel.errors import ConfigurationError
from tests.support.data.installation import GATES, Installation
from tests.support.data.repository import days
from tests.support.host.processes import pids_whose_command_holds
from tests.support.services.oidc import Issuer, issuer, new_key

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
WINDOW = days(0, 2)
ONE_ROW = {
    "origin": ["JFK"],
    "temp": [51.0],
    "event_timestamp": [WINDOW.end.isoformat()],
    "created": [WINDOW.end.isoformat()],
}
ALLOWED, FORBIDDEN, UNKNOWN = "allowed", "forbidden", "not authenticated"
SECRET = """
secret = FeatureView(
    name="secret",
    entities=[origin],
    ttl=timedelta(hours=6),
    schema=floats("temp"),
    source=weather_table,
)
"""


@dataclass(frozen=True)
class Served:
    """An installation with its servers up."""

    installation: Installation
    issuer: Issuer
    port: int

    @property
    def trail(self) -> Journal:
        return self.installation.trail

    def post(self, path: str, body: dict[str, Any], token: str | None) -> requests.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"http://127.0.0.1:{self.port}{path}"
        return requests.post(url, json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def identity() -> Iterator[Issuer]:
    with issuer() as running:
        yield running


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Two days online and published; one view can be pushed to, one has no permission."""
    made = Installation.at(tmp_path_factory.mktemp("two"), num_days=2)
    (made.repository.path / "more.py").write_text(GATES + SECRET)
    file = made.repository.path / "permissions.py"
    file.write_text(file.read_text().replace('"weather",', '"weather",\n    "gate_weather",'))
    tables = made.refresh(WINDOW)
    made.materialize(tables, WINDOW)
    made.publish(tables)
    return made


@pytest.fixture(scope="module")
def served(installation: Installation, identity: Issuer) -> Iterator[Served]:
    at = Listening("127.0.0.1", free_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in identity.environment.items():
            patch.setenv(name, value)
        with feature_server(installation.settings, at):
            yield Served(installation, identity, at.port)


SERVICE_KEYS = {"origin": ["JFK"], "dest": ["LAX"], "carrier": ["UA"], "tailnum": ["N14228"]}
TIMES = {"start_ts": WINDOW.start.isoformat(), "end_ts": WINDOW.end.isoformat()}


def reading(feature: str) -> tuple[str, dict[str, Any]]:
    return "/get-online-features", {"features": [feature], "entities": {"origin": ["JFK", "EWR"]}}


ACTS: dict[str, tuple[str, dict[str, Any]]] = {
    "online view": reading("weather:temp"),
    "online service": (
        "/get-online-features",
        {
            "feature_service": "flight_delay_v1",
            "entities": SERVICE_KEYS,
            "full_feature_names": True,
        },
    ),
    "online view without permission": reading("secret:temp"),
    "push": ("/push", {"push_source_name": "gates", "df": ONE_ROW}),
    "write without permission": (
        "/write-to-online-store",
        {"feature_view_name": "secret", "df": ONE_ROW},
    ),
    "materialize": ("/materialize", {**TIMES, "feature_views": ["weather"]}),
}


def answer(served: Served, act: str, token: str | None) -> str:
    response = served.post(*ACTS[act], token)
    return {200: ALLOWED, 401: UNKNOWN, 403: FORBIDDEN}.get(response.status_code, response.text)


READS_ONLINE = {"online view", "online service"}
PERMITTED = {
    "nobody": set[str](),
    "reader": READS_ONLINE,
    "trainer": READS_ONLINE,
    "operator": {*READS_ONLINE, "push", "materialize"},
    "admin": ACTS.keys(),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("role", PERMITTED)
def test_each_role_may_do_what_its_permissions_say_and_nothing_else(
    served: Served, role: str, act: str
) -> None:
    told = answer(served, act, served.issuer.token(role))
    assert told == (ALLOWED if act in PERMITTED[role] else FORBIDDEN)


def spoilt_tokens(identity: Issuer) -> dict[str, str | None]:
    """Tokens that must open nothing, though each says it is an administrator's."""
    return {
        "none": None,
        "junk": "junk",
        "expired": identity.token("admin", exp=1_600_000_000),
        "other audience": identity.token("admin", aud="billing"),
        "no audience": identity.token("admin", aud=None),
        "other issuer": identity.token("admin", iss="http://127.0.0.1:1/"),
        "other key": identity.token("admin", key=new_key()),
        "unsigned": identity.token("admin", key="", alg="none"),
        "signed with a shared secret": identity.token("admin", key="s" * 64, alg="HS256"),
        "of a cluster": identity.token("admin", key=new_key(), **{"kubernetes.io": {}}),
        "of a server": identity.token("admin", key=new_key(), preferred_username=""),
    }


@pytest.mark.parametrize("act", ["online view", "push", "materialize"])
@pytest.mark.parametrize("kind", spoilt_tokens(Issuer()))
def test_a_token_that_is_not_the_issuers_for_this_service_opens_nothing(
    served: Served, kind: str, act: str
) -> None:
    assert answer(served, act, spoilt_tokens(served.issuer)[kind]) == UNKNOWN


def test_callers_at_the_same_time_are_never_taken_for_each_other(served: Served) -> None:
    tokens = {role: served.issuer.token(role) for role in ("trainer", "nobody")}

    def ask(number: int) -> tuple[str, str]:
        role = ("trainer", "nobody")[number % 2]
        act = ("online view", "online service")[number % 4 // 2]
        return role, answer(served, act, tokens[role])

    with ThreadPoolExecutor(8) as threads:
        answers = set(threads.map(ask, range(64)))
    assert answers == {("trainer", ALLOWED), ("nobody", FORBIDDEN)}


def test_every_act_and_every_denial_is_in_the_audit_with_subject_and_roles(served: Served) -> None:
    before = len(list(served.trail.lines()))
    answer(served, "push", served.issuer.token("operator", sub="bob"))
    answer(served, "materialize", served.issuer.token("operator", sub="cyd"))
    answer(served, "online view", served.issuer.token("nobody", sub="dan"))
    acts = [line.content for line in list(served.trail.lines())[before:]]
    told = {(a["action"], a["outcome"], a["who"]["subject"], *a["who"]["roles"]) for a in acts}
    assert told == {
        ("push", "begun", "bob", "operator"),
        ("push", "ok", "bob", "operator"),
        ("materialize", "begun", "cyd", "operator"),
        ("materialize", "ok", "cyd", "operator"),
        ("denied", "denied", "dan", "nobody"),
    }
    assert verify(served.trail).faults == ()


def test_refused_tokens_are_in_the_audit_and_cannot_flood_it(served: Served) -> None:
    before = len(list(served.trail.lines()))
    for _ in range(20):
        answer(served, "online view", "junk")
    refused = [line.content for line in list(served.trail.lines())[before:]]
    assert {a["outcome"] for a in refused} <= {"token refused"}
    assert len(refused) < 20


def test_a_window_in_the_future_is_refused_with_a_sentence(served: Served) -> None:
    body = {**TIMES, "end_ts": "2113-01-01T05:00Z", "feature_views": ["weather"]}
    refused = served.post("/materialize", body, served.issuer.token("operator"))
    assert refused.status_code == 422
    assert "ends in the future" in refused.text


@pytest.mark.parametrize("path", ["/chat", "/docs", "/openapi.json", "/materialize-incremental"])
def test_paths_that_are_not_guarded_are_not_served(served: Served, path: str) -> None:
    assert served.post(path, {}, served.issuer.token("admin")).status_code == 404


def test_a_body_behind_an_upgrade_is_no_request(served: Served) -> None:
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received = b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as line:
        line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(hidden))
        line.sendall(hidden + last)
        while piece := line.recv(65_536):
            received += piece
    assert re.findall(rb"HTTP/1\.1 (\d+) ", received) == [b"404", b"200"]


def test_no_token_or_password_stands_on_a_command_line(served: Served) -> None:
    (pid,) = [
        pid
        for pid in pids_whose_command_holds(f"127.0.0.1\x00{served.port}")
        if b"guard.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert words[1:-2] == [b"-m", b"tasks.features.access.server", b"127.0.0.1"]


@pytest.mark.parametrize(
    ("host", "missing", "said"),
    [
        ("127.0.0.1", "FALAJ_OIDC_AUDIENCE", "needs FALAJ_OIDC_AUDIENCE"),
        ("0.0.0.0", None, "unencrypted; expected a loopback address"),
        ("::", None, "unencrypted; expected a loopback address"),
    ],
)
def test_serving_is_refused_without_an_issuer_or_in_the_clear(
    installation: Installation,
    identity: Issuer,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    missing: str | None,
    said: str,
) -> None:
    for name, value in identity.environment.items():
        monkeypatch.setenv(name, value)
    if missing:
        monkeypatch.delenv(missing)
    with (
        pytest.raises(ConfigurationError, match=said),
        feature_server(installation.settings, Listening(host, free_port())),
    ):
        pytest.fail("it was started")
