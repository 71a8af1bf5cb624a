"""A supervisor of small children, in a process of its own: this module, with HOME CHILDREN.

CHILDREN is JSON: a list of fields of `Service`, "probe" being a file that must exist. The first
group to be stopped is all whose name begins with "worker".
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.platform import supervisor
from infra.platform.files import (
    CutRun,
    PlatformFiles,
    PlatformState,
    ServiceState,
    only_supervisor,
    read_state,
)
from infra.platform.supervisor import Child, Service, Supervisor
from tests.support.host.processes import python, wait_until

LIMIT_S = 120
SLEEP = [sys.executable, "-S", "-c", "import sys, time; time.sleep(600)"]


def make_child(files: PlatformFiles, described: dict[str, Any]) -> Child:
    fields = {**described, "command": tuple(described["command"]), "environment": dict(os.environ)}
    if file := fields.pop("probe", None):
        fields["probe"] = lambda started: Path(file).exists()
    fields["needs"] = tuple(fields.get("needs", ()))
    return Child(Service(**fields), files.log(fields["name"]))


def main(home: str, described: str) -> None:
    supervisor.GRACE_S, supervisor.LOG_LIMIT_BYTES, supervisor.ROTATE_EVERY_S = 1, 10_000, 1
    files = PlatformFiles(Path(home))
    files.folder.mkdir(mode=0o700, exist_ok=True)
    children = [make_child(files, one) for one in json.loads(described)]
    names = {child.service.name for child in children}
    workers = frozenset(name for name in names if name.startswith("worker"))

    def after_workers() -> list[CutRun]:
        with (files.home / "order").open("a") as order:
            order.write("workers ended\n")
        return [CutRun(id="1", name="some-run", state="CRASHED")]

    def forget_plans() -> bool:
        with (files.home / "forgotten").open("a") as told:
            told.write("asked\n")
        return (files.home / "forgotten").read_text().count("asked") > 1

    # As a library may have: a signal that the main thread blocks would come to this one.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    with only_supervisor(files):
        Supervisor(
            files=files,
            children=children,
            servers=frozenset(names - workers),
            after_workers=after_workers,
            on_up=lambda name: (files.home / f"up-{name}").touch(),
            planner="server",
            forget_plans=forget_plans,
        ).run()


def sleeper(mark: object) -> list[str]:
    """A command that sleeps, with `mark` on its command line."""
    return [*SLEEP, str(mark)]


class Supervised:
    """A supervisor in a process of its own."""

    def __init__(self, home: Path, process: subprocess.Popen[str]) -> None:
        self.files, self.process = PlatformFiles(home), process

    def state(self) -> PlatformState | None:
        return read_state(self.files)

    def child(self, name: str) -> ServiceState:
        state = self.state()
        found = state.service(name) if state else None
        assert found, state
        return found

    def until(self, what: Callable[[PlatformState], object], said: str) -> None:
        def holds() -> object:
            assert self.process.poll() is None, f"the supervisor has ended: {self.said()}"
            state = self.state()
            return state and what(state)

        wait_until(holds, said, LIMIT_S)

    def until_up(self) -> None:
        self.until(lambda state: state.phase == "up", "all up")

    def said(self) -> str:
        return (self.files.home / "supervisor.log").read_text(errors="replace")


@contextmanager
def supervised(home: Path, *children: dict[str, Any]) -> Iterator[Supervised]:
    with (home / "supervisor.log").open("ab") as log:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        words = ("-m", __name__, str(home), json.dumps(children))
        process = python(*words, **pipes, start_new_session=True)
    try:
        yield Supervised(home, process)
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
