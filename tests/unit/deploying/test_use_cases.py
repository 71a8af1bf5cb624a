"""Which use cases a deploy serves, and where people are told."""

from __future__ import annotations

import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from falaj.__main__ import main
from falaj.deploy import NUM_ATTEMPTS
from infra.deploying.blocks import CHANNELS, channel_blocks
from infra.deploying.file import read_use_cases
from infra.deploying.items import differences
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

REPO = PROJECT_ROOT / DEFAULT_FEATURE_REPO


def other_repo(folder: Path, name: str = "other") -> Path:
    repo = folder / "other"
    shutil.copytree(REPO, repo)
    described = yaml.safe_load((repo / "use_case.yaml").read_text()) | {"name": name}
    described["registry"] |= {"model_name": f"model-of-{name}"}
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
        assert second.repo_on_workers == str(other)


def test_where_workers_find_the_repository_can_be_told(tmp_path: Path) -> None:
    _, second = read_use_cases([str(REPO), f"{other_repo(tmp_path)}=/srv/repo"])
    assert second.repo_on_workers == "/srv/repo"


def test_without_a_word_the_platforms_own_repository_is_deployed() -> None:
    [only] = read_use_cases([], {"FALAJ_FEATURE_REPO": str(REPO)})
    assert only.is_first
    assert only.repo_on_workers is None


def test_workers_are_told_of_a_first_repository_that_is_not_their_own(tmp_path: Path) -> None:
    other = other_repo(tmp_path)
    first, second = read_use_cases([str(other), str(REPO)], {})
    assert (first.is_first, first.repo_on_workers) == (True, str(other))
    assert (second.is_first, second.repo_on_workers) == (False, str(REPO))
    [elsewhere] = read_use_cases([f"{REPO}=/srv/repo"], {})
    assert (elsewhere.is_first, elsewhere.repo_on_workers) == (True, "/srv/repo")


def test_two_use_cases_that_register_one_model_are_refused(tmp_path: Path) -> None:
    other = other_repo(tmp_path)
    described = yaml.safe_load((other / "use_case.yaml").read_text())
    described["registry"] = yaml.safe_load((REPO / "use_case.yaml").read_text())["registry"]
    (other / "use_case.yaml").write_text(yaml.safe_dump(described))
    with pytest.raises(ConfigurationError, match="would replace the other's champion"):
        read_use_cases([str(REPO), str(other)])


def test_two_use_cases_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="named flights; give one of them another name"):
        read_use_cases([str(REPO), str(other_repo(tmp_path, "flights"))])


@pytest.mark.filterwarnings(
    "ignore:'imghdr' is deprecated:DeprecationWarning"
)  # apprise, in Slack's
def test_a_channel_is_made_for_each_address_that_there_is() -> None:
    assert channel_blocks({}) == ()
    made = channel_blocks(
        {
            "FALAJ_NOTIFY_WEBHOOK": "https://alerts.example.org/x",
            "FALAJ_NOTIFY_SLACK": "https://hooks.slack.com/services/T0/B0/XX",
            "FALAJ_NOTIFY_EMAIL": "mailtos://u:p@example.org:587?to=team@example.org",
        }
    )
    assert [item.label for item in made] == [f"block {c.slug}/{c.block_name}" for c in CHANNELS]


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda c: c.variable)
def test_a_wrong_address_is_refused_and_not_repeated(channel: object) -> None:
    variable = str(getattr(channel, "variable", ""))
    with pytest.raises(ConfigurationError, match=f"{variable} begins with none of") as refused:
        channel_blocks({variable: "ftp://topsecret.example.org"})
    assert "topsecret" not in str(refused.value)


def test_differences_name_the_place_and_both_values() -> None:
    wanted = {"a": {"b": 1, "c": [1]}, "d": None}
    found = {"a": {"b": 2, "e": "x" * 99}, "d": None}
    assert list(differences(wanted, found)) == [
        "a.b should be 1 and is 2 on the server",
        "a.c is missing on the server; it should be [1]",
        f"a.e is on the server alone: '{'x' * 59}...",
    ]


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

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.slow
def test_a_server_that_goes_away_meanwhile_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ServerThatGoesAway.num_waits = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), ServerThatGoesAway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    settings = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}
    try:
        with temporary_settings(settings):
            assert main(["deploy", "--wait", "20"]) == 1
    finally:
        server.shutdown()
        server.server_close()
    assert ServerThatGoesAway.num_waits == NUM_ATTEMPTS
    assert capsys.readouterr().err.count("deploy again") == NUM_ATTEMPTS
