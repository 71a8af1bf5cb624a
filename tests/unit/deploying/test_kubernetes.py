"""Deploying to Kubernetes pools: an image is asked for, and nobody leases devices there."""

from __future__ import annotations

import re

import pytest

from falaj.__main__ import main
from infra.deploying.deploy import make_plan
from infra.deploying.pools import IMAGE_VARIABLE, PoolItem, read_image
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

REPO = str(PROJECT_ROOT / DEFAULT_FEATURE_REPO)
DIGEST = f"registry.example.org:5000/ml/falaj@sha256:{'0' * 64}"


@pytest.mark.parametrize("image", [DIGEST, "falaj:1.4", "registry.example.org/ml/falaj:v2-cpu"])
def test_an_image_that_says_which_release_it_is_is_taken(image: str) -> None:
    assert read_image({IMAGE_VARIABLE: image}) == image


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("", "variable FALAJ_IMAGE is not set"),
        ("two words:1", "is no name of an image"),
        ("Falaj:1", "is no name of an image"),
        ("falaj@sha256:abc", "is no name of an image"),
        ("falaj", "is whatever is newest"),
        ("registry.example.org:5000/falaj", "is whatever is newest"),
        ("falaj:latest", "is whatever is newest"),
    ],
)
def test_any_other_is_refused_before_anything_is_deployed(image: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as refusal:
        read_image({IMAGE_VARIABLE: image})
    assert "Nothing was deployed" in str(refusal.value)


def test_a_deploy_without_an_image_fails_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # it must not be asked
    monkeypatch.delenv(IMAGE_VARIABLE, raising=False)
    assert main(["deploy", "--pools", "kubernetes", "--repo", REPO]) == 2
    assert "refused: variable FALAJ_IMAGE is not set" in capsys.readouterr().err


def test_pods_start_from_the_image_and_hold_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_VARIABLE, DIGEST)
    plan = make_plan([REPO], pool_type="kubernetes")
    pools = [item for item in plan.places if isinstance(item, PoolItem)]
    assert {pool.name for pool in pools} == {"coordinator", "cpu", "gpu", "hosts"}
    for pool in pools:
        variables = pool.template["variables"]
        assert variables["required"] == ["image"]
        assert variables["properties"]["image"]["default"] == DIGEST
    configs = [item.parameters["config"] for item in plan.deployments if item.use_case]
    assert len(configs) > 5
    assert not any(config["lease"]["enabled"] for config in configs)


def test_processes_need_no_image_and_lease_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(IMAGE_VARIABLE, raising=False)
    plan = make_plan([REPO])
    assert all(i.parameters["config"]["lease"]["enabled"] for i in plan.deployments if i.use_case)
    assert not re.search("image", str([getattr(p, "template", "") for p in plan.places]))
