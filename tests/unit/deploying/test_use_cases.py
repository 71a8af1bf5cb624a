"""Which use cases a deploy serves, from which image, and where people are notified."""

from __future__ import annotations

import asyncio
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from falaj.__main__ import main
from infra.deploying.automations import CHANNELS, Channel, channel_blocks
from infra.deploying.deploy import NUM_ATTEMPTS, make_plan
from infra.deploying.file import read_use_cases
from infra.deploying.items import BlockItem, Found, differences
from infra.deploying.pools import IMAGE_VARIABLE, PoolItem, read_image
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

REPO = PROJECT_ROOT / DEFAULT_FEATURE_REPO
DIGEST = f"registry.example.org:5000/ml/falaj@sha256:{'0' * 64}"


def other_repo(folder: Path, name: str = "other", model: str = "model-of-other") -> Path:
    repo = folder / "other"
    shutil.copytree(REPO, repo)
    described = yaml.safe_load((repo / "use_case.yaml").read_text()) | {"name": name}
    described["registry"] |= {"model_name": model}
    (repo / "use_case.yaml").write_text(yaml.safe_dump(described))
    return repo


def test_the_first_has_plain_names_and_a_further_one_its_own(tmp_path: Path) -> None:
    other = other_repo(tmp_path)
    for repos, environment in (
        ([str(REPO), str(other)], {}),
        ([], {"FALAJ_FEATURE_REPOS": f"{REPO}:{other}"}),
    ):
        first, second = read_use_cases(repos, environment)
        assert first.deployment_name("cpu") == "cpu"
        assert second.deployment_name("cpu") == "cpu-other"


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


def test_differences_name_the_place_and_both_values() -> None:
    wanted = {"a": {"b": 1, "c": [1]}, "d": None}
    found = {"a": {"b": 2, "e": "x" * 99}, "d": None}
    assert list(differences(wanted, found)) == [
        "a.b should be 1 and is 2 on the server",
        "a.c should be [1] and is missing on the server",
        f"a.e should be missing and is '{'x' * 59}... on the server",
    ]


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


def test_without_a_server_nothing_is_deployed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    assert main(["deploy"]) == 2
    assert "start one with `make up`, or name a server" in capsys.readouterr().err


class ServerThatGoesAway(BaseHTTPRequestHandler):
    """Says its version, and is away for all else."""

    num_waits = 0

    def do_GET(self) -> None:
        if not self.path.endswith("/admin/version"):
            self.close_connection = True
            return
        type(self).num_waits += 1
        self.send_response(200)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b'"3.8.8"')

    do_POST = do_PATCH = do_GET  # noqa: N815  as the base class looks for them

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.mark.slow
def test_a_server_that_goes_away_meanwhile_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ServerThatGoesAway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
            assert main(["deploy", "--wait", "20"]) == 1
        server.shutdown()
    assert ServerThatGoesAway.num_waits == NUM_ATTEMPTS
    assert capsys.readouterr().err.count("deploy again") == NUM_ATTEMPTS
