"""Which use cases a deploy serves, from which image, and where people are notified."""

import asyncio
import shutil
from pathlib import Path
from typing import cast

import pytest
import yaml
from prefect.client.orchestration import PrefectClient

from falaj.__main__ import main
from infra.deploying.automations import CHANNELS, Channel, channel_blocks
from infra.deploying.deploy import make_plan
from infra.deploying.file import read_use_cases
from infra.deploying.items import BlockItem, Found
from infra.deploying.pools import IMAGE_VARIABLE, PoolItem, read_image
from infra.images.sign import sign_image
from tasks.kernel.errors import ConfigurationError, SignatureError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

REPO = PROJECT_ROOT / DEFAULT_FEATURE_REPO
DIGEST = f"registry.example.org:5000/ml/falaj@sha256:{'0' * 64}"


def other_repo(folder: Path, name: str = "other", model: str = "other") -> Path:
    repo = folder / "other"
    shutil.copytree(REPO, repo)
    described = yaml.safe_load((repo / "use_case.yaml").read_text()) | {"name": name}
    described["registry"] |= {"model_name": model}
    (repo / "use_case.yaml").write_text(yaml.safe_dump(described))
    return repo


def test_workers_are_told_of_a_repository_that_is_not_their_own(tmp_path: Path) -> None:
    other = other_repo(tmp_path)
    for repos, expected in (
        ([], [None]),
        ([f"{REPO}=/srv/repo"], ["/srv/repo"]),
        ([str(other), str(REPO)], [str(other), str(REPO)]),
        ([str(REPO), f"{other}=/srv/other"], [None, "/srv/other"]),
    ):
        assert [each.repo_on_workers for each in read_use_cases(repos, {})] == expected


@pytest.mark.parametrize(("name", "model"), [("flights", "mine"), ("other", "flight-delay")])
def test_two_use_cases_of_one_name_or_one_model_are_refused(
    tmp_path: Path, name: str, model: str
) -> None:
    with pytest.raises(ConfigurationError, match="would replace the other's champion"):
        read_use_cases([str(REPO), str(other_repo(tmp_path, name, model))])


@pytest.mark.filterwarnings(
    "ignore:'imghdr' is deprecated:DeprecationWarning"
)  # apprise, in Slack's
def test_a_channel_is_made_for_each_address_and_a_changed_one_is_never_shown() -> None:
    assert channel_blocks({}) == ()
    made = channel_blocks({channel.variable: channel.example for channel in CHANNELS})
    assert [item.label for item in made] == [f"block {c.slug}/{c.block_name}" for c in CHANNELS]

    class Moved(BlockItem):
        async def found(self, client: PrefectClient) -> Found:
            return Found({**await self.wanted(client), "secrets": {"address": "another"}})

    moved = Moved(name=made[0].name, block=made[0].block)
    compared = asyncio.run(moved.compare(cast(PrefectClient, None)))
    assert compared.differences == ("secrets.address is another one",)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda c: c.variable)
def test_a_wrong_address_is_refused_and_not_repeated(channel: Channel) -> None:
    with pytest.raises(ConfigurationError, match=channel.variable) as refused:
        channel_blocks({channel.variable: "ftp://topsecret.example.org"})
    assert "topsecret" not in str(refused.value)


@pytest.mark.parametrize("image", [DIGEST, "falaj:1.4", "registry.example.org/ml/falaj:v2-cpu"])
def test_an_image_that_says_which_release_it_is_is_taken(image: str) -> None:
    assert read_image({IMAGE_VARIABLE: image}) == image


@pytest.mark.parametrize(
    "image",
    [
        *("", "two words:1", "Falaj:1", "falaj@sha256:abc"),
        *("falaj", "registry.example.org:5000/falaj", "falaj:latest"),
    ],
)
def test_any_other_is_refused_before_anything_is_deployed(
    image: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # it must not be asked
    monkeypatch.setenv(IMAGE_VARIABLE, image)
    assert main(["deploy", "--pools", "kubernetes", "--repo", str(REPO)]) == 2
    assert f"refused: {IMAGE_VARIABLE}={image!r}" in capsys.readouterr().err


def test_pods_start_from_the_image_and_hold_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_VARIABLE, DIGEST)
    plans = {kind: make_plan([str(REPO)], pool_type=kind) for kind in ("kubernetes", "process")}
    for kind, plan in plans.items():
        pools = [item for item in plan.places if isinstance(item, PoolItem)]
        images = [pool.template["variables"]["properties"].get("image", {}) for pool in pools]
        on_pods = kind == "kubernetes"
        assert {image.get("default") for image in images} == {DIGEST if on_pods else None}
        leases = [i.parameters["config"]["lease"] for i in plan.deployments if i.use_case]
        assert {lease["enabled"] for lease in leases} == {not on_pods}


def test_where_keys_are_trusted_pods_start_from_a_signed_digest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, stranger = tmp_path / "home", tmp_path / "stranger"
    foreign = f"{DIGEST[:-1]}1"
    sign_image(home, DIGEST)
    sign_image(stranger, foreign)
    shutil.copytree(stranger / "signatures", home / "signatures", dirs_exist_ok=True)
    with pytest.raises(ConfigurationError, match="is no digest of an image"):
        sign_image(home, "registry.example.org/falaj:1.4")
    monkeypatch.setenv("FALAJ_HOME", str(home))
    monkeypatch.setenv("FALAJ_TRUSTED_KEYS", str(home / "keyring"))
    monkeypatch.setenv(IMAGE_VARIABLE, DIGEST)
    assert make_plan([str(REPO)], pool_type="kubernetes").deployments
    seen = {foreign: "does not trust", "registry.example.org/falaj:1.4": "there is none"}
    for image, why in seen.items():
        monkeypatch.setenv(IMAGE_VARIABLE, image)
        with pytest.raises(SignatureError, match=why):
            make_plan([str(REPO)], pool_type="kubernetes")


def test_without_a_server_nothing_is_deployed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    assert main(["deploy"]) == 3
    assert "start one with `make up`, or name a server" in capsys.readouterr().err
