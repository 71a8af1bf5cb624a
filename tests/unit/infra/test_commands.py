"""Long commands: their logs, causes of failure, end with set-up, and lines on the screen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.provision.commands import (
    GUARD,
    Commands,
    Progress,
    SetupError,
    Step,
    cause_of,
    explained,
    percent_done,
)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path, {"PATH": os.environ["PATH"]}, tmp_path, held_locks=())


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("error: failed to write: No space left on device (os error 28)", "disk is full"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "digest differs"),
        ("error: Hash mismatch for `six==1.17.0`", "digest differs"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
        ("OSError: [Errno 30] Read-only file system", "write was refused"),
        ("Caused by: dns error: failed to lookup address", "cannot be reached"),
        ("Failed to establish a new connection: [Errno 111]", "cannot be reached"),
        ("ERROR: No matching distribution found for uv==9", "lacks a version"),
        ("something never seen before", "log shows why"),
        ("", "log shows why"),
    ],
)
def test_known_causes_are_told_in_a_sentence(log: str, words: str) -> None:
    assert words in cause_of(log)


def test_words_far_above_the_end_of_a_log_are_no_cause() -> None:
    assert "log shows why" in cause_of("No space left on device\n" + "fine\n" * 100)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "write was refused"),
        (errno.EACCES, "write was refused"),
        (errno.ENOTDIR, "Not a directory"),
    ],
)
def test_errors_of_the_system_name_the_place(code: int, words: str) -> None:
    sentence = explained(OSError(code, os.strerror(code), "/co/.venv"))
    assert sentence.startswith("/co/.venv: ")
    assert words in sentence


def test_a_command_returns_its_output_and_keeps_it_in_a_log(
    commands: Commands, tmp_path: Path
) -> None:
    assert commands.run("a greeting", ["sh", "-c", "echo salam >&2"], Step("x")) == "salam\n"
    assert (tmp_path / "a-greeting.log").read_text() == "salam\n"


def test_a_failed_command_tells_exit_code_cause_log_and_last_lines(
    commands: Commands, tmp_path: Path
) -> None:
    script = "echo x.cc:7: error: no type; for i in $(seq 99); do echo line $i; done; exit 3"
    with pytest.raises(SetupError) as caught:
        commands.run("build", ["sh", "-c", script], Step("x"))
    text = str(caught.value)
    assert text.startswith("build failed with exit code 3: ")
    assert str(tmp_path / "build.log") in text
    assert "x.cc:7: error: no type\n...\nline 88\n" in text
    assert text.endswith("\nline 99")


def test_a_command_ended_by_a_signal_is_a_failure(commands: Commands) -> None:
    with pytest.raises(SetupError, match="exit code 137"):
        commands.run("build", ["sh", "-c", "kill -9 $$"], Step("x"))


def test_a_command_that_does_not_exist_is_a_failure(commands: Commands) -> None:
    with pytest.raises(SetupError, match="no-such-program"):
        commands.run("build", ["no-such-program"], Step("x"))


def test_commands_see_only_the_environment_they_are_given(commands: Commands) -> None:
    seen = commands.run("env", ["env"], Step("x"))
    assert {line.partition("=")[0] for line in seen.splitlines()} <= {"PATH", "LC_CTYPE"}


def gone(pid: int) -> bool:
    """Whether a process has ended (one that waits to be collected has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.02)


def test_a_command_and_its_children_end_when_setup_is_killed() -> None:
    tree = "sleep 300 & echo $!; sleep 300 & echo $!; echo $$; wait"
    with subprocess.Popen(
        [sys.executable, "-I", str(GUARD), "sh", "-c", tree],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        assert not any(gone(pid) for pid in pids)
        process.stdin.close()  # what a kill -9 of set-up does
        wait_until_gone(pids)


def test_an_error_inside_setup_ends_the_command(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Step, detail: str = "") -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise RuntimeError("interrupted")

    monkeypatch.setattr(Step, "tick", interrupted)
    with pytest.raises(RuntimeError, match="interrupted"):
        commands.run("sleep", ["sh", "-c", "echo $$ > pid; sleep 300; true"], Step("x"))
    wait_until_gone([int((tmp_path / "pid").read_text())])


def test_percent_is_the_compilers_last_word(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("no percent yet\n")
    assert percent_done(log) == ""
    log.write_text("[  4%] Building\n" + "noise " * 9000 + "\n[ 45%] Building CXX\nwarning: 99%\n")
    assert percent_done(log) == "45 %"


def test_steps_are_numbered_and_say_how_they_ended(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_on_a_terminal_the_line_is_drawn_over_and_its_status_is_never_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1001.0, 1001.2, 1002.0, 1003.0])
    monkeypatch.setattr("infra.provision.commands.time.monotonic", lambda: next(times))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shutil.get_terminal_size", lambda **_: os.terminal_size((21, 24)))
    step = Step("a title too long", started=1000.0)
    for _ in range(3):
        step.tick("5 %")
    step.finish()
    assert capsys.readouterr().out.split("\r")[1:] == [
        "a title too long\x1b[K",
        "a title ... 1 s, 5 %\x1b[K",
        "a title ... 2 s, 5 %\x1b[K",
        "a title too long: done (3.0 s)\x1b[K\n",
    ]
