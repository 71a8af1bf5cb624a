"""What status and doctor show, on real files, disks and ports, with and without a platform."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from falaj.__main__ import EXIT_FAILED, EXIT_WRONG_INPUT, main
from infra.orchestration.embedded import free_port
from infra.platform import health, lifecycle
from infra.platform.api import PrefectApi
from infra.platform.config import PlatformConfig
from infra.platform.files import PlatformFiles, PlatformState, ensure_password, write_state
from tasks.control.config import LeaseRequest
from tasks.control.leases.repository import LeaseRepository, acquire
from tasks.kernel.errors import TransientError
from tasks.kernel.files import private_folder, write_atomically
from tasks.kernel.settings import Settings
from tests.support.host.disks import small_disk
from tests.support.platform.lease_devices import host
from tests.support.services.listeners import http_listener, json_answer
from tests.support.services.servers import redis_server

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
TWO_CORES = LeaseRequest(cores=2)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder; a command that is told another one sets it, and it is put back."""
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))


def only(found: health.Finding | Iterator[health.Finding], level: str) -> health.Finding:
    [finding] = [found] if isinstance(found, health.Finding) else found
    assert finding.level == level
    assert bool(finding.advice) == (level != "ok")
    return finding


@pytest.mark.parametrize(
    ("name", "installed", "level"),
    [
        ("fastapi", "0.150.0", "ok"),
        ("fastapi", "0.151.0", "problem"),
        ("sqlalchemy", "2.1.0b1", "problem"),
        ("prefect", "3.9.0", "problem"),
    ],
)
def test_versions_that_break_the_server_in_silence_are_a_problem(
    name: str, installed: str, level: str
) -> None:
    assert f"{name} {installed}" in only(health.check_pins({name: installed}), level).seen


def test_a_disk_without_space_or_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    only(health.check_disk(tmp_path), "ok")
    with small_disk(tmp_path, 4_000_000) as disk:
        only(health.check_disk(tmp_path), "problem")
        file = tmp_path / "operation.db"
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE t (x)")
        with disk.filled():  # doctor asks for space, and for nothing that destroys
            finding = only(health.check_database(file), "problem")
            assert "leave the file as it is; free some space" in finding.advice
        only(health.check_database(file), "ok")


def test_a_damaged_database_is_found_and_what_cannot_be_read_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prefect.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [(str(n) * 200,) for n in range(999)])
        connection.commit()
    only(health.check_database(file), "ok")
    with file.open("r+b") as stream:
        stream.seek(3 * 4096)
        stream.write(os.urandom(8 * 4096))
    assert "is damaged: " in only(health.check_database(file), "problem").seen
    file.write_bytes(b"no database at all" * 1000)
    assert "is damaged: " in only(health.check_database(file), "problem").seen
    (tmp_path / "folder").mkdir()
    finding = only(health.check_database(tmp_path / "folder"), "problem")
    assert "leave the file as it is" in finding.advice
    assert ".recover" not in finding.advice


def test_a_password_or_folder_that_others_can_read_is_found(tmp_path: Path) -> None:
    files, config = PlatformFiles(tmp_path), PlatformConfig()
    files.folder.mkdir()
    assert "is missing" in only(health.check_secret(files, config), "problem").seen
    ensure_password(files)
    only(health.check_secret(files, config), "ok")
    files.secret.chmod(0o640)
    assert "has mode 640, expected 600" in only(health.check_secret(files, config), "problem").seen
    only(health.check_secret(files, PlatformConfig(password=False)), "warning")
    tmp_path.chmod(0o755)
    assert f"chmod 700 {tmp_path}" in only(health.check_private(tmp_path), "warning").advice
    tmp_path.chmod(0o700)
    only(health.check_private(tmp_path), "ok")


def test_stores_that_do_not_answer_are_problems_and_no_password_is_shown(tmp_path: Path) -> None:
    port = free_port()
    found = [
        only(
            health.check_postgres(f"postgresql://falaj:the-password@127.0.0.1:{port}/falaj"),
            "problem",
        ),
        only(health.check_redis(f"redis://:the-password@127.0.0.1:{port}/0"), "problem"),
        *health.check_api(PrefectApi(f"http://127.0.0.1:{port}/api", "admin:the-password")),
    ]
    for finding in found:
        assert finding.level == "problem"
        assert "does not answer" in finding.seen
        assert "the-password" not in finding.seen
    with redis_server(tmp_path) as server:
        assert health.check_redis(f"redis://{server.connection_string}/0").level != "problem"


def test_a_busy_server_is_asked_again_and_one_that_dies_does_not_answer() -> None:
    statuses = [503, 503, 200]  # as Prefect answers while SQLite is locked
    with http_listener(lambda _: json_answer("3.8.8", statuses.pop(0))) as url:
        assert PrefectApi(f"{url}/api", None).version() == "3.8.8"
    assert statuses == []
    with http_listener(lambda _: json_answer("3.8.8"), lacking=1000) as url:
        with pytest.raises(TransientError, match="does not answer"):
            PrefectApi(f"{url}/api", None).version()


def test_before_the_first_start_only_that_is_wrong(tmp_path: Path) -> None:
    findings = health.examine(PlatformFiles(tmp_path), {})
    assert health.exit_code(findings) == 3
    assert "-> make up" in health.report(findings)
    status = health.read_status(PlatformFiles(tmp_path))
    assert (status.exit_code, status.leases) == (3, ())
    assert health.table(status) == f"No platform runs on {tmp_path}."
    assert list(tmp_path.iterdir()) == []


def test_a_killed_platform_is_told_from_one_that_was_stopped(tmp_path: Path) -> None:
    files = PlatformFiles(tmp_path)
    files.folder.mkdir()
    write_state(files, PlatformState(pid=1, phase="up", started=NOW, written=NOW))
    assert "It was killed; make up starts it again." in health.table(health.read_status(files))
    write_state(files, PlatformState(pid=1, phase="stopped", started=NOW, written=NOW))
    assert health.read_status(files).phase == "down"


def pool(name: str, *, paused: bool) -> health.PoolStatus:
    return health.PoolStatus(name=name, type="process", paused=paused, online=1)


def test_a_pool_that_a_person_paused_or_that_is_not_there_is_wrong() -> None:
    pools = [pool("cpu", paused=True), pool("down", paused=True), pool("other", paused=False)]
    absent, paused = health.pool_faults(pools, ["coordinator", "cpu"], ["down"])
    assert "'coordinator'" in absent
    assert "falaj deploy" in absent
    assert "prefect work-pool resume cpu" in paused


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status"], 0),
        (["down"], 0),
        (["doctor"], 3),
        (["up", "--port", "99999"], 2),
        (["up", "--host", "0.0.0.0", "--no-password"], 2),
        (["up", "--profile", "server"], 2),
        (["up", "--config", "/nowhere/platform.yaml"], 2),
        (["logs", "prefect"], 2),
    ],
)
def test_every_command_answers_with_a_sentence_and_its_exit_code(
    tmp_path: Path, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--home", str(tmp_path), *arguments]) == code
    said = capsys.readouterr()
    assert said.out or said.err.startswith("refused: ")


def test_a_platform_is_not_started_on_a_disk_that_can_only_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path, 40_000_000) as disk:
        private_folder(PlatformFiles(tmp_path).folder)
        disk.close()
        assert main(["--home", str(tmp_path), "up"]) == EXIT_FAILED
    assert "the disk refused a write" in capsys.readouterr().err


def test_status_shows_who_holds_devices_and_who_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FALAJ_DATABASE_URL", raising=False)
    leases = LeaseRepository(Settings.from_environment().leases_path)
    devices = host(cores=2)
    with acquire(leases, TWO_CORES, "train-delay (run 1)", devices=devices):
        waiting = leases.ask(TWO_CORES, "train-fares (run 2)", devices, priority=2)
        assert main(["status"]) == 0
        waiting.release()
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("held")
    assert "train-delay (run 1) (process" in first
    assert second.startswith("waiting")
    assert "train-fares (run 2) (process" in second


def test_options_of_an_earlier_start_are_kept_shown_and_changed_by_giving_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, asked = PlatformFiles(tmp_path), list[PlatformConfig]()

    def start(files: PlatformFiles, config: PlatformConfig, environment: dict[str, str]) -> None:
        asked.append(config)
        write_atomically(files.config, config.model_dump_json())

    def ports(*options: str) -> tuple[int, int, bool]:
        assert main(["--home", str(tmp_path), "up", *options]) == 0
        return asked[-1].port, asked[-1].mlflow_port, asked[-1].serving

    monkeypatch.setattr(lifecycle, "bring_up", start)
    monkeypatch.delenv("FALAJ_PLATFORM_CONFIG", raising=False)
    given = ("--port", "14400", "--mlflow-port", "15000", "--no-serving")
    assert ports(*given) == (14400, 15000, False)
    assert ports() == (14400, 15000, False)
    assert ports("--port", "14401", "--serving") == (14401, 15000, True)
    assert health.read_status(files).options == {"port": "14401", "mlflow_port": "15000"}
    assert "port=14401, mlflow_port=15000; kept for each start" in health.table(
        health.read_status(files)
    )
    file = tmp_path / "platform.yaml"
    file.write_text("port: 4300\n")
    assert ports("--config", str(file)) == (4300, 5000, True)  # a file says all
    assert ports("--reset") == (4200, 5000, True)


@pytest.mark.parametrize("command", ["up", "down", "status", "doctor", "logs"])
def test_a_file_is_no_state_folder(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["--home", str(file / "home"), command]) == EXIT_WRONG_INPUT


def test_the_status_shows_each_pool_with_its_workers_and_whether_it_is_paused() -> None:
    pools = (pool("cpu", paused=False), pool("gpu", paused=True))
    shown = health.table(health.Status(running=True, phase="up", home=Path("home"), pools=pools))
    lines = shown[shown.index("Pool") :].splitlines()[:3]
    assert [line.split(maxsplit=2) for line in lines] == [
        ["Pool", "Workers", "State"],
        ["cpu", "1", "hands out runs"],
        ["gpu", "1", "paused"],
    ]
