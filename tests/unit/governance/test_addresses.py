"""Every setting that holds an address is asked about, or it is said here why it need not be."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import AnyUrl, BaseModel

from flows.config import ImportConfig, PipelineConfig
from infra.gateway.config import GatewayConfig
from infra.platform.config import PlatformConfig
from serving.config import ServingConfig
from serving.security.config import SecurityConfig
from tasks.contracts.hardware import HardwareClass
from tasks.governance.handling import VARIABLES, Address, Placement, addresses, variables
from tasks.governance.policy import require_placements, require_tls
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.settings import PROJECT_ROOT, SERVER_NAMES, Settings

ROOTS = (PipelineConfig, ImportConfig, ServingConfig, SecurityConfig)
ROOTS += (GatewayConfig, PlatformConfig, HardwareClass)
WORDS = re.compile(
    r"(^|_)(ur[il]s?|hosts?|endpoints?|address(es)?|locations?|webhooks?|servers?|brokers?|"
    r"collectors?|redis|database|storage|listen|traces|http|grpc|place|issuers?|keys|registry)(_|$)"
)
LOOKS = re.compile(r"https?:|s3:|:\[0-9\]")
NOT_ASKED = {
    "GatewayConfig.hosts": "names in the certificate",
    "PlatformListener.address": "as browsers know what `listen` is",
    "PlatformConfig.sign_in_urls": "browsers are sent there, with a code that only we can use",
    "GatewayConfig.address_limit": "a rate",
    "GatewayConfig.upstream_tls": "a switch",
    "IssuerConfig.keys": "public keys are read from there, nothing goes there",
    "IssuerConfig.issuer": "a claim that is compared",
    "SecurityConfig.api_keys": "a file beside it",
    "ServedModel.golden_rows": "a file that is read",
    "FeatureTable.entity_keys": "columns",
    "ElasticConfig.slots_per_host": "a number",
    "ElasticConfig.ssh_known_hosts_file": "a file that is read",
}
VARIABLES_NOT_ASKED = {
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "keys are read from there",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "keys are read from there",
    "FALAJ_EXPECTED_STATE": "a name that is compared",
    "FALAJ_REPORTS_HOME": "a folder of the state",
    "PREFECT_SERVER_UI_API_URL": "made of `api_url` and `host`",
    "PREFECT_UI_URL": "made of `api_url` and `host`",
    "PREFECT_API_DATABASE_CONNECTION_URL": "SQLite in the state folder",
    **dict.fromkeys(
        ("PREFECT_SERVER_DOCKET_URL", "PREFECT_REDIS_MESSAGING_URL"), "as FALAJ_PLATFORM_REDIS_URL"
    ),
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "as FALAJ_PLATFORM_DATABASE_URL",
}


def models(kind: Any, seen: set[type[BaseModel]]) -> None:
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
        seen.add(kind)
        for field in kind.model_fields.values():
            models(field.annotation, seen)
    for part in get_args(kind):
        models(part, seen)


def fields() -> Iterator[tuple[str, Any]]:
    seen: set[type[BaseModel]] = set()
    for root in ROOTS:
        models(root, seen)
    for kind in seen:
        for name, field in kind.model_fields.items():
            yield f"{kind.__name__}.{name}", field


def holds_text(kind: Any) -> bool:
    if parts := get_args(kind):
        return any(holds_text(part) for part in parts)
    return isinstance(kind, type) and issubclass(kind, str | AnyUrl)


def test_every_field_that_may_hold_an_address_is_marked_or_named_with_a_reason() -> None:
    unmarked, marked = set(), set()
    for name, field in fields():
        patterns = " ".join(str(getattr(m, "pattern", "")) for m in field.metadata)
        is_url = "Url" in str(field.annotation) or LOOKS.search(patterns)
        named = WORDS.search(name.partition(".")[2]) and holds_text(field.annotation)
        if any(isinstance(mark, Address) for mark in field.metadata):
            marked.add(name)
        elif is_url or named:
            unmarked.add(name)
    assert unmarked - NOT_ASKED.keys() == set()
    assert {"RawTable.uri", "TraceConfig.endpoint", "GatewayConfig.listen"} <= marked
    assert len(marked) >= 14
    assert not NOT_ASKED.keys() & marked


def test_every_variable_that_may_hold_an_address_is_asked_about() -> None:
    shape = r'"((?:FALAJ|PREFECT|OPENLINEAGE|AWS|OTEL|MLFLOW)_[A-Z_0-9]*)"'
    words = "URL|URI|HOST|ENDPOINT|ADDRESS|STATE|REDIS|WEBHOOK|SLACK|EMAIL|AUDIT"
    ends = re.compile(rf"_({words})(_S3)?$")
    rooms = ("tasks", "flows", "falaj", "infra", "serving")
    files = [file for room in rooms for file in (PROJECT_ROOT / room).rglob("*.py")]
    read = {name for file in files for name in re.findall(shape, file.read_text("utf-8"))}
    found = {name for name in read if ends.search(name) and "bench" not in name}
    assert len(found) > 10
    assert found - VARIABLES.keys() - VARIABLES_NOT_ASKED.keys() == set()
    assert {*SERVER_NAMES.values()} <= VARIABLES.keys()


@pytest.mark.parametrize("name", sorted([*VARIABLES, "FALAJ_ORDERS_URL"]))
def test_a_variable_is_a_placement(name: str) -> None:
    found = [each.setting for each in variables({name: "https://x.example.org", "HOME": "/x"})]
    assert found == ([name] if VARIABLES.get(name, "features") else [])


def test_addresses_are_found_at_any_depth() -> None:
    url = "https://x.example.org/v1/traces"
    config = ServingConfig.model_validate({"observability": {"traces": {"endpoint": url}}})
    found = {each.setting: each.where for each in addresses(config, {}, "s")}
    assert found == {"s.host": "https://127.0.0.1", "s.observability.traces.endpoint": url}


@pytest.mark.parametrize(
    ("address", "passes"),
    [
        ("https://x.example.org", True),
        ("http://x.example.org", False),
        ("http://127.0.0.1:4200/api", True),
        ("postgresql+psycopg://u:p@x.example.org/d?sslmode=verify-full", True),
        ("postgresql://u:p@x.example.org/d?sslmode=require", False),
        ("postgresql://u:p@127.0.0.1,x.example.org/d", False),
        ("postgresql://u:p@127.0.0.1/d?host=x.example.org", False),
        ("rediss://x.example.org:6379/0", True),
        ("rediss://x.example.org:6379/0?ssl_cert_reqs=none", False),
        ("x.example.org:6379,ssl=true,password=p", True),
        ("10.0.0.1:4200", False),
        ("mailto://u:p@x.example.org?to=a@example.org", False),
        ("s3://bucket/prefix", True),  # asked of AWS_ENDPOINT_URL
        ("file:data/rows.csv", True),
        ("pool:burst", True),
    ],
)
def test_an_encrypted_state_sends_nothing_in_clear_text(address: str, passes: bool) -> None:
    placed = [Placement("anything", address, "a setting")]
    require_tls(placed, {})
    if passes:
        require_tls(placed, {ENCRYPTION: "state"})
        return
    with pytest.raises(ConfigurationError, match=r"a setting names .*example\.org|10\.") as caught:
        require_tls(placed, {ENCRYPTION: "state"})
    assert "u:p" not in str(caught.value)


def test_no_field_and_no_variable_escapes_the_rule_of_tls(tmp_path: Path) -> None:
    settings = Settings(tmp_path, tmp_path)
    for name in [*(n for n, what in VARIABLES.items() if what), "FALAJ_ORDERS_URL"]:
        with pytest.raises(ConfigurationError, match=name):
            require_placements(settings, [], [], {name: "x.example.org:1", ENCRYPTION: "state"})
    marks = {m.prefix for _, f in fields() for m in f.metadata if isinstance(m, Address)}
    assert marks == {"", "https://", "hosts:"}
    platform = PlatformConfig(host="10.0.0.1")
    with pytest.raises(ConfigurationError, match=r"host names 10\.0\.0\.1"):
        require_placements(settings, addresses(platform, {}), [], {ENCRYPTION: "state"})
