"""The split as manifests of a cluster."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest

from falaj.__main__ import main
from infra.gateway.manifests.manifests import KSERVE, SPLIT, Values, parts, render
from infra.gateway.shares import Shares
from tasks.kernel.errors import ConfigurationError

VALUES = Values(model="flight-delay", host="serving.example.org", stable_uri="s3://models/7")
CANDIDATE = {"candidate_version": "8", "candidate_uri": "s3://models/8"}


def test_core_kinds_fit_the_schemas_of_kubernetes() -> None:
    documents = parts(render(SPLIT, VALUES, Shares(candidate=0.1, mirror=0.5)))
    core = [d for d in documents if d["kind"] in ("Service", "NetworkPolicy")]
    assert len(core) == 4
    for document in core:
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_weights_mirror_and_slots_are_those_of_the_shares() -> None:
    documents = parts(render(SPLIT, VALUES, Shares(candidate=0.1, mirror=0.5)))
    (route,) = [d for d in documents if d["kind"] == "HTTPRoute"]
    rule = route["spec"]["rules"][0]
    assert [(b["name"], b["weight"]) for b in rule["backendRefs"]] == [
        ("falaj-serving-candidate", 10),
        ("falaj-serving-stable", 90),
    ]
    (mirror,) = [f["requestMirror"] for f in rule["filters"] if f["type"] == "RequestMirror"]
    assert mirror["percent"] == 50
    removed = rule["filters"][0]["requestHeaderModifier"]["remove"]
    assert "x-falaj-slot" in removed
    without = parts(render(SPLIT, VALUES, Shares()))
    assert "RequestMirror" not in str(without)


def test_a_candidate_is_a_canary_of_its_own_in_kserve() -> None:
    values = VALUES.model_copy(update=CANDIDATE)
    (service,) = parts(render(KSERVE, values, Shares(candidate=0.25)))
    (canary,) = service["spec"]["canary"]
    assert canary["trafficPercent"] == 25
    assert canary["predictor"]["name"] == "v8"
    assert "canaryTrafficPercent" not in str(service)
    (alone,) = parts(render(KSERVE, VALUES, Shares()))
    assert "canary" not in alone["spec"]


def test_shares_that_a_cluster_cannot_express_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="whole percent"):
        render(SPLIT, VALUES, Shares(candidate=0.001))
    with pytest.raises(ConfigurationError, match="the values name none"):
        render(KSERVE, VALUES, Shares(candidate=0.1))


def test_values_cannot_add_lines_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text('{model: "m", host: "a\\nkind: Secret", stable_uri: "s3://a"}')
    assert main(["gateway", "manifests", "split", str(file)]) == 2
    assert "host" in capsys.readouterr().err
    file.write_text('{model: "m", host: "a.example", stable_uri: "s3://a"}')
    assert main(["gateway", "manifests", "split", str(file), "--candidate", "0.1"]) == 0
    assert "weight: 10" in capsys.readouterr().out
