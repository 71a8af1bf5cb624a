"""Progress of long work: bars in a terminal, the plain lines everywhere else."""

import io
import logging
from collections.abc import Iterator

import pytest
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console

from infra.orchestration.console import progress_shown
from tasks.kernel.process import report_progress


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefectConsoleHandler]:
    """The handler that prints a run's lines, at a terminal of 80 columns."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    logger, handler = logging.getLogger("prefect"), PrefectConsoleHandler(io.StringIO())
    handler.console = Console(file=handler.stream, force_terminal=True, width=80)
    before, logger.handlers = logger.handlers, [handler]
    yield handler
    logger.handlers = before


def work(handler: PrefectConsoleHandler) -> str:
    """What is seen of two stages, the first with two epochs."""
    with progress_shown():
        report_progress("stages", 0, 2, "stage 1 of 2: training")
        for epoch in (1, 2):
            report_progress("epochs", epoch, 2, f"epoch {epoch} of at most 2")
        handler.console.print("epoch 1: validation AUC 0.75", highlight=False)
        report_progress("stages", 1, 2, "stage 2 of 2: conversion")
    report_progress("stages", 2, 2, "after the block")
    return str(handler.stream.getvalue())


def test_a_terminal_shows_bars_below_the_lines(shown: PrefectConsoleHandler) -> None:
    said = work(shown)
    for text in ("stage 2 of 2: conversion", "epoch 1: validation AUC 0.75", "━"):
        assert text in said
    assert "after the block" not in said
    assert "\x1b[2K" in said[said.rindex("━") :]  # in the end they are wiped


@pytest.mark.parametrize("why", ["no terminal", "NO_COLOR", "dumb", "quiet"])
def test_elsewhere_the_lines_are_all_there_is(
    shown: PrefectConsoleHandler, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    if why == "quiet":
        shown.setLevel(logging.WARNING)
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if why in ("no terminal", "dumb"):
        is_terminal = why == "dumb"
        shown.console = Console(file=shown.stream, force_terminal=is_terminal, width=80)
    assert work(shown) == "epoch 1: validation AUC 0.75\n"


def test_nobody_shows_it_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report_progress("epochs", 1, 2, "epoch 1 of at most 2")
    assert caplog.text == ""
