"""Long commands: their logs, what a failure shows, and lines on the screen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.provision.commands import Commands, Progress, SetupError, Step, percent_done


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path, {"PATH": os.environ["PATH"]}, tmp_path, held_locks=())


def test_a_command_returns_its_output_and_keeps_it_in_a_log(
    commands: Commands, tmp_path: Path
) -> None:
    assert commands.run("a greeting", ["sh", "-c", "echo salam >&2"], Step("x")) == "salam\n"
    assert (tmp_path / "a-greeting.log").read_text() == "salam\n"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["sh", "-c", "for i in $(seq 99); do echo line $i; done; exit 3"], "exit code 3.*line 99"),
        (["sh", "-c", "kill -9 $$"], "exit code -9"),
        (["no-such-program"], "no-such-program"),
    ],
)
def test_a_failed_command_shows_how_it_ended_and_its_last_lines(
    commands: Commands, command: list[str], shown: str
) -> None:
    with pytest.raises(SetupError, match=f"(?s)build failed.*{shown}") as caught:
        commands.run("build", command, Step("x"))
    assert "line 1\n" not in str(caught.value)


def test_commands_see_only_the_environment_they_are_given(commands: Commands) -> None:
    seen = commands.run("env", ["env"], Step("x"))
    assert {line.partition("=")[0] for line in seen.splitlines()} <= {"PATH", "LC_CTYPE"}


def test_an_error_inside_setup_ends_the_command(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Step, detail: str = "") -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise RuntimeError("interrupted")

    monkeypatch.setattr(Step, "tick", interrupted)
    with pytest.raises(RuntimeError, match="interrupted"):
        commands.run("sleep", ["sh", "-c", "echo $$ > pid; exec sleep 300"], Step("x"))
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_percent_is_the_compilers_last_word(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("no percent yet\n")
    assert percent_done(log) == ""
    log.write_text("[  4%] Building\n" + "noise " * 9000 + "\n[ 45%] Building CXX\nwarning: 99%\n")
    assert percent_done(log) == "45 %"


def test_steps_are_numbered_and_show_how_they_ended(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2)
    with progress.step("first") as step:
        step.outcome = "as planned"
    with pytest.raises(ValueError, match="broken"), progress.step("second"):
        raise ValueError("broken")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[1/2] first ... as planned (")
    assert second.startswith("[2/2] second ... stopped (")


def test_without_a_terminal_a_long_step_reports_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1010.0, 1031.0, 1032.0, 1070.0, 1070.0])
    monkeypatch.setattr("infra.provision.commands.time.monotonic", lambda: next(times))
    step = Step("building", started=1000.0)
    for _ in range(4):
        step.tick("12 %")
    step.finish()
    assert capsys.readouterr().out == "building ... 31 s, 12 % ... 70 s, 12 % ... done (70.0 s)\n"
