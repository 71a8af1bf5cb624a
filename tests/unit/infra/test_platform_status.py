"""What status shows of options and of leased devices, with and without a platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.__main__ import EXIT_WRONG_INPUT, main
from infra.platform import lifecycle
from infra.platform.config import PlatformConfig
from infra.platform.files import PlatformFiles
from infra.platform.health import EXIT_NOT_RUNNING, read_status, table
from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.leases import acquire
from tasks.control.leases.repository import LeaseRepository
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import Settings
from tests.support.platform.lease_devices import host

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
