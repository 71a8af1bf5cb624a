"""What status and doctor show, on real files, disks and ports, with and without a platform."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from falaj.__main__ import EXIT_FAILED, EXIT_WRONG_INPUT, main
from infra.platform import lifecycle
from infra.platform.api import PrefectApi
from infra.platform.config import PlatformConfig
from infra.platform.files import PlatformFiles, PlatformState, ensure_password, write_state
from infra.platform.health import (
    EXIT_NOT_RUNNING,
    Finding,
    check_api,
    check_clock,
    check_databases,
    check_disk,
    check_pins,
    check_postgres,
    check_private,
    check_redis,
    check_secret,
    check_writable,
    examine,
    exit_code,
    installed_pins,
    read_status,
    report,
    table,
)
from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.leases import acquire
from tasks.control.leases.repository import LeaseRepository
from tasks.kernel.errors import TransientError
from tasks.kernel.files import private_folder, write_atomically
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tests.support.host.disks import small_disk
from tests.support.platform.lease_devices import host
from tests.support.services.servers import free_port, redis_server

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def only(found: Finding | list[Finding], level: str) -> Finding:
    [finding] = found if isinstance(found, list) else [found]
    assert finding.level == level
    assert bool(finding.advice) == (level != "ok")
    return finding


@pytest.mark.parametrize(
    ("name", "installed", "level"),
    [
        ("fastapi", "0.150.0", "ok"),
        ("fastapi", "0.151.0", "problem"),
        ("sqlalchemy", "2.1.0b1", "problem"),
        ("sqlalchemy", "2.0.58", "ok"),
        ("prefect", "3.9.0", "problem"),
    ],
)
def test_versions_that_break_the_server_in_silence_are_a_problem(
    name: str, installed: str, level: str
) -> None:
    _, bounds = installed_pins()
    finding = only(check_pins({name: installed}, {name: bounds[name]}), level)
    if level != "ok":
        assert f"{name} {installed} is installed, expected" in finding.seen
        assert "make setup" in finding.advice


def test_a_disk_with_less_space_than_asked_is_a_problem(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    assert only(check_disk(tmp_path, free // 2), "ok").name == "disk"
    finding = only(check_disk(tmp_path, 1000 * free), "problem")
    assert "GB free at" in finding.seen
    assert "free some space" in finding.advice


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    assert only(check_writable(tmp_path / "artifacts"), "ok").name == "stores"
    (tmp_path / "file").touch()
    finding = only(check_writable(tmp_path / "file"), "problem")
    assert "cannot be written: " in finding.seen


def test_a_damaged_database_is_found_and_a_missing_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "prefect.db"
    assert check_databases([file]) == []
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [(str(n) * 200,) for n in range(999)])
    connection.close()
    assert only(check_databases([file]), "ok").seen.startswith("prefect.db is intact")
    with file.open("r+b") as stream:
        stream.seek(3 * 4096)
        stream.write(os.urandom(8 * 4096))
    assert "is damaged: " in only(check_databases([file]), "problem").seen
    file.write_bytes(b"no database at all" * 1000)
    assert "file is not a database" in only(check_databases([file]), "problem").seen


def test_a_database_that_cannot_be_looked_at_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "prefect.db").mkdir()
    finding = only(check_databases([tmp_path / "prefect.db"]), "problem")
    assert "cannot be checked now" in finding.seen
    assert "leave the file as it is" in finding.advice
    assert ".recover" not in finding.advice


def test_on_a_full_disk_doctor_asks_for_space_and_for_nothing_that_destroys(tmp_path: Path) -> None:
    with small_disk(tmp_path, 4_000_000) as disk:
        file = tmp_path / "operation.db"
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE t (x)")
        with disk.filled():
            finding = only(check_databases([file]), "problem")
            assert "disk I/O error" in finding.seen
            assert "leave the file as it is; free some space" in finding.advice
        only(check_databases([file]), "ok")


def test_a_clock_that_was_set_back_is_a_problem() -> None:
    state = PlatformState(pid=1, phase="up", started=NOW, written=NOW + timedelta(hours=1))
    assert "3600 s later than now" in only(check_clock(state, NOW), "problem").seen
    assert only(check_clock(state, NOW + timedelta(hours=2)), "ok").name == "clock"
    assert (
        "clock shows 1970"
        in only(check_clock(None, datetime(1970, 1, 1, tzinfo=UTC)), "problem").seen
    )


def test_a_password_that_others_can_read_or_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    files, config = PlatformFiles(tmp_path), PlatformConfig()
    files.folder.mkdir()
    assert "is missing" in only(check_secret(files, config), "problem").seen
    ensure_password(files)
    assert only(check_secret(files, config), "ok").name == "password"
    files.secret.chmod(0o640)
    assert "has mode 640, expected 600" in only(check_secret(files, config), "problem").seen
    assert only(check_secret(files, PlatformConfig(password=False)), "warning").name == "password"


def test_a_state_folder_that_others_can_read_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    finding = only(check_private(tmp_path), "warning")
    assert f"chmod 700 {tmp_path}" in finding.advice
    tmp_path.chmod(0o700)
    only(check_private(tmp_path), "ok")


def test_stores_that_do_not_answer_are_problems_and_no_password_is_told(tmp_path: Path) -> None:
    port = free_port()
    url = f"postgresql://falaj:the-password@127.0.0.1:{port}/falaj"
    finding = only(check_postgres(url, NOW), "problem")
    assert "PostgreSQL does not answer" in finding.seen
    assert "the-password" not in finding.seen
    finding = only(check_redis(f"redis://:the-password@127.0.0.1:{port}/0"), "problem")
    assert "Redis does not answer" in finding.seen
    assert "the-password" not in finding.seen
    with redis_server(tmp_path) as server:
        assert only(check_redis(f"redis://{server.connection_string}/0"), "ok").name == "stores"


class BusyAtFirst(BaseHTTPRequestHandler):
    """Answers 503, as Prefect does while SQLite is locked, and then the version."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(503 if self.asked < 3 else 200)
        self.end_headers()
        self.wfile.write(b'"3.8.8"')

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_server_that_is_busy_is_asked_again() -> None:
    with HTTPServer(("127.0.0.1", 0), BusyAtFirst) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            api = PrefectApi(f"http://127.0.0.1:{server.server_port}/api", None)
            assert api.version() == "3.8.8"
        finally:
            server.shutdown()
            thread.join()
    assert BusyAtFirst.asked == 3


class DyingWhileAnswering(BusyAtFirst):
    """Promises more than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'"3.')


def test_a_server_that_dies_while_it_answers_does_not_answer() -> None:
    with HTTPServer(("127.0.0.1", 0), DyingWhileAnswering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            api = PrefectApi(f"http://127.0.0.1:{server.server_port}/api", None)
            with pytest.raises(TransientError, match="does not answer"):
                api.version()
        finally:
            server.shutdown()
            thread.join()


def test_before_the_first_start_only_that_is_wrong(tmp_path: Path) -> None:
    findings = examine(PlatformFiles(tmp_path), {})
    assert exit_code(findings) == 3
    assert "-> make up" in report(findings)
    status = read_status(PlatformFiles(tmp_path))
    assert status.exit_code == 3
    assert table(status) == f"No platform runs on {tmp_path}."


def test_a_killed_platform_is_told_from_one_that_was_stopped(tmp_path: Path) -> None:
    files = PlatformFiles(tmp_path)
    files.folder.mkdir()
    write_state(files, PlatformState(pid=1, phase="up", started=NOW, written=NOW))
    assert "It was killed; make up starts it again." in table(read_status(files))
    write_state(files, PlatformState(pid=1, phase="stopped", started=NOW, written=NOW))
    assert read_status(files).phase == "down"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["status"], 3, "No platform runs on"),
        (["down"], 0, "No platform runs on"),
        (["doctor"], 3, "1 problem, 0 warnings, "),
        (["up", "--port", "99999"], 2, "port: Input should be less than or equal to 65535"),
        (["up", "--host", "0.0.0.0", "--no-password"], 2, "would let anybody run code here"),
        (["up", "--profile", "server"], 2, "needs the URL of a PostgreSQL database"),
        (["up", "--config", "/nowhere/platform.yaml"], 2, "cannot be read as YAML"),
        (["logs", "prefect"], 2, "no log 'prefect'; there are: none yet"),
    ],
)
def test_every_command_answers_with_a_sentence_and_its_exit_code(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "falaj", "--home", str(tmp_path), *arguments],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_platform_is_not_started_on_a_disk_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))  # so that it is put back
    with small_disk(tmp_path, 40_000_000) as disk:
        private_folder(PlatformFiles(tmp_path).folder)
        disk.close()
        assert main(["--home", str(tmp_path), "up"]) == EXIT_FAILED
    assert "the disk refused a write" in capsys.readouterr().err


TWO_CORES = LeaseRequest(cores=2)


def test_status_shows_who_holds_devices_and_who_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FALAJ_DATABASE_URL", raising=False)
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    book = LeaseRepository(Settings.from_environment().metadata_url, host="big-one")
    devices = host(cores=2)
    with acquire(book, TWO_CORES, "train-delay (run 1)", devices=devices):
        book.ask(TWO_CORES, "train-fares (run 2)", devices, priority=2)
        held, waiting = read_status(PlatformFiles(tmp_path)).leases
        assert (held.state, waiting.state) == ("held", "waiting")
        code = main(["status"])
    assert code == EXIT_NOT_RUNNING
    _, _, header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == "Devices of State Since Priority What, and for whom".split()
    assert first.startswith("big-one")
    assert "held" in first
    assert "train-delay (run 1), process" in first
    assert "waiting" in second
    assert second.split(": ")[1].startswith("train-fares (run 2)")


def test_options_of_an_earlier_start_are_kept_shown_and_changed_by_giving_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, asked = PlatformFiles(tmp_path), list[PlatformConfig]()

    def start(files: PlatformFiles, config: PlatformConfig, environment: dict[str, str]) -> None:
        asked.append(config)
        write_atomically(files.config, config.model_dump_json())

    def ports(*options: str) -> tuple[int, int, bool]:
        assert main(["--home", str(tmp_path), "up", *options]) == 0
        return asked[-1].port, asked[-1].mlflow_port, asked[-1].serving

    monkeypatch.setattr(lifecycle, "bring_up", start)
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    monkeypatch.delenv("FALAJ_PLATFORM_CONFIG", raising=False)
    assert ports("--port", "14400", "--mlflow-port", "15000", "--no-serving") == (
        14400,
        15000,
        False,
    )
    assert ports() == (14400, 15000, False)
    assert ports("--port", "14401", "--serving") == (14401, 15000, True)
    assert read_status(files).options == {"port": "14401", "mlflow_port": "15000"}
    assert "port=14401, mlflow_port=15000; kept for each start" in table(read_status(files))
    file = tmp_path / "platform.yaml"
    file.write_text("port: 4300\n")
    assert ports("--config", str(file)) == (4300, 5000, True)  # a file says all
    assert ports("--reset") == (4200, 5000, True)
    assert read_status(files).options == {}


def test_looking_at_the_status_makes_no_database(tmp_path: Path) -> None:
    status = read_status(PlatformFiles(tmp_path))
    assert status.leases == ()
    assert table(status) == f"No platform runs on {tmp_path}."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["up", "down", "status", "doctor", "logs"])
def test_a_file_is_no_state_folder(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FALAJ_HOME", str(file))  # so that it is put back
    assert main(["--home", str(file / "home"), command]) == EXIT_WRONG_INPUT
    assert f"refused: {file} is no folder, so {file}/home cannot be" in capsys.readouterr().err


def test_a_damaged_database_of_leases_is_told_and_the_rest_is_still_shown(tmp_path: Path) -> None:
    file = Settings(home=tmp_path, feature_repo=tmp_path).metadata_file
    file.parent.mkdir()
    file.write_bytes(b"no database at all" * 100)
    status = read_status(PlatformFiles(tmp_path))
    [sentence] = status.wrong
    assert sentence.startswith("the leases of devices cannot be read: ")
    assert sentence in table(status)


def test_an_api_that_does_not_answer_is_a_problem() -> None:
    (finding,) = check_api(PrefectApi(f"http://127.0.0.1:{free_port()}/api", None))
    assert finding.level == "problem"
    assert "does not answer" in finding.seen
