"""What the platform is asked to be: configuration, ports, password, logs, profiles."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.gateway.config import GatewayFiles
from infra.orchestration.client import is_running, platform_environment, running_platform
from infra.platform.apps import PasswordGate, WithReports
from infra.platform.config import (
    DATABASE_URL,
    REDIS_URL,
    PlatformConfig,
    Ports,
    choose_ports,
    is_free,
    read_config,
)
from infra.platform.files import PlatformFiles, ensure_password, only_supervisor, read_endpoint
from infra.platform.services import (
    DEPLOYING,
    GATEWAY,
    MLFLOW,
    RECOVERY,
    SERVER,
    SERVING,
    Plan,
    database_url,
    for_asyncpg,
    make_services,
    redis_url,
    write_endpoint,
)
from infra.platform.supervisor import rotate, tail
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT, platform_address

PASSWORD = "admin:a-secret-that-nobody-may-see"


@pytest.fixture
def files(tmp_path: Path) -> PlatformFiles:
    files = PlatformFiles(tmp_path)
    files.folder.mkdir(mode=0o700)
    return files


def plan(files: PlatformFiles, config: PlatformConfig | None = None, **environment: str) -> Plan:
    return Plan(
        files=files,
        config=config or PlatformConfig(),
        ports=Ports(4200, 5000),
        password=PASSWORD,
        environment=environment,
        classes=("cpu",),
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"port": 70_000}, "port: Input should be less than or equal to 65535"),
        ({"prot": 4200}, "prot is no setting of the platform; there are .*, port, "),
        ({"public_host": "a b/c"}, "public_host: 'a b/c'; expected: Name by which"),
        ({"public_api_url": "https://u:p@x.org/api"}, "expected: Address of the API"),
        ({"public_mlflow_url": "mlflow.example.org"}, "expected: Address of MLflow"),
        ({"host": "localhost"}, "is no IP address; write 127.0.0.1"),
        ({"host": "0.0.0.0", "password": False}, "would let anybody run code here"),
        ({"port": 4200, "mlflow_port": 4200}, "are both 4200; give one another number"),
        ({"profile": "cloud"}, "Input should be 'embedded' or 'server'"),
        ({"deploying": "os; rm -rf /"}, "expected: Python module and command"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_field(
    tmp_path: Path, fields: dict[str, object], sentence: str
) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text("\n".join(f"{name}: {value}" for name, value in fields.items()))
    with pytest.raises(ConfigurationError, match=sentence):
        read_config(file, {})


def test_the_command_line_goes_over_the_file_and_what_it_does_not_say_stays(tmp_path: Path) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text("port: 4300\ndrain_limit_s: 5\n")
    config = read_config(file, {"port": 4400, "host": None})
    assert (config.port, config.drain_limit_s, config.host) == (4400, 5, "127.0.0.1")


@pytest.mark.parametrize("content", [b"- 1", b"a: [", b"\x00", b"\xff\xfe"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "platform.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"platform\.yaml"):
        read_config(file, {})


def test_a_wanted_port_is_taken_and_kept(files: PlatformFiles) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        listener.listen()
        assert not is_free("127.0.0.1", taken)
        config = PlatformConfig(port=taken, mlflow_port=0)
        chosen = choose_ports(config, files)
        assert chosen.prefect != taken
        assert f"port {chosen.prefect} is used instead of {taken}" in chosen.remarks[0]
    again = choose_ports(config, files)
    assert (again.prefect, again.mlflow) == (chosen.prefect, chosen.mlflow)
    assert "was chosen earlier" in again.remarks[0]
    wanted_anew = choose_ports(PlatformConfig(port=chosen.mlflow, mlflow_port=0), files)
    assert wanted_anew.prefect == chosen.mlflow
    assert wanted_anew.mlflow != chosen.mlflow


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
    assert by_name["worker-cpu"]["AWS_SECRET_ACCESS_KEY"] == "aws"
    for name in (MLFLOW, DEPLOYING, SERVING, "worker-cpu"):
        assert not [v for v in by_name[name].values() if "database-password" in v]
    stored = by_name[SERVER]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    assert stored == "postgresql+asyncpg://falaj:database-password@127.0.0.1/falaj?ssl=disable", (
        stored
    )


@pytest.mark.parametrize(
    ("fields", "ui", "mlflow", "mlflow_name"),
    [
        ({}, "http://127.0.0.1:4200", "http://127.0.0.1:5000", "localhost"),
        (
            {"host": "0.0.0.0", "public_host": "falaj.example.org"},
            "http://falaj.example.org:4200",
            "http://falaj.example.org:5000",
            "falaj.example.org",
        ),
        (
            {
                "public_api_url": "https://falaj.example.org/ml/api",
                "public_mlflow_url": "https://mlflow.example.org/",
            },
            "https://falaj.example.org/ml",
            "https://mlflow.example.org",
            "mlflow.example.org",
        ),
    ],
)
def test_links_for_people_begin_with_the_public_address_and_processes_stay_on_this_machine(
    files: PlatformFiles, fields: dict[str, object], ui: str, mlflow: str, mlflow_name: str
) -> None:
    made = plan(files, PlatformConfig.model_validate(fields))
    by_name = {service.name: service.environment for service in make_services(made)}
    assert by_name[SERVER]["PREFECT_SERVER_UI_API_URL"] == f"{ui}/api"
    for name in (SERVER, DEPLOYING, RECOVERY, "worker-cpu"):  # messages, artifacts, logs
        assert by_name[name]["PREFECT_UI_URL"] == ui, name
        assert by_name[name]["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert mlflow_name in by_name[MLFLOW]["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    write_endpoint(made)
    endpoint = read_endpoint(files)
    assert endpoint
    assert (endpoint.ui_url, endpoint.mlflow_url) == (ui, mlflow)
    assert endpoint.local_mlflow_url == "http://127.0.0.1:5000"
    assert platform_address(files.home, "mlflow_url") == mlflow
    assert platform_address(files.home, "no_such_url") is None
    with only_supervisor(files):
        assert running_platform(files.home)["PREFECT_UI_URL"] == ui


def test_nothing_of_another_prefect_reaches_a_worker(files: PlatformFiles) -> None:
    made = make_services(plan(files, PREFECT_API_KEY="x", PREFECT_API_URL="https://elsewhere/api"))
    environment = {service.name: service.environment for service in made}[RECOVERY]
    assert "PREFECT_API_KEY" not in environment
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert environment["PREFECT_WORKER_QUERY_SECONDS"] == "2"


def test_the_server_profile_says_what_it_lacks(tmp_path: Path) -> None:
    config = PlatformConfig(profile="server", database_url_file=tmp_path / "none")
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        database_url(config, {})
    with pytest.raises(ConfigurationError, match=REDIS_URL):
        redis_url(config, {REDIS_URL: "http://127.0.0.1"})
    with pytest.raises(ConfigurationError, match=DATABASE_URL):
        database_url(PlatformConfig(profile="server"), {DATABASE_URL: "sqlite:///x"})
    (tmp_path / "url").write_text("postgres://u:p@h/d\n")
    config = PlatformConfig(profile="server", database_url_file=tmp_path / "url")
    assert for_asyncpg(database_url(config, {}) or "") == "postgresql+asyncpg://u:p@h/d"
    assert database_url(PlatformConfig(), {DATABASE_URL: "anything"}) is None


def test_a_log_that_is_written_is_rotated_without_losing_a_line(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        for number in range(3):
            writer.write(f"line {number}\n".encode() * 200)
            assert rotate(log, 1000, kept=2)
            assert not rotate(log, 1000, kept=2)
        writer.write(b"last\n")
    assert log.read_text() == "last\n"
    assert (tmp_path / "a.log.1").read_text() == "line 2\n" * 200
    assert (tmp_path / "a.log.2").read_text() == "line 1\n" * 200
    assert not (tmp_path / "a.log.3").exists()
    assert tail(log, 5) == ["last"]
    assert tail(tmp_path / "none.log", 5) == []


def test_a_command_finds_the_platform_only_while_its_supervisor_lives(files: PlatformFiles) -> None:
    assert platform_environment(files.home) is None
    ensure_password(files)
    endpoint = '{"api_url": "http://127.0.0.1:1/api"}'
    files.endpoint.write_text(endpoint)  # what a killed platform leaves
    assert platform_environment(files.home) is None
    with pytest.raises(ConfigurationError, match="no platform is ready on"):
        running_platform(files.home)
    with only_supervisor(files):
        assert is_running(files.home)
        found = running_platform(files.home)
        assert found["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
        assert found["PREFECT_API_AUTH_STRING"] == files.secret.read_text().strip()
        files.endpoint.write_text("{}")
        with pytest.raises(ConfigurationError, match="does not say where the platform answers"):
            platform_environment(files.home)
        files.endpoint.unlink()
        assert platform_environment(files.home) is None
    assert not is_running(files.home)


def test_two_supervisors_of_one_state_folder_are_refused(files: PlatformFiles) -> None:
    with only_supervisor(files):
        with (
            pytest.raises(ConfigurationError, match=f"process {os.getpid()} supervises"),
            only_supervisor(files),
        ):
            pass


def test_finding_the_platform_does_not_import_prefect() -> None:
    program = "import sys; sys.modules['prefect'] = None; import infra.platform.services"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PROJECT_ROOT)


class Application:
    """An ASGI application that answers everything."""

    def __init__(self) -> None:
        self.reached = 0

    async def __call__(self, scope: object, receive: object, send: object) -> None:
        self.reached += 1


def ask(path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> tuple[int, list[int]]:
    """Whether the application was reached, and the status codes that the gate sent."""
    application, sent = Application(), []

    async def send(message: dict[str, object]) -> None:
        if "status" in message or message["type"] == "websocket.close":
            sent.append(message.get("status", 1008))

    call = PasswordGate(application, "admin:word")(
        {"type": kind, "path": path, "headers": headers}, None, send
    )
    with pytest.raises(StopIteration):
        call.send(None)
    return application.reached, sent


def test_mlflow_is_reached_with_the_password_only() -> None:
    right = [(b"authorization", b"Basic YWRtaW46d29yZA==")]
    assert ask("/api/2.0/mlflow/experiments/search", right) == (1, [])
    assert ask("/", []) == (0, [401])
    assert ask("/", [], "websocket") == (0, [1008])
    assert ask("/health", []) == (1, [])
    assert ask("/health/../api", []) == (0, [401])


@given(st.binary(max_size=60))
def test_no_other_header_opens_mlflow(header: bytes) -> None:
    if header.strip() != b"Basic YWRtaW46d29yZA==":
        assert ask("/", [(b"authorization", header)])[0] == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/reports/latest/report.html", 200),
        ("/use_cases/traffic/reports/run-2/report.html", 200),
        ("/reports", 200),
        ("/reports/", 200),
        ("/use_cases/traffic/reports/", 200),
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
    (tmp_path / "reports" / "latest").symlink_to("run-1")
    (tmp_path / "secret").write_text("a secret")
    answer = asyncio.run(look(tmp_path, path, ("admin", "word")))
    assert answer.status_code == status
    assert "a secret" not in answer.text
    assert asyncio.run(look(tmp_path, path, None)).status_code == 401


async def look(home: Path, path: str, auth: tuple[str, str] | None) -> httpx.Response:
    """Ask for a path of an MLflow that answers all of its own with 299."""

    async def mlflow(scope: object, receive: object, send: Callable[..., Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"MLflow"})

    transport = httpx.ASGITransport(app=PasswordGate(WithReports(mlflow, home), "admin:word"))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.get(path, auth=auth)


def test_the_list_of_reports_leads_to_each_and_is_there_before_the_first(tmp_path: Path) -> None:
    word = ("admin", "word")
    before = asyncio.run(look(tmp_path, "/reports/", word))
    assert (before.status_code, re.findall('href="(.*?)"', before.text)) == (200, [])
    assert asyncio.run(look(tmp_path, "/reports/run-1/report.html", word)).status_code == 404
    for run in ("reports/run-1", "reports/run-2", "use_cases/traffic/reports/run-3"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "report.html").write_text("a report")
    (tmp_path / "reports" / "latest").symlink_to("run-2")
    (tmp_path / "reports" / "unfinished").mkdir()
    links = re.findall('href="(.*?)"', asyncio.run(look(tmp_path, "/reports/", word)).text)
    named = ("reports/latest", "reports/run-2", "reports/run-1", "use_cases/traffic/reports/run-3")
    assert links == [f"/{run}/report.html" for run in named]
    assert {asyncio.run(look(tmp_path, link, word)).status_code for link in links} == {200}
