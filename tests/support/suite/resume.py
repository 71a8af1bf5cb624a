"""`--resume` leaves out what passed on the same sources in a run that did not come to its end.

pytest writes its own cache when it ends; here each test that passes is noted at once, so that a
killed run of hours is not lost. A run in which all passed forgets them; so does `--cache-clear`.
"""

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Resume:
    """Leaves out tests named in a file, and adds those that pass."""

    def __init__(self, file: Path, writes: bool) -> None:
        self._file, self._writes = file, writes
        self._others: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Deselect what passed earlier, after all others have chosen."""
        yield
        passed = set(self._file.read_text().splitlines()) if self._file.exists() else set()
        left_out = [item for item in items if item.nodeid in passed]
        items[:] = [item for item in items if item.nodeid not in passed]
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test of which every phase passed."""
        if not report.passed:
            self._others.add(report.nodeid)
        elif self._writes and report.when == "teardown" and report.nodeid not in self._others:
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Forget what has served."""
        if self._writes and exitstatus == pytest.ExitCode.OK:
            self._file.unlink(missing_ok=True)


def add_options(parser: pytest.Parser) -> None:
    """`--resume`."""
    help_text = "leave out what passed on these sources in a run that was interrupted"
    parser.addoption("--resume", action="store_true", help=help_text)


def install(config: pytest.Config) -> None:
    """Take part where `--resume` is given."""
    if config.option.resume and not config.option.collectonly:
        digest = hashlib.sha256()
        for words in (["rev-parse", "HEAD"], ["diff", "HEAD"]):
            line = ["git", "-C", str(config.rootpath), *words]
            digest.update(subprocess.run(line, capture_output=True, check=True).stdout)
        file = config.cache.mkdir("resume") / digest.hexdigest()[:16]  # type: ignore[union-attr]
        config.pluginmanager.register(Resume(file, writes=not hasattr(config, "workerinput")))
