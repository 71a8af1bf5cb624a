"""A pytest plugin: the table of promises, and of what each drill saw, at the end of `make drills`.

Where `FALAJ_DRILL_REPORT` names a folder, the table is also written there, as `drills.json` and
`drills.md`. A drill says how often it tried with `record_property("trials", number)`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.suite import resume
from tests.support.suite.promises import Promise

FOLDER = "FALAJ_DRILL_REPORT"
HEADINGS = ("promise or complaint", "drill", "expected end state", "result", "s", "trials")
HEADINGS_TOLD = ("result", "s", "trials", "expected end state", "drill")
NOT_RUN, ELSEWHERE, SLOW = "not run", "in make test", "in make test-slow"
_WORST_FIRST = ("failed", "error", "skipped", "passed", NOT_RUN, SLOW, ELSEWHERE)


@dataclass
class Row:
    """One drill and one promise that it tries to break."""

    promise: Promise
    drill: str
    end_state: str
    results: list[str] = field(default_factory=list)
    seconds: float = 0.0
    trials: int = 0

    @property
    def result(self) -> str:
        """The worst of all that was seen."""
        return next((kind for kind in _WORST_FIRST if kind in self.results), NOT_RUN)

    def cells(self) -> tuple[str, ...]:
        """The row as people read it."""
        ran = self.result not in (NOT_RUN, SLOW, ELSEWHERE)
        seconds, trials = (f"{self.seconds:.0f}", f"{self.trials:,}") if ran else ("", "")
        return self.promise.value, self.drill, self.end_state, self.result, seconds, trials


class DrillTable:
    """Collects what tests declare, and what became of them."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._rows: dict[tuple[str, Promise], Row] = {}
        self._drills: set[str] = set()
        self._slow: set[str] = set()
        self._drilled = False

    @property
    def rows(self) -> list[Row]:
        """All rows: promises in their order, and the drills of each by name."""
        order = list(Promise)
        return sorted(self._rows.values(), key=lambda row: (order.index(row.promise), row.drill))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note what is declared, before anything is deselected."""
        for item in items:
            drill = _function(item.nodeid)
            if item.get_closest_marker("drill"):
                self._drills.add(drill)
            elif item.get_closest_marker("slow"):
                self._slow.add(drill)
            for mark in item.iter_markers("promise"):
                promise, end_state = mark.args
                self._rows.setdefault((drill, promise), Row(promise, drill, end_state))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Add what an interrupted run has shown, and say of what will not run where it does."""
        selected = {_function(item.nodeid) for item in session.items}
        resumed = session.config.pluginmanager.get_plugin(resume.NAME)
        for result in resumed.earlier if resumed else ():
            selected.add(_function(result.test))
            for row in self._of(result.test):
                row.results.append(result.outcome)
                row.seconds += result.seconds
                row.trials += result.trials
        self._drilled = bool(selected & self._drills) and not session.config.option.collectonly
        for (drill, _), row in self._rows.items():
            if drill not in selected:
                row.results.append(self._where(drill))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what one phase of a test came to."""
        for row in self._of(report.nodeid):
            row.seconds += report.duration
            if report.when == "call" or report.outcome == "skipped":
                row.results.append(report.outcome)
                row.trials += int(dict(report.user_properties).get("trials", 1))
            elif report.outcome == "failed":
                row.results.append("error")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table where a drill ran."""
        if self._drilled:
            terminalreporter.section("promises and their drills")
            for line in told(self.rows):
                terminalreporter.write_line(line)

    def pytest_sessionfinish(self) -> None:
        """Write the table, also where the drills were interrupted."""
        if self._folder and self._rows:
            write(Path(self._folder), self.rows)

    def _where(self, drill: str) -> str:
        if drill in self._drills:
            return NOT_RUN
        return SLOW if drill in self._slow else ELSEWHERE

    def _of(self, nodeid: str) -> Iterable[Row]:
        return (row for (drill, _), row in self._rows.items() if drill == _function(nodeid))


def install(config: pytest.Config) -> None:
    """Let pytest know the mark, and keep the table."""
    config.addinivalue_line(
        "markers",
        "promise(promise, end_state): what a test proves; see tests.support.suite.promises",
    )
    config.pluginmanager.register(DrillTable(os.environ.get(FOLDER)), "drill-table")


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write `drills.json` and `drills.md` into a folder, which is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = [{**asdict(row), "result": row.result} for row in rows]
    for fact in facts:
        del fact["results"]
    (folder / "drills.json").write_text(json.dumps(facts, indent=1))
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(row.cells() for row in rows)]
    table = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    (folder / "drills.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in table))


def told(rows: Sequence[Row]) -> Iterator[str]:
    """The table for a terminal: below each promise what was seen of it, the drill's name last."""
    shown = [(row.result, *row.cells()[4:], row.end_state, row.drill) for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, HEADINGS_TOLD, strict=True)]
    yield _line(HEADINGS_TOLD, widths)
    for promise, its in groupby(zip(rows, shown, strict=True), key=lambda pair: pair[0].promise):
        yield promise.value
        yield from (_line(cells, widths) for _, cells in its)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"  {'  '.join(aligned)}".rstrip()


def _function(nodeid: str) -> str:
    """A test without its parameters, and without the folder that holds all."""
    return nodeid.partition("[")[0].removeprefix("tests/")
