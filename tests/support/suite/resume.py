"""A pytest plugin: long runs that resume, and end with a table of what each file came to.

`--resume` keeps a journal of tests that passed, in pytest's cache, for one state of the sources.
The next run with `--resume` on the same sources leaves those tests out and adds them to the table.
A run in which all passed removes the journal, so the run after it begins again. With `--restart`
an earlier journal does not count.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

NAME = "resume"
OUTCOMES = ("passed", "failed", "skipped")
_WORST_FIRST = ("failed", "skipped", "passed")


@dataclass(frozen=True)
class Result:
    """What one test came to.

    Attributes:
        seconds: set-up, test and teardown together.
        trials: how often a drill tried, in its own words; see `drill_table`.
        earlier: from the journal of a run before this one.
    """

    test: str
    outcome: str
    seconds: float
    trials: int = 1
    earlier: bool = False


class Journal:
    """Passed tests of one state of the sources, one JSON object a line."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def results(self) -> dict[str, Result]:
        """By the test's node id; a line cut short by a kill does not count."""
        found = {}
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            try:
                result = Result(**{**json.loads(line), "earlier": True})
            except ValueError:
                continue
            found[result.test] = result
        return found

    def add(self, result: Result) -> None:
        """Append one, on disk before the next test begins."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def remove(self) -> None:
        """Begin again."""
        self._file.unlink(missing_ok=True)


class Resume:
    """Leaves out what passed, notes what passes, prints the table."""

    def __init__(self, journal: Journal, writes: bool) -> None:
        self._journal, self._writes = journal, writes
        self.earlier: list[Result] = []
        self._results: list[Result] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, list[str]] = defaultdict(list)
        self._trials: dict[str, int] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Deselect what passed earlier, after all others have chosen."""
        yield
        known = self._journal.results()
        left_out = [item for item in items if item.nodeid in known]
        self.earlier = [known[item.nodeid] for item in left_out]
        if left_out:
            items[:] = [item for item in items if item.nodeid not in known]
            config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test; the last one makes it a result."""
        self._seconds[report.nodeid] += report.duration
        self._outcomes[report.nodeid].append(report.outcome)
        if "trials" in (told := dict(report.user_properties)):
            self._trials[report.nodeid] = int(str(told["trials"]))
        if report.when != "teardown":
            return
        seen = self._outcomes.pop(report.nodeid)
        result = Result(
            report.nodeid,
            next(kind for kind in _WORST_FIRST if kind in seen),
            round(self._seconds.pop(report.nodeid), 2),
            self._trials.pop(report.nodeid, 1),
        )
        self._results.append(result)
        if self._writes and result.outcome == "passed":
            self._journal.add(result)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Forget a journal that has served."""
        if self._writes and exitstatus == pytest.ExitCode.OK:
            self._journal.remove()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, files in their order."""
        results = [*self.earlier, *self._results]
        if self._writes and results:
            terminalreporter.section("results by file")
            for line in table(results):
                terminalreporter.write_line(line)


def table(results: Iterable[Result]) -> Iterator[str]:
    """One line a file and one for all; `earlier` counts results from the journal."""
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        rows[result.test.partition("::")[0]].append(result)
    yield "  ".join((*(f"{kind:>7}" for kind in OUTCOMES), "seconds", "earlier", "file"))
    for file in sorted(rows):
        yield _line(rows[file], file)
    yield _line([result for of_file in rows.values() for result in of_file], "all")


def _line(results: list[Result], name: str) -> str:
    counts = [sum(result.outcome == kind for result in results) for kind in OUTCOMES]
    counts += [round(sum(r.seconds for r in results)), sum(r.earlier for r in results)]
    return "  ".join((*(f"{count:7,}" for count in counts), name))


def state_of_sources(root: Path) -> str:
    """A digest of the commit and of every change to it that git sees."""
    digest = hashlib.sha256()
    listing = ("git", "ls-files", "--others", "--modified", "--exclude-standard", "-z")
    for command in (("git", "rev-parse", "HEAD"), ("git", "diff", "HEAD"), listing):
        done = subprocess.run(command, cwd=root, capture_output=True, check=True)
        digest.update(done.stdout)
    for name in filter(None, done.stdout.decode().split("\0")):
        digest.update((root / name).read_bytes() if (root / name).is_file() else b"")
    return digest.hexdigest()[:16]


def add_options(parser: pytest.Parser) -> None:
    """`--resume` and `--restart`."""
    group = parser.getgroup("falaj")
    group.addoption("--resume", action="store_true", help="leave out what passed on these sources")
    group.addoption("--restart", action="store_true", help="with --resume: begin again")


def install(config: pytest.Config) -> None:
    """Take part where `--resume` is given."""
    if not config.option.resume or config.option.collectonly:
        return
    state = state_of_sources(config.rootpath)
    journal = Journal(config.cache.mkdir("resume") / f"{state}.jsonl")  # type: ignore[union-attr]
    on_worker = hasattr(config, "workerinput")
    if config.option.restart and not on_worker:
        journal.remove()
    plugin = Resume(journal, writes=not on_worker)
    config.pluginmanager.register(plugin, NAME)
