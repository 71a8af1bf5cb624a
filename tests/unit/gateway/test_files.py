"""What the gateway writes for Envoy and for a cluster, and what it refuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from falaj.__main__ import main
from infra.gateway.config import GatewayPlan, Shares, read_plan
from infra.gateway.prepare import GatewayTraffic, prepare
from infra.gateway.rendering import policies, rendered
from serving.security.config import read_security
from tasks.contracts.serving import address_file
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.services.signing import AUDIENCE, Signer

Describe = Callable[..., GatewayPlan]
EXAMPLES = PROJECT_ROOT / "infra" / "gateway" / "examples"
MODELS = {"flight-delay": {}, "acme-churn": {}}
ISSUER = "https://issuer.test"
OF_OURS = {"header": "x-falaj-slot", "value": "b", "slot": "candidate"}


@pytest.fixture
def describe(tmp_path: Path) -> Describe:
    """Write edge.yaml and security.yaml, and read the plan."""

    def described(security: dict[str, Any] | None = None, **edge: Any) -> GatewayPlan:
        (tmp_path / "edge").mkdir(exist_ok=True)
        (tmp_path / "serving").mkdir(exist_ok=True)
        (tmp_path / "serving" / "keys.json").write_text(Signer(ISSUER).keys())
        known = {"issuer": ISSUER, "audience": AUDIENCE, "keys": "keys.json"}
        (tmp_path / "edge" / "edge.yaml").write_text(yaml.safe_dump({"models": MODELS} | edge))
        content = {"issuers": [known]} | (security or {})
        (tmp_path / "serving" / "security.yaml").write_text(yaml.safe_dump(content))
        return read_plan(tmp_path)

    return described


def test_all_files_are_the_owners_alone(describe: Describe) -> None:
    plan = describe()
    prepare(plan)
    files = [path for path in plan.files.folder.rglob("*") if path.is_file()]
    written = {path.name for path in files}
    assert {"bootstrap.json", "listeners.json", "routes.json", "clusters.json"} <= written
    assert plan.files.folder.stat().st_mode & 0o777 == 0o700
    ours = [path for path in files if path.name != "edge.yaml"]
    assert {path.stat().st_mode & 0o077 for path in ours} == {0}


def test_the_servers_part_is_read_as_it_was_written(describe: Describe, tmp_path: Path) -> None:
    plan = describe({"api_keys": "secrets/keys.json", "owners": {"acme-churn": "acme"}})
    prepare(plan)
    server = read_security(plan.files.server_security_file)
    assert server.behind_edge
    assert server.tls.client_ca is not None
    assert server.owners == {"acme-churn": "acme"}
    assert server.api_keys == tmp_path / "serving" / "secrets" / "keys.json"
    assert server.issuers[0].keys == str(tmp_path / "serving" / "keys.json")


def test_both_ends_speak_tls_1_3_alone(describe: Describe) -> None:
    plan = describe()
    prepare(plan)
    ends = json.dumps([rendered(kind, plan) for kind in ("listeners", "clusters")])
    spoken = re.findall(r'"tls_(?:minimum|maximum)_protocol_version": "(\w+)"', ends)
    assert spoken == ["TLSv1_3"] * 2 * (1 + len(rendered("clusters", plan)))


def split_of(plan: GatewayPlan, shares: Shares) -> dict[str, Any]:
    (found,) = rendered("routes", plan, {"flight-delay": shares})
    routes = found["virtual_hosts"][0]["routes"]
    return next(
        r["route"]
        for r in routes
        if "delay" in str(r["match"]) and "weighted_clusters" in r.get("route", {})
    )


def test_weights_always_sum_to_the_same(describe: Describe) -> None:
    plan = describe()
    for share in (0.0, 0.0001, 0.1, 1 / 3, 0.99999, 1.0):
        split = split_of(plan, Shares(candidate=share))
        weights = [c["weight"] for c in split["weighted_clusters"]["clusters"]]
        assert sum(weights) == 10_000
        assert weights[0] == round(share * 10_000)
        assert split["weighted_clusters"]["use_hash_policy"] is True
    assert "hash_policy" not in split_of(plan, Shares(candidate=0.5, sticky=False))
    assert "request_mirror_policies" not in split_of(plan, Shares())


def test_servers_on_this_machine_are_found_beside_those_that_are_named(
    describe: Describe, tmp_path: Path
) -> None:
    plan = describe()
    assert plan.servers["http"] == ("127.0.0.1:8000",)
    assert "previous_hosts" not in json.dumps(rendered("routes", plan))
    for number, port in enumerate((8000, 8100)):
        addresses = {"http": f"https://127.0.0.1:{port}", "grpc": None}
        address_file(tmp_path, number).write_text(json.dumps(addresses))
    plan = read_plan(tmp_path)
    assert plan.servers == {
        "http": ("127.0.0.1:8000", "127.0.0.1:8100"),
        "grpc": ("127.0.0.1:8001",),
    }
    named = describe(http=["10.0.0.7:8000"])
    assert named.servers["http"] == ("10.0.0.7:8000", "127.0.0.1:8000", "127.0.0.1:8100")
    clusters = {one["name"]: one for one in rendered("clusters", named)}
    endpoints = clusters["http-stable"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert len(endpoints) == 3
    assert "previous_hosts" in json.dumps(rendered("routes", named)), "asked again elsewhere"


def test_a_model_belongs_to_its_tenant_for_every_issuer(describe: Describe) -> None:
    issuers = [
        {"issuer": "https://a", "audience": "x", "keys": "keys.json", "tenant_claim": "org"},
        {"issuer": "https://b", "audience": "x", "keys": "keys.json", "tenant": "globex"},
        {"issuer": "https://c", "audience": "x", "keys": "keys.json"},
    ]
    plan = describe({"issuers": issuers, "owners": {"acme-churn": "acme"}})
    found = {one["name"]: one for one in policies(plan)}
    allowed = [issuer.issuer for issuer in found["infer-acme-churn"]["issuers"]]
    assert allowed == ["https://a", "https://c"]
    assert len(found["infer-flight-delay"]["issuers"]) == 3
    principals = json.dumps(role_policies(plan)["infer-acme-churn"]["principals"])
    assert '"acme"' in principals
    assert "https://b" not in principals


def role_policies(plan: GatewayPlan) -> dict[str, Any]:
    (listener,) = rendered("listeners", plan)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (roles,) = [f for f in manager["http_filters"] if f["name"].endswith("rbac")]
    found: dict[str, Any] = roles["typed_config"]["rules"]["policies"]
    return found


@pytest.mark.parametrize("role", ["a|b", "team+ops", "(x", "infer:*"])
def test_a_role_is_matched_as_it_is_written(describe: Describe, role: str) -> None:
    plan = describe({"grants": {role: ["infer:acme-churn"]}})
    policy = json.dumps(role_policies(plan)["infer-acme-churn"])
    found = set(re.findall(r'"regex": "(.*?)"', policy))
    patterns = [json.loads(f'"{one}"') for one in found]
    assert any(re.fullmatch(pattern, f"first {role} last") for pattern in patterns)
    assert not any(re.fullmatch(one, text) for one in patterns for text in ("a", "b", "infer:x"))


@pytest.mark.parametrize(
    ("edge", "said"),
    [
        ({"models": {}}, "at least 1"),
        ({"models": {"a/b": {}}}, "pattern"),
        ({"certificate": "c.pem"}, "both certificate and key"),
        ({"http": ["10.0.0.9:8000"], "upstream_tls": False}, "not on the loopback device"),
        ({"traces": "http://user:secret@host:1/x"}, "pattern"),
        ({"unknown": 1}, "unknown"),
        ({"models": {"m": {"experiments": [OF_OURS]}}}, "removes x-falaj-slot"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(describe: Describe, edge: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        describe(**edge)


def test_what_the_edge_cannot_hold_is_refused(describe: Describe, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="anonymous clients"):
        describe({"anonymous": ["infer:*"]})
    (tmp_path / "edge" / "edge.yaml").unlink()
    with pytest.raises(ConfigurationError, match=r"models: \{flight-delay: \{\}\}"):
        read_plan(tmp_path)


def test_shares_are_kept_though_no_envoy_runs(describe: Describe, tmp_path: Path) -> None:
    plan = describe()
    prepare(plan)
    traffic = GatewayTraffic(tmp_path)
    with pytest.raises(TransientError, match="The shares are kept"):
        traffic.set_shares("flight-delay", 0.25, 0.5)
    assert traffic.shares("flight-delay") == Shares(candidate=0.25, mirror=0.5)
    assert traffic.shares("acme-churn") == Shares()
    kept = plan.files.resource("routes").read_text()
    prepare(plan)
    assert plan.files.resource("routes").read_text() == kept


def test_commands_say_what_is_wrong(
    describe: Describe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path), "gateway"]
    assert main([*home, "prepare"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    describe()
    assert main([*home, "check"]) == 0
    assert main([*home, "prepare"]) == 0
    assert "public.pem" in capsys.readouterr().out
    assert main([*home, "status"]) == 3
    assert "down" in capsys.readouterr().out
    assert main([*home, "shares"]) == 0
    assert "candidate 0.00%" in capsys.readouterr().out
    assert main([*home, "shares", "flight-delay", "--candidate", "7"]) == 2
    assert main([*home, "shares", "flight-delay", "--candidate", "0.5"]) == 1


def test_the_examples_for_a_cluster_fit_the_schemas_of_kubernetes_and_split_all_traffic() -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / "split.yaml").read_text()))
    core = [d for d in documents if d["kind"] in ("Service", "NetworkPolicy")]
    assert len(core) == 4
    for document in core:
        kubernetes_validate.validate(document, "1.30", strict=True)
    (route,) = [d for d in documents if d["kind"] == "HTTPRoute"]
    rule = route["spec"]["rules"][0]
    assert sum(backend["weight"] for backend in rule["backendRefs"]) == 100
    assert "x-falaj-slot" in rule["filters"][0]["requestHeaderModifier"]["remove"]
    kserve = yaml.safe_load((EXAMPLES / "kserve.yaml").read_text())
    assert "canaryTrafficPercent" not in str(kserve)
