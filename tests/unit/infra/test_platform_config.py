"""What the platform is asked to be: configuration, ports, password, services, web applications."""

import asyncio
import os
import re
import socket
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.gateway.config import GatewayFiles
from infra.orchestration.client import is_running
from infra.platform import services
from infra.platform.apps import PasswordGate, WithReports
from infra.platform.config import (
    CONFIG_VARIABLE,
    DATABASE_URL,
    MLFLOW_PASSWORD,
    REDIS_URL,
    PlatformConfig,
    choose_ports,
    read_config,
    require_free_ports,
    stored_config,
)
from infra.platform.files import (
    PlatformFiles,
    ensure_password,
    only_supervisor,
    platform_environment,
    read_endpoint,
    running_platform,
)
from infra.platform.services import (
    AUTHORIZER,
    DEPLOYING,
    GATEWAY,
    MLFLOW,
    RECOVERY,
    SERVER,
    SERVING,
    Plan,
    for_asyncpg,
    make_services,
    store_url,
    write_endpoint,
)
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import private_folder
from tasks.kernel.settings import Settings, platform_address

PASSWORD = "admin:a-secret-that-nobody-may-see"
WORD = ("admin", "word")
ANY_FREE = PlatformConfig(port=0, mlflow_port=0, serving_port=0, serving_grpc_port=0)


@pytest.fixture
def files(tmp_path: Path) -> PlatformFiles:
    files = PlatformFiles(tmp_path)
    files.folder.mkdir(mode=0o700)
    return files


def plan(files: PlatformFiles, config: PlatformConfig | None = None, **environment: str) -> Plan:
    return Plan(
        files=files,
        config=config or PlatformConfig(),
        ports={"prefect": 4200, "mlflow": 5000, "serving": 8000, "serving_grpc": 8001},
        password=PASSWORD,
        environment=environment,
        classes=("cpu",),
    )


@pytest.mark.parametrize(
    ("content", "place"),
    [
        *((f"{field}: {value}", field) for field, value in (
            ("port", 70_000), ("prot", 4200), ("public_api_url", "https://u:p@x.org/api"),
            ("public_mlflow_url", "mlflow.example.org"), ("profile", "cloud"),
            ("deploying", "os; rm -rf /"),
        )),
        ("host: localhost", "does not appear to be an IPv4"),
        ("host: 0.0.0.0\npassword: false", "would let anybody run code here"),
        ("port: 4200\nmlflow_port: 4200", "must differ"),
        *((text, "(is no YAML|holds a list)") for text in ("- 1", "a: [", "\0")),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_with_file_and_field(
    tmp_path: Path, content: str, place: str
) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=rf"platform\.yaml.*{place}"):
        read_config(file, {})


def test_the_command_line_goes_over_the_file_and_what_it_does_not_say_stays(tmp_path: Path) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text("port: 4300\ndrain_limit_s: 5\n")
    config = read_config(file, {"port": 4400, "host": None})
    assert (config.port, config.drain_limit_s, config.host) == (4400, 5, "127.0.0.1")


def test_a_taken_port_is_refused_and_any_free_one_is_kept(files: PlatformFiles) -> None:
    require_free_ports(ANY_FREE)
    chosen = choose_ports(ANY_FREE, files)
    assert len({*chosen.values()}) == 4
    assert choose_ports(ANY_FREE, files) == chosen
    with socket.create_server(("127.0.0.1", chosen["prefect"])):
        with pytest.raises(ConfigurationError, match="--port 0"):
            require_free_ports(ANY_FREE.model_copy(update={"port": chosen["prefect"]}))
        again = choose_ports(ANY_FREE, files)
    assert again["prefect"] != chosen["prefect"]
    assert again["mlflow"] == chosen["mlflow"]
    assert choose_ports(PlatformConfig(port=4242), files)["prefect"] == 4242


def test_the_password_is_made_once_and_readable_by_its_owner_alone(files: PlatformFiles) -> None:
    previous = os.umask(0o000)
    try:
        made, new = ensure_password(files)
    finally:
        os.umask(previous)
    assert new
    assert len(made.partition(":")[2]) >= 20
    assert stat.S_IMODE(files.secret.stat().st_mode) == 0o600
    files.secret.chmod(0o644)
    assert ensure_password(files) == (made, False)
    assert stat.S_IMODE(files.secret.stat().st_mode) == 0o600


def test_no_command_line_holds_a_secret_and_servers_inherit_none(files: PlatformFiles) -> None:
    url = "postgresql://falaj:database-password@127.0.0.1/falaj?sslmode=disable"
    redis = "redis://:redis-password@127.0.0.1:6379/0"
    foreign = {"AWS_SECRET_ACCESS_KEY": "aws", DATABASE_URL: url, REDIS_URL: redis, "LC_ALL": "C"}
    foreign |= {"PREFECT_API_KEY": "x", "PREFECT_API_URL": "https://elsewhere/api"}
    GatewayFiles(files.home).folder.mkdir()
    GatewayFiles(files.home).config_file.touch()
    made = make_services(plan(files, PlatformConfig(profile="server"), **foreign))
    secrets = [PASSWORD, "database-password", "redis-password"]
    assert not [s for s in secrets for service in made if s in " ".join(service.command)]
    by_name = {service.name: service.environment for service in made}
    workers = ["worker-coordinator", "worker-cpu"]
    assert list(by_name) == [SERVER, MLFLOW, DEPLOYING, *workers, RECOVERY, SERVING, GATEWAY]
    for server in (SERVER, MLFLOW, SERVING, GATEWAY):
        assert "AWS_SECRET_ACCESS_KEY" not in by_name[server]
        assert by_name[server]["LC_ALL"] == "C"
    worker = by_name["worker-cpu"]
    assert worker["AWS_SECRET_ACCESS_KEY"] == "aws"
    assert "PREFECT_API_KEY" not in worker  # of another Prefect
    assert worker["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    for name in (MLFLOW, DEPLOYING, SERVING, "worker-cpu"):
        assert not [v for v in by_name[name].values() if "database-password" in v]
    stored = by_name[SERVER]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    assert stored == "postgresql+asyncpg://falaj:database-password@127.0.0.1/falaj?ssl=disable"


def test_behind_the_door_each_server_has_a_password_of_its_own(files: PlatformFiles) -> None:
    private_folder(files.folder)
    GatewayFiles(files.home).config_file.parent.mkdir()
    GatewayFiles(files.home).config_file.touch()
    for has_authorizer in (False, True):
        made = make_services(replace(plan(files), has_authorizer=has_authorizer))
        by_name = {service.name: service.environment for service in made}
        assert by_name[SERVER]["PREFECT_SERVER_API_AUTH_STRING"] == PASSWORD
        assert (by_name[MLFLOW][MLFLOW_PASSWORD] == PASSWORD) is not has_authorizer
        assert (AUTHORIZER in by_name) is has_authorizer
        assert PASSWORD not in by_name.get(AUTHORIZER, {}).values()


def test_links_for_people_begin_with_the_public_address_and_processes_stay_on_this_machine(
    files: PlatformFiles,
) -> None:
    ui, mlflow = "https://falaj.example.org/ml", "https://mlflow.example.org"
    config = PlatformConfig(public_api_url=f"{ui}/api", public_mlflow_url=f"{mlflow}/")
    made = plan(files, config)
    by_name = {service.name: service.environment for service in make_services(made)}
    assert by_name[SERVER]["PREFECT_SERVER_UI_API_URL"] == f"{ui}/api"
    for name in (SERVER, DEPLOYING, RECOVERY, "worker-cpu"):  # messages, artifacts, logs
        assert by_name[name]["PREFECT_UI_URL"] == ui, name
        assert by_name[name]["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert "mlflow.example.org" in by_name[MLFLOW]["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    write_endpoint(made)
    endpoint = read_endpoint(files)
    assert (endpoint.ui_url, endpoint.mlflow_url) == (ui, mlflow)
    assert endpoint.local_mlflow_url == "http://127.0.0.1:5000"
    assert platform_address(files.home, "mlflow_url") == mlflow
    with only_supervisor(files):
        assert running_platform(files.home)["PREFECT_UI_URL"] == ui


def test_the_server_profile_says_what_it_lacks() -> None:
    config = PlatformConfig(profile="server")
    with pytest.raises(ConfigurationError, match=REDIS_URL):
        store_url(REDIS_URL, config, {REDIS_URL: "http://127.0.0.1"})
    with pytest.raises(ConfigurationError, match=DATABASE_URL):
        store_url(DATABASE_URL, config, {DATABASE_URL: "sqlite:///x"})
    found = store_url(DATABASE_URL, config, {DATABASE_URL: "postgres://u:p@h/d"})
    assert for_asyncpg(found or "") == "postgresql+asyncpg://u:p@h/d"
    assert store_url(DATABASE_URL, PlatformConfig(), {DATABASE_URL: "anything"}) is None


def test_a_command_finds_the_platform_only_while_its_one_supervisor_lives(
    files: PlatformFiles,
) -> None:
    assert platform_environment(files.home) is None
    ensure_password(files)
    made = plan(files, PlatformConfig())
    write_endpoint(made)  # a killed one leaves it
    with pytest.raises(ConfigurationError, match="no platform is ready on"):
        running_platform(files.home)
    with only_supervisor(files):
        found = running_platform(files.home)
        assert found["PREFECT_API_URL"] == made.endpoint.api_url
        assert found["PREFECT_API_AUTH_STRING"] == files.secret.read_text().strip()
        files.endpoint.write_text("{}")
        with pytest.raises(ConfigurationError, match="was changed and cannot be read"):
            platform_environment(files.home)
        with (
            pytest.raises(ConfigurationError, match=f"process {os.getpid()} supervises"),
            only_supervisor(files),
        ):
            pass
    assert not is_running(files.home)


async def asked(home: Path, path: str, headers: dict[str, bytes] | None = None) -> httpx.Response:
    """Ask for a path of an MLflow that answers all of its own with 299."""

    async def mlflow(scope: object, receive: object, send: Callable[..., Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"MLflow"})

    transport = httpx.ASGITransport(app=PasswordGate(WithReports(mlflow, home), ":".join(WORD)))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.get(path, auth=None if headers else WORD, headers=headers)


@given(st.binary(max_size=60))
def test_no_other_header_opens_mlflow(header: bytes) -> None:
    if header.strip() != b"Basic YWRtaW46d29yZA==":
        answer = asyncio.run(asked(Path("/nowhere"), "/", {"authorization": header}))
        assert answer.status_code == 401


def test_a_web_socket_without_the_password_is_closed_and_health_is_open() -> None:
    sent: list[object] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("code", message["type"]))

    gate = PasswordGate(None, ":".join(WORD))
    asyncio.run(gate({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert sent == [1008]
    no = {"authorization": b"none"}
    statuses = [
        asyncio.run(asked(Path("/nowhere"), path, no)).status_code
        for path in ("/health", "/health/../api", "/reports")
    ]
    assert statuses == [299, 401, 401]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/reports/latest/report.html", 200),
        ("/use_cases/traffic/reports/run-2/report.html", 200),
        ("/reports", 200),
        ("/reports/catalogue/", 200),
        ("/use_cases/other/reports/run-1/report.html", 404),
        ("/reportsx", 299),
        ("/reports/none.html", 404),
        ("/reports/%2e%2e/secret", 404),
        ("/reports/..%2fsecret", 404),
        ("/use_cases/traffic/reports/%2e%2e/%2e%2e/%2e%2e/secret", 404),
        ("/use_cases/%2e%2e/reports/x", 299),
        ("/api/2.0/mlflow", 299),
    ],
)
def test_reports_are_shown_beside_mlflow_and_no_other_file_is(
    tmp_path: Path, path: str, status: int
) -> None:
    for folder in ("reports/run-1", "use_cases/traffic/reports/run-2"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "report.html").write_text("a report")
    (tmp_path / "catalogue").mkdir()
    (tmp_path / "catalogue" / "index.html").write_text("a catalogue")
    (tmp_path / "reports" / "latest").symlink_to("run-1")
    (tmp_path / "secret").write_text("a secret")
    answer = asyncio.run(asked(tmp_path, path))
    assert answer.status_code == status
    assert "a secret" not in answer.text


def test_the_list_of_reports_leads_to_each_and_is_there_before_the_first(tmp_path: Path) -> None:
    before = asyncio.run(asked(tmp_path, "/reports/"))
    assert (before.status_code, re.findall('href="(.*?)"', before.text)) == (200, [])
    for run in ("reports/run-1", "reports/run-2", "use_cases/traffic/reports/run-3"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "report.html").write_text("a report")
    (tmp_path / "reports" / "latest").symlink_to("run-2")
    (tmp_path / "reports" / "unfinished").mkdir()
    links = re.findall('href="(.*?)"', asyncio.run(asked(tmp_path, "/reports/")).text)
    named = ("reports/latest", "reports/run-2", "reports/run-1", "use_cases/traffic/reports/run-3")
    assert links == [f"/{run}/report.html" for run in named]
    assert {asyncio.run(asked(tmp_path, link)).status_code for link in links} == {200}


@pytest.mark.parametrize("old", ["[]", '{"prefect": null, "mlflow": [0, 5000], "serving": 0}'])
def test_ports_that_another_version_has_kept_are_chosen_anew(
    files: PlatformFiles, old: str
) -> None:
    files.ports.write_text(old)
    assert all(choose_ports(ANY_FREE, files).values())


def test_a_supervisor_in_the_foreground_is_configured_by_the_file_of_its_variable(
    files: PlatformFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = list[Plan]()

    class Ended:
        def run(self) -> None: ...

    def noted(plan: Plan) -> Ended:
        plans.append(plan)
        return Ended()

    monkeypatch.setattr(services, "make_supervisor", noted)
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "platform.yaml"))
    for line in ("{port: 14300, serving: false}", "{port: 14301}"):
        (tmp_path / "platform.yaml").write_text(line)
        services.supervise(files)
    assert [(p.config.port, p.config.serving) for p in plans] == [(14300, False), (14301, True)]
    assert stored_config(files) == plans[-1].config


def test_no_worker_starts_for_a_class_that_its_machine_cannot_judge(tmp_path: Path) -> None:
    there = {"PREFECT_API_URL": "http://127.0.0.1:1/api", "FALAJ_HOME": str(tmp_path)}
    with pytest.raises(ConfigurationError, match=r"'gpu-h100'; described are cpu, gpu\. Copy hard"):
        services.become_worker("gpu-h100", Settings.from_environment(there), there)
