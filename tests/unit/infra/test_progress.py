"""Every step is one line: live on a terminal, readable in a log."""

from __future__ import annotations

import os

import pytest

from infra.provision.progress import Progress, Step


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
    monkeypatch.setattr("infra.provision.progress.time.monotonic", lambda: next(times))
    step = Step("building", started=1000.0)
    for _ in range(4):
        step.tick("12 %")
    step.finish()
    assert capsys.readouterr().out == "building ... 31 s, 12 % ... 70 s, 12 % ... done (70.0 s)\n"


def test_on_a_terminal_the_line_is_drawn_over_and_its_status_is_never_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1001.0, 1001.2, 1002.0, 1003.0])
    monkeypatch.setattr("infra.provision.progress.time.monotonic", lambda: next(times))
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
